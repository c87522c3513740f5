//! Sentinels: a few granules that are watched even while tracking pauses, to detect when the
//! guest enters another phase (MEB §3.5, for hosts without a counter of dTLB misses).
//!
//! At the beginning of each interval the sentinels are revoked. The event is the number of
//! sentinels touched in the interval; those that were not touched in the interval before count
//! twice. A guest in one phase touches the same ones again and again. A guest that begins to read
//! much once may touch no more of them than before, but others each time. Cost: at most one trap
//! per sentinel and interval.
//!
//! The working set of an interval is the mean of the estimates in its steps.
//!
//! **A limit by cost** ([`Duty`]) applies with the judgement in use. In a stretch of full
//! tracking the traps are counted, each at the measured cost, up to the length of the stretch. If
//! traps were lost, they came faster than they could be read, and all of the time counts. Then
//! tracking pauses for the time that [`Duty`] demands. The paper's judgements are left unchanged,
//! because they are the baseline.

use std::collections::BTreeSet;

use model::{Millis, Time};
use pages::phase::{Duty, Intermittent as Phases, Judgement};

/// The length of an interval.
pub const INTERVAL: Millis = Millis(1_000);
/// The number of sentinels: a set that grows by a tenth of the VM touches six more of them.
const SENTINELS: u32 = 64;

/// The sentinels of a VM, and whether tracking pauses.
#[derive(Debug)]
pub(super) struct Sentinels {
    granules: Vec<u32>,
    touched: BTreeSet<u32>,
    /// Sentinels touched in the interval before.
    touched_before: BTreeSet<u32>,
    /// Sum and number of the working sets of this interval.
    sizes: (f64, f64),
    ends: Time,
    event: Option<f64>,
    /// `None`: the event is only measured.
    phases: Option<Phases>,
    /// `None`: the cost of tracking does not limit it.
    duty: Option<Duty>,
    began: Time,
    /// Traps of this interval; `None`: some were lost.
    traps: Option<u64>,
    /// CPU time of tracking in addition to the traps.
    spent_ns: u64,
    is_following: bool,
}

impl Sentinels {
    /// Sentinels among `granules` granules, evenly spread.
    pub(super) fn new(judgement: Option<Judgement>, granules: u32, now: Time) -> Self {
        let count = granules.min(SENTINELS);
        // The middle of each of `count` equal parts.
        let place = |n: u32| (2 * u64::from(n) + 1) * u64::from(granules) / (2 * u64::from(count));
        Self {
            granules: (0..count).filter_map(|n| u32::try_from(place(n)).ok()).collect(),
            touched: BTreeSet::new(),
            touched_before: BTreeSet::new(),
            sizes: (0.0, 0.0),
            ends: now,
            event: None,
            phases: judgement.map(Phases::new),
            duty: (judgement == Some(Judgement::Anchored)).then(Duty::default),
            began: now,
            traps: Some(0),
            spent_ns: 0,
            is_following: true,
        }
    }

    /// Whether all granules are tracked now.
    pub(super) fn is_following(&self) -> bool {
        self.is_following
    }

    /// The event of the last interval.
    pub(super) fn event(&self) -> Option<f64> {
        self.event
    }

    /// Records a touch of a granule, which trapped.
    pub(super) fn touched(&mut self, granule: u32) {
        self.traps = self.traps.map(|traps| traps.saturating_add(1));
        if self.granules.binary_search(&granule).is_ok() {
            self.touched.insert(granule);
        }
    }

    /// Records that traps came faster than they could be read.
    pub(super) fn lost(&mut self) {
        self.traps = None;
    }

    /// Adds CPU time of tracking in addition to the traps.
    pub(super) fn spent(&mut self, ns: u64) {
        self.spent_ns = self.spent_ns.saturating_add(ns);
    }

    /// Called in each step: `working_set` in bytes, if it is measured; `trap_ns` is the cost of a
    /// trap. At the end of an interval it returns the granules to revoke for the next.
    pub(super) fn turn(
        &mut self,
        now: Time,
        working_set: Option<f64>,
        trap_ns: u64,
    ) -> Option<Vec<u32>> {
        if let Some(size) = working_set {
            self.sizes = (self.sizes.0 + size, self.sizes.1 + 1.0);
        }
        if now < self.ends {
            return None;
        }
        let (sum, count) = std::mem::take(&mut self.sizes);
        let working_set = (count > 0.0).then(|| sum / count);
        self.ends = now.after(INTERVAL);
        let taken = self.is_following.then(|| self.taken(now, trap_ns));
        (self.began, self.traps, self.spent_ns) = (now, Some(0), 0);
        // One is added, so that a first touch after silence is not an infinite change.
        let count = self.touched.len() + self.touched.difference(&self.touched_before).count();
        let event = f64::from(u32::try_from(count).unwrap_or(u32::MAX)) + 1.0;
        self.touched_before = std::mem::take(&mut self.touched);
        // Before the first interval nothing was revoked, so no touch could be seen.
        let is_first = self.event.replace(event).is_none();
        if let Some(phases) = self.phases.as_mut().filter(|_| !is_first) {
            let is_wanted = phases.observe(working_set, event);
            let duty = self.duty.as_mut();
            self.is_following = duty.map_or(is_wanted, |duty| duty.observe(taken, is_wanted));
        }
        Some(self.granules.clone())
    }

