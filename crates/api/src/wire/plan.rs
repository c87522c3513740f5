//! One plan: the change of each VM and its reason, from the daemon or from `overbook plan --from`.

use std::collections::BTreeMap;

use model::{Action, Plan};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{LoanStatus, ScanStatus, VmChange, Words, raw};

/// The outcome of one tick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlanStatus {
    /// Time of the plan, in milliseconds of the host's boot clock.
    pub at_ms: u64,
    /// `observe`, `recommend` or `enforce`: whether it is carried out.
    pub mode: String,
    /// Conditions of the host that concern every user.
    pub host: Vec<Words>,
    /// Loans between groups; a loan of 0 ends with this plan.
    pub loans: Vec<LoanStatus>,
    /// The scan of each group for identical pages; carried out in every mode.
    pub scans: BTreeMap<String, ScanStatus>,
    /// VMs whose memory changes, in order of execution: takes before gives.
    pub order: Vec<String>,
    /// Every VM.
    pub vms: Vec<PlannedVm>,
}

/// The decision about one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedVm {
    /// Its name.
    pub name: String,
    /// Its group; absent: not managed.
    pub group: Option<String>,
    /// The memory that it is meant to have.
    pub target_bytes: Option<u64>,
    /// The change, if there is one.
    pub change: Option<VmChange>,
    /// Why nothing, or not more, was taken or given.
    pub refusals: Vec<Words>,
}

impl PlanStatus {
    /// The plan as an API object.
    pub fn of(plan: &Plan) -> Self {
        let vm_of = |action: Action| match action {
            Action::Resize { vm, .. } => vm.to_string(),
        };
        let vms = plan.vms.iter().map(|(name, decision)| PlannedVm {
            name: name.to_string(),
            group: decision.group.as_ref().map(ToString::to_string),
            target_bytes: raw(decision.target),
            change: decision.change.as_ref().map(VmChange::of),
            refusals: Words::all(&decision.refusals),
        });
        let scans = plan.scans.iter();
        let loans = plan.loans.iter().map(|(lender, loan)| LoanStatus::of(lender, loan));
        Self {
            at_ms: plan.at.0,
            mode: plan.mode.to_string(),
            host: Words::all(&plan.host),
            loans: loans.collect(),
            scans: scans.map(|(name, scan)| (name.to_string(), ScanStatus::of(scan))).collect(),
            order: plan.actions().into_iter().map(vm_of).collect(),
            vms: vms.collect(),
        }
    }
}
