//! The tracking of the paper (MEB §3.1 to §3.4): every touch outside the hot set traps, and each
//! trapped granule moves to the top of an LRU stack; its depth there is the distance.
//!
//! It is kept for experiments that compare with it. Nothing bounds its cost, which is the rate at
//! which the guest leaves its hot set (a random pattern: tens of thousands of traps a second). A
//! granule counts once in a tick, as in all trackers here. With a sample (SHARDS) only some
//! granules are ever revoked; each stands for the others, so distances are divided by the share.
//! In phases without changes tracking can pause ([`Sentinels`]), with the judgement in use for a
//! time that depends on its cost. The last estimate holds meanwhile.

use model::Time;
use pages::curve::{AgedHistogram, Histogram};
use pages::lru::{AvlStack, DenseStack, ListStack, StackDistance};
use pages::probe::{AGEING, TICK, TOLERABLE_MISS_RATIO};
use protocol::Tracking;

use super::cost::TrackingUse;
use super::granules::Granules;
use super::mode::{HotSet, Intermittent, Lru, Structure};
use super::sentinels::{INTERVAL, Sentinels};
use super::strategy::{Estimate, Strategy};

/// LRU stack, histogram and hot set.
pub(super) struct LruStrategy {
    stack: Box<dyn StackDistance + Send>,
    histogram: AgedHistogram,
    last_tick: Vec<u32>,
    tracking: Tracking,
    share: f64,
    /// `None`: the size of the hot set is fixed.
    dynamic: Option<pages::hot_set::HotSet>,
    adjusted: Time,
    sentinels: Option<Sentinels>,
    /// The cost of a trap; known from the first step on.
    trap_ns: u64,
    granule_bytes: f64,
}

impl std::fmt::Debug for LruStrategy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LruStrategy").field("tracking", &self.tracking).finish_non_exhaustive()
    }
}

impl LruStrategy {
    /// A strategy for these granules.
    #[expect(clippy::cast_precision_loss, reason = "a granule has at most 2 MiB")]
    pub(super) fn new(lru: &Lru, granules: &Granules, now: Time) -> Self {
        let count = granules.count();
        let ids = usize::try_from(count).unwrap_or(usize::MAX);
        let stack: Box<dyn StackDistance + Send> = match lru.structure {
            Structure::List => Box::new(ListStack::new()),
            Structure::Avl => Box::new(AvlStack::new()),
            Structure::Bitmap => Box::new(DenseStack::<pages::lru::Bitmap>::new(ids)),
        };
        let (hot_set, dynamic) = match lru.hot_set {
            HotSet::Fixed(size) => (size, None),
            HotSet::Dynamic => {
                let dynamic = pages::hot_set::HotSet::new(count);
                (dynamic.size(), Some(dynamic))
            }
        };
        let histogram = Histogram::exact_to(count.into());
        Self {
            stack,
            histogram: AgedHistogram::new(histogram, AGEING, now),
            last_tick: vec![0; ids],
            tracking: Tracking {
                granule_pages: granules.granule_pages(),
                hot_set: Some(hot_set.max(protocol::MIN_HOT_SET)),
                sample: threshold(lru.sample),
                // Unlimited, because the experiments measure the real cost.
                max_traps_per_s: u32::MAX,
            },
            share: lru.sample.clamp(f64::MIN_POSITIVE, 1.0),
            dynamic,
            adjusted: now,
            sentinels: match lru.intermittent {
                Intermittent::Off => None,
                Intermittent::Watched => Some(Sentinels::new(None, count, now)),
                Intermittent::On(judgement) => Some(Sentinels::new(Some(judgement), count, now)),
            },
            trap_ns: 0,
            granule_bytes: granules.granule_bytes() as f64,
        }
    }
}

impl Strategy for LruStrategy {
    fn tracking(&self) -> Option<Tracking> {
        if self.is_following() {
            return Some(self.tracking);
        }
        // The shim revokes nothing by itself; the sentinels are named in requests.
        Some(Tracking { hot_set: None, sample: u32::MAX, ..self.tracking })
    }

    fn revoke(&mut self, now: Time) -> Vec<u32> {
        let is_following = self.is_following();
        let set = if is_following { self.estimate(now).and_then(|e| e.working_set) } else { None };
        let Some(sentinels) = &mut self.sentinels else { return Vec::new() };
        let set_bytes = set.map(|set| set * self.granule_bytes);
        sentinels.turn(now, set_bytes, self.trap_ns).unwrap_or_default()
    }

    fn is_following(&self) -> bool {
        self.sentinels.as_ref().is_none_or(Sentinels::is_following)
    }

    fn event(&self) -> Option<f64> {
        self.sentinels.as_ref()?.event()
    }

