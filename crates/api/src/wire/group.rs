//! One tenant's memory: its ledger and its VMs.

use model::{GroupName, Loan};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{CacheStatus, GroupDedup, GroupFreePages, LoanStatus, Words, WorkerStatus};
use crate::shown::TickView;

/// A group and its ledger.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct GroupStatus {
    /// Its name.
    pub name: String,
    /// The policy by which its surplus is shared out.
    pub policy: String,
    /// Memory that the tenant pays for.
    pub budget_bytes: u64,
    /// Memory that its VMs occupy on the host.
    pub used_bytes: u64,
    /// Granted above base and not touched yet.
    pub promised_bytes: u64,
    /// Kept back for bursts.
    pub reserve_bytes: u64,
    /// Whether it takes part in lending.
    #[serde(default)]
    pub lends: bool,
    /// Memory of its budget that another group may use for now.
    #[serde(default)]
    pub lent_bytes: u64,
    /// Memory of other groups' budgets that it may use for now.
    #[serde(default)]
    pub borrowed_bytes: u64,
    /// The loans that make up both.
    #[serde(default)]
    pub loans: Vec<LoanStatus>,
    /// Memory that can be handed out.
    pub surplus_bytes: u64,
    /// Memory that must come back.
    pub deficit_bytes: u64,
    /// Why it stays over its budget; absent: it does not.
    #[serde(default)]
    pub stays_over: Option<Words>,
    /// Its VMs, by name.
    pub vms: Vec<String>,
    /// Cost limit of tracking for each of its VMs: a share of one vCPU, or `off`.
    pub tracking: String,
    /// Identical pages of its VMs.
    pub dedup: GroupDedup,
    /// Memory that its VMs have freed.
    #[serde(default)]
    pub free_pages: GroupFreePages,
    /// Its spare memory that caches pages of its data disks; absent: none of its disks has a cache.
    #[serde(default)]
    pub cache: Option<CacheStatus>,
    /// The process that works on its VMs' memory; absent: none is needed.
    pub worker: Option<WorkerStatus>,
}

impl GroupStatus {
    /// Every configured group, including groups without VMs.
    pub fn all(shown: &TickView) -> Vec<Self> {
        shown.published.spec.groups.keys().map(|name| Self::build(shown, name)).collect()
    }

    /// The group with this name. `None`: not configured.
    pub fn of(shown: &TickView, name: &GroupName) -> Option<Self> {
        shown.published.spec.groups.contains_key(name).then(|| Self::build(shown, name))
    }

    fn build(shown: &TickView, name: &GroupName) -> Self {
        let plan = &shown.published.plan;
        let ledger = plan.groups.get(name).copied().unwrap_or_default();
        let spec = shown.published.spec.groups.get(name);
        let worker = shown.published.view.workers.get(name);
        let members = plan.vms.iter().filter(|(_, d)| d.group.as_ref() == Some(name));
        let takes_part =
            |(lender, loan): &(&GroupName, &Loan)| *lender == name || loan.borrower == *name;
        let loans = plan.loans.iter().filter(takes_part);
        Self {
            name: name.to_string(),
            policy: spec.map(|group| group.policy.to_string()).unwrap_or_default(),
            budget_bytes: ledger.budget.0,
            used_bytes: ledger.used.0,
            promised_bytes: ledger.promised.0,
            reserve_bytes: ledger.reserve.0,
            lends: spec.is_some_and(|group| group.lend.takes_part()),
            lent_bytes: ledger.lent.0,
            borrowed_bytes: ledger.borrowed.0,
            loans: loans.map(|(lender, loan)| LoanStatus::of(lender, loan)).collect(),
            surplus_bytes: ledger.surplus.0,
            deficit_bytes: ledger.deficit.0,
            stays_over: plan.over.get(name).map(Words::of),
            vms: members.map(|(vm, _)| vm.to_string()).collect(),
            tracking: spec.map(|group| group.tracking.to_string()).unwrap_or_default(),
            dedup: GroupDedup::of(shown, name),
            free_pages: GroupFreePages::of(shown, name),
            cache: CacheStatus::of(shown, name),
            worker: worker.map(|reading| WorkerStatus::from(&reading.value)),
        }
    }
}
