//! A limit on what intermittent tracking takes over time: rests as long as tracking was dear.
//!
//! Problem: the detectors decide by what they see, not by what seeing costs. A guest that leaves
//! its hot set all the time nearly stands still while it is tracked; what intermittent tracking
//! takes from it is then the share of time in which it is on, and a check after every thirty quiet
//! intervals alone is 3 %.
//!
//! Idea: after a stretch with tracking on that took c of the vCPU's time, tracking rests for at
//! least c / 1 %. Where traps are rare the detectors decide as before. What would have woken
//! tracking meanwhile is noted and wakes it as soon as the rest is over. A stretch that has cost
//! most of an interval is cut, and goes on after its rest; only the first is not, in which the
//! working set becomes known. No rest that is imposed is longer than 120 intervals, so that a guest
//! that has changed is not misjudged for ever.
//!
//! Invariant: after the first, what a stretch took is at most 1 % of the rest after it, unless that
//! is more than 1.2 intervals; it is never more than 1.9, and 120 intervals follow.
//!
//! Cost: four numbers. Source: MEB §3.5 aims at 2 % and gets there with fixed periods of up to
//! 100 s, as a trap took 2 µs there; the limit is ours. Left out: what the tracker takes while it
//! rests, which is what the rest up to 2 % is for.

/// The share of the vCPU's time that tracking may take, stretch by stretch.
const SHARE: f64 = 0.01;
/// What a stretch may have taken and yet go on, in intervals.
const STRETCH: f64 = 0.9;
/// The longest rest that is imposed, in intervals.
const LONGEST: f64 = 120.0;

/// When tracking may go on again.
#[derive(Clone, Debug, Default)]
pub struct Duty {
    /// What the present stretch took, in intervals of the vCPU's time.
    spent: f64,
    /// Intervals for which tracking must yet rest.
    rest: f64,
    /// Something would have woken it since it went off.
    is_noted: bool,
    /// The first stretch is over.
    is_settled: bool,
}

impl Duty {
    /// One interval has passed. Where tracking was on in it, `spent` is what it took of the
    /// vCPU's time, in intervals. Answers whether it is to be on in the next one, where the
    /// detectors say `wanted`.
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

    /// Intervals without tracking, when every one of them would have woken it.
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
