//! Live times as a Fenwick tree: the usual solution, kept as a baseline (Bennett & Kruskal 1975).
//!
//! Cost: 32 bits per time, and O(log N) cache lines per reference, which makes it slower than the
//! bitmap.

use super::timeline::LiveTimes;

/// Partial sums over times: entry `i` (from 1) holds the live times in `i − lowbit(i) .. i`.
#[derive(Debug, Clone)]
pub struct Fenwick {
    sums: Vec<u32>,
}

const fn low_bit(index: usize) -> usize {
    index & index.wrapping_neg()
}

impl LiveTimes for Fenwick {
    fn full(capacity: u32) -> Self {
        Self { sums: (0..=capacity).map(|index| index & index.wrapping_neg()).collect() }
    }

    fn capacity(&self) -> u32 {
        u32::try_from(self.sums.len() - 1).unwrap_or(u32::MAX)
    }

    fn rank(&self, time: u32) -> u32 {
        let mut index = time as usize;
        let mut rank = 0;
        while index > 0 {
            rank += self.sums[index];
            index -= low_bit(index);
        }
        rank
    }

    fn take(&mut self, time: u32) -> u32 {
        let rank = self.rank(time);
        let mut index = time as usize + 1;
        while let Some(sum) = self.sums.get_mut(index) {
            *sum -= 1;
            index += low_bit(index);
        }
        rank
    }

    fn glance(&self, time: u32) -> u64 {
        u64::from(self.sums[time as usize])
    }

    fn bytes(&self) -> usize {
        size_of_val(&self.sums[..])
    }
}
