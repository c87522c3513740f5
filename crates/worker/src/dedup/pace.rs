//! The number of pages that may be scanned now: a rate, and its credit.

use std::time::{Duration, Instant};

use model::PagesPerMs;

/// The most time for which credit accumulates.
const LONGEST_CREDIT: Duration = Duration::from_millis(200);
/// The rate of scanning, and its credit.
#[derive(Debug)]
pub(super) struct Pace {
    /// Pages in a millisecond.
    pub(super) rate: Option<PagesPerMs>,
    pub(super) credit: f64,
    last: Instant,
}

impl Pace {
    /// Without a limit, and without credit.
    pub(super) fn new() -> Self {
        Self { rate: None, credit: 0.0, last: Instant::now() }
    }

    /// Adds credit for the time since the last call; at most that of [`LONGEST_CREDIT`] is kept.
    pub(super) fn refill(&mut self) {
        let now = Instant::now();
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.last, now));
        let of = |time: Duration, PagesPerMs(rate)| time.as_secs_f64() * 1000.0 * f64::from(rate);
        self.credit = match self.rate {
            None => f64::INFINITY,
            // A window is scanned as a whole, so there may be a debt.
            Some(rate) if self.credit.is_finite() => {
                (self.credit + of(passed, rate)).min(of(LONGEST_CREDIT, rate))
            }
            Some(_) => 0.0,
        };
    }
}
