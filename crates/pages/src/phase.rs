//! Intermittent tracking: measures the working set while it changes, and pauses while it does
//! not.
//!
//! Problem: tracking costs CPU time, and within a phase of a program its result stays the same.
//!
//! Idea (MEB §3.5, Wang et al. 2016): two phase detectors. While tracking is on, one watches the
//! working set; when that is stable, tracking goes off, and the last size is held. While tracking
//! is off, the other watches a cheap *event* (dTLB misses, or touches of
//! [sentinels](crate::probe)); when that moves, tracking goes on again. After `PERIOD` quiet
//! intervals tracking goes on for one interval, to check whether the event is reliable. Each time
//! that it is, the period grows by `PERIOD_STEP`, up to `PERIOD_MAX`.
//!
//! Three ways to judge the event ([`Judgement`]):
//! * `Fixed` and `Adaptive` are the paper's: they compare the smoothed value with the mean of its
//!   own recent past. The threshold is given, or is moved to the value at which both detectors
//!   would have agreed.
//! * `Anchored` is ours, and the one in use. It compares the event with its level at the last
//!   measurement of the working set (the *anchor*), not with a mean that drifts. The threshold is
//!   three times the noise seen while the working set was stable, and falls when a check shows it
//!   wrong. Checks are also rarer. An alarm costs one interval: if the working set has not moved,
//!   the anchor moves and tracking pauses again, where the paper refills its filter. A working
//!   set that is never stable is held at its mean for a while, instead of being tracked for ever.
//!
//! Cost: a few numbers. An interval is 5 s. Left out: the choice of the event and its reading,
//! and the cost of tracking, from which [`Duty`] derives the rests where that cost is known.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

mod anchored;
mod duty;
mod replay;
#[cfg(test)]
mod tests;

use anchored::Anchored;
pub use duty::Duty;
pub use replay::{Replay, Sample, replay};

/// Samples that are averaged, the paper's k.
const FILTER: usize = 3;
/// Threshold of the working set, and the initial threshold of the event.
const THRESHOLD: f64 = 0.05;
/// A change of the working set below this, in bytes, counts as none: memory moves in megabytes.
const NO_CHANGE_BYTES: f64 = (1 << 20) as f64;
/// Quiet intervals until a check.
const PERIOD: u32 = 10;
/// Quiet intervals that are added after each check that found nothing to correct.
const PERIOD_STEP: u32 = 5;
/// The longest period.
const PERIOD_MAX: u32 = 20;

/// How the event is judged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Judgement {
    /// The paper's, with this threshold (0.05 to 0.30).
    Fixed(f64),
    /// The paper's, with a threshold that follows the working set's stability.
    Adaptive,
    /// Comparison with the level at the last measurement, in units of its noise.
    Anchored,
}

/// Decides when to track.
#[derive(Clone, Debug)]
pub struct Intermittent {
    state: Detector,
}

#[derive(Clone, Debug)]
enum Detector {
    Paper(Paper),
    Anchored(Anchored),
}

impl Intermittent {
    /// Starts with tracking on.
    #[must_use]
    pub fn new(judgement: Judgement) -> Self {
        let state = match judgement {
            Judgement::Fixed(threshold) => Detector::Paper(Paper::new(threshold, false)),
            Judgement::Adaptive => Detector::Paper(Paper::new(THRESHOLD, true)),
            Judgement::Anchored => Detector::Anchored(Anchored::new()),
        };
        Self { state }
    }

    /// Takes in one interval: the working set in bytes if tracking was on, and the event. Returns
    /// whether tracking is to be on in the next interval.
    pub fn observe(&mut self, working_set: Option<f64>, event: f64) -> bool {
        match &mut self.state {
            Detector::Paper(paper) => paper.observe(working_set, event),
            Detector::Anchored(anchored) => anchored.observe(working_set, event),
        }
    }

