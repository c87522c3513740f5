//! What the daemon and a worker say to each other: one JSON object per line.
//!
//! Orders are always whole: every VM that the group has now. So nothing depends on an earlier line,
//! and a line that got lost costs nothing but a second.

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::{
    Bytes, Cold, Dedup, FreePages, PagesPerMs, Reading, Time, Tracking, TrackingBudget, VmName,
};
use serde::{Deserialize, Serialize};
use sys::process::Identity;

use super::freed::FreedOrder;

/// From the daemon: what is to be done with the group's VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// The VMs; the others are let go.
    pub vms: BTreeMap<VmName, Order>,
    /// How fast identical pages are looked for; `None`: not at all, and what is shared is unshared.
    #[serde(default)]
    pub scan_rate: Option<PagesPerMs>,
    /// Files of shared-pages tables: pages that these name are looked for first.
    #[serde(default)]
    pub tables: Vec<PathBuf>,
}

/// A VM that is to be worked on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// Which life of it.
    pub incarnation: u64,
    /// QEMU's process.
    pub pid: u32,
    /// When that began, in clock ticks since boot: the pid alone may be another's by now.
    pub started: u64,
    /// What of the guest lies in its swap.
    pub swapped: Bytes,
    /// What the guest may use.
    pub memory: Bytes,
    /// What QEMU occupies beside its guest; absent: not known yet.
    #[serde(default)]
    pub own: Option<Bytes>,
    /// What share of a vCPU's time tracking took in half a minute, as a worker said last; absent:
    /// nothing is known.
    #[serde(default)]
    pub spent: Option<Reading<f64>>,
    /// What tracking may take; off: its pages are only merged.
    pub budget: TrackingBudget,
    /// The RAM of a VM without the shim, which is tracked from outside; absent: by its shim.
    #[serde(default)]
    pub attach: Option<Bytes>,
    /// It leaves the group: what it shares is unshared.
    #[serde(default)]
    pub leaves: bool,
    /// What is to become of what it frees.
    #[serde(default)]
    pub freed: FreedOrder,
    /// What it is to have in memory at most, the rest being paged out; absent: everything.
    #[serde(default)]
    pub resident: Option<Bytes>,
}

impl Order {
    /// QEMU's process.
    #[must_use]
    pub fn process(&self) -> Identity {
        Identity { pid: self.pid, start_ticks: self.started }
    }
}

/// From the worker, once in a second: what it knows. All moments are on the boot clock, which both
/// processes share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// When it was made.
    pub at: Time,
    /// Every VM that it has been told of.
    pub vms: BTreeMap<VmName, VmReport>,
    /// What the group's pool of shared pages takes.
    #[serde(default)]
    pub pool: Bytes,
    /// Pages that the group's tables name.
    #[serde(default)]
    pub known_pages: u64,
    /// Why its tables are of no use.
    #[serde(default)]
    pub why_not_known: Option<String>,
}

/// What is known of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmReport {
    /// Which life of it.
    pub incarnation: u64,
    /// What tracking has found out; absent: nothing, or not yet.
    pub tracking: Option<Reading<Tracking>>,
    /// Why it is not being tracked just now.
    pub why_not: Option<String>,
    /// What of it is shared; absent: nothing is known yet.
    #[serde(default)]
    pub dedup: Option<Reading<Dedup>>,
    /// Why its pages are not being merged just now.
    #[serde(default)]
    pub why_not_merged: Option<String>,
    /// What it has freed; absent: that is not handed over, or nothing is known yet.
    #[serde(default)]
    pub free_pages: Option<Reading<FreePages>>,
    /// Why nothing of it is taken just now, although it is to be.
    #[serde(default)]
    pub why_not_taken: Option<String>,
    /// Where its memory is; absent: nothing of it is to be paged out, or that is not known.
    #[serde(default)]
    pub cold: Option<Reading<Cold>>,
    /// Why nothing of it is paged out just now, although it is to be.
    #[serde(default)]
    pub why_not_paged_out: Option<String>,
}