    fn revoked(&mut self, _granule: u32, _at: Time) {}

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a distance is at most the number of granules, and the share positive"
    )]
    fn touched(&mut self, granule: u32, at: Time) {
        if let Some(sentinels) = &mut self.sentinels {
            sentinels.touched(granule);
            if !sentinels.is_following() {
                return;
            }
        }
        // Ticks are counted from 1: 0 is "never".
        let tick = u32::try_from(at.0 / TICK.0 % u64::from(u32::MAX)).unwrap_or(0) + 1;
        let Some(last) = self.last_tick.get_mut(granule as usize) else { return };
        if *last == tick {
            return;
        }
        *last = tick;
        let distance = self.stack.touch(granule.into());
        let distance = distance.map(|distance| (distance as f64 / self.share) as u64);
        self.histogram.add(distance, 1.0 / self.share, at);
    }

    // A lost touch is one lost reference among very many.
    fn resync(&mut self, _now: Time, _is_revoked: &mut dyn FnMut(u32) -> bool) {
        if let Some(sentinels) = &mut self.sentinels {
            sentinels.lost();
        }
    }

    fn given_back(&mut self, _now: Time) {}

    fn observe(&mut self, now: Time, trap_ns: u64, taken: TrackingUse) {
        self.trap_ns = trap_ns;
        if let Some(sentinels) = &mut self.sentinels {
            sentinels.spent(taken.cpu_ns);
        }
        if now < self.adjusted.after(INTERVAL) || !self.is_following() {
            return;
        }
        self.adjusted = now;
        let Some(Estimate { working_set: Some(set), curve, .. }) = self.estimate(now) else {
            return;
        };
        if let Some(dynamic) = &mut self.dynamic {
            dynamic.adjust(&curve, set);
            self.tracking.hot_set = Some(dynamic.size());
        }
    }

    fn estimate(&self, now: Time) -> Option<Estimate> {
        let curve = self.histogram.curve();
        let references_per_s = self.histogram.references_per_second(now);
        let working_set = curve.least_size(TOLERABLE_MISS_RATIO);
        (references_per_s > 0.0).then_some(Estimate {
            working_set,
            curve,
            references_per_s,
            at: now,
        })
    }
}

/// A share of all hashes in the format of the protocol.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a share of 2^32, saturating"
)]
fn threshold(share: f64) -> u32 {
    (share.clamp(0.0, 1.0) * f64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use pages::phase::Judgement;

    use super::*;

    /// Granules of 8 KiB, in 32 MiB.
    const GRANULES: u32 = 4_096;
    const TRAP_NS: u64 = 100_000;

    /// A guest that touches five eighths of its memory at random, and a shim with its hot set.
    struct RandomGuest {
        strategy: LruStrategy,
        hot: VecDeque<u32>,
        seed: u64,
        now: Time,
    }

    impl RandomGuest {
        fn new(intermittent: Intermittent) -> Self {
            let region = protocol::Region { first_page: 0, pages: 2 * GRANULES, address: 0 };
            let granules = Granules::new(&[region], Some(2), model::Bytes::mib(1024)).unwrap();
            let (structure, hot_set) = (Structure::Bitmap, HotSet::Dynamic);
            let lru = Lru { structure, hot_set, sample: 1.0, intermittent };
            let strategy = LruStrategy::new(&lru, &granules, Time(0));
            Self { strategy, hot: VecDeque::new(), seed: 1, now: Time(0) }
        }

        /// The generator of Numerical Recipes, its upper half.
        fn touch(&mut self) -> u32 {
            self.seed = self.seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u32::try_from((self.seed >> 16) % u64::from(GRANULES * 5 / 8)).unwrap()
        }

        /// A step of 20 ms with `touches` touches; returns whether tracking is on after it.
        fn step(&mut self, touches: u32) -> bool {
            self.now = self.now.after(model::Millis(20));
            for _ in 0..touches {
                let granule = self.touch();
                if self.strategy.is_following() && !self.hot.contains(&granule) {
                    self.strategy.touched(granule, self.now);
                    self.hot.push_front(granule);
                    self.hot.truncate(self.strategy.tracking.hot_set.unwrap() as usize);
                }
            }
            self.strategy.observe(self.now, TRAP_NS, TrackingUse::default());
            self.strategy.revoke(self.now);
            self.strategy.is_following()
        }
    }

    #[test]
    fn a_hot_set_grows_to_an_eighth_of_the_vm_within_seconds_and_the_working_set_stays_known() {
        let mut guest = RandomGuest::new(Intermittent::Off);
        (0..12 * 50).for_each(|_| assert!(guest.step(100)));
        assert_eq!(guest.strategy.tracking.hot_set, Some(GRANULES / 8));
        let set = guest.strategy.estimate(guest.now).and_then(|e| e.working_set).unwrap();
        let truth = f64::from(GRANULES * 5 / 8);
        assert!((set / truth - 1.0).abs() < 0.06, "{set} of {truth}");
    }

    #[test]
    fn intermittent_tracking_takes_its_share_once_it_knows_the_guest() {
        let mut guest = RandomGuest::new(Intermittent::On(Judgement::Anchored));
        (0..70 * 50).for_each(|_| {
            guest.step(200);
        });
        let on = (0..180 * 50).filter(|_| guest.step(200)).count();
        // While tracking is on, it traps some 8,000 times a second; the checks alone would take a
        // twentieth of the time.
        let up_ratio = f64::from(u32::try_from(on).unwrap()) / (180.0 * 50.0);
        assert!((0.006..=0.0125).contains(&up_ratio), "{up_ratio}");
    }
}
