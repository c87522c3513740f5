//! What the daemon and a worker say to each other: one JSON object per line.
//!
//! Orders are always whole: every VM that the group has now. So nothing depends on an earlier line, and
//! a line that got lost costs nothing but a second.

use std::collections::BTreeMap;

use model::{Bytes, Tracking, TrackingBudget, VmName};
use serde::{Deserialize, Serialize};

/// From the daemon: what is to be tracked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Orders {
    /// The VMs; the others are let go.
    pub vms: BTreeMap<VmName, Order>,
}

/// A VM that is to be tracked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Order {
    /// Which life of it.
    pub incarnation: u64,
    /// QEMU's process.
    pub pid: u32,
    /// What of the guest lies in its swap.
    pub swapped: Bytes,
    /// What the guest may use.
    pub memory: Bytes,
    /// What tracking may take.
    pub budget: TrackingBudget,
}

/// From the worker, once in a second: what it knows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Every VM that it has been told of.
    pub vms: BTreeMap<VmName, VmReport>,
}

/// What is known of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmReport {
    /// Which life of it.
    pub incarnation: u64,
    /// What tracking has found out; absent: nothing, or not yet.
    pub tracking: Option<Tracking>,
    /// Why it is not being tracked just now.
    pub why_not: Option<String>,
}
