//! The time that tracking takes from a VM, over a window of wall-clock time.
//!
//! A trapped access stops its vCPU for the switch to the shim's fault thread, the handling, and the
//! switch back. The shim counts the handling of all traps ([`ShimCounters::trap_ns`]). The kernel
//! counts how long the fault thread waited for a CPU ([`sys::threads`]). No counter shows the two
//! context switches. Their time is taken to be the quickest touch of the shim's own granule less
//! the quickest handling, which load on the host does not lengthen. The cost also includes the CPU
//! time of tracking itself: the worker's, and that of the shim's control thread.
//!
//! All times are sums over the last [`WINDOW`], divided by its length. So a share above one means
//! that more than one thread was stopped. A restarted worker continues with the cost that its
//! predecessor reported ([`Before`]).

use std::collections::VecDeque;
use std::time::Duration;

use model::tracking::TrackingCost;

use super::link::ShimCounters;

/// The time over which a cost is taken.
pub(super) const WINDOW: Duration = Duration::from_secs(30);
/// The length of the spans over which the cost of an earlier connection is spread.
const BEFORE_US: u64 = 1_000_000;
/// The shortest span: the counters are not evaluated more often.
const SPAN_US: u64 = 50_000;
/// The assumed time of a trap's two context switches until the shim has measured it, in
/// nanoseconds: between idle CPUs.
const UNMEASURED_NS: u64 = 50_000;
/// The least that two switches take, for their system calls: a shim cannot report less.
const CHEAPEST_NS: u64 = 2_000;
/// The number of measurements from which on more than [`UNMEASURED_NS`] is believed.
const FEW: u32 = 3;

/// The time that tracking took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct TrackingUse {
    /// Accesses that trapped.
    pub(super) traps: u64,
    /// The time for which they stopped the guest's threads, in nanoseconds.
    pub(super) held_ns: u64,
    /// CPU time besides, in nanoseconds.
    pub(super) cpu_ns: u64,
}

/// A part of the window, up to the start of the next, and the time that tracking took in it.
#[derive(Clone, Copy, Debug)]
struct Span {
    since_us: u64,
    taken: TrackingUse,
}

/// The cost of tracking on an earlier connection, or by an earlier worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Before {
    /// Share of one vCPU's time in a [`WINDOW`].
    pub(super) share: f64,
    /// When that window ended, in microseconds.
    pub(super) until_us: u64,
}

impl Before {
    /// The part of the window that is not over at `now_us`: the cost before it is paid.
    pub(super) fn unpaid(self, now_us: u64) -> Duration {
        WINDOW.saturating_sub(Duration::from_micros(now_us.saturating_sub(self.until_us)))
    }
}

/// Computes the cost from the shim's counters.
#[derive(Clone, Debug)]
pub(super) struct CostMeter {
    first_traps: u64,
    held_ns: u64,
    last: ShimCounters,
    last_us: u64,
    /// The newest is last.
    spans: VecDeque<Span>,
    /// CPU time that is in no span yet.
    cpu_ns: u64,
    /// The shim's own touches.
    round_trips: Quickest,
    /// The handler's time per trap.
    handlers: Quickest,
}

impl CostMeter {
    /// Starts from the present `counters`.
    pub(super) fn new(counters: ShimCounters, now_us: u64, before: Option<Before>) -> Self {
        let mut meter = Self {
            first_traps: counters.traps,
            held_ns: 0,
            last: counters,
            last_us: now_us,
            spans: before.map_or_else(VecDeque::new, |before| before.spans(now_us)),
            cpu_ns: 0,
            round_trips: Quickest::default(),
            handlers: Quickest::default(),
        };
        meter.round_trips.take(counters.round_trip_ns);
        meter
    }

    /// Adds `ns` of CPU time that this worker spent on tracking the VM.
    pub(super) fn spent(&mut self, ns: u64) {
        self.cpu_ns = self.cpu_ns.saturating_add(ns);
    }

    /// Evaluates the counters, and the nanoseconds for which the shim's fault thread has `waited`
    /// for a CPU since the last call. Returns the time that tracking took since then; `None`: the
    /// last call was less than a span ago.
    pub(super) fn look(
        &mut self,
        counters: ShimCounters,
        now_us: u64,
        waited: impl FnOnce() -> u64,
    ) -> Option<TrackingUse> {
        let passed_us = now_us.saturating_sub(self.last_us);
        if passed_us < SPAN_US {
            return None;
        }
        let traps = counters.traps.saturating_sub(self.last.traps);
        let handled_ns = counters.trap_ns.saturating_sub(self.last.trap_ns);
        // The shim measures every few seconds; an equal value is the same measurement.
        if counters.round_trip_ns != self.last.round_trip_ns {
            self.round_trips.take(counters.round_trip_ns);
        }
        self.handlers.take(handled_ns.checked_div(traps).unwrap_or(0));
        // Without a trap, no vCPU waits for the thread. No wait is longer than the time passed.
        let waited_ns = waited();
        let waited_ns = if traps > 0 { waited_ns.min(passed_us.saturating_mul(1_000)) } else { 0 };
        let switches_ns = traps.saturating_mul(self.switch_ns());
        let held_ns = handled_ns.saturating_add(waited_ns).saturating_add(switches_ns);
        let taken = TrackingUse {
            traps,
            held_ns,
            cpu_ns: std::mem::take(&mut self.cpu_ns)
                .saturating_add(control_ns((self.last.control_ns, counters.control_ns), passed_us)),
        };
        self.held_ns = self.held_ns.saturating_add(taken.held_ns);
        self.spans.push_back(Span { since_us: self.last_us, taken });
        (self.last, self.last_us) = (counters, now_us);
        let begin_us = now_us.saturating_sub(us(WINDOW));
        // The newest span stays, also if it is longer than the window.
        while self.spans.len() > 1 && self.spans[0].since_us < begin_us {
            self.spans.pop_front();
        }
        Some(taken)
    }

