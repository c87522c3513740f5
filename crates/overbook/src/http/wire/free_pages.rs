//! What VMs have freed, and what is taken of it.

use model::{FreePages, Reading, VmName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Words;
use crate::http::follow::Shown;

/// What a VM has freed. Totals count since the group's worker began with this VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FreePagesStatus {
    /// Handed over, and neither taken nor known to be in use again.
    pub freed_bytes: u64,
    /// What of it the host can take at once, by the kernel's count of a moment ago.
    pub lazy_bytes: u64,
    /// Handed over, again and again.
    pub handed_over_bytes_total: u64,
    /// Taken for the host.
    pub taken_bytes_total: u64,
    /// Dropped by the kernel itself, as far as that was seen.
    pub dropped_bytes_total: u64,
    /// Found in use again when it was to be taken.
    pub taken_back_bytes_total: u64,
    /// What is left to it of what it has freed while more is taken; absent: nothing is taken.
    pub keep_bytes: Option<u64>,
    /// Why it is taken.
    pub take: Option<Words>,
    /// Age of all this at the tick.
    pub age_ms: u64,
}

impl FreePagesStatus {
    /// The reading as it goes over the wire.
    pub(super) fn of(shown: &Shown, name: &VmName, reading: &Reading<FreePages>) -> Self {
        let free = reading.value;
        let take = shown.published.plan.takes.get(name);
        Self {
            freed_bytes: free.freed.0,
            lazy_bytes: free.lazy.0,
            handed_over_bytes_total: free.handed_over.0,
            taken_bytes_total: free.taken.0,
            dropped_bytes_total: free.dropped.0,
            taken_back_bytes_total: free.taken_back.0,
            keep_bytes: take.map(|take| take.keep.0),
            take: take.map(|take| Words::of(&take.reason)),
            age_ms: reading.age(shown.published.at).0,
        }
    }
}
