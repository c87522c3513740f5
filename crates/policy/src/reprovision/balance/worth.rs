//! What memory is worth to one VM: the misses that it would have with this much of it.
//!
//! **Inside what it has** that is its miss-ratio curve times its references (Wang 2016 §4). The
//! curve counts pieces of memory in LRU order; to have one back takes a read for each
//! [`tuning::READ_AHEAD`] of it, and reads are what all misses are counted in. The guest's kernel
//! has set some memory apart and hardly touches it (page structures, its own code), as much as the
//! guest may use beyond what it counts; so much less is there for the rest. It keeps some more
//! free, so that more is *needed* than the working set. Where the VM was seen to miss more than its
//! curve says, that counts ([`crate::experience`]).
//!
//! **Beyond what it has** there is no curve: what misses there goes to the guest's swap (§3.6). The
//! misses of now are its major faults, each a wait for a disk as a miss is. They end when what it
//! has in swap is back; until then they fall as the curve does where it ends, at most evenly: not
//! at all for a program that goes through all of its data in turn.
//!
//! **Below what it has**, if it is short already, the curve says too much: who waits for the disk
//! cannot miss more often than the disk answers, and makes the fewer references the more it waits.
//! How often that is shows the VM of the group that missed most of late. Where two VMs thrash, one
//! of them loses little by giving the other what that lacks.
//!
//! **Without a curve** the same is all that is known: nothing of the VM can be taken, and its
//! faults would end with what its swap tells that it lacks, or as much more as a round may give.

use model::{Bytes, Tracking};

use crate::{
    experience::Experience,
    member::{growth, with_room},
    reads::Reads,
    tuning,
};

/// Misses per second by memory: falling, piece by piece straight.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Worth {
    /// Memory in bytes, ascending strictly, and the misses with it.
    points: Vec<(f64, f64)>,
    /// What it could use: its working set, what lies in swap included, and what the guest needs
    /// beside.
    pub(crate) need: Bytes,
    /// The same, as far as it was seen to touch it.
    pub(crate) seen: Bytes,
    /// Whether a curve says so.
    pub(crate) is_tracked: bool,
    /// Whether what it lacks is only looked for.
    pub(crate) is_guess: bool,
}

/// No VM touches more pieces of memory in a second.
const MOST_REFERENCES: f64 = 1e12;

/// How a VM stands while it is judged.
#[derive(Clone, Debug, Default)]
pub(crate) struct Condition {
    /// What it may use now.
    pub(crate) held: Bytes,
    /// Whether it is short of memory.
    pub(crate) is_short: bool,
    /// The share of its time in which it waits for the disk, where it is; else 0.
    pub(crate) waits: f64,
    /// What was seen of it before.
    pub(crate) experience: Experience,
    /// What it lacks at least if it is short, beyond all that it has, filled or not.
    pub(crate) lacking: Bytes,
    /// What its kernel has set apart.
    pub(crate) set_apart: Bytes,
    /// What it has had free for a while.
    pub(crate) idle: Bytes,
    /// What it has free now, if it is short: it was given that and has not filled it yet.
    pub(crate) unfilled: Bytes,
    /// What its disk can answer.
    pub(crate) disk: Reads,
}

impl Condition {
    /// Whether it lacks something, and it is not known how much.
    fn is_guess(&self) -> bool {
        self.is_short && self.experience.enough(self.held, self.disk).is_none()
    }

    /// Its major faults per second.
    fn faults(&self) -> f64 {
        self.waits * self.disk.faults
    }
}

impl Worth {
    /// As its curve and its faults say; without a curve, or with one that cannot be true, as its
    /// faults alone say.
    pub(crate) fn of(tracking: Option<&Tracking>, now: &Condition) -> Self {
        tracking
            .and_then(|tracking| Self::tracked(tracking, now))
            .unwrap_or_else(|| Self::untracked(now))
    }

