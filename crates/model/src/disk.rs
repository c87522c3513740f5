//! How the disks do that VMs have by NBD.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// How one disk does, since the process that serves it began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DiskReading {
    /// The layers that it is made of.
    pub made_of: String,
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read: Bytes,
    /// Half of the reads took less, in microseconds, to a power of two.
    pub read_us_median: u64,
    /// 99 % of the reads took less.
    pub read_us_p99: u64,
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub written: Bytes,
    /// Half of the writes took less, in microseconds, to a power of two.
    pub write_us_median: u64,
    /// Bytes trimmed.
    pub trimmed: Bytes,
    /// Operations that failed.
    pub errors: u64,
    /// What it has of repositories; absent: it is a plain file.
    pub repositories: Option<RepositoriesReading>,
}

/// How a group's second-level cache does: pages of data disks in memory that the group has to spare
/// (Kim 2014 §4.2.3). Totals count since the process that serves its disks began.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheReading {
    /// What it may hold now.
    pub capacity: Bytes,
    /// What it holds.
    pub held: Bytes,
    /// Pages that were read from it.
    pub hits: u64,
    /// Pages that were read from disks.
    pub misses: u64,
    /// Of all pages that were read, the share that a cache of this size would have held, as SHARDS
    /// estimates it for LRU; sizes ascend.
    pub curve: Vec<(Bytes, f32)>,
}

/// What a disk has of repositories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RepositoriesReading {
    /// Whether what is written goes there: not while the VM has all the memory that it was started
    /// with.
    #[serde(default)]
    pub admits: bool,
    /// So many are connected.
    pub connected: u64,
    /// What lies there.
    pub held: Bytes,
    /// Reads that they answered.
    pub reads: u64,
    /// Reads of what they do not have.
    pub misses: u64,
    /// Reads that they did not answer in time.
    pub late: u64,
    /// Pages that came back changed, old or from another place.
    pub forged: u64,
}
