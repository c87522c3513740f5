//! The kernel's own merging of identical pages (KSM), for VMs whose QEMU has no shim: what it is told, what
//! it has come to, and why it must not.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Bytes, GroupName, PagesPerMs, VmName};

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
    /// The groups whose identical pages are to be merged and that have VMs without the shim; each with why
    /// KSM does not merge those, `None`: it does.
    pub groups: BTreeMap<GroupName, Option<String>>,
}

/// Why KSM must not merge.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KsmRefusal {
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
}
