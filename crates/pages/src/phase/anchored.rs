//! The detector in use: compares the event with its level at the last measurement of the working
//! set.

use std::ops::RangeInclusive;

use super::{Checks, NO_CHANGE_BYTES};

/// Measurements that differ by less agree. This is more than the paper's 5 %, because the held
/// value is their mean.
const AGREES: f64 = 0.08;
/// The threshold in units of the event's noise.
const SIGMAS: f64 = 3.0;
/// The least threshold of the event.
const LEAST: f64 = 0.1;
/// The largest threshold of the event.
const MOST: f64 = 0.5;
/// The weight of one sample in the noise and in a level.
const LEARN: f64 = 0.2;
/// The number of measurements in the held mean.
const MEMORY: u32 = 4;
/// After this number of measurements that never agree, the mean is held.
const GIVE_UP: u32 = 5;
/// Quiet intervals until a check.
const PERIODS: RangeInclusive<u32> = 20..=30;

#[derive(Clone, Debug)]
pub(super) struct Anchored {
    /// The present estimate of the working set.
    held: Option<f64>,
    /// The event's level at that estimate.
    anchor: f64,
    /// Mean square of the event's relative distance from the anchor while the working set was
    /// stable.
    noise: f64,
    /// An upper limit of the threshold that a check has found; it rises back slowly.
    cap: f64,
    /// Consecutive measurements that agreed with the held value; one is enough to rest.
    agreed: u32,
    /// Measurements since tracking went on.
    measured: u32,
    checks: Checks,
}

impl Anchored {
    pub(super) fn new() -> Self {
        Self {
            held: None,
            anchor: 0.0,
            noise: 0.0,
            cap: MOST,
            agreed: 0,
            measured: 0,
            checks: Checks::new(PERIODS),
        }
    }

    pub(super) fn held(&self) -> Option<f64> {
        self.held
    }

    /// Relative distance of an event from the anchor.
    fn moved(&self, event: f64) -> f64 {
        (event - self.anchor).abs() / self.anchor.abs().max(event.abs()).max(f64::MIN_POSITIVE)
    }

    fn threshold(&self) -> f64 {
        (SIGMAS * self.noise.sqrt()).max(LEAST).min(self.cap)
    }

    pub(super) fn observe(&mut self, working_set: Option<f64>, event: f64) -> bool {
        match working_set {
            Some(size) => self.measure(size, event),
            None => self.moved(event) > self.threshold() || self.checks.due(),
        }
    }

    /// Takes in a measurement; returns whether another is needed.
    fn measure(&mut self, size: f64, event: f64) -> bool {
        self.measured += 1;
        let Some(held) = self.held else {
            self.settle(size, event);
            return true;
        };
        let off = (size - held).abs();
        let moved = self.moved(event);
        if off <= AGREES * held || off < NO_CHANGE_BYTES {
            self.agreed += 1;
            self.noise += LEARN * (moved * moved - self.noise);
            self.cap = (self.cap + LEARN * (MOST - self.cap)).min(MOST);
            let weight = 1.0 / f64::from(self.agreed.min(MEMORY) + 1);
            self.held = Some(held + weight * (size - held));
            self.anchor += weight * (event - self.anchor);
            return self.rest(false);
        }
        if self.agreed > 0 && moved <= self.threshold() {
            self.cap = (moved * 0.8).max(LEAST / 2.0);
        }
        self.agreed = 0;
        if self.measured >= GIVE_UP {
            self.held = Some(f64::midpoint(held, size));
            self.anchor = event;
            return self.rest(true);
        }
        self.settle(size, event);
        true
    }

    fn settle(&mut self, size: f64, event: f64) {
        self.held = Some(size);
        self.anchor = event;
    }

    /// Ends the stretch: tracking goes off.
    fn rest(&mut self, corrected: bool) -> bool {
        self.measured = 0;
        self.checks.done(corrected);
        false
    }
}
