//! Hosts as one pool: the report of each host, and the VMs to move.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::words::maybe_of_others;
use crate::{Bytes, GroupName, HostName, Profile, Reading, Severity, Time, Together, VmName};

/// A host's report: only the data that other hosts need to decide.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct HostReport {
    /// The host's memory without its reserve and its repository's share of the pool's excess space.
    pub memory: Bytes,
    /// Whether VMs can move to this host.
    #[serde(default = "yes")]
    pub receives: bool,
    /// The most memory that its repository would hold for other hosts; zero: it has none.
    #[serde(default)]
    pub lends: Bytes,
    /// The host's managed VMs.
    pub vms: BTreeMap<VmName, VmReport>,
    /// Memory that the host never hands out; for people.
    #[serde(default)]
    pub reserve: Bytes,
    /// Pages of the VMs that lie in other hosts' memory; for people.
    #[serde(default)]
    pub in_repositories: Bytes,
}

/// Hosts of an older version do not tell.
fn yes() -> bool {
    true
}

/// A host's report of one VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct VmReport {
    /// The VM's group on this host.
    pub group: GroupName,
    /// Memory that the VM was promised.
    pub promised: Bytes,
    /// Memory that the VM was given of that.
    pub given: Bytes,
    /// How much it is overloaded.
    pub severity: Severity,
    /// Pages paged in and out since this overload began.
    pub paged: u64,
    /// How often it is overloaded; `None`: not measured.
    #[serde(default)]
    pub rates: Option<OverloadRates>,
    /// Why the VM cannot be moved; `None`: it can.
    #[serde(default, deserialize_with = "maybe_of_others")]
    pub immovable: Option<String>,
    /// Memory that the VM saves by shared pages; for people.
    #[serde(default)]
    pub saved: Bytes,
}

/// Shares of the time in which a VM is overloaded, in thousandths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverloadRates {
    /// Of transient overloads.
    pub transient: u16,
    /// Of sustained ones.
    pub sustained: u16,
}

impl OverloadRates {
    /// The rates in a profile of intervals of this length, rounded up. `None`: less than an hour
    /// was measured.
    #[must_use]
    pub fn of(profile: &Profile, interval_s: u64) -> Option<Self> {
        let share = |n: u64| u16::try_from((n * 1000).div_ceil(profile.intervals)).unwrap_or(1000);
        (profile.intervals >= (3600 / interval_s).max(1)).then(|| Self {
            transient: share(profile.transient),
            sustained: share(profile.sustained),
        })
    }
}

/// Memory that is kept for overloads: excess space (Williams 2011 §4).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExcessSpace {
    /// For VMs in sustained overload, which move to it.
    pub targets: Bytes,
    /// For pages of VMs in transient overload, in repositories.
    pub repositories: Bytes,
}

/// The excess space of a pool, as its controller has shared it out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ExcessPlan {
    /// The probability that it suffices at any moment, 0 to 1.
    pub certainty: f64,
    /// The need of all VMs.
    pub need: ExcessSpace,
    /// The part of the need that no host has room for.
    pub missing: ExcessSpace,
    /// The part of each host.
    pub shares: BTreeMap<HostName, ExcessSpace>,
    /// How often VMs of the pool were overloaded at once, by one count at each plan. `transient`
    /// counts all overloads, because sustained ones page to repositories as well.
    #[serde(default)]
    pub together: Together,
}

/// A VM that is to change hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intent {
    /// Tells one intent of this VM from the next.
    pub generation: u64,
    /// The source host.
    pub from: HostName,
    /// The target host.
    pub to: HostName,
    /// The VM's group on both hosts. A host that has the VM in another group takes no part.
    pub group: GroupName,
    /// Whether the intent is withdrawn: a VM that has not left stays on its host.
    pub is_withdrawn: bool,
}

/// All that is known of a pool at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterView {
    /// Reports by host; a host that has lost its lease has no report.
    pub hosts: BTreeMap<HostName, Reading<HostReport>>,
    /// Intents in flight, by VM, each with the time it began.
    pub intents: BTreeMap<VmName, Reading<Intent>>,
    /// The memory that each host keeps for overloads.
    #[serde(default)]
    pub excess: ExcessPlan,
}

/// The moves to make in a pool, and the reasons for no more.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ClusterPlan {
    /// When it was made.
    pub at: Time,
    /// VMs that are to change hosts from now on.
    pub moves: BTreeMap<VmName, Move>,
    /// Intents that have taken too long: a VM that has not left stays.
    pub withdrawn: Vec<VmName>,
    /// Why nothing is moved for these VMs, which are in sustained overload.
    pub refusals: BTreeMap<VmName, MoveRefusal>,
}

/// A VM that is to change hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// The source host.
    pub from: HostName,
    /// The target host.
    pub to: HostName,
    /// The VM that benefits: the moved VM, or one that stays and gets its memory.
    pub for_whom: VmName,
    /// Free memory on the target for the VM.
    pub room: Bytes,
    /// The cost of the move: the number of bytes sent.
    pub cost: Bytes,
}

/// Why nothing is moved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "code")]
pub enum MoveRefusal {
    /// Two hosts claim the VM.
    #[error("{other} says that it has a VM of this name, too")]
    Claimed {
        /// The other host.
        other: HostName,
    },
    /// Another VM leaves the host.
    #[error("{vm} is leaving this host: one at a time")]
    Leaving {
        /// The VM that leaves.
        vm: VmName,
    },
    /// Shortly before, a VM has left the host, or this VM has moved.
    #[error(
        "something was moved for it or its host {ago_s} s ago: what that has changed is not known \
         yet"
    )]
    TooSoon {
        /// Seconds since that move.
        ago_s: u64,
    },
    /// The VM has paged fewer bytes than its move would send.
    #[error("it has paged {paged} in this overload, and to move a VM costs {cost}")]
    NotWorth {
        /// Bytes paged since the overload began.
        paged: Bytes,
        /// Bytes that the cheapest move sends.
        cost: Bytes,
    },
    /// No VM on the host can be moved.
    #[error(
        "it cannot be moved ({why}), and no other VM on its host that has the missing memory can be"
    )]
    Immovable {
        /// Why the overloaded VM itself cannot be moved.
        why: String,
    },
    /// No other host has room.
    #[error("no other host has {needed} left for it")]
    NoTarget {
        /// Memory that the cheapest move needs.
        needed: Bytes,
    },
}
