//! The longest time for which the work stood still.
//!
//! The worker sends heartbeats, some tens of microseconds of work apart. The longest time between
//! two beats since the last report is the stall that the guest felt, from any cause: a page
//! fault, a slow disk, a host that ran something else. An intended wait of the worker (its pace)
//! does not count. A beat costs one reading of the clock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const NEVER: u64 = u64::MAX;

/// Written by the worker, read by the reporter.
#[derive(Debug)]
pub(crate) struct Gap {
    last_us: AtomicU64,
    longest_us: AtomicU64,
}

impl Gap {
    pub(crate) const fn new() -> Self {
        Self { last_us: AtomicU64::new(NEVER), longest_us: AtomicU64::new(0) }
    }

    /// The worker makes progress.
    pub(crate) fn beat(&self, now: Duration) {
        let last_us = self.last_us.load(Ordering::Relaxed);
        let now_us = micros(now);
        if last_us != NEVER {
            self.longest_us.fetch_max(now_us.saturating_sub(last_us), Ordering::Relaxed);
        }
        self.last_us.store(now_us, Ordering::Relaxed);
    }

    /// The worker waits on purpose: the next beat starts a new measurement.
    pub(crate) fn pause(&self) {
        self.last_us.store(NEVER, Ordering::Relaxed);
    }

    /// The longest gap since the last call, in milliseconds; `None` while the worker has not
    /// beaten. A gap that still lasts counts with its length up to now, and again when it ends.
    pub(crate) fn take_ms(&self, now: Duration) -> Option<f64> {
        let (last_us, longest_us) =
            (self.last_us.load(Ordering::Relaxed), self.longest_us.swap(0, Ordering::Relaxed));
        let lasting_us = match last_us {
            NEVER if longest_us == 0 => return None,
            NEVER => 0,
            last_us => micros(now).saturating_sub(last_us),
        };
        Some(longest_us.max(lasting_us) as f64 / 1000.0)
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(NEVER)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_workload_that_does_not_beat_reports_nothing() {
        assert_eq!(Gap::new().take_ms(ms(5)), None);
    }

    #[test]
    fn the_longest_gap_since_the_last_report_counts() {
        let gap = Gap::new();
        for at in [10, 12, 42, 43] {
            gap.beat(ms(at));
        }
        assert_eq!(gap.take_ms(ms(44)), Some(30.0));
        assert_eq!(gap.take_ms(ms(45)), Some(2.0));
    }

    #[test]
    fn a_stall_that_still_lasts_is_seen() {
        let gap = Gap::new();
        gap.beat(ms(10));
        assert_eq!(gap.take_ms(ms(1010)), Some(1000.0));
        gap.beat(ms(1510));
        assert_eq!(gap.take_ms(ms(1510)), Some(1500.0));
    }

    #[test]
    fn a_wait_for_the_pace_is_no_stall() {
        let gap = Gap::new();
        gap.beat(ms(1));
        gap.pause();
        gap.beat(ms(900));
        gap.beat(ms(903));
        assert_eq!(gap.take_ms(ms(904)), Some(3.0));
    }
}
