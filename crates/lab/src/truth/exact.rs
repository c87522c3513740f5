//! Exact working set and miss-ratio curve from ticks of touched pages.
//!
//! **Idea.** At the resolution of ticks, granules that were last referenced in the same tick are
//! equivalent. The number of granules that were last referenced in each tick is therefore
//! sufficient. Take a reference now to a granule whose last one was in tick `s`. Its distance
//! counts all granules last referenced in later ticks, and those of this tick that come from `s`
//! or before. One walk over the ticks gives this for all references of a tick.
//!
//! **Cost.** Per tick, its pages and a walk over the ticks so far (an hour's trace: 36,000 ticks,
//! a second in all); 4 bytes per granule and 12 per tick.

use std::collections::BTreeMap;

use model::{Bytes, Millis, Time};
use pages::curve::{AgedHistogram, Histogram, MissRatioCurve};
use pages::probe::{AGEING, TOLERABLE_MISS_RATIO};
use pages::working_set::SMALL_GRANULE;

use super::TruthSample;
use super::trace::Tick;

const PAGE_BYTES: u64 = 4096;

/// The parameters of the definitions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Definition {
    /// Pages per granule; at least 1.
    pub granule_pages: u32,
    /// The time constant by which old references fade.
    pub time_constant: Millis,
    /// The miss ratio that a working set may have.
    pub tolerable: f64,
}

impl Default for Definition {
    /// The tracker's choices.
    fn default() -> Self {
        Self {
            granule_pages: SMALL_GRANULE,
            time_constant: AGEING,
            tolerable: TOLERABLE_MISS_RATIO,
        }
    }
}

/// A tick that was added.
#[derive(Debug, Clone, Copy)]
struct Past {
    end_us: u64,
    /// Granules that have not been referenced since.
    last_here: u32,
}

/// The results of all ticks so far.
#[derive(Debug)]
pub struct Exact {
    definition: Definition,
    histogram: AgedHistogram,
    /// The tick (from 1) in which each granule was last referenced; 0: never.
    last_tick: Vec<u32>,
    ticks: Vec<Past>,
    touched: u64,
    start_us: u64,
}

impl Exact {
    /// The state for a guest of `pages` pages, before its first tick.
    pub fn new(definition: Definition, pages: u64, start_us: u64) -> Self {
        let granules = pages.div_ceil(u64::from(definition.granule_pages.max(1)));
        let histogram = Histogram::exact_to(granules);
        Self {
            definition,
            histogram: AgedHistogram::new(histogram, definition.time_constant, time(start_us)),
            last_tick: vec![0; usize::try_from(granules).unwrap_or(usize::MAX)],
            ticks: Vec::new(),
            touched: 0,
            start_us,
        }
    }

    /// Adds a tick; pages beyond the guest's are skipped.
    pub fn tick(&mut self, tick: &Tick) {
        let begin_us = self.now_us();
        let end_us = tick.end_us.max(begin_us + 1);
        // The number of this tick's granules by the tick of their last reference.
        let came_from = self.move_to_now(&tick.pages);
        // References happened all over the tick; dated at its end, they would have aged too
        // little.
        let middle = time(u64::midpoint(begin_us, end_us));
        let mut older: u32 = came_from.values().sum();
        let last_here = older;
        let (mut since, mut walked) = (0, self.ticks.len());
        for (&from, &count) in came_from.iter().rev() {
            if from == 0 {
                self.histogram.add(None, f64::from(count), middle);
                continue;
            }
            let from = from as usize;
            since +=
                self.ticks[from..walked].iter().map(|past| u64::from(past.last_here)).sum::<u64>();
            walked = from;
            self.histogram.add(Some(since + u64::from(older)), f64::from(count), middle);
            older -= count;
        }
        for (&from, &count) in came_from.iter().filter(|(from, _)| **from > 0) {
            self.ticks[from as usize - 1].last_here -= count;
        }
        self.touched += u64::from(came_from.get(&0).copied().unwrap_or(0));
        self.ticks.push(Past { end_us, last_here });
    }

    /// Marks the granules of these pages as referenced in the new tick, and counts them by the
    /// tick of their last reference.
    fn move_to_now(&mut self, pages: &[u32]) -> BTreeMap<u32, u32> {
        let now = u32::try_from(self.ticks.len() + 1).unwrap_or(u32::MAX);
        let mut came_from = BTreeMap::new();
        for page in pages {
            let granule = page / self.definition.granule_pages.max(1);
            let Some(last) = self.last_tick.get_mut(granule as usize) else { continue };
            let from = std::mem::replace(last, now);
            if from != now {
                *came_from.entry(from).or_default() += 1;
            }
        }
        came_from
    }

    /// The end of the last tick, in microseconds of CLOCK_MONOTONIC.
    pub fn now_us(&self) -> u64 {
        self.ticks.last().map_or(self.start_us, |past| past.end_us)
    }

    /// The aged miss-ratio curve over bytes of memory.
    pub fn curve(&self) -> MissRatioCurve {
        self.histogram.curve().scaled(self.granule_bytes() as f64)
    }

    /// The least memory with a tolerable miss ratio. While the share of first references exceeds
    /// that ratio, no memory is enough; the result is then everything ever touched.
    pub fn working_set_size(&self) -> Bytes {
        let least = self.histogram.curve().least_size(self.definition.tolerable);
        Bytes(least.map_or(self.touched, granules) * self.granule_bytes())
    }

