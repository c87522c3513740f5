//! One row of a VM's history: a reading, a decision, or a step of a move to another host.

use model::PagesPerMs;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{LastChange, raw};
use crate::{
    history::{self, Entry},
    shown,
};

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

impl From<history::HistoryRow> for HistoryRow {
    fn from(row: history::HistoryRow) -> Self {
        let moment = Self { wall_ms: row.wall_ms, ..Self::default() };
        match row.entry {
            Entry::Reading {
                step_s,
                used,
                balloon,
                target,
                swap_per_s,
                working_set,
                shared,
                saved,
                merged,
                scan_rate,
                freed,
                freed_taken,
                in_repositories,
                disk_read_us,
                resident,
                paged_out,
                refaults_per_s,
            } => Self {
                step_seconds: Some(step_s),
                balloon_bytes: raw(balloon),
                target_bytes: raw(target),
                used_bytes: raw(used),
                working_set_bytes: raw(working_set),
                shared_bytes: raw(shared),
                saved_bytes: raw(saved),
                merged_bytes: raw(merged),
                scan_rate_pages_per_ms: scan_rate.map(|PagesPerMs(rate)| rate),
                freed_bytes: raw(freed),
                freed_taken_bytes: raw(freed_taken),
                in_repositories_bytes: raw(in_repositories),
                disk_read_median_us: disk_read_us,
                resident_bytes: raw(resident),
                paged_out_bytes: raw(paged_out),
                refaults_per_second: refaults_per_s,
                swap_bytes_per_second: raw(swap_per_s),
                ..moment
            },
            Entry::Change { mode, is_take, target, words, .. } => Self {
                target_bytes: Some(target.0),
                mode: Some(mode.to_string()),
                change: Some(shown::change_words(is_take, target, &words)),
                ..moment
            },
            Entry::Move { words } => Self { moved: Some(words), ..moment },
        }
    }
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
