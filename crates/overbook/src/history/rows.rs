//! Rows of the history as objects of the API.

use api::shown::change_words;
use api::wire::{HistoryRow, LoanRow, LoanStatus, Words};
use model::{Bytes, PagesPerMs};

use super::read::{self, Entry};

/// The number of bytes.
fn raw(amount: Option<Bytes>) -> Option<u64> {
    amount.map(|bytes| bytes.0)
}

impl From<read::HistoryRow> for HistoryRow {
    fn from(row: read::HistoryRow) -> Self {
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
                change: Some(change_words(is_take, target, &words)),
                ..moment
            },
            Entry::Move { words } => Self { moved: Some(words), ..moment },
        }
    }
}

impl From<read::LoanRow> for LoanRow {
    fn from(row: read::LoanRow) -> Self {
        let read::LoanRow { wall_ms, mode, lender, borrower, amount, reason, words } = row;
        let code = reason.map_or_else(|| "unknown".to_owned(), |reason| Words::of(&reason).code);
        let reason = Words { code, text: words };
        let (lender, borrower) = (lender.to_string(), borrower.to_string());
        let loan = LoanStatus { lender, borrower, amount_bytes: amount.0, reason };
        Self { wall_ms, mode: mode.to_string(), loan }
    }
}