    fn tracked(tracking: &Tracking, now: &Condition) -> Option<Self> {
        let references = tracking.references_per_s;
        let is_sound = (0.0..=MOST_REFERENCES).contains(&references) && !tracking.curve.is_empty();
        let working_set = tracking.working_set.filter(|_| is_sound)?;
        let swapped = tracking.swapped.minus(now.unfilled);
        let missing = if now.is_short { swapped.max(now.lacking) } else { Bytes::ZERO };
        let seen = with_room(working_set.plus(now.set_apart));
        let need = if now.is_short {
            seen.max(now.held.plus(missing))
        } else {
            // Who is not short has what it needs but for a little, however much it has just
            // touched.
            let at_most = now.held.plus(now.held.percent(tuning::STEP_PERCENT));
            seen.max(now.experience.needed(now.disk)).min(at_most.minus(now.idle))
        };
        let held = now.held.0 as f64;
        let granule = tracking.granule.clamp(tuning::READ_AHEAD, tuning::GRANULE_MAX);
        let reads = granule.0 as f64 / tuning::READ_AHEAD.0 as f64;
        let mut points: Vec<(f64, f64)> = Vec::with_capacity(tracking.curve.len());
        for point in &tracking.curve {
            let memory = point.memory.plus(now.set_apart).0 as f64;
            let misses = point.miss_ratio * references * reads;
            let is_falling = points.last().is_none_or(|last| last.0 < memory && misses <= last.1);
            if !(is_falling && (0.0..=1.0).contains(&point.miss_ratio)) {
                return None;
            }
            points.push((memory, misses));
        }
        let mut worth = Self { points, need, seen, is_tracked: true, is_guess: false };
        // What it misses now, it is known to miss with what it uses now; what is seen beyond that
        // was seen when it used more.
        let used = now.held.minus(now.idle).0 as f64;
        let here = worth.misses_at(used);
        worth.points.retain(|point| point.0 < used);
        worth.points.iter_mut().for_each(|point| point.1 = point.1 - here + now.faults());
        worth.points.extend([used, held].map(|memory| (memory, now.faults())));
        worth.points.dedup_by_key(|point| point.0);
        let part = now.held.percent(tuning::LAST_PART_PERCENT);
        let fall = worth.misses_at(now.held.minus(part).0 as f64) - now.faults();
        worth.learn(now);
        let slope = fall / part.0.max(1) as f64;
        let (missing, slope) = if swapped >= now.lacking {
            (missing, slope)
        } else {
            worth.is_guess = now.is_guess();
            let has_had_more = now.experience.waits(now.disk).any(|(size, _)| size > now.held);
            // What is only looked for may as well be twice as much.
            let is_search = worth.is_guess && !has_had_more;
            (if is_search { missing.plus(missing) } else { missing }, f64::INFINITY)
        };
        worth.go_on(now, missing, slope);
        worth.bound(now);
        Some(worth)
    }

    fn untracked(now: &Condition) -> Self {
        let is_guess = now.is_guess();
        let known = now.experience.enough(now.held, now.disk);
        let missing =
            known.map_or(growth(now.held), |known| known.minus(now.held).max(tuning::UNIT));
        let missing = if now.is_short { missing } else { Bytes::ZERO };
        let need = now.held.plus(missing);
        let mut worth = Self { points: Vec::new(), need, seen: need, is_tracked: false, is_guess };
        worth.go_on(now, missing, f64::INFINITY);
        worth
    }

    /// With less than it has it misses at least what it was seen to miss.
    fn learn(&mut self, now: &Condition) {
        let mut seen = now.experience.losses(now.disk);
        seen.retain(|(size, _)| *size < now.held);
        seen.push((now.held, now.waits));
        let seen: Vec<(f64, f64)> =
            seen.into_iter().map(|(size, waits)| (size.0 as f64, waits)).collect();
        let sizes = self.points.iter().chain(&seen).map(|point| point.0);
        let mut sizes: Vec<f64> = sizes.collect();
        sizes.sort_by(f64::total_cmp);
        sizes.dedup();
        let misses = |size: f64| self.misses_at(size).max(at(&seen, size) * now.disk.faults);
        self.points = sizes.iter().map(|size| (*size, misses(*size))).collect();
    }

    /// Beyond what it has it misses what it was seen to miss there, and nothing when it has what is
    /// `missing`. To there its faults fall evenly, or more slowly where the curve falls by less per
    /// byte.
    fn go_on(&mut self, now: &Condition, missing: Bytes, slope: f64) {
        let mut last = (now.held.0 as f64, now.faults());
        let mut points = vec![last];
        for (size, waits) in now.experience.waits(now.disk) {
            if size > now.held && waits < now.waits {
                last = (size.0 as f64, waits * now.disk.faults);
                points.push(last);
            }
        }
        let (from, faults) = last;
        let end = now.held.plus(missing).0 as f64;
        if end > from {
            let fall = slope.min(faults / (end - from));
            // A cliff is as steep as a piece of memory is large.
            let edge = (end - tuning::PIECE.0 as f64).max(from);
            points.extend([(edge, faults - fall * (edge - from)), (end, 0.0)]);
        }
        for point in points {
            if self.points.last().is_none_or(|last| last.0 < point.0) {
                self.points.push(point);
            }
        }
    }