    /// The cost as of the last [`Self::look`].
    #[expect(clippy::cast_precision_loss, reason = "rates need three digits")]
    pub(super) fn cost(&self) -> TrackingCost {
        let (taken, s) = (self.all(), self.window_us() as f64 / 1e6);
        let per_s = |amount: u64| if s > 0.0 { amount as f64 / s } else { 0.0 };
        TrackingCost {
            traps_per_s: per_s(taken.traps),
            traps: self.last.traps.saturating_sub(self.first_traps),
            held_us: self.held_ns / 1_000,
            vcpu_share: per_s(taken.held_ns.saturating_add(taken.cpu_ns)) / 1e9,
        }
    }

    /// The typical time for which a trap stops its thread, in nanoseconds: the median over the
    /// spans of the window that had traps, so that a few traps that fill huge pages change little.
    /// Without traps, the expected time.
    pub(super) fn trap_ns(&self) -> u64 {
        let of_span = |span: &Span| span.taken.held_ns.checked_div(span.taken.traps);
        let mut held_ns: Vec<u64> = self.spans.iter().filter_map(of_span).collect();
        let middle = held_ns.len() / 2;
        if held_ns.is_empty() {
            return self.round_trips.ns.unwrap_or(UNMEASURED_NS).max(CHEAPEST_NS);
        }
        *held_ns.select_nth_unstable(middle).1
    }

    fn all(&self) -> TrackingUse {
        self.spans.iter().fold(TrackingUse::default(), |all, Span { taken, .. }| TrackingUse {
            traps: all.traps.saturating_add(taken.traps),
            held_ns: all.held_ns.saturating_add(taken.held_ns),
            cpu_ns: all.cpu_ns.saturating_add(taken.cpu_ns),
        })
    }

    fn window_us(&self) -> u64 {
        let since_us = self.spans.front().map_or(self.last_us, |span| span.since_us);
        self.last_us.saturating_sub(since_us)
    }

    /// The time of a trap's two context switches.
    fn switch_ns(&self) -> u64 {
        let Some(round_trip) = self.round_trips.ns else { return UNMEASURED_NS };
        let switches = round_trip.saturating_sub(self.handlers.ns.unwrap_or(0));
        // Load may have lengthened each of one or two measurements.
        let most = if self.round_trips.made < FEW { UNMEASURED_NS } else { u64::MAX };
        switches.clamp(CHEAPEST_NS, most)
    }
}

impl Before {
    /// The cost as spans, spread evenly over the window.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a share of a second, and not negative"
    )]
    fn spans(self, now_us: u64) -> VecDeque<Span> {
        let (mut until_us, end_us) = (self.until_us.min(now_us), now_us.saturating_sub(us(WINDOW)));
        let cpu_ns = (self.share.clamp(0.0, 1e3) * BEFORE_US as f64 * 1e3) as u64;
        let mut spans = VecDeque::new();
        while let Some(since_us) = until_us.checked_sub(BEFORE_US).filter(|us| *us >= end_us) {
            let taken = TrackingUse { cpu_ns, ..TrackingUse::default() };
            spans.push_front(Span { since_us, taken });
            until_us = since_us;
        }
        spans
    }
}

/// The quickest of the measurements so far.
#[derive(Clone, Copy, Debug, Default)]
struct Quickest {
    ns: Option<u64>,
    made: u32,
}

impl Quickest {
    /// Adds a measurement; 0: there was none.
    fn take(&mut self, ns: u64) {
        if ns > 0 {
            self.ns = Some(self.ns.map_or(ns, |quickest| quickest.min(ns)));
            self.made = self.made.saturating_add(1);
        }
    }
}

/// The CPU time of the shim's control thread between two looks. The bound is the time that has
/// passed: a shim may report any value.
fn control_ns((before_ns, ns): (u64, u64), passed_us: u64) -> u64 {
    ns.saturating_sub(before_ns).min(passed_us.saturating_mul(1_000))
}

