//! What was decided: the ledgers, one decision per VM, and why.
//!
//! A plan leaves no choices to whoever carries it out. Its actions hold ids, amounts and the one
//! precondition that matters (the VM's incarnation); they are idempotent, so repeating one is
//! harmless.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Bytes, GroupName, Mode, Overload, PagesPerMs, Reason, Time, VmLimits, VmName};

/// The outcome of one tick.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// When it was made.
    pub at: Time,
    /// Whether its actions are carried out; the scans and the takes are in any case.
    pub mode: Mode,
    /// Each group's memory.
    pub groups: BTreeMap<GroupName, Ledger>,
    /// Groups that stay over their budget, with why.
    #[serde(default)]
    pub over: BTreeMap<GroupName, Reason>,
    /// What groups lend, by lender; a loan of nothing has just ended.
    #[serde(default)]
    pub loans: BTreeMap<GroupName, Loan>,
    /// How each group's identical pages are looked for.
    #[serde(default)]
    pub scans: BTreeMap<GroupName, Scan>,
    /// Of what VMs have freed, what is taken.
    #[serde(default)]
    pub takes: BTreeMap<VmName, Take>,
    /// What each group's second-level cache may hold, where a disk of it has one.
    #[serde(default)]
    pub caches: BTreeMap<GroupName, Quota>,
    /// Which VMs are overloaded, of those whose paging is known.
    #[serde(default)]
    pub overloads: BTreeMap<VmName, Overload>,
    /// What happens to each VM, groups together.
    pub vms: BTreeMap<VmName, Decision>,
    /// Something about the host that everybody should know, for example that it is short of memory.
    pub host: Vec<Reason>,
}

impl Plan {
    /// What to do, in order: memory is taken before it is handed out.
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

/// One deed. Ids, amounts and preconditions; nothing is left to choose.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "verb")]
pub enum Action {
    /// Leave the guest of `vm` so much memory.
    Resize {
        /// Which VM.
        vm: VmName,
        /// Do nothing if the VM is not in this life any more.
        incarnation: u64,
        /// What the guest may use from now on, or have in memory.
        target: Bytes,
        /// Who sees to it.
        #[serde(default)]
        by: Means,
    },
}

/// How memory leaves a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Means {
    /// Its balloon: the guest chooses what goes, and may use no more.
    #[default]
    Balloon,
    /// The host pages out what the guest does not touch: it may use all, and has so much in memory.
    Paging,
}

/// What one tick decided about one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Its group; `None`: not managed.
    pub group: Option<GroupName>,
    /// Its limits; `None`: not managed.
    pub limits: Option<VmLimits>,
    /// What it is meant to have.
    pub target: Option<Bytes>,
    /// What changes now.
    pub change: Option<Change>,
    /// Why nothing, or not more, was taken or given.
    pub refusals: Vec<Reason>,
    /// What the latest move by `balance` has saved, of those that show it.
    #[serde(default)]
    pub outcome: Option<Outcome>,
}

/// What a move by `balance` was expected to save, and what it did save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// When it was decided.
    pub at: Time,
    /// What the VM was meant to have before …
    pub from: Bytes,
    /// … and with it.
    pub to: Bytes,
    /// Misses per minute that it was expected to save the VM; negative: to cost.
    pub expected: i64,
    /// Major faults per minute that the VM has had less since; negative: more.
    pub saved: i64,
}

/// A change of one VM's memory, with its reason.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Change {
    /// What is done.
    pub action: Action,
    /// Whether it takes memory from the VM.
    pub is_take: bool,
    /// Whether the same was asked before and is only said again, in case it was lost.
    pub is_repeat: bool,
    /// Why.
    pub reason: Reason,
}

/// How a group's identical pages are looked for until the next plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scan {
    /// How fast; `None`: not at all, and what is shared is unshared.
    pub rate: Option<PagesPerMs>,
    /// Why.
    pub reason: Reason,
    /// The group that its worker's CPU time is charged to, if not its own: the one that borrows of
    /// it.
    #[serde(default)]
    pub payer: Option<GroupName>,
}

/// Memory that a VM has freed and that is taken until the next plan, what was freed first first
/// (Wan 2013 §3.3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Take {
    /// So much of what it has freed stays.
    pub keep: Bytes,
    /// Why no more.
    pub reason: Reason,
}

/// Memory that a group's second-level cache may hold until the next plan (Kim 2014 §4.2.3).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quota {
    /// How much.
    pub amount: Bytes,
    /// Why so much.
    pub reason: Reason,
}

/// Idle surplus of one group that serves another until the next plan (Kim 2014 §7.1).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loan {
    /// Who may use it.
    pub borrower: GroupName,
    /// How much; nothing: it ends with this plan.
    pub amount: Bytes,
    /// Why so much.
    pub reason: Reason,
}

/// One group's memory, in physical bytes (Kim 2014 §4.2).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ledger {
    /// What the tenant pays for.
    pub budget: Bytes,
    /// What its VMs occupy on the host.
    pub used: Bytes,
    /// Granted above base and not touched yet: it will be used, so it is not handed out twice.
    pub promised: Bytes,
    /// Kept back for bursts.
    pub reserve: Bytes,
    /// What another group may use of its budget for now.
    #[serde(default)]
    pub lent: Bytes,
    /// What it may use of other groups' budgets for now.
    #[serde(default)]
    pub borrowed: Bytes,
    /// `budget + borrowed − lent − used − promised − reserve`: what can be handed out.
    pub surplus: Bytes,
    /// What must come back: how far `used + promised` exceeds `budget + borrowed − lent`.
    pub deficit: Bytes,
}
