//! The expected effect of a configuration, in words: for `overbook check --diff`, and for a reload
//! that waits until it is confirmed.

use std::{collections::BTreeMap, fmt::Write};

use model::{Bytes, GroupName, VmName};
use policy::{Case, ForeseenChange};
use serde::Serialize;

/// A reload that takes more than this share of a group's memory must be confirmed, in percent.
const MOST_PERCENT: u64 = 10;

/// The expected changes of all VMs.
#[derive(Debug)]
pub(crate) struct Foreseen<'a> {
    case: &'a Case,
    changes: BTreeMap<VmName, ForeseenChange>,
}

/// The expected change of a VM, for programs.
#[derive(Debug, Serialize)]
pub(crate) struct ForeseenRow {
    vm: String,
    from_bytes: u64,
    to_bytes: u64,
    within_ms: u64,
    reason: String,
}

impl<'a> Foreseen<'a> {
    /// The changes that this case leads to.
    #[must_use]
    pub(crate) fn of(case: &'a Case) -> Self {
        Self { case, changes: case.foresee() }
    }

    /// One line for each group that is over its budget and for each VM that changes.
    #[must_use]
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for (name, ledger) in &self.case.decide().groups {
            let of_group = |vm: &&VmName| self.group_of(vm) == Some(name);
            let vms = self.case.view.vms.keys().filter(of_group).count();
            if ledger.used > ledger.budget && vms > 0 {
                let (budget, used) = (ledger.budget, ledger.used);
                let _ =
                    writeln!(text, "group {name}: {vms} VMs use {used} of a budget of {budget}");
            }
        }
        for (vm, change) in &self.changes {
            let ForeseenChange { from, to, within, reason } = change;
            let (taken, given) = (from.minus(*to), to.minus(*from));
            let _ = if taken.is_zero() {
                writeln!(text, "would give {given} to {vm} within {within}: {reason}")
            } else {
                writeln!(text, "would take {taken} from {vm} within {within}: {reason}")
            };
        }
        if self.changes.is_empty() {
            text.push_str("would change no VM's memory\n");
        }
        text
    }

    /// The same for programs.
    #[must_use]
    pub(crate) fn rows(&self) -> Vec<ForeseenRow> {
        let row = |(vm, change): (&VmName, &ForeseenChange)| ForeseenRow {
            vm: vm.to_string(),
            from_bytes: change.from.0,
            to_bytes: change.to.0,
            within_ms: change.within.0,
            reason: change.reason.to_string(),
        };
        self.changes.iter().map(row).collect()
    }

    /// The groups that lose more than a tenth of their memory, each with the loss.
    #[must_use]
    pub(crate) fn large_losses(&self) -> BTreeMap<GroupName, Bytes> {
        let mut sums: BTreeMap<&GroupName, (Bytes, Bytes)> = BTreeMap::new();
        for (name, vm) in &self.case.view.vms {
            let Some(group) = self.group_of(name) else { continue };
            let change = self.changes.get(name);
            let has = change.map_or(vm.balloon.map_or(vm.ram, |it| it.value), |it| it.from);
            let (all, lost) = sums.entry(group).or_default();
            *all = all.plus(has);
            *lost = lost.plus(change.map_or(Bytes::ZERO, |change| change.from.minus(change.to)));
        }
        let is_large = |(all, lost): &(Bytes, Bytes)| *lost > all.percent(MOST_PERCENT);
        let large = sums.into_iter().filter(|(_, sums)| is_large(sums));
        large.map(|(group, (_, lost))| (group.clone(), lost)).collect()
    }

    fn group_of(&self, vm: &VmName) -> Option<&GroupName> {
        self.case.spec.group_of(vm).map(|(group, _)| group)
    }
}
