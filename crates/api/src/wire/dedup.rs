//! Memory that VMs of a group share, and the scan for identical pages.

use model::{Bytes, Dedup, GroupName, KsmReading, PagesPerMs, Reading, Scan};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Words;
use crate::shown::TickView;

/// A VM's part in its group's shared pages. Totals count since the group's worker began with this
/// VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DedupStatus {
    /// The part of its memory that is shared now.
    pub shared_bytes: u64,
    /// The memory that sharing saves it.
    pub saved_bytes: u64,
    /// Memory that was merged.
    pub merged_bytes_total: u64,
    /// Merged memory that the guest has since written, so that it has its own copy again.
    pub broken_bytes_total: u64,
    /// Pages of zeros that were dropped.
    pub dropped_bytes_total: u64,
    /// Number of full scans of its memory.
    pub passes_total: u64,
    /// Age of these readings at the tick.
    pub age_ms: u64,
}

impl DedupStatus {
    /// The reading as an API object.
    pub(super) fn of(shown: &TickView, reading: &Reading<Dedup>) -> Self {
        let dedup = reading.value;
        Self {
            shared_bytes: dedup.shared.0,
            saved_bytes: dedup.saved.0,
            merged_bytes_total: dedup.merged.0,
            broken_bytes_total: dedup.broken.0,
            dropped_bytes_total: dedup.dropped.0,
            passes_total: dedup.passes,
            age_ms: reading.age(shown.published.at).0,
        }
    }
}

/// Identical pages of one group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupDedup {
    /// The configured value: `off`, `adaptive` or a rate.
    pub configured: String,
    /// The scan; absent: nothing was decided yet.
    pub scan: Option<ScanStatus>,
    /// Memory that the pool of shared pages takes.
    pub pool_bytes: u64,
    /// Pages that the group's shared-pages tables name.
    #[serde(default)]
    pub known_pages: u64,
    /// Why these tables cannot be used; absent: they are used, or there are none.
    #[serde(default)]
    pub why_not_known: Option<String>,
    /// Memory that sharing saves the group's VMs.
    pub saved_bytes: u64,
    /// The kernel's KSM; absent: no VM without the shim is to be merged.
    #[serde(default)]
    pub ksm: Option<GroupKsm>,
}

/// KSM's state for the VMs of a group that have no shim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupKsm {
    /// Memory that KSM saves on the whole host.
    pub host_saved_bytes: u64,
    /// Memory that the merged pages take.
    pub host_shared_bytes: u64,
    /// Why it does not merge; absent: it does.
    pub why_not: Option<String>,
}

impl GroupKsm {
    fn of(ksm: &KsmReading, group: &GroupName) -> Option<Self> {
        let why_not = ksm.groups.get(group)?.clone();
        Some(Self { host_saved_bytes: ksm.saved.0, host_shared_bytes: ksm.shared.0, why_not })
    }

    /// The saving, or why there is none, in words.
    pub fn words(&self) -> String {
        let saved = Bytes(self.host_saved_bytes);
        match &self.why_not {
            None => format!("kernel KSM merges them and saves {saved} on this host"),
            Some(why) => format!("not merged: {why}"),
        }
    }
}

impl GroupDedup {
    /// The group as of the last tick.
    pub(super) fn of(shown: &TickView, name: &GroupName) -> Self {
        let (view, plan) = (&shown.published.view, &shown.published.plan);
        let members = plan.vms.iter().filter(|(_, d)| d.group.as_ref() == Some(name));
        let dedup = members.filter_map(|(vm, _)| view.vms.get(vm)?.dedup);
        let saved: Bytes = dedup.map(|reading| reading.value.saved).sum();
        let spec = shown.published.spec.groups.get(name);
        let worker = view.workers.get(name).map(|worker| &worker.value);
        Self {
            configured: spec.map(|group| group.dedup.to_string()).unwrap_or_default(),
            scan: plan.scans.get(name).map(ScanStatus::of),
            pool_bytes: worker.map_or(0, |worker| worker.pool.0),
            known_pages: worker.map_or(0, |worker| worker.known_pages),
            why_not_known: worker.and_then(|worker| worker.why_not_known.clone()),
            saved_bytes: saved.0,
            ksm: view.ksm.as_ref().and_then(|ksm| GroupKsm::of(&ksm.value, name)),
        }
    }
}

/// The scan rate for identical pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScanStatus {
    /// Pages scanned per millisecond; absent: none.
    pub pages_per_ms: Option<u32>,
    /// The reason.
    pub reason: Words,
    /// The group for whose VMs the worker scans and which pays for it, if it is not its own.
    #[serde(default)]
    pub payer: Option<String>,
}

impl ScanStatus {
    /// The decision as an API object.
    pub fn of(scan: &Scan) -> Self {
        let pages_per_ms = scan.rate.map(|PagesPerMs(rate)| rate);
        let payer = scan.payer.as_ref().map(ToString::to_string);
        Self { pages_per_ms, reason: Words::of(&scan.reason), payer }
    }

    /// Rate and reason, in the words used everywhere.
    pub fn words(&self) -> String {
        let why = &self.reason.text;
        let payer = self.payer.iter().map(|group| format!(" for group {group}, which pays for it"));
        let payer: String = payer.collect();
        match self.pages_per_ms {
            Some(rate) => format!("scanned at {}{payer}: {why}", PagesPerMs(rate)),
            None => format!("not scanned: {why}"),
        }
    }
}