    /// The vCPU time that tracking took since the last turn, in intervals. All of its CPU time is
    /// at the vCPU's expense if there is no other CPU.
    #[expect(clippy::cast_precision_loss, reason = "three digits are enough")]
    fn taken(&self, now: Time, trap_ns: u64) -> f64 {
        let all_ms = now.since(self.began).0 as f64;
        let traps_ms = |traps: u64| traps as f64 * trap_ns as f64 / 1e6;
        let taken_ms = self.traps.map_or(all_ms, traps_ms) + self.spent_ns as f64 / 1e6;
        taken_ms.min(all_ms) / INTERVAL.0 as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRAP_NS: u64 = 20_000;

    #[test]
    fn sentinels_are_spread_over_the_vm_and_count_once_in_an_interval() {
        let mut sentinels = Sentinels::new(None, 6_400, Time(0));
        let asked = sentinels.turn(Time(0), None, TRAP_NS).unwrap();
        assert_eq!((asked.len(), asked[0], asked[63]), (64, 50, 6_350));
        for granule in [50, 50, 51, 150] {
            sentinels.touched(granule);
        }
        assert_eq!(sentinels.turn(Time(999), None, TRAP_NS), None);
        assert!(sentinels.turn(Time(1_000), None, TRAP_NS).is_some());
        assert_eq!(sentinels.event(), Some(5.0), "two, both of them for the first time");
        [50, 250].into_iter().for_each(|granule| sentinels.touched(granule));
        assert!(sentinels.turn(Time(2_000), None, TRAP_NS).is_some());
        assert_eq!(sentinels.event(), Some(4.0), "two, one of them for the first time");
    }

    #[test]
    fn tracking_rests_while_nothing_changes_and_awakes_when_something_does() {
        let mut sentinels = Sentinels::new(Some(Judgement::Adaptive), 640, Time(0));
        let mut interval = |n: u64, touches: u32| {
            (0..touches).for_each(|n| sentinels.touched(5 + 10 * n));
            let set = sentinels.is_following().then_some(1e8);
            sentinels.turn(Time(n * 1_000), set, TRAP_NS);
            sentinels.is_following()
        };
        assert!((0..8).map(|n| interval(n, 20)).any(|following| !following), "it never rests");
        assert!((8..12).any(|n| interval(n, 60)), "it sleeps on");
    }

    /// The first rest, in intervals, of a guest that raises an alarm in every interval.
    fn rest(judgement: Judgement, mut interval: impl FnMut(&mut Sentinels)) -> usize {
        let mut sentinels = Sentinels::new(Some(judgement), 640, Time(0));
        let following = (0..200).map(|n: u64| {
            if sentinels.is_following() {
                interval(&mut sentinels);
            } else {
                (0..64).for_each(|n| sentinels.touched(5 + 10 * n));
            }
            let set = sentinels.is_following().then_some(1e8);
            sentinels.turn(Time(n * 1_000), set, TRAP_NS);
            sentinels.is_following()
        });
        let following: Vec<bool> = following.collect();
        following.split(|on| *on).map(<[bool]>::len).find(|rest| *rest > 0).unwrap_or(0)
    }

    fn traps(count: u32) -> impl FnMut(&mut Sentinels) {
        move |sentinels| (0..count).for_each(|_| sentinels.touched(0))
    }

    #[test]
    fn the_dearer_tracking_was_the_longer_it_rests() {
        assert_eq!(rest(Judgement::Anchored, traps(0)), 1);
        // A fifth of the second, and again in the interval in which nothing has changed.
        assert_eq!(rest(Judgement::Anchored, traps(10_000)), 40);
        assert_eq!(rest(Judgement::Anchored, traps(50_000)), 120);
    }

    #[test]
    fn what_tracking_takes_beside_traps_lengthens_the_rest_as_they_do() {
        let spends = |sentinels: &mut Sentinels| sentinels.spent(200_000_000);
        assert_eq!(rest(Judgement::Anchored, spends), 40);
    }

    #[test]
    fn traps_that_were_lost_count_as_all_of_the_time() {
        assert_eq!(rest(Judgement::Anchored, Sentinels::lost), 120);
    }

    #[test]
    fn the_papers_judgements_are_not_limited() {
        assert_eq!(rest(Judgement::Fixed(0.2), traps(50_000)), 1);
    }

    #[test]
    fn a_vm_without_memory_has_none() {
        assert_eq!(Sentinels::new(None, 0, Time(0)).turn(Time(0), None, TRAP_NS), Some(vec![]));
    }
}