    /// The nearer it is to missing as often as its disk can answer, the less more it can miss with
    /// less than it has. Who misses nothing is protected by all that its curve says.
    fn bound(&mut self, now: &Condition) {
        if now.waits <= 0.0 {
            return;
        }
        let room = (1.0 - now.waits).max(0.0) / now.waits * now.disk.faults;
        let held = now.held.0 as f64;
        let here = self.misses_at(held);
        for (_, misses) in self.points.iter_mut().filter(|(memory, _)| *memory < held) {
            let more = (*misses - here).max(0.0);
            *misses = here + more * room / (more + room).max(f64::MIN_POSITIVE);
        }
    }

    /// Misses per second with `memory`. What it has less than it needs is missed once in a while
    /// even where its curve is flat: memory that a cliff ends is not worthless.
    pub(crate) fn misses(&self, memory: Bytes) -> f64 {
        let lacking = self.need.minus(memory).0 as f64 / tuning::PIECE.0 as f64;
        self.misses_at(memory.0 as f64) + lacking * 1e3 / tuning::MISSED_WITHIN.0 as f64
    }

    fn misses_at(&self, memory: f64) -> f64 {
        at(&self.points, memory)
    }
}

/// On the straight lines through `points`, and level beyond them.
fn at(points: &[(f64, f64)], memory: f64) -> f64 {
    let after = points.partition_point(|point| point.0 <= memory);
    match (after.checked_sub(1).map(|at| points[at]), points.get(after)) {
        (Some(before), Some(after)) => {
            before.1 + (after.1 - before.1) * (memory - before.0) / (after.0 - before.0)
        }
        (Some((_, misses)), None) | (None, Some(&(_, misses))) => misses,
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use model::tracking::CurvePoint;

    use super::*;

    fn tracking(points: &[(u64, f64)], swapped: u64) -> Tracking {
        let point =
            |&(mib, miss_ratio): &(u64, f64)| CurvePoint { memory: Bytes::mib(mib), miss_ratio };
        Tracking {
            working_set: Some(Bytes::mib(190 + swapped)),
            swapped: Bytes::mib(swapped),
            curve: points.iter().map(point).collect(),
            references_per_s: 1_000.0,
            ..Tracking::default()
        }
    }

    const DISK: f64 = 1e6;

    fn disk(faults: f64) -> Reads {
        Reads { faults, bytes: 0.0 }
    }

    fn now(held: u64, faults: f64) -> Condition {
        let held = Bytes::mib(held);
        Condition {
            held,
            is_short: faults > 0.0,
            waits: faults / DISK,
            disk: disk(DISK),
            ..Condition::default()
        }
    }

    #[test]
    fn inside_its_memory_the_curve_counts() {
        let worth = Worth::of(Some(&tracking(&[(0, 1.0), (188, 0.1)], 0)), &now(400, 0.0));
        assert_eq!((worth.need, worth.is_tracked), (Bytes::mib(202), true));
        assert!((worth.misses(Bytes::mib(94)) - 450.0).abs() < 0.3);
        assert!(worth.misses(Bytes::mib(400)).abs() < 1e-6, "it misses nothing now");
    }

    #[test]
    fn a_large_piece_takes_several_reads() {
        let misses = |granule| {
            let tracking = Tracking { granule, ..tracking(&[(0, 1.0), (188, 0.1)], 0) };
            Worth::of(Some(&tracking), &now(400, 0.0)).misses(Bytes::mib(94)).round()
        };
        let granules = [Bytes::ZERO, Bytes::kib(128), Bytes::mib(2), Bytes(u64::MAX)];
        assert_eq!(granules.map(misses), [450.0, 1_800.0, 28_800.0, 28_800.0]);
    }

    #[test]
    fn what_the_kernel_sets_apart_is_needed_beside() {
        let tracking = tracking(&[(0, 1.0), (188, 0.1)], 0);
        let worth =
            Worth::of(Some(&tracking), &Condition { set_apart: Bytes::mib(38), ..now(400, 0.0) });
        assert_eq!(worth.need, Bytes::mib(240));
        assert!((worth.misses(Bytes::mib(132)) - 450.0).abs() < 0.3);
        assert!(worth.misses(Bytes::mib(38)) >= 900.0);
    }

    #[test]
    fn beyond_its_memory_the_faults_of_now_fall_until_its_swap_is_empty() {
        let worth = Worth::of(Some(&tracking(&[(0, 1.0), (188, 0.0)], 100)), &now(200, 80.0));
        let misses = |mib| worth.misses(Bytes::mib(mib));
        // The last 50 MiB of what it has save 202 misses, and so would the next 20, at most.
        assert!((misses(200) - 80.0).abs() < 0.3 && (misses(210) - 72.0).abs() < 0.3);
        assert!(misses(300).abs() < 0.1 && misses(1_000).abs() < 1e-6);
        assert!(misses(190) > 80.0);
        assert_eq!(worth.need, Bytes(Bytes::mib(290).0 * 20 / 19));
    }

    #[test]
    fn what_it_was_given_and_has_not_filled_yet_it_does_not_lack() {
        let tracking = tracking(&[(0, 1.0), (188, 0.0)], 100);
        let need = |unfilled| {
            let now = Condition { unfilled: Bytes::mib(unfilled), ..now(300, 80.0) };
            Worth::of(Some(&tracking), &now).need.0 >> 20
        };
        assert_eq!([0, 60, 100].map(need), [400, 340, 305], "at last what it was seen to touch");
    }

    #[test]
    fn where_the_curve_is_flat_nothing_is_saved_before_all_fits() {
        let worth = Worth::of(Some(&tracking(&[(0, 1.0), (188, 1.0)], 100)), &now(200, 80.0));
        let misses = |mib| worth.misses(Bytes::mib(mib));
        assert!((misses(100) - misses(299)).abs() < 0.5, "{} {}", misses(100), misses(299));
        assert!(misses(299) - misses(300) > 79.0, "{} {}", misses(299), misses(300));
    }

    #[test]
    fn who_misses_as_often_as_a_disk_answers_loses_nothing_more() {
        let of = |faults| {
            let now =
                Condition { disk: disk(1_000.0), waits: faults / 1_000.0, ..now(200, faults) };
            let worth = Worth::of(Some(&tracking(&[(0, 1.0), (188, 0.0)], 50)), &now);
            (worth.misses(Bytes::mib(100)) - worth.misses(Bytes::mib(200))).round()
        };
        assert_eq!([1_000.0, 500.0, 250.0, 10.0].map(of), [0.0, 234.0, 351.0, 464.0]);
    }

    #[test]
    fn who_was_short_of_late_would_be_again_with_less() {
        let calm = tracking(&[(0, 1.0), (188, 0.0)], 0);
        let mut short = Condition { experience: Experience::default(), ..now(300, 0.0) };
        short.experience = Experience::seen(Bytes::mib(250), 0.25 * DISK);
        let worth = Worth::of(Some(&calm), &short);
        let misses = |mib| (worth.misses(Bytes::mib(mib)) / DISK * 100.0).round();
        assert_eq!([100, 250, 270, 300].map(misses), [25.0, 25.0, 15.0, 0.0]);
    }

    #[test]
    fn without_a_curve_its_faults_would_end_with_what_a_round_may_give() {
        let worth = Worth::of(None, &now(100, 60.0));
        assert_eq!((worth.need, worth.is_tracked), (Bytes::mib(130), false));
        assert!((worth.misses(Bytes::mib(115)) - 30.0).abs() < 0.1);
        assert_eq!(Worth::of(None, &now(100, 0.0)).need, Bytes::mib(100));
    }

    #[test]
    fn a_curve_that_cannot_be_true_is_none() {
        for points in [&[(0, 0.5), (100, 0.9)][..], &[(10, 0.5), (5, 0.4)], &[(0, f64::NAN)], &[]] {
            assert!(
                !Worth::of(Some(&tracking(points, 0)), &now(100, 0.0)).is_tracked,
                "{points:?}"
            );
        }
        let mut endless = tracking(&[(0, 1.0)], 0);
        endless.references_per_s = f64::INFINITY;
        assert!(!Worth::of(Some(&endless), &now(100, 0.0)).is_tracked);
    }
}
