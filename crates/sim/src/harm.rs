//! The definition of harm, judged from inside the guests and never by the policy's own words.
//!
//! Some discomfort is the price of sharing: a guest that wakes waits until its memory is back, and
//! a neighbour's grant takes seconds to return. Harms that heal therefore have a grace period, and
//! only the harm that outlasts it counts.

use std::collections::BTreeMap;

use model::{Action, Bytes, GroupName, Plan, Spec, VmLimits, VmName, spec::LendSpec};

use crate::{fake::Nature, guest::Guest, host::Host};

/// Seconds for which a guest below its base may suffer before this counts as harm. Statistics have
/// an age, a balloon takes time to move, and pages come back from a disk.
const GRACE_BASE: u64 = 6;

/// Seconds of suffering after which even late statistics show it.
const VISIBLE: u64 = 3;

/// Seconds for which a group may occupy more than its budget, or the host less than its reserve.
const GRACE_OVER: u64 = 15;

/// Seconds within which memory that a balloon took must reach the host, or return to the guest.
const GRACE_LOST: u64 = 30;

/// Memory that a guest may lose without harm.
const LITTLE: Bytes = Bytes::mib(30);

/// Most times within [`WINDOW`] that memory may be taken from a guest and given back.
const REVERSALS_MAX: usize = 5;

/// The seconds over which reversals are counted.
const WINDOW: u64 = 600;

/// The share of its memory, in percent, that a guest's balloon may take in a second without
/// stalling it.
const STALL_PERCENT: u64 = 30;

/// Harm that was done.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Harm {
    /// A program was killed for want of memory.
    #[error("a program of {vm} was killed for want of memory")]
    Killed {
        /// The VM.
        vm: VmName,
    },
    /// A balloon took a guest below its `min`.
    #[error("{vm} has {actual}, less than its minimum")]
    BelowMinimum {
        /// The VM.
        vm: VmName,
        /// Its memory.
        actual: Bytes,
    },
    /// A guest suffered with less than its base for too long.
    #[error("{vm} suffered for {GRACE_BASE} s with {actual}, less than its base")]
    DeniedBase {
        /// The VM.
        vm: VmName,
        /// Its memory.
        actual: Bytes,
    },
    /// Memory was taken from a guest that suffers, while `instead` had memory to spare.
    #[error("memory was taken from {vm}, which suffers, instead of {instead}")]
    TakenFromSuffering {
        /// The guest that suffers.
        vm: VmName,
        /// The guest with cheaper memory.
        instead: VmName,
    },
    /// A migrating guest's balloon was touched.
    #[error("the balloon of {vm} was touched during its migration")]
    TouchedInMigration {
        /// The VM.
        vm: VmName,
    },
    /// A balloon took too much at once.
    #[error("{vm} lost {inflated} within a second")]
    Stalled {
        /// The VM.
        vm: VmName,
        /// Memory that the balloon took.
        inflated: Bytes,
    },
    /// Memory was taken and given back too often.
    #[error("memory of {vm} went back and forth more than {REVERSALS_MAX} times in ten minutes")]
    Oscillation {
        /// The VM.
        vm: VmName,
    },
    /// QEMU occupies more memory than its cgroup may, so the kernel kills it.
    #[error("QEMU of {vm} was killed: it occupied {beyond} more than its cgroup may")]
    QemuKilled {
        /// QEMU's VM.
        vm: VmName,
        /// Memory beyond the limit.
        beyond: Bytes,
    },
    /// A guest lost memory, and the host did not get it.
    #[error("{vm} was without {lost} for {GRACE_LOST} s that the host never got")]
    Lost {
        /// The VM.
        vm: VmName,
        /// Memory that is missing.
        lost: Bytes,
    },
    /// A group occupies more memory than it may.
    #[error("{group} occupied up to {over} more than it may for {GRACE_OVER} s")]
    OverBudget {
        /// The group.
        group: GroupName,
        /// Memory beyond its share at the end of the grace period.
        over: Bytes,
    },
    /// The host's available memory stayed below its reserve.
    #[error("the host had {available} left for {GRACE_OVER} s, less than its reserve")]
    HostShort {
        /// Available memory at the end of the grace period.
        available: Bytes,
    },
}

