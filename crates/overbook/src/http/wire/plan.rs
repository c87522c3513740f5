//! One plan: what happens to each VM and why, from the daemon or from `overbook plan --from`.

use std::collections::BTreeMap;

use model::{Action, Plan};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{LoanStatus, ScanStatus, VmChange, Words, host::mode_name, raw};

/// The outcome of one tick.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlanStatus {
    /// When it was made, in milliseconds of the host's boot clock.
    pub at_ms: u64,
    /// `observe`, `recommend` or `enforce`: whether it is carried out.
    pub mode: String,
    /// What everybody should know about the host.
    pub host: Vec<Words>,
    /// What groups lend each other; a loan of nothing ends with this plan.
    pub loans: Vec<LoanStatus>,
    /// How each group's identical pages are looked for; carried out in every mode.
    pub scans: BTreeMap<String, ScanStatus>,
    /// VMs whose memory changes, in the order in which that is done: takes before gives.
    pub order: Vec<String>,
    /// Every VM.
    pub vms: Vec<PlannedVm>,
}

/// What was decided about one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlannedVm {
    /// Its name.
    pub name: String,
    /// Its group; absent: not managed.
    pub group: Option<String>,
    /// What it is meant to have.
    pub target_bytes: Option<u64>,
    /// What changes.
    pub change: Option<VmChange>,
    /// Why nothing, or not more, was taken or given.
    pub refusals: Vec<Words>,
}

impl PlanStatus {
    /// The plan as it goes over the wire.
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
            mode: mode_name(plan.mode).to_owned(),
            host: Words::all(&plan.host),
            loans: loans.collect(),
            scans: scans.map(|(name, scan)| (name.to_string(), ScanStatus::of(scan))).collect(),
            order: plan.actions().into_iter().map(vm_of).collect(),
            vms: vms.collect(),
        }
    }
}
