//! Intermittent tracking over a recorded trace: how often it is on, and its error (MEB Table II).

use super::{Intermittent, Judgement};

/// One interval of a trace recorded with tracking always on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The working set in bytes.
    pub working_set: f64,
    /// The event's count.
    pub event: f64,
}

/// The result of a replay.
#[derive(Clone, Debug, PartialEq)]
pub struct Replay {
    /// The share of intervals in which tracking was on.
    pub up_ratio: f64,
    /// The mean of |held − recorded| / recorded over all intervals.
    pub mean_relative_error: f64,
    /// For each interval: whether tracking was on, and the estimate of the working set.
    pub intervals: Vec<(bool, f64)>,
}

/// Replays a trace. Intervals without a working set (0) count in the up ratio only.
#[must_use]
pub fn replay(judgement: Judgement, trace: &[Sample]) -> Replay {
    let mut tracking = Intermittent::new(judgement);
    let mut on = true;
    let mut error = 0.0;
    let mut intervals = Vec::with_capacity(trace.len());
    for sample in trace {
        let held = tracking.working_set().unwrap_or(0.0);
        let size = if on { sample.working_set } else { held };
        if sample.working_set > 0.0 {
            error += (size - sample.working_set).abs() / sample.working_set;
        }
        intervals.push((on, size));
        on = tracking.observe(on.then_some(sample.working_set), sample.event);
    }
    let count = trace.len().max(1) as f64;
    let up = intervals.iter().filter(|interval| interval.0).count() as f64;
    Replay { up_ratio: up / count, mean_relative_error: error / count, intervals }
}