impl Harm {
    /// The guest that was harmed; `None` if a group or the host was.
    #[must_use]
    pub const fn victim(&self) -> Option<&VmName> {
        match self {
            Self::Killed { vm }
            | Self::BelowMinimum { vm, .. }
            | Self::DeniedBase { vm, .. }
            | Self::TakenFromSuffering { vm, .. }
            | Self::TouchedInMigration { vm }
            | Self::Stalled { vm, .. }
            | Self::QemuKilled { vm, .. }
            | Self::Lost { vm, .. }
            | Self::Oscillation { vm } => Some(vm),
            Self::OverBudget { .. } | Self::HostShort { .. } => None,
        }
    }
}

/// Watches a run and reports each harm once, at the end of its grace period.
#[derive(Debug, Default)]
pub struct Judge {
    vms: BTreeMap<VmName, HarmRecord>,
    over_for: BTreeMap<GroupName, u64>,
    short_for: u64,
}

#[derive(Debug, Default)]
struct HarmRecord {
    kills: u64,
    suffered_for: u64,
    denied_for: u64,
    lost_for: u64,
    was_beyond: bool,
    was_below_min: bool,
    was_taken: bool,
    reversals: Vec<u64>,
}

impl Judge {
    /// Judges `second`: the state of the guests, and the plan's actions on them.
    pub fn judge(&mut self, second: u64, host: &Host, spec: &Spec, plan: &Plan) -> Vec<Harm> {
        let mut harms = Vec::new();
        for guest in host.guests.iter().filter(|guest| guest.is_alive) {
            self.judge_guest(guest, spec, &mut harms);
        }
        let targets: BTreeMap<VmName, Bytes> = plan
            .actions()
            .into_iter()
            .map(|Action::Resize { vm, target, .. }| (vm, target))
            .collect();
        for vm in targets.keys() {
            self.judge_action(second, vm, &targets, host, spec, &mut harms);
        }
        self.judge_groups(host, spec, &mut harms);
        let reserve = spec.host.reserve.unwrap_or_default();
        self.short_for = if host.available() < reserve { self.short_for + 1 } else { 0 };
        if self.short_for == GRACE_OVER {
            harms.push(Harm::HostShort { available: host.available() });
        }
        harms
    }

    /// The number of times that memory of `vm` was taken and given back so far.
    #[must_use]
    pub fn reversals(&self, vm: &VmName) -> usize {
        self.vms.get(vm).map_or(0, |record| record.reversals.len())
    }

    fn judge_guest(&mut self, guest: &Guest, spec: &Spec, harms: &mut Vec<Harm>) {
        let Some(limits) = limits_of(guest, spec) else { return };
        let record = self.vms.entry(guest.name.clone()).or_default();
        let (vm, actual) = (guest.name.clone(), guest.actual);
        if guest.kills > record.kills {
            record.kills = guest.kills;
            harms.push(Harm::Killed { vm: vm.clone() });
        }
        let is_below_min = actual < limits.min && guest.inflated > Bytes::ZERO;
        if is_below_min && !record.was_below_min {
            harms.push(Harm::BelowMinimum { vm: vm.clone(), actual });
        }
        record.was_below_min |= is_below_min;
        record.suffered_for = if guest.suffers() { record.suffered_for + 1 } else { 0 };
        let is_denied = guest.suffers() && actual < limits.base && can_be_helped(guest);
        record.denied_for = if is_denied { record.denied_for + 1 } else { 0 };
        if record.denied_for == GRACE_BASE {
            harms.push(Harm::DeniedBase { vm: vm.clone(), actual });
        }
        let lost = guest.used.minus(actual);
        record.lost_for = if lost > LITTLE { record.lost_for + 1 } else { 0 };
        if record.lost_for == GRACE_LOST {
            harms.push(Harm::Lost { vm: vm.clone(), lost });
        }
        let beyond = guest.beyond_limit();
        if !beyond.is_zero() && !record.was_beyond {
            harms.push(Harm::QemuKilled { vm: vm.clone(), beyond });
        }
        record.was_beyond |= !beyond.is_zero();
        if guest.inflated > actual.plus(guest.inflated).percent(STALL_PERCENT) {
            harms.push(Harm::Stalled { vm, inflated: guest.inflated });
        }
    }

