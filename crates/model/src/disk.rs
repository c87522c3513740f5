//! Statistics of the disks that VMs use by NBD.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// Statistics of one disk since the process that serves it started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskReading {
    /// The layers of the disk.
    pub made_of: String,
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read: Bytes,
    /// Median duration of a read in microseconds, rounded up to a power of two.
    pub read_us_median: u64,
    /// 99th percentile of the duration of a read in microseconds.
    pub read_us_p99: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub written: Bytes,
    /// Median duration of a write in microseconds, rounded up to a power of two.
    pub write_us_median: u64,
    /// Bytes trimmed.
    pub trimmed: Bytes,
    /// Operations that failed.
    pub errors: u64,
    /// The disk's use of repositories; absent: a plain file.
    pub repositories: Option<RepositoriesReading>,
}

/// Statistics of a group's second-level cache: pages of data disks in the group's spare memory
/// (Kim 2014 §4.2.3). Counters run since the process that serves the disks started.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheReading {
    /// Bytes that the cache may hold now.
    pub capacity: Bytes,
    /// Bytes that the cache holds.
    pub held: Bytes,
    /// Pages read from the cache.
    pub hits: u64,
    /// Pages read from disks.
    pub misses: u64,
    /// The hit ratio of all page reads for a cache of each size, as SHARDS estimates it for LRU;
    /// sizes ascend.
    pub curve: Vec<(Bytes, f32)>,
}

/// A disk's use of repositories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepositoriesReading {
    /// Whether written pages go there. They do not while the VM has all the memory that it was
    /// started with.
    #[serde(default)]
    pub admits: bool,
    /// Number of connected repositories.
    pub connected: u64,
    /// Bytes that the repositories hold.
    pub held: Bytes,
    /// Reads that the repositories answered.
    pub reads: u64,
    /// Reads of pages that the repositories do not have.
    pub misses: u64,
    /// Reads that the repositories did not answer in time.
    pub late: u64,
    /// Pages that came back changed, stale or from another offset.
    pub forged: u64,
}
