//! One line of a VM's past: a reading, a decision, or a move to another host.

use model::PagesPerMs;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{LastChange, host::mode_name, raw};
use crate::{
    explain,
    history::{self, Entry},
};

/// One moment in the life of a VM, or one decision about it, or a step between hosts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HistoryRow {
    /// When, in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// For a reading: how long a time it is the mean of.
    pub step_seconds: Option<u32>,
    /// What the balloon left the guest.
    pub balloon_bytes: Option<u64>,
    /// What the guest was meant to have.
    pub target_bytes: Option<u64>,
    /// What the guest occupied on the host.
    pub used_bytes: Option<u64>,
    /// Its working set, where it was tracked.
    pub working_set_bytes: Option<u64>,
    /// What of its memory was shared with VMs of its group.
    pub shared_bytes: Option<u64>,
    /// What it needed less therefore.
    pub saved_bytes: Option<u64>,
    /// What had been merged of it since its group's worker met it.
    pub merged_bytes: Option<u64>,
    /// How fast identical pages of its group were looked for.
    pub scan_rate_pages_per_ms: Option<u32>,
    /// What it had freed and the host had not taken.
    #[serde(default)]
    pub freed_bytes: Option<u64>,
    /// What had been taken of what it freed since its group's worker met it.
    #[serde(default)]
    pub freed_taken_bytes: Option<u64>,
    /// What of its disks lay in repositories.
    #[serde(default)]
    pub in_repositories_bytes: Option<u64>,
    /// Half of the reads of the slowest of its disks took less, since that was served.
    #[serde(default)]
    pub disk_read_median_us: Option<u32>,
    /// What it had in memory, where the host paged out what it did not touch.
    #[serde(default)]
    pub resident_bytes: Option<u64>,
    /// What of it was in the host's swap.
    #[serde(default)]
    pub paged_out_bytes: Option<u64>,
    /// How often it waited for that.
    #[serde(default)]
    pub refaults_per_second: Option<f64>,
    /// Swapped in and out per second.
    pub swap_bytes_per_second: Option<u64>,
    /// For a decision: the mode at the time; only in `enforce` was it carried out.
    pub mode: Option<String>,
    /// For a decision: what and why.
    pub change: Option<String>,
    /// For a VM that was to change hosts: what became of that, and why.
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
                mode: Some(mode_name(mode).to_owned()),
                change: Some(explain::change_words(is_take, target, &words)),
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