    fn judge_action(
        &mut self,
        second: u64,
        vm: &VmName,
        targets: &BTreeMap<VmName, Bytes>,
        host: &Host,
        spec: &Spec,
        harms: &mut Vec<Harm>,
    ) {
        let target = targets[vm];
        let Some(guest) = host.guests.iter().find(|guest| guest.name == *vm) else { return };
        let record = self.vms.entry(vm.clone()).or_default();
        let vm = vm.clone();
        if guest.is_migrating {
            harms.push(Harm::TouchedInMigration { vm: vm.clone() });
        }
        if target < guest.actual && record.suffered_for >= VISIBLE {
            let left = |other: &Guest| targets.get(&other.name).copied().unwrap_or(other.actual);
            let cheaper = |other: &&Guest| has_cheaper_memory(other, left(other), guest, spec);
            if let Some(other) = host.guests.iter().find(cheaper) {
                let instead = other.name.clone();
                harms.push(Harm::TakenFromSuffering { vm: vm.clone(), instead });
            }
        }
        if target > guest.actual && record.was_taken {
            record.reversals.push(second);
            let recent = record.reversals.iter().filter(|at| second - **at < WINDOW).count();
            if recent == REVERSALS_MAX + 1 {
                harms.push(Harm::Oscillation { vm });
            }
        }
        record.was_taken = target < guest.actual;
    }

    /// A group may occupy its budget. A group that lends may also occupy memory that other lending
    /// groups leave unused.
    fn judge_groups(&mut self, host: &Host, spec: &Spec, harms: &mut Vec<Harm>) {
        let standings: Vec<(&GroupName, &LendSpec, Bytes, Bytes)> = spec
            .groups
            .iter()
            .map(|(name, group)| {
                let (used, budget) = standing(name, host, spec);
                (name, &group.lend, used, budget)
            })
            .collect();
        for (name, lends, used, budget) in &standings {
            let others = standings.iter().filter(|(other, ..)| other != name);
            let lenders = others.filter(|(_, lend, ..)| lend.includes(lends));
            let lendable: Bytes = lenders.map(|(.., used, budget)| budget.minus(*used)).sum();
            let over = used.minus(budget.plus(lendable));
            let streak = self.over_for.entry((*name).clone()).or_default();
            *streak = if over.is_zero() { 0 } else { *streak + 1 };
            if *streak == GRACE_OVER {
                harms.push(Harm::OverBudget { group: (*name).clone(), over });
            }
        }
    }
}

/// Memory that the guests of group `name` occupy, and the group's budget.
fn standing(name: &GroupName, host: &Host, spec: &Spec) -> (Bytes, Bytes) {
    let is_in = |guest: &&Guest| {
        guest.is_alive && spec.group_of(&guest.name).is_some_and(|(of, _)| of == name)
    };
    let members = || host.guests.iter().filter(is_in);
    let used: Bytes = members().map(|guest| guest.used).sum();
    let bases = members().filter_map(|guest| limits_of(guest, spec)).map(|l| l.base);
    (used, spec.groups[name].budget.unwrap_or_else(|| bases.sum()))
}

fn limits_of(guest: &Guest, spec: &Spec) -> Option<VmLimits> {
    let (_, group) = spec.group_of(&guest.name)?;
    Some(spec.limits_of(&guest.name, group, guest.fake.ram))
}

/// Whether the policy can give this guest more memory: its balloon works, and it is not migrating.
fn can_be_helped(guest: &Guest) -> bool {
    let is_helpless =
        guest.any(|nature| matches!(nature, Nature::StuckBalloon { .. } | Nature::NoBalloonDriver));
    !is_helpless && !guest.is_migrating
}

/// Whether `other`, of the same group as `guest`, is left with a grant and does not use all of it.
fn has_cheaper_memory(other: &Guest, left: Bytes, guest: &Guest, spec: &Spec) -> bool {
    let group = |of: &Guest| spec.group_of(&of.name).map(|(name, _)| name.clone());
    let unused = left.minus(other.resident).minus(left.percent(15));
    other.name != guest.name
        && other.is_alive
        && group(other) == group(guest)
        && can_be_helped(other)
        && other.target == other.actual
        && !other.suffers()
        // A guest without swap may come to need its unused memory, and cannot wait.
        && !other.any(|nature| *nature == Nature::Swapless)
        && limits_of(other, spec).is_some_and(|l| left > l.base.plus(Bytes::mib(10)))
        && unused > Bytes::mib(10)
}
