//! Second-level caches: pages of data disks in memory that a group has to spare.

use model::{Bytes, CacheReading, GroupName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Words;
use crate::http::follow::Shown;

/// A group's second-level cache. Totals count since the process that serves its disks began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheStatus {
    /// What it may hold from this tick on; absent: nothing, for the daemon is paused.
    pub quota_bytes: Option<u64>,
    /// Why so much.
    pub quota: Option<Words>,
    /// What it was last seen to hold at most.
    pub capacity_bytes: u64,
    /// What it holds.
    pub held_bytes: u64,
    /// Pages that were read from it.
    pub hits_total: u64,
    /// Pages that were read from disks.
    pub misses_total: u64,
    /// What other sizes would have been worth; none until something was read.
    pub curve: Vec<CacheSize>,
    /// Age of all this at the tick.
    pub age_ms: u64,
}

/// A size that a cache could have had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CacheSize {
    /// The size.
    pub bytes: u64,
    /// Share of all pages read that it would have held, estimated from a sample (SHARDS, for LRU).
    pub hit_ratio: f32,
}

impl CacheStatus {
    /// The group as the last tick saw it; `None`: its disks have no cache, or their process does
    /// not answer.
    pub(super) fn of(shown: &Shown, name: &GroupName) -> Option<Self> {
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

    /// Share of the pages read that were found in it; `None`: nothing was read.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share")]
    pub fn hit_ratio(&self) -> Option<f64> {
        let all = self.hits_total + self.misses_total;
        (all > 0).then(|| self.hits_total as f64 / all as f64)
    }

    /// The first size that is twice its capacity or more.
    #[must_use]
    pub fn twice(&self) -> Option<CacheSize> {
        self.curve.iter().find(|size| size.bytes >= 2 * self.capacity_bytes).copied()
    }
}
