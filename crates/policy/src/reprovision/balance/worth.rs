//! The value of memory to one VM: the share of time for which it would wait at each size.
//!
//! **A whole curve** (Wang 2016 §4) gives the share of references that would miss at each size of
//! a VM's memory: the host pages out memory that the VM does not touch, and tracking sees all
//! memory, resident or not. A miss stalls the VM for the duration of a refault. A VM makes fewer
//! references while it waits. So with `x` seconds of misses for each second of running, it waits
//! for `x / (1 + x)` of its time.
//!
//! **Curves scatter.** They are averaged over [`tuning::BALANCE_PERIOD`], and the mean absolute
//! deviation is recorded too. At less than its current size, a VM is expected to miss more by
//! that deviation: an uncertain curve counts against taking memory.
//!
//! **Curves err.** A VM that waits longer than its curve says is treated as having less memory,
//! by the amount that explains the wait, if one does: the host does not always page out the
//! oldest memory.
//!
//! **Without a whole curve** only the VM's own swap is known ([`Worth::of_swapping`]).

use model::{Bytes, Cold, Time, Tracking};
use serde::{Deserialize, Serialize};

use crate::{cold, tuning};

/// The number of known sizes of a VM, spaced evenly from zero to all of its RAM.
const SIZES: usize = 128;
/// The largest plausible number of references per second.
const MOST_REFERENCES: f64 = 1e12;
/// A VM that waits for more than this share of its time makes too few references to estimate its
/// rate.
const MOST_WAITS: f64 = 0.9;

/// A VM's recent curves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Curves {
    ram: Bytes,
    at: Time,
    /// Misses per second of running, by size: their mean, …
    mean: Vec<f64>,
    /// … and their mean absolute deviation.
    off: Vec<f64>,
}

impl Curves {
    /// Merges `known` with the tracking of a VM that waits for this share of its time; `None`:
    /// the VM has no curve, or an implausible one.
    pub(crate) fn with(
        known: Option<Self>,
        tracking: &Tracking,
        waits: f64,
        ram: Bytes,
        now: Time,
    ) -> Option<Self> {
        let latest = misses(tracking, waits, ram)?;
        let Some(mut known) = known.filter(|known| known.ram == ram) else {
            return Some(Self { ram, at: now, off: vec![0.0; latest.len()], mean: latest });
        };
        let passed = now.since(known.at).0 as f64 / tuning::BALANCE_PERIOD.0 as f64;
        known.at = now;
        let share = passed.min(1.0);
        for ((mean, off), latest) in known.mean.iter_mut().zip(&mut known.off).zip(latest) {
            *off += share * ((latest - *mean).abs() - *off);
            *mean += share * (latest - *mean);
        }
        Some(known)
    }
}

/// Misses per second of running, by size. Misses that remain with all of the VM's RAM are left
/// out, because no memory saves them.
fn misses(tracking: &Tracking, waits: f64, ram: Bytes) -> Option<Vec<f64>> {
    let Tracking { working_set, curve, references_per_s, .. } = tracking;
    let is_sound = (0.0..=MOST_REFERENCES).contains(references_per_s) && !ram.is_zero();
    let last = curve.last().filter(|_| is_sound && working_set.is_some())?;
    let is_falling = curve
        .windows(2)
        .all(|two| two[0].memory < two[1].memory && two[0].miss_ratio >= two[1].miss_ratio);
    let is_share = curve.iter().all(|point| (0.0..=1.0).contains(&point.miss_ratio));
    let points: Vec<(f64, f64)> =
        curve.iter().map(|point| (point.memory.0 as f64, point.miss_ratio)).collect();
    let while_running = references_per_s / (1.0 - waits.clamp(0.0, MOST_WAITS));
    let at = |place: usize| {
        let size = ram.0 as f64 * place as f64 / (SIZES - 1) as f64;
        (straight(&points, size) - last.miss_ratio) * while_running
    };
    (is_falling && is_share).then(|| (0..SIZES).map(at).collect())
}

/// Linear interpolation between `points`, constant beyond them.
fn straight(points: &[(f64, f64)], x: f64) -> f64 {
    let after = points.partition_point(|point| point.0 <= x);
    match (after.checked_sub(1).map(|at| points[at]), points.get(after)) {
        (Some(before), Some(after)) => {
            before.1 + (after.1 - before.1) * (x - before.0) / (after.0 - before.0)
        }
        (Some((_, y)), None) | (None, Some(&(_, y))) => y,
        (None, None) => 0.0,
    }
}

