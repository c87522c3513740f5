//! SHARDS: miss-ratio curves from a spatially hashed sample of the ids.
//!
//! Idea: an id is in the sample if its hash is below a threshold, so all of its references are
//! seen, or none. Within the sampled share `R` of the ids, distances are `R` times as long. So a
//! sampled reference at distance `d` counts for 1/R references at distance 1 + (d − 1)/R.
//!
//! Fixed rate: the threshold stays, memory grows with the ids. Fixed size: at most `size` ids are
//! kept. One more drops the id with the largest hash and lowers the threshold to that hash, so a
//! trace of any length takes constant memory. The paper rescales all counts when the threshold
//! falls; weighing each reference with the 1/R of its own moment is the same, up to a factor
//! common to all.
//!
//! The sample may by chance hold more or fewer references than its share (one hot id decides).
//! The difference to the true number is added at distance 1 ("SHARDS-adj"), where hot ids mostly
//! are.
//!
//! Cost: two multiplications per reference that is not sampled, an exact stack for those that are.
//! Source: Waldspurger, Park, Garthwaite, Ahmad, FAST 2015, §3. Left out: several samples at once.

use std::collections::BinaryHeap;

use crate::{
    curve::{Histogram, MissRatioCurve},
    lru::{HashedStack, StackDistance as _},
};

#[cfg(test)]
mod tests;

/// References examined at once; the sampled ones among them are then touched together.
const BATCH: usize = 2048;

/// A miss-ratio curve under construction, from a sample.
#[derive(Debug, Clone)]
pub struct Shards {
    /// An id is in the sample if its hash is below this.
    threshold: u64,
    stack: HashedStack,
    histogram: Histogram,
    references: u64,
    /// The ids in the sample by hash, where their number is limited.
    limited: Option<Limited>,
}

#[derive(Debug, Clone)]
struct Limited {
    size: usize,
    ids: BinaryHeap<(u64, u64)>,
}

/// The reason why a sample cannot be taken.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum ShardsError {
    /// The rate is not a share.
    #[error("sampling rate {0}: it must be above 0 and at most 1")]
    Rate(f64),
    /// The sample is too small to be useful.
    #[error("sample of {size} ids: it must hold at least {least}", least = Shards::LEAST_SIZE)]
    Size {
        /// The size asked for.
        size: usize,
    },
}

impl Shards {
    /// A smaller sample is not useful.
    pub const LEAST_SIZE: usize = 16;

    /// Samples a share of the ids.
    ///
    /// # Errors
    /// If `rate` is not above 0 and at most 1.
    pub fn fixed_rate(rate: f64) -> Result<Self, ShardsError> {
        if !(rate > 0.0 && rate <= 1.0) {
            return Err(ShardsError::Rate(rate));
        }
        Ok(Self::new(threshold_of(rate), None))
    }

    /// Samples at most `size` ids, at a rate that falls as needed.
    ///
    /// # Errors
    /// If `size` is below [`Self::LEAST_SIZE`].
    pub fn fixed_size(size: usize) -> Result<Self, ShardsError> {
        if size < Self::LEAST_SIZE {
            return Err(ShardsError::Size { size });
        }
        let ids = BinaryHeap::new();
        Ok(Self::new(threshold_of(1.0), Some(Limited { size, ids })))
    }

    fn new(threshold: u64, limited: Option<Limited>) -> Self {
        let (stack, histogram) = (HashedStack::new(), Histogram::default());
        Self { threshold, stack, histogram, references: 0, limited }
    }

    /// Touches the ids in turn.
    pub fn touch_all(&mut self, ids: &[u64]) {
        self.references += ids.len() as u64;
        let mut sampled = [0; BATCH];
        for batch in ids.chunks(BATCH) {
            // Every id is written and only the sampled ones are kept, so there is no branch to
            // mispredict.
            let mut count = 0;
            for id in batch {
                sampled[count] = *id;
                count += usize::from(hash(*id) < self.threshold);
            }
            match self.limited {
                None => self.touch_sampled(&sampled[..count]),
                Some(_) => sampled[..count].iter().for_each(|id| self.touch_limited(*id)),
            }
        }
    }

    fn touch_sampled(&mut self, ids: &[u64]) {
        let weight = 1.0 / self.rate();
        let histogram = &mut self.histogram;
        self.stack.touch_all(ids, |distance| histogram.add(scaled(distance, weight), weight));
    }

    fn touch_limited(&mut self, id: u64) {
        let hash = hash(id);
        if hash >= self.threshold {
            return;
        }
        let weight = 1.0 / self.rate();
        let distance = self.stack.touch(id);
        self.histogram.add(scaled(distance, weight), weight);
        let Some(limited) = self.limited.as_mut().filter(|_| distance.is_none()) else { return };
        limited.ids.push((hash, id));
        if limited.ids.len() <= limited.size {
            return;
        }
        self.threshold = limited.ids.peek().map_or(self.threshold, |(hash, _)| *hash);
        while let Some((hash, id)) = limited.ids.pop() {
            if hash < self.threshold {
                limited.ids.push((hash, id));
                break;
            }
            self.stack.forget(id);
        }
    }

    /// The share of the ids that is sampled now.
    #[must_use]
    pub fn rate(&self) -> f64 {
        self.threshold as f64 / 2_f64.powi(64)
    }

    /// The number of references, sampled or not.
    #[must_use]
    pub const fn references(&self) -> u64 {
        self.references
    }

    /// The number of distinct ids, estimated from those sampled now.
    #[must_use]
    pub fn distinct(&self) -> f64 {
        self.stack.len() as f64 / self.rate()
    }

    /// The curve so far.
    #[must_use]
    pub fn curve(&self) -> MissRatioCurve {
        let mut histogram = self.histogram.clone();
        histogram.add(Some(1), self.references as f64 - histogram.total());
        histogram.curve()
    }

    /// Memory used, without that of the histogram (bounded) and the allocator's overhead.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let heap = self.limited.as_ref().map_or(0, |limited| limited.ids.capacity());
        self.stack.bytes() + heap * size_of::<(u64, u64)>()
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "casts saturate")]
fn threshold_of(rate: f64) -> u64 {
    ((rate * 2_f64.powi(64)) as u64).max(1)
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "casts saturate")]
fn scaled(distance: Option<u64>, weight: f64) -> Option<u64> {
    distance.map(|distance| 1 + ((distance - 1) as f64 * weight).round() as u64)
}

/// Spreads ids over 64 bits, most evenly over the upper ones. It must differ from the hash by
/// which the stack finds an id's slot, or the sample would fill one corner of its table.
#[inline]
const fn hash(id: u64) -> u64 {
    let id = (id ^ (id >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    (id ^ (id >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53)
}
