//! What tracking takes from a VM, from the shim's own counters.
//!
//! A trapped access costs its vCPU the way to the shim's fault thread and back, and the moving of the
//! granule meanwhile. The shim measures that now and then on a granule of its own, and for every trap the
//! time that its handler is at work. The round trip counts, unless the handler alone has become slower.
//! Of the last few measurements the median is taken: one touch during which the machine did something
//! else says nothing of the others.

use model::tracking::TrackingCost;

use super::link::Counters;

/// What a trap is taken to cost until the shim has measured it, in nanoseconds: a round trip between
/// idle CPUs.
const UNMEASURED_NS: u64 = 50_000;
/// No trap is cheaper than the system calls that it takes, whatever a shim says.
const CHEAPEST_NS: u64 = 2_000;
/// Measurements that the median is taken of.
const ROUND_TRIPS: usize = 7;
/// How long a rate is measured over.
const WINDOW_US: u64 = 1_000_000;

/// Follows the counters.
#[derive(Clone, Copy, Debug)]
pub(super) struct CostMeter {
    first: Counters,
    last: Counters,
    last_us: u64,
    cost: TrackingCost,
    /// The last measurements of a round trip, the newest first; 0: not made yet.
    round_trips: [u64; ROUND_TRIPS],
    /// The handler's time per trap in the last seconds, likewise.
    handlers: [u64; ROUND_TRIPS],
}

impl CostMeter {
    /// Begins at what the counters show now.
    pub(super) fn new(counters: Counters, now_us: u64) -> Self {
        let mut meter = Self {
            first: counters,
            last: counters,
            last_us: now_us,
            cost: TrackingCost::default(),
            round_trips: [0; ROUND_TRIPS],
            handlers: [0; ROUND_TRIPS],
        };
        meter.learn_trap(counters, 0);
        meter
    }

    /// Looks at the counters; once in a second there is news.
    #[expect(clippy::cast_precision_loss, reason = "rates need three digits")]
    pub(super) fn look(&mut self, counters: Counters, now_us: u64) {
        let elapsed_us = now_us.saturating_sub(self.last_us);
        if elapsed_us < WINDOW_US {
            return;
        }
        let traps = counters.traps.saturating_sub(self.last.traps);
        self.learn_trap(counters, traps);
        let elapsed_s = elapsed_us as f64 / 1e6;
        self.cost = TrackingCost {
            traps_per_s: traps as f64 / elapsed_s,
            traps: counters.traps.saturating_sub(self.first.traps),
            vcpu_share: traps as f64 * self.trap_ns() as f64 / 1e9 / elapsed_s,
        };
        (self.last, self.last_us) = (counters, now_us);
    }

    fn learn_trap(&mut self, counters: Counters, traps: u64) {
        // Measured anew every few seconds; the same value twice is the same measurement.
        if counters.round_trip_ns != self.round_trips[0] {
            push(&mut self.round_trips, counters.round_trip_ns);
        }
        let handled_ns = counters.trap_ns.saturating_sub(self.last.trap_ns);
        if let Some(handler_ns) = handled_ns.checked_div(traps) {
            push(&mut self.handlers, handler_ns);
        }
    }

    /// What it has cost.
    pub(super) fn cost(&self) -> TrackingCost {
        self.cost
    }

    /// What one trap costs, in nanoseconds.
    pub(super) fn trap_ns(&self) -> u64 {
        let round_trip = median(&self.round_trips).unwrap_or(UNMEASURED_NS);
        round_trip.max(median(&self.handlers).unwrap_or(0)).max(CHEAPEST_NS)
    }
}

fn push(window: &mut [u64; ROUND_TRIPS], newest: u64) {
    window.rotate_right(1);
    window[0] = newest;
}

/// Of what has been measured.
fn median(window: &[u64; ROUND_TRIPS]) -> Option<u64> {
    let mut made: Vec<u64> = window.iter().copied().filter(|ns| *ns > 0).collect();
    made.sort_unstable();
    made.get(made.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counters(traps: u64, trap_ns: u64, round_trip_ns: u64) -> Counters {
        Counters { traps, trap_ns, round_trip_ns, control_ns: 0, given_back: 0 }
    }

    #[test]
    fn the_cost_is_the_traps_times_what_one_takes() {
        let mut meter = CostMeter::new(counters(1_000, 0, 30_000), 0);
        meter.look(counters(1_200, 10_000_000, 30_000), 500_000);
        assert_eq!(meter.cost(), TrackingCost::default(), "not before a second has passed");
        meter.look(counters(1_400, 20_000_000, 30_000), 2_000_000);
        let cost = meter.cost();
        assert_eq!((cost.traps_per_s, cost.traps, meter.trap_ns()), (200.0, 400, 50_000));
        assert!((cost.vcpu_share - 0.01).abs() < 1e-9, "{cost:?}");
    }

    #[test]
    fn what_was_not_measured_is_not_taken_to_be_free() {
        assert_eq!(CostMeter::new(counters(0, 0, 0), 0).trap_ns(), UNMEASURED_NS);
        assert_eq!(CostMeter::new(counters(0, 0, 1), 0).trap_ns(), CHEAPEST_NS);
    }

    #[test]
    fn one_measurement_that_was_disturbed_changes_nothing() {
        let mut meter = CostMeter::new(counters(0, 0, 20_000), 0);
        for (second, round_trip_ns) in [(1, 21_000), (2, 22_000), (3, 3_000_000), (4, 20_500)] {
            meter.look(counters(0, 0, round_trip_ns), second * 1_000_000);
            assert!(meter.trap_ns() <= 22_000, "{}", meter.trap_ns());
        }
    }

    #[test]
    fn counters_that_run_backwards_cost_nothing_and_break_nothing() {
        let mut meter = CostMeter::new(counters(u64::MAX, u64::MAX, u64::MAX), 0);
        meter.look(counters(0, 0, u64::MAX), 1_000_000);
        assert_eq!(meter.cost().traps, 0);
    }
}