/// A VM's waiting time as a function of memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Worth {
    /// Memory that the VM may use now.
    held: f64,
    /// The smallest known size …
    from: f64,
    /// … and the distance to the next.
    step: f64,
    /// Misses per second of running, by size, …
    mean: Vec<f64>,
    /// … and the possible excess over them.
    off: Vec<f64>,
    /// The amount by which the VM is treated as smaller.
    shift: f64,
    /// Duration of a miss in seconds.
    miss_s: f64,
}

impl Worth {
    /// The worth for a VM with `held` bytes, with waits as in `cold` and misses as in `curves`.
    pub(crate) fn of_paged(curves: &Curves, cold: &Cold, held: Bytes) -> Self {
        let mut worth = Self {
            held: held.0 as f64,
            from: 0.0,
            step: curves.ram.0 as f64 / (SIZES - 1) as f64,
            mean: curves.mean.clone(),
            off: curves.off.clone(),
            shift: 0.0,
            miss_s: cold::refault_s(cold),
        };
        let waits = cold::waits(cold).min(MOST_WAITS);
        let at_worst = worth.share(worth.at(&worth.mean, held) + worth.at(&worth.off, held));
        if waits >= tuning::WAITS_FOR_MORE && at_worst < waits {
            let as_if = worth.last_with(|misses| worth.share(misses) >= waits);
            let most = held.percent(tuning::GROW_PERCENT).0 as f64;
            worth.shift = as_if.map_or(0.0, |as_if| (worth.held - as_if).clamp(0.0, most));
        }
        worth
    }

    /// The worth for a VM without a whole curve that reads `per_second` bytes from its own swap.
    /// It is assumed to stop swapping with `claim` more bytes.
    pub(crate) fn of_swapping(held: Bytes, per_second: Bytes, claim: Bytes) -> Self {
        let misses = per_second.0 as f64 / tuning::READ_AHEAD.0 as f64;
        Self {
            held: held.0 as f64,
            from: held.0 as f64,
            step: claim.0.max(1) as f64,
            mean: vec![misses, 0.0],
            off: vec![0.0; 2],
            shift: 0.0,
            miss_s: tuning::SWAP_READ_S,
        }
    }

    /// The share of time for which the VM waits with `memory`; at worst, if that is less than it
    /// has.
    pub(crate) fn waits(&self, memory: Bytes) -> f64 {
        let is_less = (memory.0 as f64) < self.held;
        let more = if is_less { self.at(&self.off, memory) } else { 0.0 };
        self.share(self.at(&self.mean, memory) + more)
    }

    /// The VM's misses per second with `memory`.
    pub(crate) fn misses(&self, memory: Bytes) -> f64 {
        self.waits(memory) / self.miss_s
    }

    /// Duration of a miss in seconds.
    pub(crate) const fn miss_s(&self) -> f64 {
        self.miss_s
    }

    /// The size from which the VM's waits are negligible.
    pub(crate) fn enough(&self) -> Bytes {
        let last = self.last_with(|misses| self.share(misses) >= tuning::WAITS_FOR_MORE);
        bytes(last.map_or(self.from, |last| last + self.step) + self.shift)
    }

    /// The largest size whose misses satisfy `is_so`; misses fall with size.
    fn last_with(&self, is_so: impl Fn(f64) -> bool) -> Option<f64> {
        let last = self.mean.iter().rposition(|misses| is_so(*misses))?;
        Some(self.from + self.step * last as f64)
    }

    fn share(&self, misses: f64) -> f64 {
        let waits = misses * self.miss_s;
        waits / (1.0 + waits)
    }