    /// All granules touched within the last `window` (Denning's working set).
    pub fn working_set_over(&self, window: Millis) -> Bytes {
        let since_us = self.now_us().saturating_sub(window.0 * 1000);
        let recent = self.ticks.iter().rev().take_while(|past| past.end_us > since_us);
        let granules: u64 = recent.map(|past| u64::from(past.last_here)).sum();
        Bytes(granules * self.granule_bytes())
    }

    /// Everything ever touched.
    pub fn touched(&self) -> Bytes {
        Bytes(self.touched * self.granule_bytes())
    }

    /// References per second, aged as the curve is.
    pub fn references_per_s(&self) -> f64 {
        self.histogram.references_per_second(time(self.now_us()))
    }

    /// All results, dated `at_us`.
    pub fn sample(&self, at_us: u64) -> TruthSample {
        TruthSample {
            at_us,
            working_set: self.working_set_size(),
            curve: self.curve(),
            references_per_s: self.references_per_s(),
        }
    }

    fn granule_bytes(&self) -> u64 {
        u64::from(self.definition.granule_pages.max(1)) * PAGE_BYTES
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates")]
fn granules(size: f64) -> u64 {
    size.ceil() as u64
}

fn time(us: u64) -> Time {
    Time(us / 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TICK_US: u64 = 100_000;

    const SLOW: Definition =
        Definition { granule_pages: 1, time_constant: Millis::secs(10), tolerable: 0.05 };

    /// Each tick touches these pages; one page per granule.
    fn after(ticks: impl IntoIterator<Item = Vec<u32>>) -> Exact {
        after_with(SLOW, ticks)
    }

    fn after_with(definition: Definition, ticks: impl IntoIterator<Item = Vec<u32>>) -> Exact {
        let mut exact = Exact::new(definition, 1000, 0);
        for (number, pages) in (1..).zip(ticks) {
            exact.tick(&Tick { end_us: number * TICK_US, pages });
        }
        exact
    }

    #[test]
    fn a_cyclic_sweep_needs_all_it_sweeps() {
        let exact = after(vec![(0..100).collect(); 600]);
        assert_eq!(exact.working_set_size(), Bytes::kib(400));
        assert!((exact.curve().miss_ratio(99.0 * 4096.0) - 1.0).abs() < 1e-9);
        assert!((exact.references_per_s() - 1000.0).abs() < 20.0, "{}", exact.references_per_s());
    }

    #[test]
    fn pages_of_one_granule_are_one_reference() {
        let exact = after_with(Definition::default(), vec![(0..64).rev().collect(); 100]);
        assert_eq!(exact.touched(), Bytes::kib(256));
        assert_eq!(exact.working_set_over(Millis(100)), Bytes::kib(256));
        assert!((exact.references_per_s() - 20.0).abs() < 1.0, "{}", exact.references_per_s());
    }

    #[test]
    fn a_set_that_shrinks_is_followed_within_a_few_time_constants() {
        let large = vec![(0..500).collect::<Vec<u32>>(); 300];
        let small = vec![(0..50).collect::<Vec<u32>>(); 600];
        let exact = after(large.into_iter().chain(small));
        assert_eq!(exact.working_set_size(), Bytes::kib(200));
        assert_eq!(exact.touched(), Bytes::kib(2000));
        assert_eq!(exact.working_set_over(Millis::secs(59)), Bytes::kib(200));
        assert_eq!(exact.working_set_over(Millis::secs(61)), Bytes::kib(2000));
    }

    #[test]
    fn while_most_is_new_the_set_is_all_that_was_touched() {
        let exact = after((0..10).map(|tick| (tick * 10..tick * 10 + 10).collect()));
        assert_eq!(exact.working_set_size(), Bytes::kib(400));
    }

    #[test]
    fn the_order_within_a_tick_does_not_matter() {
        let forth_and_back = (0..400)
            .map(|tick| if tick % 2 == 0 { (0..100).collect() } else { (0..100).rev().collect() });
        assert_eq!(after(forth_and_back).curve(), after(vec![(0..100).collect(); 400]).curve());
    }

    #[test]
    fn distances_are_those_of_the_definition_counted_naively() {
        const GRANULES: u32 = 40;
        let mut state = 7_u64;
        let mut random = |bound: u32| {
            state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            u32::try_from(state >> 33).unwrap() % bound
        };
        let ticks: Vec<Vec<u32>> = (0..200)
            .map(|_| {
                let (most, count) = (1 + random(GRANULES), random(12));
                (0..count).map(|_| random(most)).collect()
            })
            .collect();
        let mut naive = AgedHistogram::new(Histogram::exact_to(1000), SLOW.time_constant, Time(0));
        for (now, pages) in ticks.iter().enumerate() {
            let middle = Time(now as u64 * 100 + 50);
            let mut references = pages.clone();
            references.sort_unstable();
            references.dedup();
            for granule in references {
                let last = ticks[..now].iter().rposition(|pages| pages.contains(&granule));
                let distance = last.map(|last| {
                    let mut between = ticks[last + 1..=now].concat();
                    between.sort_unstable();
                    between.dedup();
                    between.len() as u64
                });
                naive.record(distance, middle);
            }
        }
        let expected = naive.curve().scaled(4096.0);
        assert!(after(ticks).curve().mean_absolute_error(&expected, 40.0 * 4096.0) < 1e-9);
    }
}
