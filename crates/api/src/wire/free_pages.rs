//! Memory that VMs have freed, and the part that the host takes.

use model::{Bytes, FreePages, GroupName, Reading, VmName};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Words;
use crate::shown::TickView;

/// Memory that a VM has freed. Totals count since the group's worker began with this VM.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FreePagesStatus {
    /// Handed over, and neither taken nor known to be in use again.
    pub freed_bytes: u64,
    /// The part that the host can take at once, by a recent count of the kernel.
    pub lazy_bytes: u64,
    /// Handed over; a page may count several times.
    pub handed_over_bytes_total: u64,
    /// Taken for the host.
    pub taken_bytes_total: u64,
    /// Dropped by the kernel itself, where that was seen.
    pub dropped_bytes_total: u64,
    /// Found in use again when it was to be taken.
    pub taken_back_bytes_total: u64,
    /// Taken, and refaulted by the guest since, where that was seen.
    #[serde(default)]
    pub refaulted_bytes_total: u64,
    /// Freed memory that it keeps while the rest is taken; absent: nothing is taken.
    pub keep_bytes: Option<u64>,
    /// Why memory is taken.
    pub take: Option<Words>,
    /// Age of these readings at the tick.
    pub age_ms: u64,
}

impl FreePagesStatus {
    /// The reading as an API object.
    pub(super) fn of(shown: &TickView, name: &VmName, reading: &Reading<FreePages>) -> Self {
        let free = reading.value;
        let take = shown.published.plan.takes.get(name);
        Self {
            freed_bytes: free.freed.0,
            lazy_bytes: free.lazy.0,
            handed_over_bytes_total: free.handed_over.0,
            taken_bytes_total: free.taken.0,
            dropped_bytes_total: free.dropped.0,
            taken_back_bytes_total: free.taken_back.0,
            refaulted_bytes_total: free.refaulted.0,
            keep_bytes: take.map(|take| take.keep.0),
            take: take.map(|take| Words::of(&take.reason)),
            age_ms: reading.age(shown.published.at).0,
        }
    }
}

/// Memory that the VMs of a group have freed. Totals drop when a VM leaves or the group's worker
/// is replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupFreePages {
    /// The part that the host can take at once.
    pub lazy_bytes: u64,
    /// Handed over; a page may count several times.
    pub handed_over_bytes_total: u64,
    /// Taken for the host, or dropped by the kernel itself.
    pub taken_bytes_total: u64,
    /// Found in use again when it was to be taken.
    pub taken_back_bytes_total: u64,
    /// Taken, and refaulted by a guest since.
    pub refaulted_bytes_total: u64,
}

impl GroupFreePages {
    /// The group as of the last tick.
    pub(super) fn of(shown: &TickView, name: &GroupName) -> Self {
        let (view, plan) = (&shown.published.view, &shown.published.plan);
        let members = plan.vms.iter().filter(|(_, d)| d.group.as_ref() == Some(name));
        let free: Vec<FreePages> =
            members.filter_map(|(vm, _)| Some(view.vms.get(vm)?.free_pages?.value)).collect();
        let sum = |of: fn(&FreePages) -> Bytes| free.iter().map(of).sum::<Bytes>().0;
        Self {
            lazy_bytes: sum(|free| free.lazy),
            handed_over_bytes_total: sum(|free| free.handed_over),
            taken_bytes_total: sum(|free| free.taken.plus(free.dropped)),
            taken_back_bytes_total: sum(|free| free.taken_back),
            refaulted_bytes_total: sum(|free| free.refaulted),
        }
    }
}
