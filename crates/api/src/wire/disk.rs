//! VMs' disks that Overbook serves.

use model::{DiskReading, Reading};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::shown::TickView;

/// A disk that a VM uses by NBD. Totals count since the start of the process that serves it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// The layers that it consists of.
    pub made_of: String,
    /// Reads.
    pub reads_total: u64,
    /// Bytes read.
    pub read_bytes_total: u64,
    /// Median time of a read, rounded up to a power of two.
    pub read_median_us: u64,
    /// 99th percentile of the time of a read.
    pub read_p99_us: u64,
    /// Writes.
    pub writes_total: u64,
    /// Bytes written.
    pub written_bytes_total: u64,
    /// Median time of a write, rounded up to a power of two.
    pub write_median_us: u64,
    /// Bytes trimmed.
    pub trimmed_bytes_total: u64,
    /// Failed operations.
    pub errors_total: u64,
    /// Its use of repositories; absent: it is a plain file.
    pub repositories: Option<RepositoriesStatus>,
    /// Age of these readings at the tick.
    pub age_ms: u64,
}

/// A disk's use of repositories.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RepositoriesStatus {
    /// Whether writes go to repositories; not while the VM has all the memory that it was started
    /// with.
    pub admits: bool,
    /// Number of connected repositories.
    pub connected: u64,
    /// Bytes that they hold.
    pub held_bytes: u64,
    /// Reads that they answered.
    pub reads_total: u64,
    /// Reads of pages that they do not have.
    pub misses_total: u64,
    /// Reads that they did not answer in time.
    pub late_total: u64,
    /// Pages that came back changed, stale or from another place.
    pub forged_total: u64,
}

impl DiskStatus {
    /// The reading as an API object.
    pub(super) fn of(shown: &TickView, reading: &Reading<DiskReading>) -> Self {
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