fn us(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn counters(traps: u64, trap_ns: u64, round_trip_ns: u64) -> ShimCounters {
        ShimCounters { traps, trap_ns, round_trip_ns, control_ns: 0, given_back: 0 }
    }

    #[test]
    fn the_cost_is_the_time_taken_over_the_time_that_passed() {
        let mut meter = CostMeter::new(counters(1_000, 0, 30_000), 0, None);
        assert_eq!(meter.look(counters(1_100, 1, 30_000), 40_000, || 0), None, "that was just now");
        meter.spent(1_000_000);
        // The handler took 20 of the 30 µs, and the switches took the other 10.
        let counted = ShimCounters { control_ns: 2_000_000, ..counters(1_400, 8_000_000, 30_000) };
        let taken = meter.look(counted, 2 * SECOND, || 3_000_000).unwrap();
        assert_eq!(taken, TrackingUse { traps: 400, held_ns: 15_000_000, cpu_ns: 3_000_000 });
        let cost = meter.cost();
        assert_eq!((cost.traps_per_s, cost.traps), (200.0, 400));
        assert!((cost.vcpu_share - 0.009).abs() < 1e-9, "18 ms of 2 s: {cost:?}");
        assert_eq!(meter.trap_ns(), 37_500);
    }

    #[test]
    fn what_was_not_measured_is_not_taken_to_be_free() {
        assert_eq!(CostMeter::new(counters(0, 0, 0), 0, None).trap_ns(), UNMEASURED_NS);
        assert_eq!(CostMeter::new(counters(0, 0, 1), 0, None).trap_ns(), CHEAPEST_NS);
        let mut meter = CostMeter::new(counters(0, 0, 0), 0, None);
        let taken = meter.look(counters(10, 0, 0), SECOND, || 0).unwrap();
        assert_eq!(taken.held_ns, 10 * UNMEASURED_NS);
    }

    #[test]
    fn touches_that_were_disturbed_make_no_other_trap_dearer() {
        let mut meter = CostMeter::new(counters(0, 0, 20_000), 0, None);
        for second in 1..8 {
            let now = counters(second * 100, second * 1_000_000, 3_000_000 + second);
            meter.look(now, second * SECOND, || 0);
        }
        let cost = meter.cost();
        assert!(cost.vcpu_share < 0.003, "{cost:?}");
    }

    #[test]
    fn no_thread_waits_or_works_for_longer_than_time_has_passed() {
        let mut meter = CostMeter::new(counters(0, 0, 10_000), 0, None);
        let lie = ShimCounters { control_ns: u64::MAX, ..counters(1, 0, 10_000) };
        let taken = meter.look(lie, SECOND, || u64::MAX).unwrap();
        assert_eq!((taken.held_ns, taken.cpu_ns), (1_000_010_000, 1_000_000_000));
    }

    #[test]
    fn what_lies_further_back_than_the_window_does_not_count() {
        let mut meter = CostMeter::new(counters(0, 0, 10_000), 0, None);
        meter.look(counters(1_000, 1_000_000_000, 10_000), SECOND, || 0);
        assert!(meter.cost().vcpu_share > 0.9);
        for second in 2..=31 {
            meter.look(counters(1_000, 1_000_000_000, 10_000), second * SECOND, || 0);
        }
        assert_eq!(meter.cost().vcpu_share, 0.0);
    }

    #[test]
    fn who_begins_anew_goes_on_with_what_was_taken_before() {
        let before = Before { share: 0.02, until_us: 98 * SECOND };
        let mut meter = CostMeter::new(counters(0, 0, 10_000), 100 * SECOND, Some(before));
        meter.look(counters(0, 0, 10_000), 101 * SECOND, || 0);
        let share = |meter: &CostMeter| meter.cost().vcpu_share;
        assert!((share(&meter) - 0.018).abs() < 1e-3, "27 of 30 s: {}", share(&meter));
        assert_eq!(meter.trap_ns(), 10_000, "of no trap anything is known");
        for second in 102..=128 {
            meter.look(counters(0, 0, 10_000), second * SECOND, || 0);
        }
        assert_eq!(share(&meter), 0.0);
        let lie = Before { share: f64::NAN, until_us: u64::MAX };
        assert_eq!(share(&CostMeter::new(counters(0, 0, 0), 100 * SECOND, Some(lie))), 0.0);
    }

    #[test]
    fn counters_that_run_backwards_cost_nothing_and_break_nothing() {
        let all = ShimCounters { control_ns: u64::MAX, ..counters(u64::MAX, u64::MAX, u64::MAX) };
        let mut meter = CostMeter::new(all, 0, None);
        let taken = meter.look(counters(0, 0, u64::MAX), SECOND, || 0).unwrap();
        assert_eq!((taken, meter.cost().traps), (TrackingUse::default(), 0));
    }

    #[test]
    fn who_was_not_looked_at_for_long_is_not_shown_as_free() {
        let mut meter = CostMeter::new(counters(0, 0, 10_000), 0, None);
        meter.look(counters(1_000, 900 * SECOND, 10_000), 90 * SECOND, || 0).unwrap();
        let share = meter.cost().vcpu_share;
        assert!((0.01..0.02).contains(&share), "{share}");
    }
}
