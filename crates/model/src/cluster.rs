//! Hosts as one pool: what each of them reports, and what is to move.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::words::maybe_of_others;
use crate::{Bytes, GroupName, HostName, Reading, Severity, Time, VmName};

/// What a host reports of itself: only what others need to decide.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostReport {
    /// Its memory without its reserve.
    pub memory: Bytes,
    /// Its VMs that are managed.
    pub vms: BTreeMap<VmName, VmReport>,
}

/// What a host reports of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmReport {
    /// Its group on this host.
    pub group: GroupName,
    /// What it was promised.
    pub promised: Bytes,
    /// What it was given of that.
    pub given: Bytes,
    /// How much it is overloaded.
    pub severity: Severity,
    /// Pages that it has paged since this overload began, in and out.
    pub paged: u64,
    /// Why it cannot be moved; `None`: it can.
    #[serde(default, deserialize_with = "maybe_of_others")]
    pub immovable: Option<String>,
}

/// A VM that is to change hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// Tells one intent of this VM from the next.
    pub generation: u64,
    /// Where it is.
    pub from: HostName,
    /// Where it is to be.
    pub to: HostName,
    /// Its group, on either host: one that has it in another takes no part.
    pub group: GroupName,
    /// It is to stay where it is, if it has not left.
    pub is_withdrawn: bool,
}

/// All that is known of a pool at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterView {
    /// By host; of one that has lost its lease nothing is known.
    pub hosts: BTreeMap<HostName, Reading<HostReport>>,
    /// What is under way, by VM, and since when.
    pub intents: BTreeMap<VmName, Reading<Intent>>,
}

/// What is to be done in a pool, and why no more.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterPlan {
    /// When it was made.
    pub at: Time,
    /// VMs that are to change hosts from now on.
    pub moves: BTreeMap<VmName, Move>,
    /// Intents that have taken too long: what has not left stays.
    pub withdrawn: Vec<VmName>,
    /// Why nothing is moved for these VMs, which are in sustained overload.
    pub refusals: BTreeMap<VmName, MoveRefusal>,
}

/// A VM that is to change hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// Where it is.
    pub from: HostName,
    /// Where it is to be.
    pub to: HostName,
    /// For whom: itself, or one that stays and gets what it had.
    pub for_whom: VmName,
    /// What the target has left for it.
    pub room: Bytes,
    /// What moving it costs: so much is sent.
    pub cost: Bytes,
}

/// Why nothing is moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "code")]
pub enum MoveRefusal {
    /// Two hosts say that it is theirs.
    #[error("{other} says that it has a VM of this name, too")]
    Claimed {
        /// Which.
        other: HostName,
    },
    /// Another VM leaves the host.
    #[error("{vm} is leaving this host: one at a time")]
    Leaving {
        /// Which.
        vm: VmName,
    },
    /// Something has left the host, or it has moved, a moment ago.
    #[error(
        "something was moved for it or its host {ago_s} s ago: what that has changed is not known \
         yet"
    )]
    TooSoon {
        /// So many seconds ago.
        ago_s: u64,
    },
    /// What it has paged is less than moving it would send.
    #[error("it has paged {paged} in this overload, and to move a VM costs {cost}")]
    NotWorth {
        /// Since the overload began.
        paged: Bytes,
        /// Of the cheapest move.
        cost: Bytes,
    },
    /// Nobody on the host can be moved.
    #[error(
        "it cannot be moved ({why}), and no other VM on its host that has the missing memory can be"
    )]
    Immovable {
        /// Why itself cannot.
        why: String,
    },
    /// No other host has room.
    #[error("no other host has {needed} left for it")]
    NoTarget {
        /// What the cheapest move needs.
        needed: Bytes,
    },
}
