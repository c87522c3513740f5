//! How many pages may be looked at now: a rate, and what is left of it.

use std::time::{Duration, Instant};

use model::PagesPerMs;

/// How long credit is kept.
const LONGEST_CREDIT: Duration = Duration::from_millis(200);
/// How many pages may be looked at.
#[derive(Debug)]
pub(super) struct Pace {
    /// In a millisecond.
    pub(super) rate: Option<PagesPerMs>,
    pub(super) credit: f64,
    last: Instant,
}

impl Pace {
    /// Without a limit, and without credit.
    pub(super) fn new() -> Self {
        Self { rate: None, credit: 0.0, last: Instant::now() }
    }

    /// What was not used for longer than [`LONGEST_CREDIT`] is lost.
    pub(super) fn refill(&mut self) {
        let now = Instant::now();
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.last, now));
        let of = |time: Duration, PagesPerMs(rate)| time.as_secs_f64() * 1000.0 * f64::from(rate);
        self.credit = match self.rate {
            None => f64::INFINITY,
            // A window is looked at whole, so there may be a debt.
            Some(rate) if self.credit.is_finite() => {
                (self.credit + of(passed, rate)).min(of(LONGEST_CREDIT, rate))
            }
            Some(_) => 0.0,
        };
    }
}