    /// The value of `of` at `memory`, interpolated between the known sizes.
    fn at(&self, of: &[f64], memory: Bytes) -> f64 {
        let last = of.len() - 1;
        let place = (memory.0 as f64 - self.shift - self.from) / self.step;
        let place = place.clamp(0.0, last as f64);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let before = place as usize;
        let after = (before + 1).min(last);
        of[before] + (of[after] - of[before]) * (place - before as f64)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
fn bytes(size: f64) -> Bytes {
    Bytes(size as u64)
}

#[cfg(test)]
mod tests {
    use model::{Millis, tracking::CurvePoint};

    use super::*;

    const RAM: Bytes = Bytes::mib(508);

    fn tracking(points: &[(u64, f64)], references_per_s: f64) -> Tracking {
        let point =
            |&(mib, miss_ratio): &(u64, f64)| CurvePoint { memory: Bytes::mib(mib), miss_ratio };
        let curve = points.iter().map(point).collect();
        let working_set = Some(Bytes::mib(100));
        Tracking { working_set, curve, references_per_s, ..Tracking::default() }
    }

    fn curves(points: &[(u64, f64)], waits: f64) -> Curves {
        Curves::with(None, &tracking(points, 1_000.0), waits, RAM, Time(0)).unwrap()
    }

    /// A miss takes a millisecond.
    fn waiting(waits: f64) -> Cold {
        Cold { refaults_per_s: waits * 1e3, refault_ns: 1_000_000, ..Cold::default() }
    }

    const SLOPE: [(u64, f64); 2] = [(0, 1.0), (400, 0.0)];

    #[test]
    fn it_waits_for_what_it_misses_and_refers_to_less_meanwhile() {
        let worth = Worth::of_paged(&curves(&SLOPE, 0.0), &waiting(0.0), Bytes::mib(400));
        let percent = |mib| (worth.waits(Bytes::mib(mib)) * 100.0).round();
        assert_eq!([0, 200, 360, 400, 500].map(percent), [50.0, 33.0, 9.0, 0.0, 0.0]);
        assert!((worth.misses(Bytes::mib(200)) - 333.3).abs() < 0.1);
        assert_eq!(worth.enough().0 >> 20, 400);
    }

    #[test]
    fn who_waits_half_of_its_time_would_refer_to_twice_as_much() {
        let held = Bytes::mib(100);
        let worth = Worth::of_paged(&curves(&SLOPE, 0.5), &waiting(0.5), held);
        assert!((worth.waits(held) - 0.6).abs() < 0.01, "{}", worth.waits(held));
    }

    #[test]
    fn what_all_memory_does_not_save_is_no_miss() {
        let worth =
            Worth::of_paged(&curves(&[(0, 1.0), (400, 0.2)], 0.0), &waiting(0.0), Bytes::mib(400));
        assert!(worth.waits(Bytes::mib(400)) < 1e-9);
    }

    #[test]
    fn who_waits_longer_than_its_curve_says_has_less_than_it_seems() {
        let worth = |waits| Worth::of_paged(&curves(&SLOPE, 0.0), &waiting(waits), Bytes::mib(400));
        let enough = |waits| worth(waits).enough().0 >> 20;
        assert_eq!([0.0, 0.004, 0.09].map(enough), [400, 400, 440]);
        assert_eq!(enough(0.5), 520, "by 30 % at most");
    }

    #[test]
    fn curves_that_scatter_count_badly_for_who_gives() {
        let cliff = |mib| tracking(&[(0, 1.0), (mib - 1, 1.0), (mib, 0.0)], 1_000.0);
        let with = |known, (second, mib): (u64, u64)| {
            Curves::with(known, &cliff(mib), 0.0, RAM, Time(0).after(Millis::secs(second)))
        };
        let known = (0..60).zip([200, 300].into_iter().cycle()).fold(None, with).unwrap();
        let at_250 =
            |held| Worth::of_paged(&known, &waiting(0.0), Bytes::mib(held)).waits(Bytes::mib(250));
        assert!((at_250(200) - 1.0 / 3.0).abs() < 0.03, "{}", at_250(200));
        assert!((at_250(400) - 0.5).abs() < 0.03, "{}", at_250(400));
    }

    #[test]
    fn a_curve_that_cannot_be_true_is_none() {
        for points in [&[(0, 0.5), (100, 0.9)][..], &[(10, 0.5), (5, 0.4)], &[(0, f64::NAN)], &[]] {
            let curves = Curves::with(None, &tracking(points, 1e3), 0.0, RAM, Time(0));
            assert_eq!(curves, None, "{points:?}");
        }
        for references in [f64::INFINITY, f64::NAN, -1.0] {
            let tracking = tracking(&SLOPE, references);
            assert_eq!(Curves::with(None, &tracking, 0.0, RAM, Time(0)), None);
        }
    }

    #[test]
    fn who_swaps_by_itself_is_expected_to_end_that_with_what_it_claims() {
        let (held, claim) = (Bytes::mib(200), Bytes::mib(50));
        let worth = Worth::of_swapping(held, Bytes::mib(10), claim);
        let waits = |mib| (worth.waits(Bytes::mib(mib)) * 100.0).round();
        assert_eq!([100, 200, 250, 300].map(waits), [24.0, 24.0, 0.0, 0.0]);
        assert_eq!(worth.enough(), Bytes::mib(250));
    }
}
