//! Sentinels: a few granules that are watched even while tracking rests, to see whether the guest has
//! moved on (MEB §3.5, for hosts without a counter of dTLB misses).
//!
//! At the beginning of each interval the sentinels are taken out of reach; how many of them are touched
//! in it is the event. A guest in one phase touches the same ones again and again. Cost: one trap per
//! sentinel and interval at most.

use std::collections::BTreeSet;

use model::{Millis, Time};
use pages::phase::{Intermittent as Phases, Judgement};

/// How long an interval lasts.
pub const INTERVAL: Millis = Millis(1_000);
/// How many there are: a set that grows by a tenth of the VM touches six more of them.
const SENTINELS: u32 = 64;

/// The sentinels of a VM, and whether tracking rests.
#[derive(Debug)]
pub(super) struct Sentinels {
    granules: Vec<u32>,
    touched: BTreeSet<u32>,
    ends: Time,
    event: Option<f64>,
    /// `None`: the event is only measured.
    phases: Option<Phases>,
    is_following: bool,
}

impl Sentinels {
    /// Among so many granules, evenly spread.
    pub(super) fn new(judgement: Option<Judgement>, granules: u32, now: Time) -> Self {
        let count = granules.min(SENTINELS);
        // In the middle of as many equal parts.
        let place = |n: u32| (2 * u64::from(n) + 1) * u64::from(granules) / (2 * u64::from(count));
        Self {
            granules: (0..count).filter_map(|n| u32::try_from(place(n)).ok()).collect(),
            touched: BTreeSet::new(),
            ends: now,
            event: None,
            phases: judgement.map(Phases::new),
            is_following: true,
        }
    }

    /// Whether everything is to be followed now.
    pub(super) fn is_following(&self) -> bool {
        self.is_following
    }

    /// What the last interval has shown.
    pub(super) fn event(&self) -> Option<f64> {
        self.event
    }

    /// A granule was touched.
    pub(super) fn touched(&mut self, granule: u32) {
        if self.granules.binary_search(&granule).is_ok() {
            self.touched.insert(granule);
        }
    }

    /// At the end of an interval: which granules to revoke for the next. `working_set` in bytes, where it
    /// was measured in this one.
    pub(super) fn turn(&mut self, now: Time, working_set: Option<f64>) -> Option<Vec<u32>> {
        if now < self.ends {
            return None;
        }
        self.ends = now.after(INTERVAL);
        // One more than none, so that a first touch after silence is no change beyond all measure.
        let event = f64::from(u32::try_from(self.touched.len()).unwrap_or(u32::MAX)) + 1.0;
        self.touched.clear();
        // Before the first interval nothing was out of reach, so nothing could be seen.
        let is_first = self.event.replace(event).is_none();
        if let Some(phases) = self.phases.as_mut().filter(|_| !is_first) {
            self.is_following = phases.observe(working_set, event);
        }
        Some(self.granules.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentinels_are_spread_over_the_vm_and_count_once_in_an_interval() {
        let mut sentinels = Sentinels::new(None, 6_400, Time(0));
        let asked = sentinels.turn(Time(0), None).unwrap();
        assert_eq!((asked.len(), asked[0], asked[63]), (64, 50, 6_350));
        for granule in [50, 50, 51, 150] {
            sentinels.touched(granule);
        }
        assert_eq!(sentinels.turn(Time(999), None), None);
        assert!(sentinels.turn(Time(1_000), None).is_some());
        assert_eq!(sentinels.event(), Some(3.0));
    }

    #[test]
    fn tracking_rests_while_nothing_changes_and_awakes_when_something_does() {
        let mut sentinels = Sentinels::new(Some(Judgement::Adaptive), 640, Time(0));
        let mut interval = |n: u64, touches: u32| {
            (0..touches).for_each(|n| sentinels.touched(5 + 10 * n));
            let set = sentinels.is_following().then_some(1e8);
            sentinels.turn(Time(n * 1_000), set);
            sentinels.is_following()
        };
        assert!((0..8).map(|n| interval(n, 20)).any(|following| !following), "it never rests");
        assert!((8..12).any(|n| interval(n, 60)), "it sleeps on");
    }

    #[test]
    fn a_vm_without_memory_has_none() {
        assert_eq!(Sentinels::new(None, 0, Time(0)).turn(Time(0), None), Some(vec![]));
    }
}
