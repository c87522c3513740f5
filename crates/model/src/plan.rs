//! The decisions of a tick: the ledgers, one decision per VM, and the reasons.
//!
//! A plan leaves no choices to its executor. Its actions hold ids, amounts and the one
//! precondition that matters (the VM's incarnation). They are idempotent, so repeating one is
//! harmless.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Bytes, GroupName, Mode, Overload, PagesPerMs, Reason, Time, VmLimits, VmName};

/// The outcome of one tick.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// When it was made.
    pub at: Time,
    /// Whether the actions are carried out. Scans and takes always are.
    pub mode: Mode,
    /// Each group's memory.
    pub groups: BTreeMap<GroupName, Ledger>,
    /// Groups that stay over their budget, each with the reason.
    #[serde(default)]
    pub over: BTreeMap<GroupName, Reason>,
    /// Loans by lender; a loan of nothing has just ended.
    #[serde(default)]
    pub loans: BTreeMap<GroupName, Loan>,
    /// How each group's identical pages are scanned.
    #[serde(default)]
    pub scans: BTreeMap<GroupName, Scan>,
    /// Memory to take of what VMs have freed.
    #[serde(default)]
    pub takes: BTreeMap<VmName, Take>,
    /// The size of each group's second-level cache, where one of its disks has a cache.
    #[serde(default)]
    pub caches: BTreeMap<GroupName, Quota>,
    /// The overloads, of VMs whose paging is known.
    #[serde(default)]
    pub overloads: BTreeMap<VmName, Overload>,
    /// The decision for each VM of all groups.
    pub vms: BTreeMap<VmName, Decision>,
    /// Host-wide notices, for example that the host is short of memory.
    pub host: Vec<Reason>,
    /// Memory of the host that no VM wants; `None`: a VM was refused memory.
    #[serde(default)]
    pub spare: Option<Bytes>,
}

impl Plan {
    /// The actions in order: takes before grants.
    #[must_use]
    pub fn actions(&self) -> Vec<Action> {
        let mut takes = Vec::new();
        let mut gives = Vec::new();
        for decision in self.vms.values() {
            if let Some(change) = &decision.change {
                let list = if change.is_take { &mut takes } else { &mut gives };
                list.push(change.action.clone());
            }
        }
        takes.append(&mut gives);
        takes
    }
}

/// One action: ids, amounts and preconditions. Nothing is left to choose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verb")]
pub enum Action {
    /// Leave the guest of `vm` this much memory.
    Resize {
        /// The VM.
        vm: VmName,
        /// The incarnation that the action is for: another incarnation is left alone.
        incarnation: u64,
        /// Memory that the guest may use from now on, or may have resident.
        target: Bytes,
        /// The means.
        #[serde(default)]
        by: Means,
    },
}

/// How memory leaves a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Means {
    /// The balloon: the guest chooses the pages, and may use no more than the target.
    #[default]
    Balloon,
    /// Paging by the host: the guest may use all its memory, and has `target` resident.
    Paging,
}

/// The decision for one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Its group; `None`: not managed.
    pub group: Option<GroupName>,
    /// Its limits; `None`: not managed.
    pub limits: Option<VmLimits>,
    /// The memory that the VM should have.
    pub target: Option<Bytes>,
    /// The change to make now.
    pub change: Option<Change>,
    /// Whether its balloon holds nothing of its `max`: the guest lacks no memory that the host has
    /// taken.
    #[serde(default)]
    pub is_at_max: bool,
    /// Why nothing, or not more, was taken or given.
    pub refusals: Vec<Reason>,
    /// The saving by the latest move of `balance` that shows its saving.
    #[serde(default)]
    pub outcome: Option<Outcome>,
}

/// The expected saving of a move by `balance`, and the measured one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Time of the decision.
    pub at: Time,
    /// The VM's target before the move …
    pub from: Bytes,
    /// … and with it.
    pub to: Bytes,
    /// Misses per minute that the move was expected to save the VM; negative: to cost.
    pub expected: i64,
    /// Major faults per minute that the VM has saved since; negative: more faults.
    pub saved: i64,
}

/// A change of one VM's memory, with its reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// The action.
    pub action: Action,
    /// Whether it takes memory from the VM.
    pub is_take: bool,
    /// Whether the action repeats an earlier one that may have been lost.
    pub is_repeat: bool,
    /// Why.
    pub reason: Reason,
}

/// How a group's identical pages are scanned until the next plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scan {
    /// The scan rate; `None`: no scan, and shared pages are unshared.
    pub rate: Option<PagesPerMs>,
    /// Why.
    pub reason: Reason,
    /// The group that pays for the worker's CPU time, if not its own: the one that borrows from
    /// it.
    #[serde(default)]
    pub payer: Option<GroupName>,
}

/// Memory that a VM has freed and that is taken until the next plan, the oldest first (Wan 2013
/// §3.3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Take {
    /// The amount of freed memory that stays.
    pub keep: Bytes,
    /// Why no more stays.
    pub reason: Reason,
}

/// Memory that a group's second-level cache may hold until the next plan (Kim 2014 §4.2.3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// The amount.
    pub amount: Bytes,
    /// The reason for the amount.
    pub reason: Reason,
}

/// Idle surplus of one group that another may use until the next plan (Kim 2014 §7.1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// The group that may use it.
    pub borrower: GroupName,
    /// The amount; zero: the loan ends with this plan.
    pub amount: Bytes,
    /// The reason for the amount.
    pub reason: Reason,
}

/// One group's memory, in physical bytes (Kim 2014 §4.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// Memory that the tenant pays for.
    pub budget: Bytes,
    /// Memory that the group's VMs occupy on the host.
    pub used: Bytes,
    /// Granted above base and not touched yet: it will be used, so it is not granted twice.
    pub promised: Bytes,
    /// Kept back for bursts.
    pub reserve: Bytes,
    /// The part of the budget that another group may use for now.
    #[serde(default)]
    pub lent: Bytes,
    /// The part of other groups' budgets that this group may use for now.
    #[serde(default)]
    pub borrowed: Bytes,
    /// `budget + borrowed − lent − used − promised − reserve`: the memory that can be granted.
    pub surplus: Bytes,
    /// The memory that must come back: the excess of `used + promised` over `budget + borrowed −
    /// lent`.
    pub deficit: Bytes,
}
