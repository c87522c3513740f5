//! A limit on the cost of intermittent tracking over time: each rest is in proportion to that
//! cost.
//!
//! Problem: the detectors decide by their signals, not by the cost of tracking. A guest that
//! leaves its hot set all the time nearly stops while it is tracked. Its loss is then the share
//! of time in which tracking is on, and a check after every thirty quiet intervals alone is 3 %.
//!
//! Idea: after a stretch with tracking on that took c of the vCPU's time, tracking rests for at
//! least c / 1 %. Where traps are rare the detectors decide as before. An alarm during the rest
//! is noted, and starts tracking as soon as the rest is over. A stretch that has cost most of an
//! interval is cut, and continues after its rest. Only the first stretch is not cut: it
//! determines the working set. No imposed rest is longer than 120 intervals, so a guest that has
//! changed is not misjudged for ever.
//!
//! Invariant: after the first stretch, the cost of a stretch is at most 1 % of the rest after it,
//! unless the cost is more than 1.2 intervals. It is never more than 1.9 intervals, and 120
//! intervals follow.
//!
//! Cost: four numbers. Source: MEB §3.5 aims at 2 % and reaches that with fixed periods of up to
//! 100 s, because a trap took 2 µs there; the limit is ours. Left out: the tracker's own cost
//! while it rests; the difference to 2 % is for that.

/// The share of the vCPU's time that tracking may take, for each stretch.
const SHARE: f64 = 0.01;
/// The cost, in intervals, at which a stretch is cut.
const STRETCH: f64 = 0.9;
/// The longest rest that is imposed, in intervals.
const LONGEST: f64 = 120.0;

/// Decides when tracking may go on again.
#[derive(Clone, Debug, Default)]
pub struct Duty {
    /// The cost of the present stretch, in intervals of the vCPU's time.
    spent: f64,
    /// Intervals for which tracking must still rest.
    rest: f64,
    /// There was an alarm since tracking went off.
    is_noted: bool,
    /// The first stretch is over.
    is_settled: bool,
}

impl Duty {
    /// Takes in one interval. If tracking was on in it, `spent` is its cost in vCPU time, in
    /// intervals. `wanted` is the detectors' decision. Returns whether tracking is to be on in
    /// the next interval.
    pub fn observe(&mut self, spent: Option<f64>, wanted: bool) -> bool {
        if let Some(spent) = spent {
            self.spent += spent.max(0.0);
            let is_cut = self.is_settled && self.spent >= STRETCH;
            if wanted && !is_cut {
                return true;
            }
            let rest = (self.spent / SHARE).min(LONGEST).ceil();
            *self = Self { rest, spent: 0.0, is_noted: wanted, is_settled: true };
            return false;
        }
        self.rest = (self.rest - 1.0).max(0.0);
        self.is_noted |= wanted;
        self.is_noted && self.rest < 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Intervals without tracking, if every one of them has an alarm.
    fn rest(duty: &mut Duty) -> usize {
        1 + (0..1_000).take_while(|_| !duty.observe(None, true)).count()
    }

    /// The same after a first stretch.
    fn rest_after(stretch: &[f64]) -> usize {
        let mut duty = Duty::default();
        for spent in &stretch[1..] {
            assert!(duty.observe(Some(*spent), true), "the first stretch is never cut");
        }
        assert!(!duty.observe(Some(stretch[0]), false));
        rest(&mut duty)
    }

    #[test]
    fn a_rest_is_as_long_as_the_whole_stretch_was_dear() {
        assert_eq!(rest_after(&[0.195]), 20);
        assert_eq!(rest_after(&[0.1, 0.05, 0.045]), 20);
        assert_eq!(rest_after(&[0.205]), 21);
    }

    #[test]
    fn no_rest_is_longer_than_a_hundred_and_twenty_intervals() {
        assert_eq!(rest_after(&[1.0, 1.0, 1.0]), 120);
        assert_eq!(rest_after(&[f64::INFINITY]), 120);
    }

    #[test]
    fn a_later_stretch_that_is_dear_is_cut_and_goes_on_after_its_rest() {
        let mut duty = Duty::default();
        duty.observe(Some(0.0), false);
        assert!(duty.observe(None, true));
        assert!(duty.observe(Some(0.5), true));
        assert!(!duty.observe(Some(0.5), true), "that was an interval in all");
        let rest = 1 + (0..1_000).take_while(|_| !duty.observe(None, false)).count();
        assert_eq!(rest, 100, "nothing else had to wake it");
        assert!(duty.observe(Some(0.3), true), "the next one begins at nothing");
    }

    #[test]
    fn tracking_that_costs_nothing_wakes_at_once() {
        assert_eq!(rest_after(&[0.0]), 1);
        assert_eq!(rest_after(&[f64::NAN]), 1);
    }

    #[test]
    fn what_happened_during_the_rest_wakes_when_it_is_over() {
        let mut duty = Duty::default();
        duty.observe(Some(0.1), false);
        let on: Vec<bool> = (1..=12).map(|interval| duty.observe(None, interval == 3)).collect();
        assert_eq!(on.iter().position(|on| *on), Some(9), "in the tenth, not in the third");
    }

    #[test]
    fn a_rest_goes_on_while_nothing_happens_and_its_note_is_not_kept_for_the_next() {
        let mut duty = Duty::default();
        duty.observe(Some(0.03), false);
        assert!((0..100).all(|_| !duty.observe(None, false)));
        assert!(duty.observe(None, true));
        duty.observe(Some(0.03), false);
        assert!((0..100).all(|_| !duty.observe(None, false)));
    }

    #[test]
    fn over_any_stretch_and_its_rest_it_takes_its_share() {
        for spent in [0.001, 0.01, 0.1, 0.5, 1.2] {
            let share = spent / rest_after(&[spent]) as f64;
            assert!(share <= SHARE + 1e-9, "{spent}: {share}");
        }
    }
}
