//! A histogram that forgets: each reference weighs e^(−age / time constant).
//!
//! Nothing is multiplied as time goes on. A new reference weighs e^(+time) instead, which leaves
//! every ratio the same; only before the weights grow out of proportion is everything scaled down
//! once. Ageing lets the curve follow a shrinking set: what is no longer touched fades within a few
//! time constants. Time is an argument; times that step back count as the newest one seen.

use model::{Millis, Time};

use super::{Histogram, MissRatioCurve};

/// Time constants after which the weights are scaled down: e^40 is far from what a float holds.
const RESCALE: f64 = 40.0;

/// Counts of stack distances that fade with time.
#[derive(Debug, Clone)]
pub struct AgedHistogram {
    histogram: Histogram,
    time_constant_ms: f64,
    start: Time,
    /// When a reference weighs 1.
    unit: Time,
    newest: Time,
    weight: f64,
}

impl AgedHistogram {
    /// Ages an empty `histogram` from `now` on. A time constant of 0 counts as 1 ms.
    #[must_use]
    pub fn new(histogram: Histogram, time_constant: Millis, now: Time) -> Self {
        let time_constant_ms = time_constant.0.max(1) as f64;
        Self { histogram, time_constant_ms, start: now, unit: now, newest: now, weight: 1.0 }
    }

    /// Counts a reference; one without distance is a first one.
    pub fn record(&mut self, distance: Option<u64>, now: Time) {
        self.add(distance, 1.0, now);
    }

    /// Counts a reference `weight` times, as a sampled one stands for others.
    pub fn add(&mut self, distance: Option<u64>, weight: f64, now: Time) {
        if now > self.newest {
            self.advance(now);
        }
        self.histogram.add(distance, weight * self.weight);
    }

    fn advance(&mut self, now: Time) {
        self.newest = now;
        let age = self.constants(now.since(self.unit));
        if age > RESCALE {
            self.histogram.scale((-age).exp());
            self.unit = now;
            self.weight = 1.0;
        } else {
            self.weight = age.exp();
        }
    }

    fn constants(&self, length: Millis) -> f64 {
        length.0 as f64 / self.time_constant_ms
    }

    /// The curve of the recent references.
    #[must_use]
    pub fn curve(&self) -> MissRatioCurve {
        self.histogram.curve()
    }

    /// How many references the curve rests on: their weight, faded until `now`.
    #[must_use]
    pub fn references(&self, now: Time) -> f64 {
        self.histogram.total() * (-self.constants(now.since(self.unit))).exp()
    }

    /// References per second lately (the paper's NR, as a rate): their faded number over the length
    /// of the window that fading leaves of the time since the start.
    #[must_use]
    pub fn references_per_second(&self, now: Time) -> f64 {
        let seen = 1.0 - (-self.constants(now.since(self.start))).exp();
        let window_s = self.time_constant_ms / 1e3 * seen;
        if window_s > 0.0 { self.references(now) / window_s } else { 0.0 }
    }
}