    /// The present estimate of the working set in bytes: measured now, or held since tracking
    /// went off.
    #[must_use]
    pub fn working_set(&self) -> Option<f64> {
        match &self.state {
            Detector::Paper(paper) => paper.held,
            Detector::Anchored(anchored) => anchored.held(),
        }
    }
}

/// How long tracking may stay off before a check.
#[derive(Clone, Debug)]
struct Checks {
    /// The shortest and the longest period.
    bounds: RangeInclusive<u32>,
    period: u32,
    quiet: u32,
}

impl Checks {
    fn new(bounds: RangeInclusive<u32>) -> Self {
        Self { period: *bounds.start(), bounds, quiet: 0 }
    }

    /// Counts an interval without tracking; returns whether a check is due.
    fn due(&mut self) -> bool {
        self.quiet += 1;
        self.quiet >= self.period
    }

    /// A check ended.
    fn done(&mut self, corrected: bool) {
        self.quiet = 0;
        let next = if corrected { 0 } else { self.period + PERIOD_STEP };
        self.period = next.clamp(*self.bounds.start(), *self.bounds.end());
    }
}

/// The paper's filter: compares the moving average of the samples with the mean of its own last
/// values.
#[derive(Clone, Debug, Default)]
struct Filter {
    samples: VecDeque<f64>,
    averages: VecDeque<f64>,
}

impl Filter {
    /// Relative and absolute distance of the latest average from the mean of the recent ones;
    /// `None` until there are enough samples.
    fn take(&mut self, sample: f64) -> Option<(f64, f64)> {
        push(&mut self.samples, sample);
        push(&mut self.averages, mean(&self.samples));
        if self.samples.len() < FILTER {
            return None;
        }
        let (last, middle) = (self.averages.back()?, mean(&self.averages));
        let off = (last - middle).abs();
        Some((off / middle.abs().max(f64::MIN_POSITIVE), off))
    }

    fn clear(&mut self) {
        self.samples.clear();
        self.averages.clear();
    }
}

fn push(window: &mut VecDeque<f64>, value: f64) {
    if window.len() == FILTER {
        window.pop_front();
    }
    window.push_back(value);
}

fn mean(values: &VecDeque<f64>) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The paper's state machine (§3.5.3 and §3.5.4).
#[derive(Clone, Debug)]
struct Paper {
    adaptive: bool,
    threshold: f64,
    sizes: Filter,
    events: Filter,
    held: Option<f64>,
    checks: Checks,
}

impl Paper {
    fn new(threshold: f64, adaptive: bool) -> Self {
        Self {
            adaptive,
            threshold,
            sizes: Filter::default(),
            events: Filter::default(),
            held: None,
            checks: Checks::new(PERIOD..=PERIOD_MAX),
        }
    }

    fn observe(&mut self, working_set: Option<f64>, event: f64) -> bool {
        let moved = self.events.take(event).map(|off| off.0);
        let Some(size) = working_set else {
            let wake = moved.is_some_and(|moved| moved > self.threshold);
            if wake {
                self.events.clear();
                self.sizes.clear();
            }
            // Checks are part of the adaptive scheme: a fixed threshold has nothing to adjust.
            return wake || self.adaptive && self.checks.due();
        };
        self.held = Some(size);
        let Some((relative, absolute)) = self.sizes.take(size) else { return true };
        let stable = relative <= THRESHOLD || absolute < NO_CHANGE_BYTES;
        if !stable {
            self.sizes.clear();
        }
        let corrected = moved.is_some_and(|moved| self.adapt(stable, moved));
        self.checks.done(corrected);
        let quiet = moved.is_some_and(|moved| moved <= self.threshold);
        !(stable && (quiet || !self.adaptive))
    }

    /// Moves the threshold to where both detectors agree; returns whether that was necessary.
    fn adapt(&mut self, stable: bool, moved: f64) -> bool {
        let disagree = self.adaptive && stable == (moved > self.threshold);
        if disagree {
            self.threshold = moved;
        }
        disagree
    }
}
