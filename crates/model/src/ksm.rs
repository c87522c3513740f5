//! The kernel's own merging of identical pages (KSM), for VMs whose QEMU has no shim: the order
//! for it, its state, and the reasons against it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Bytes, GroupName, PagesPerMs, VmName};

/// Whether Overbook may drive KSM on this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KsmSpec {
    /// Overbook writes nothing to KSM, except to restore an earlier change.
    #[default]
    Off,
    /// Overbook drives KSM where all memory that KSM could merge belongs to one group.
    Drive,
}

/// A process of the host, VM or not, whose memory KSM may merge, or whose state is unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mergeable {
    /// The process id.
    pub pid: u32,
    /// The program that it runs.
    pub program: String,
    /// `None`: the process has mergeable memory; otherwise why that is unknown.
    pub unknown: Option<String>,
}

/// Overbook's order for KSM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KsmOrder {
    /// No decision yet.
    #[default]
    Undecided,
    /// Merge at this rate.
    Drive(PagesPerMs),
    /// Stop scanning, and leave merged pages merged.
    Rest,
    /// Restore the settings from before Overbook.
    PutBack,
}

/// KSM's latest state, and the outcome of the order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmReading {
    /// Memory that the whole host saves by KSM, with Overbook as its driver or not.
    pub saved: Bytes,
    /// Memory that the merged pages take.
    pub shared: Bytes,
    /// Whether Overbook drives KSM.
    pub is_driven: bool,
    /// A fault in KSM's state, or a setting that was not restored.
    pub trouble: Option<String>,
    /// The groups whose identical pages are to be merged and that have VMs without the shim. Each
    /// has the reason why KSM does not merge those pages; `None`: KSM merges them.
    pub groups: BTreeMap<GroupName, Option<String>>,
}

/// Why KSM must not merge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KsmRefusal {
    /// The operator has not enabled it.
    #[error("kernel KSM is not driven (`ksm = \"off\"` in [host])")]
    Off,
    /// No VM without the shim is to be merged.
    #[error("no VM needs it")]
    Unneeded,
    /// KSM would merge pages of two tenants.
    #[error("kernel KSM cannot keep groups apart: this host has VMs of {0} and of {1}")]
    TwoGroups(GroupName, GroupName),
    /// KSM would merge pages of a VM that belongs to no group.
    #[error("kernel KSM cannot keep groups apart: VM {0} belongs to no group")]
    Stranger(VmName),
    /// The VM's identity is unknown until QEMU tells its name.
    #[error("kernel KSM cannot keep groups apart: QEMU of {0} has not said yet which VM it is")]
    Nameless(VmName),
    /// KSM would merge pages of a process that is not known to be a VM of the group.
    #[error(
        "kernel KSM cannot keep groups apart: process {pid} ({program:?}) has mergeable memory and is no VM \
         that Overbook knows"
    )]
    Process {
        /// The process id.
        pid: u32,
        /// The program that it runs.
        program: String,
    },
    /// KSM might merge pages of such a process.
    #[error(
        "kernel KSM cannot keep groups apart: whether process {pid} ({program:?}) has mergeable memory is not \
         known: {why}"
    )]
    Unknown {
        /// The process id.
        pid: u32,
        /// The program that it runs.
        program: String,
        /// The kernel's error.
        why: String,
    },
    /// The owner of the memory that KSM would merge is unknown.
    #[error("kernel KSM cannot keep groups apart: {0}")]
    Unseen(String),
}
