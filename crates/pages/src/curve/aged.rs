//! A histogram that forgets: each reference weighs e^(−age / time constant).
//!
//! Counts are not multiplied as time goes on. Instead a new reference weighs e^(+time), which
//! leaves every ratio the same. Only before the weights grow too large, all counts are scaled
//! down once. Ageing lets the curve follow a shrinking set: memory that is no longer touched
//! fades within a few time constants. Time is an argument; a time that steps back counts as the
//! newest one seen.

use model::{Millis, Time};

use super::{Histogram, MissRatioCurve};

/// Time constants after which the weights are scaled down: e^40 is far below the limit of a
/// float.
const RESCALE: f64 = 40.0;

/// Counts of stack distances that fade with time.
#[derive(Debug, Clone)]
pub struct AgedHistogram {
    histogram: Histogram,
    time_constant_ms: f64,
    start: Time,
    /// The time at which a reference weighs 1.
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

    /// Counts a reference; `None` is a first reference, which has no distance.
    pub fn record(&mut self, distance: Option<u64>, now: Time) {
        self.add(distance, 1.0, now);
    }

    /// Counts a reference `weight` times: a sampled one stands for others.
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

    /// Recent references per second (the paper's NR, as a rate): their faded number, divided by
    /// the length of the window that fading leaves of the time since the start.
    #[must_use]
    pub fn references_per_second(&self, now: Time) -> f64 {
        let seen = 1.0 - (-self.constants(now.since(self.start))).exp();
        let window_s = self.time_constant_ms / 1e3 * seen;
        if window_s > 0.0 { self.references(now) / window_s } else { 0.0 }
    }
}
