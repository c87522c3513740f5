//! Pacing: a target number of operations per second, like a service with a fixed load.
//!
//! The schedule grants operations in slices of about 20 ms (one operation per slice below 50/s);
//! the clock is read once per slice, not per operation. A late worker catches up only on the last
//! 200 ms. After a long stall it goes on at the target rate instead of in a storm, and the
//! shortfall shows as `ops` below the rate.
//!
//! Time is an argument, so this is a pure schedule.

use std::time::Duration;

const SLICES_PER_S: f64 = 50.0;
const CATCH_UP: Duration = Duration::from_millis(200);

/// The schedule of one worker.
#[derive(Debug)]
pub(crate) struct Pacer {
    rate: Option<f64>,
    /// Operations that are granted and not yet used.
    credit: f64,
    /// The moment at which the next slice may start.
    due: Duration,
}

impl Pacer {
    /// `rate` in operations per second; `None` grants everything at once.
    pub(crate) fn new(rate: Option<f64>) -> Self {
        Self { rate, credit: 0.0, due: Duration::ZERO }
    }

    /// Takes `n` operations from the current slice; false if it is used up (then
    /// [`Pacer::next_slice`]).
    pub(crate) fn take(&mut self, n: usize) -> bool {
        let enough = self.rate.is_none() || self.credit >= n as f64;
        if enough {
            self.credit -= n as f64;
        }
        enough
    }

    /// Grants a slice of at least `n` operations; returns the moment at which it may start (in
    /// the past if the worker is late).
    pub(crate) fn next_slice(&mut self, n: usize, now: Duration) -> Duration {
        let Some(rate) = self.rate else { return now };
        let grant = (rate / SLICES_PER_S).max(n as f64);
        let start = self.due.max(now.saturating_sub(CATCH_UP));
        self.due = start + Duration::from_secs_f64(grant / rate);
        self.credit += grant;
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a worker whose operations take `cost`; returns the operations that it did until `to`.
    fn ops_between(pacer: &mut Pacer, now: &mut Duration, to: Duration, cost: Duration) -> u32 {
        let mut ops = 0;
        while *now < to {
            if !pacer.take(1) {
                *now = pacer.next_slice(1, *now).max(*now);
                continue;
            }
            *now += cost;
            ops += 1;
        }
        ops
    }

    #[test]
    fn a_fast_worker_does_exactly_the_rate() {
        for rate in [0.5, 3.0, 49.0, 50.0, 777.0, 100_000.0] {
            let mut pacer = Pacer::new(Some(rate));
            let cost = Duration::from_nanos(100);
            let ops =
                ops_between(&mut pacer, &mut Duration::default(), Duration::from_secs(100), cost);
            let target = rate * 100.0;
            assert!((f64::from(ops) - target).abs() <= target / 1000.0 + 1.0, "{rate}: {ops}");
        }
    }

    #[test]
    fn a_slow_worker_falls_behind_visibly() {
        let mut pacer = Pacer::new(Some(100.0));
        let cost = Duration::from_millis(20);
        let ops = ops_between(&mut pacer, &mut Duration::default(), Duration::from_secs(10), cost);
        assert_eq!(ops, 500);
    }

    #[test]
    fn after_a_long_stall_at_most_200_ms_are_caught_up() {
        let mut pacer = Pacer::new(Some(100.0));
        let cost = Duration::from_micros(1);
        let mut now = Duration::ZERO;
        ops_between(&mut pacer, &mut now, Duration::from_secs(1), cost);
        now += Duration::from_secs(30);
        let ops = ops_between(&mut pacer, &mut now, Duration::from_secs(32), cost);
        assert!((118..=124).contains(&ops), "{ops}");
    }

    #[test]
    fn without_a_rate_nothing_waits() {
        let mut pacer = Pacer::new(None);
        assert!((0..1000).all(|_| pacer.take(1_000_000)));
    }

    #[test]
    fn a_batch_larger_than_a_slice_is_granted_whole_and_paid_for() {
        let mut pacer = Pacer::new(Some(100.0));
        assert_eq!(pacer.next_slice(500, Duration::ZERO), Duration::ZERO);
        assert!(pacer.take(500));
        assert_eq!(pacer.next_slice(1, Duration::ZERO), Duration::from_secs(5));
    }
}
