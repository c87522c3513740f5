//! Disks of VMs that Overbook serves.

use model::{DiskReading, Reading};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::follow::Shown;

/// A disk that a VM has by NBD. Totals count since the process that serves it began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// The layers that it is made of.
    pub made_of: String,
    /// Reads.
    pub reads_total: u64,
    /// Bytes read.
    pub read_bytes_total: u64,
    /// Half of the reads took less, to a power of two.
    pub read_median_us: u64,
    /// 99 % of the reads took less.
    pub read_p99_us: u64,
    /// Writes.
    pub writes_total: u64,
    /// Bytes written.
    pub written_bytes_total: u64,
    /// Half of the writes took less, to a power of two.
    pub write_median_us: u64,
    /// Bytes trimmed.
    pub trimmed_bytes_total: u64,
    /// Operations that failed.
    pub errors_total: u64,
    /// What it has of repositories; absent: it is a plain file.
    pub repositories: Option<RepositoriesStatus>,
    /// Age of all this at the tick.
    pub age_ms: u64,
}

/// What a disk has of repositories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RepositoriesStatus {
    /// Whether what is written goes there: not while the VM has all the memory that it was started
    /// with.
    pub admits: bool,
    /// So many are connected.
    pub connected: u64,
    /// What lies there.
    pub held_bytes: u64,
    /// Reads that they answered.
    pub reads_total: u64,
    /// Reads of what they do not have.
    pub misses_total: u64,
    /// Reads that they did not answer in time.
    pub late_total: u64,
    /// Pages that came back changed, old or from another place.
    pub forged_total: u64,
}

impl DiskStatus {
    /// The reading as it goes over the wire.
    pub(super) fn of(shown: &Shown, reading: &Reading<DiskReading>) -> Self {
        let disk = &reading.value;
        Self {
            made_of: disk.made_of.clone(),
            reads_total: disk.reads,
            read_bytes_total: disk.read.0,
            read_median_us: disk.read_us_median,
            read_p99_us: disk.read_us_p99,
            writes_total: disk.writes,
            written_bytes_total: disk.written.0,
            write_median_us: disk.write_us_median,
            trimmed_bytes_total: disk.trimmed.0,
            errors_total: disk.errors,
            repositories: disk.repositories.map(|repositories| RepositoriesStatus {
                admits: repositories.admits,
                connected: repositories.connected,
                held_bytes: repositories.held.0,
                reads_total: repositories.reads,
                misses_total: repositories.misses,
                late_total: repositories.late,
                forged_total: repositories.forged,
            }),
            age_ms: reading.age(shown.published.at).0,
        }
    }
}
