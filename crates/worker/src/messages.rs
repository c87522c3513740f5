//! The protocol between the daemon and a worker: one JSON object per line.
//!
//! Orders are always complete: every VM that the group has now. So nothing depends on an earlier
//! line, and a lost line costs only a second.

use std::collections::BTreeMap;
use std::path::PathBuf;

use model::{
    Bytes, Cold, Dedup, FreePages, PagesPerMs, Reading, ShimVersion, Time, Tracking,
    TrackingBudget, VmName,
};
use serde::{Deserialize, Serialize};
use sys::process::Identity;

use super::freed::FreedOrder;

/// From the daemon: the work to do for the group's VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// The VMs; all others are released.
    pub vms: BTreeMap<VmName, Order>,
    /// The rate of scanning for identical pages; `None`: no scanning, and shared pages are
    /// unshared.
    #[serde(default)]
    pub scan_rate: Option<PagesPerMs>,
    /// Files of shared-pages tables: the pages in them are looked for first.
    #[serde(default)]
    pub tables: Vec<PathBuf>,
}

/// The order for one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// The incarnation of the VM.
    pub incarnation: u64,
    /// QEMU's process.
    pub pid: u32,
    /// The start of that process, in clock ticks since boot: the pid alone may have been reused.
    pub started: u64,
    /// The guest's swap in use.
    pub swapped: Bytes,
    /// The memory that the guest may use.
    pub memory: Bytes,
    /// The memory that QEMU occupies in addition to its guest; absent: not known yet.
    #[serde(default)]
    pub own: Option<Bytes>,
    /// The share of a vCPU's time that tracking took in half a minute, as last reported by a
    /// worker; absent: unknown.
    #[serde(default)]
    pub spent: Option<Reading<f64>>,
    /// The budget of tracking; off: its pages are only merged.
    pub budget: TrackingBudget,
    /// The RAM of a VM without the shim, which is tracked from outside; absent: its shim tracks
    /// it.
    #[serde(default)]
    pub attach: Option<Bytes>,
    /// Whether it leaves the group: then its shared pages are unshared.
    #[serde(default)]
    pub leaves: bool,
    /// The treatment of memory that it frees.
    #[serde(default)]
    pub freed: FreedOrder,
    /// The most memory that it may have resident, the rest being paged out; absent: all of it.
    #[serde(default)]
    pub resident: Option<Bytes>,
    /// Whether its shared pages stay as they are: none is merged and none is unshared.
    #[serde(default)]
    pub keeps_shares: bool,
}

impl Order {
    /// QEMU's process.
    #[must_use]
    pub fn process(&self) -> Identity {
        Identity { pid: self.pid, start_ticks: self.started }
    }
}

/// From the worker, once in a second: its knowledge. All times are on the boot clock, which both
/// processes share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The time of the report.
    pub at: Time,
    /// Every VM in the orders.
    pub vms: BTreeMap<VmName, VmReport>,
    /// The size of the group's pool of shared pages.
    #[serde(default)]
    pub pool: Bytes,
    /// The number of pages in the group's tables.
    #[serde(default)]
    pub known_pages: u64,
    /// The reason why its tables cannot be used.
    #[serde(default)]
    pub why_not_known: Option<String>,
}

/// The knowledge about a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmReport {
    /// The incarnation of the VM.
    pub incarnation: u64,
    /// Its shim; absent: it was not asked yet, or there is none.
    #[serde(default)]
    pub shim: Option<ShimVersion>,
    /// The result of tracking; absent: none, or not yet.
    pub tracking: Option<Reading<Tracking>>,
    /// The reason why it is not being tracked just now.
    pub why_not: Option<String>,
    /// Its shared pages; absent: unknown yet.
    #[serde(default)]
    pub dedup: Option<Reading<Dedup>>,
    /// The reason why its pages are not being merged just now.
    #[serde(default)]
    pub why_not_merged: Option<String>,
    /// Its freed memory; absent: that is not handed over, or unknown yet.
    #[serde(default)]
    pub free_pages: Option<Reading<FreePages>>,
    /// The reason why no freed memory is taken just now, although there is an order.
    #[serde(default)]
    pub why_not_taken: Option<String>,
    /// The location of its memory; absent: there is no order to page out, or it is unknown.
    #[serde(default)]
    pub cold: Option<Reading<Cold>>,
    /// The reason why nothing is paged out just now, although there is an order.
    #[serde(default)]
    pub why_not_paged_out: Option<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A daemon and its workers are one program. This keeps a line of a neighbouring release
    /// readable all the same: it may have keys more, and lack those that came later.
    #[test]
    fn keys_that_are_new_or_missing_make_no_line_unreadable() {
        let order = json!({
            "incarnation": 1, "pid": 2, "started": 3, "swapped": 0, "memory": 4096,
            "budget": TrackingBudget::default(), "more": [1],
        });
        let orders = json!({"vms": {"a": order}, "more": {}});
        let orders: Orders = serde_json::from_value(orders).unwrap();
        assert_eq!((orders.vms[&"a".into()].pid, orders.scan_rate), (2, None));
        let report = json!({"incarnation": 1, "tracking": Value::Null, "why_not": "w", "more": 1});
        let report = json!({"at": Time(5), "vms": {"a": report}, "more": 1});
        let report: Report = serde_json::from_value(report).unwrap();
        assert_eq!((report.at, report.vms[&"a".into()].shim.clone()), (Time(5), None));
    }
}
