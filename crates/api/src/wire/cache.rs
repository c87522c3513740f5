//! Second-level caches: pages of data disks in a group's spare memory.

use model::{Bytes, CacheReading, GroupName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Words;
use crate::shown::TickView;

/// A group's second-level cache. Totals count since the start of the process that serves its disks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheStatus {
    /// Maximum size from this tick on; absent: none, because the daemon is paused.
    pub quota_bytes: Option<u64>,
    /// The reason for this size.
    pub quota: Option<Words>,
    /// Maximum size, as last reported.
    pub capacity_bytes: u64,
    /// Bytes that it holds.
    pub held_bytes: u64,
    /// Pages that were read from it.
    pub hits_total: u64,
    /// Pages that were read from disks.
    pub misses_total: u64,
    /// Hit ratios of other sizes; empty until something was read.
    pub curve: Vec<CacheSize>,
    /// Age of these readings at the tick.
    pub age_ms: u64,
}

/// A possible size of the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheSize {
    /// The size.
    pub bytes: u64,
    /// Estimated share of all page reads that would have hit (from a SHARDS sample, for LRU).
    pub hit_ratio: f32,
}

impl CacheStatus {
    /// The group's cache as of the last tick. `None`: its disks have no cache, or their process
    /// does not answer.
    pub(super) fn of(shown: &TickView, name: &GroupName) -> Option<Self> {
        let reading = shown.published.view.caches.get(name)?;
        let quota = shown.published.plan.caches.get(name);
        let CacheReading { capacity, held, hits, misses, curve } = &reading.value;
        let size =
            |(size, hit_ratio): &(Bytes, f32)| CacheSize { bytes: size.0, hit_ratio: *hit_ratio };
        Some(Self {
            quota_bytes: quota.map(|quota| quota.amount.0),
            quota: quota.map(|quota| Words::of(&quota.reason)),
            capacity_bytes: capacity.0,
            held_bytes: held.0,
            hits_total: *hits,
            misses_total: *misses,
            curve: curve.iter().map(size).collect(),
            age_ms: reading.age(shown.published.at).0,
        })
    }

    /// Share of page reads that hit. `None`: nothing was read.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub fn hit_ratio(&self) -> Option<f64> {
        let all = self.hits_total + self.misses_total;
        (all > 0).then(|| self.hits_total as f64 / all as f64)
    }

    /// The first size that is at least twice the capacity.
    #[must_use]
    pub fn twice(&self) -> Option<CacheSize> {
        self.curve.iter().find(|size| size.bytes >= 2 * self.capacity_bytes).copied()
    }
}
