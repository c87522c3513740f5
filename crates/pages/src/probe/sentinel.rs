//! The event for machines without performance counters: a small sample that is always watched.
//!
//! Problem: intermittent tracking needs a cheap signal that moves when the guest's behaviour
//! changes. The paper uses dTLB misses; most clouds hide their counters.
//!
//! Idea: a few hundred granules, always the same ones, are revoked at the beginning of each
//! interval, and each traps at its first touch. A sentinel that is touched at once scores 1, a
//! late touch scores less, and no touch scores 0. The sum moves with the size of the memory in
//! use and with the frequency of its use. The granules are the same every time, so the choice of
//! the sample shifts the level but not its changes.
//!
//! Cost: at most one trap per sentinel and interval: 256 of them in 5 s are 51 traps a second,
//! and a tenth of that for a guest that uses a tenth of its memory. 8 bytes per sentinel. Left
//! out: tracking's own traps. A sentinel must not be tracked as well: see
//! [`Tracker::exclude`](super::Tracker::exclude).

use model::{Millis, Time};

/// The watched granules, and their score in this interval.
#[derive(Clone, Debug)]
pub struct Sentinels {
    granules: Vec<u32>,
    touched: Vec<bool>,
    score: f64,
    since: Time,
    interval: Millis,
}

impl Sentinels {
    /// Chooses `count` granules, spread evenly over all with a random place in each part.
    #[must_use]
    pub fn new(all: u32, count: u32, interval: Millis, seed: u64, now: Time) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let count = count.min(all);
        let start = |part: u32| -> u32 {
            let start = u64::from(part) * u64::from(all) / u64::from(count.max(1));
            u32::try_from(start).unwrap_or(all)
        };
        let granules: Vec<u32> =
            (0..count).map(|part| random.u32(start(part)..start(part + 1))).collect();
        let touched = vec![false; granules.len()];
        Self { granules, touched, score: 0.0, since: now, interval }
    }

    /// The sentinels in ascending order, to be revoked at the beginning of each interval.
    #[must_use]
    pub fn granules(&self) -> &[u32] {
        &self.granules
    }

    /// Returns whether this granule is a sentinel; if so, its touch counts once in an interval.
    pub fn touched(&mut self, granule: u32, at: Time) -> bool {
        let Ok(index) = self.granules.binary_search(&granule) else { return false };
        if !std::mem::replace(&mut self.touched[index], true) {
            let late = at.since(self.since).0 as f64 / super::TICK.0 as f64;
            let longest = self.interval.0 as f64 / super::TICK.0 as f64;
            self.score += (1.0 - late.max(1.0).ln() / longest.max(2.0).ln()).max(0.0);
        }
        true
    }

    /// Ends an interval and begins the next. Returns the event, which is at least 1.
    pub fn end_interval(&mut self, now: Time) -> f64 {
        self.touched.fill(false);
        self.since = now;
        1.0 + std::mem::take(&mut self.score)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The event of a guest that touches the granules below `used`, `after_ms` ms after each
    /// revocation.
    fn event(used: u32, after_ms: u64) -> f64 {
        let mut sentinels = Sentinels::new(3200, 256, Millis(5_000), 7, Time(0));
        for granule in sentinels.granules().to_vec() {
            if granule < used {
                sentinels.touched(granule, Time(after_ms));
            }
        }
        sentinels.end_interval(Time(5_000))
    }

    #[test]
    fn the_event_moves_with_the_size_of_what_is_in_use() {
        let (small, large) = (event(320, 1), event(640, 1));
        assert!((1.7..2.2).contains(&(large / small)), "{small} {large}");
    }

    #[test]
    fn the_event_moves_with_how_busily_memory_is_used() {
        assert!(event(1600, 1) > 1.5 * event(1600, 1_000));
        assert!(event(1600, 1_000) > 1.5 * event(1600, 4_000));
    }

    #[test]
    fn a_sentinel_counts_once_in_an_interval_and_others_never() {
        let mut sentinels = Sentinels::new(100, 10, Millis(5_000), 7, Time(0));
        let granule = sentinels.granules()[3];
        assert!(sentinels.touched(granule, Time(1)));
        assert!(sentinels.touched(granule, Time(2)));
        assert!(!sentinels.touched(u32::MAX, Time(2)));
        assert!((sentinels.end_interval(Time(5_000)) - 2.0).abs() < 1e-9);
        assert!((sentinels.end_interval(Time(10_000)) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn a_guest_with_fewer_granules_than_sentinels_has_them_all() {
        assert_eq!(Sentinels::new(5, 256, Millis(5_000), 7, Time(0)).granules(), [0, 1, 2, 3, 4]);
        assert!(Sentinels::new(0, 256, Millis(5_000), 7, Time(0)).granules().is_empty());
    }
}
