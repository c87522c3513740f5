//! One row of a VM's history: a reading, a decision, or a step of a move to another host.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::LastChange;

/// One reading of a VM, or one decision about it, or a step of a move between hosts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistoryRow {
    /// Time in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// For a reading: the length of its step.
    pub step_seconds: Option<u32>,
    /// Memory that the balloon left the guest.
    pub balloon_bytes: Option<u64>,
    /// Memory that the guest was meant to have.
    pub target_bytes: Option<u64>,
    /// Memory that the guest occupied on the host.
    pub used_bytes: Option<u64>,
    /// Its working set, if it was tracked.
    pub working_set_bytes: Option<u64>,
    /// The part of its memory that was shared with VMs of its group.
    pub shared_bytes: Option<u64>,
    /// The memory that sharing saved it.
    pub saved_bytes: Option<u64>,
    /// Memory of it that was merged since its group's worker first connected to it.
    pub merged_bytes: Option<u64>,
    /// The rate at which its group was scanned for identical pages.
    pub scan_rate_pages_per_ms: Option<u32>,
    /// Memory that it had freed and the host had not taken.
    #[serde(default)]
    pub freed_bytes: Option<u64>,
    /// Freed memory that the host took since its group's worker first connected to it.
    #[serde(default)]
    pub freed_taken_bytes: Option<u64>,
    /// The part of its disks that was in repositories.
    #[serde(default)]
    pub in_repositories_bytes: Option<u64>,
    /// Median time of a read of its slowest disk, over the time that the disk was served.
    #[serde(default)]
    pub disk_read_median_us: Option<u32>,
    /// Resident memory, if the host paged out cold memory.
    #[serde(default)]
    pub resident_bytes: Option<u64>,
    /// Memory in the host's swap.
    #[serde(default)]
    pub paged_out_bytes: Option<u64>,
    /// Refaults per second.
    #[serde(default)]
    pub refaults_per_second: Option<f64>,
    /// Swapped in and out per second.
    pub swap_bytes_per_second: Option<u64>,
    /// For a decision: the mode at the time; only `enforce` carries decisions out.
    pub mode: Option<String>,
    /// For a decision: the change and its reason.
    pub change: Option<String>,
    /// For a move between hosts: the step and its reason.
    #[serde(default)]
    pub moved: Option<String>,
}

impl HistoryRow {
    /// The change in this row.
    pub fn into_change(self) -> Option<LastChange> {
        let text = self.change?;
        let text = match self.mode.as_deref() {
            Some("enforce") => text,
            _ => format!("only recommended: {text}"),
        };
        Some(LastChange { wall_ms: self.wall_ms, text })
    }
}
