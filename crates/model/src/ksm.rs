//! The kernel's own merging of identical pages (KSM), for VMs whose QEMU has no shim: what it is
//! told, what it has come to, and why it must not.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Bytes, GroupName, PagesPerMs, VmName};

/// Whether Overbook may drive KSM on this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KsmSpec {
    /// It writes nothing to KSM, but to put back what it has changed before.
    #[default]
    Off,
    /// It does, where all memory that KSM could merge is of one group.
    Drive,
}

/// A process of the host, VM or not, whose memory KSM may merge, or may for all that is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mergeable {
    /// Its process id.
    pub pid: u32,
    /// The program that it runs.
    pub program: String,
    /// `None`: it has mergeable memory; else why that is not known.
    pub unknown: Option<String>,
}

/// What Overbook wants of KSM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KsmOrder {
    /// Nothing was decided yet.
    #[default]
    Undecided,
    /// Merge at this rate.
    Drive(PagesPerMs),
    /// Look for nothing, and leave merged what is.
    Rest,
    /// Be as it was before Overbook.
    PutBack,
}

/// KSM as it was last seen, and what became of the order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmReading {
    /// What is needed less on the whole host because of it, whoever drives it.
    pub saved: Bytes,
    /// What the merged pages take.
    pub shared: Bytes,
    /// Whether Overbook drives it.
    pub is_driven: bool,
    /// What is wrong with it, or was not put back.
    pub trouble: Option<String>,
    /// The groups whose identical pages are to be merged and that have VMs without the shim; each
    /// with why KSM does not merge those, `None`: it does.
    pub groups: BTreeMap<GroupName, Option<String>>,
}

/// Why KSM must not merge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KsmRefusal {
    /// The operator has not asked for it.
    #[error("kernel KSM is not driven (`ksm = \"off\"` in [host])")]
    Off,
    /// No VM without the shim is to be merged.
    #[error("no VM needs it")]
    Unneeded,
    /// It would merge pages of two tenants.
    #[error("kernel KSM cannot keep groups apart: this host has VMs of {0} and of {1}")]
    TwoGroups(GroupName, GroupName),
    /// It would merge pages of a VM that nobody has put into the group.
    #[error("kernel KSM cannot keep groups apart: VM {0} belongs to no group")]
    Stranger(VmName),
    /// Whose VM it is will only be known when QEMU tells its name.
    #[error("kernel KSM cannot keep groups apart: QEMU of {0} has not said yet which VM it is")]
    Nameless(VmName),
    /// It would merge pages of a process that is no VM of the group, as far as anybody knows.
    #[error(
        "kernel KSM cannot keep groups apart: process {pid} ({program:?}) has mergeable memory and is no VM \
         that Overbook knows"
    )]
    Process {
        /// Its process id.
        pid: u32,
        /// The program that it runs.
        program: String,
    },
    /// It might.
    #[error(
        "kernel KSM cannot keep groups apart: whether process {pid} ({program:?}) has mergeable memory is not \
         known: {why}"
    )]
    Unknown {
        /// Its process id.
        pid: u32,
        /// The program that it runs.
        program: String,
        /// What the kernel said.
        why: String,
    },
    /// Whose memory it would merge is not known.
    #[error("kernel KSM cannot keep groups apart: {0}")]
    Unseen(String),
}
