//! Latency percentiles in fixed memory: a log-linear histogram.
//!
//! Each power of two is cut into 32 equal buckets, so a percentile is at most 1/32 (3.1 %) too
//! high and never too low; values below 32 are exact. 1,024 counters (8 kB) cover 1 µs to 19
//! hours; longer latencies count as the longest. One thread records, another takes snapshots.
//! Counters are relaxed atomics, so a snapshot may miss the newest values.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SUB_BITS: u32 = 5;
const SUB: usize = 1 << SUB_BITS;
const OCTAVES: usize = 36;
const BUCKETS: usize = (OCTAVES - SUB_BITS as usize + 1) * SUB;
const LARGEST: u64 = (1 << OCTAVES) - 1;

/// Counts of latencies in microseconds.
#[derive(Debug)]
pub(crate) struct Histogram {
    counts: Box<[AtomicU64]>,
    sum: AtomicU64,
}

impl Histogram {
    pub(crate) fn new() -> Self {
        let counts = (0..BUCKETS).map(|_| AtomicU64::new(0)).collect();
        Self { counts, sum: AtomicU64::new(0) }
    }

    pub(crate) fn record(&self, latency: Duration) {
        let us = u64::try_from(latency.as_micros()).unwrap_or(LARGEST).min(LARGEST);
        self.counts[bucket(us)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(us, Ordering::Relaxed);
    }

    pub(crate) fn snapshot(&self) -> Snapshot {
        let counts = self.counts.iter().map(|c| c.load(Ordering::Relaxed)).collect();
        Snapshot { counts, sum: self.sum.load(Ordering::Relaxed) }
    }
}

/// The counts at one moment, or between two.
#[derive(Debug, Clone)]
pub(crate) struct Snapshot {
    counts: Box<[u64]>,
    sum: u64,
}

impl Snapshot {
    /// The latencies recorded after `earlier`.
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let pairs = self.counts.iter().zip(&earlier.counts);
        let counts = pairs.map(|(now, then)| now - then).collect();
        Self { counts, sum: self.sum.wrapping_sub(earlier.sum) }
    }

    /// The mean in µs; `None` if nothing was recorded.
    pub(crate) fn mean_us(&self) -> Option<u64> {
        self.sum.checked_div(self.counts.iter().sum())
    }

    /// The value in µs that `share` of the recorded ones, in ten-thousandths, do not exceed;
    /// `None` if nothing was recorded.
    pub(crate) fn percentile_us(&self, share: u64) -> Option<u64> {
        let total: u64 = self.counts.iter().sum();
        let rank = (total * share).div_ceil(10_000).max(1);
        let mut seen = 0;
        let reaches = |count: &u64| {
            seen += count;
            seen >= rank
        };
        self.counts.iter().position(reaches).map(upper_edge)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "both are below 64")]
fn bucket(us: u64) -> usize {
    if us < SUB as u64 {
        return us as usize;
    }
    let octave = us.ilog2();
    let sub = (us >> (octave - SUB_BITS)) as usize - SUB;
    (octave - SUB_BITS + 1) as usize * SUB + sub
}

/// The largest value that falls into bucket `index`.
fn upper_edge(index: usize) -> u64 {
    if index < SUB {
        return index as u64;
    }
    let shift = index / SUB - 1;
    let start = ((SUB + index % SUB) as u64) << shift;
    start + (1 << shift) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recorded(values_us: impl IntoIterator<Item = u64>) -> Histogram {
        let histogram = Histogram::new();
        values_us.into_iter().for_each(|us| histogram.record(Duration::from_micros(us)));
        histogram
    }

    #[test]
    fn percentiles_are_never_low_and_at_most_one_32nd_high() {
        let all = recorded(1..=100_000).snapshot();
        for (share, exact) in [(10, 100), (5_000, 50_000), (9_500, 95_000), (9_999, 99_990)] {
            let found = all.percentile_us(share).unwrap();
            assert!(found >= exact && found <= exact + exact / 32 + 1, "{share}: {found}");
        }
    }

    #[test]
    fn the_mean_is_that_of_what_came_since() {
        let histogram = recorded([1, 5]);
        let earlier = histogram.snapshot();
        assert_eq!(earlier.mean_us(), Some(3));
        assert_eq!(earlier.since(&earlier).mean_us(), None);
        histogram.record(Duration::from_micros(100));
        assert_eq!(histogram.snapshot().since(&earlier).mean_us(), Some(100));
    }

    #[test]
    fn small_values_are_exact() {
        let few = recorded([3, 3, 3, 31]).snapshot();
        assert_eq!(few.percentile_us(5_000), Some(3));
        assert_eq!(few.percentile_us(9_900), Some(31));
    }

    #[test]
    fn every_value_lies_below_the_edge_of_its_bucket_and_above_the_one_before() {
        for us in (0..70_000).chain((17..36).flat_map(|e| [(1 << e) - 1, 1 << e, (1 << e) + 1])) {
            let index = bucket(us);
            assert!(us <= upper_edge(index), "{us}");
            assert!(index == 0 || us > upper_edge(index - 1), "{us}");
        }
        assert_eq!(bucket(LARGEST), BUCKETS - 1);
    }

    #[test]
    fn absurdly_long_latencies_count_in_the_last_bucket() {
        let one = recorded([u64::MAX]).snapshot();
        assert_eq!(one.percentile_us(5_000), Some(LARGEST));
    }

    #[test]
    fn an_interval_holds_only_what_came_after_its_start() {
        let histogram = recorded([1000; 50]);
        let earlier = histogram.snapshot();
        assert_eq!(histogram.snapshot().since(&earlier).percentile_us(5_000), None);
        histogram.record(Duration::from_micros(5));
        assert_eq!(histogram.snapshot().since(&earlier).percentile_us(9_900), Some(5));
    }
}
