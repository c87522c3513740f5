//! The near future under a configuration: for `overbook check --diff`, and for a reload that would
//! take much.
//!
//! The policy runs over the present view for two minutes of simulated time, as if each guest went
//! on with what it uses now. A guest that wakes, or a balloon that is slow, changes the outcome: so
//! it is an estimate, and no promise.

use std::collections::BTreeMap;

use model::{
    Action, Bytes, HostView, Means, Millis, Mode, Pauses, Reading, Reason, VmName, VmView,
};

use crate::{Case, grace::Grace, tick, tuning};

/// The length of the simulated time.
const HORIZON: Millis = Millis::secs(120);

/// The expected change of one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct ForeseenChange {
    /// Memory of the guest now: its balloon's size, or its limit of resident memory.
    pub from: Bytes,
    /// The same at the end.
    pub to: Bytes,
    /// Time until the last change.
    pub within: Millis,
    /// The reason of the first change.
    pub reason: Reason,
}

impl Case {
    /// The VMs whose memory changes in the next two minutes. The time of grace does not count, and
    /// neither does a pause.
    #[must_use]
    pub fn foresee(&self) -> BTreeMap<VmName, ForeseenChange> {
        let mut changes: BTreeMap<VmName, ForeseenChange> = BTreeMap::new();
        if self.spec.modes.balloon != Mode::Enforce {
            return changes;
        }
        let Self { now: began, mut spec, mut view, mut memory } = self.clone();
        spec.host.grace = Millis(0);
        memory.grace = Grace::default();
        memory.paused = false;
        memory.pauses = Pauses::default();
        let mut passed = Millis(0);
        while passed < HORIZON {
            passed = Millis(passed.0 + tuning::PERIOD.0);
            let now = began.after(passed);
            later(&mut view, tuning::PERIOD);
            let plan = tick(&view, &spec, &mut memory, now);
            for Action::Resize { vm: name, target, by, .. } in plan.actions() {
                let Some(vm) = view.vms.get_mut(&name) else { continue };
                let before = resize(vm, target, by);
                let reason = plan.vms.get(&name).and_then(|vm| vm.change.as_ref());
                let reason = reason.map_or(Reason::Content, |change| change.reason.clone());
                let change = changes.entry(name).or_insert(ForeseenChange {
                    from: before,
                    to: before,
                    within: passed,
                    reason,
                });
                if change.to != target {
                    (change.to, change.within) = (target, passed);
                }
            }
        }
        changes.retain(|_, change| change.from != change.to);
        changes
    }
}

/// The same view, seen `by` later.
fn later(view: &mut HostView, by: Millis) {
    fn move_on<T>(reading: &mut Option<Reading<T>>, by: Millis) {
        reading.iter_mut().for_each(|reading| reading.at = reading.at.after(by));
    }
    move_on(&mut view.host, by);
    for vm in view.vms.values_mut() {
        move_on(&mut vm.balloon, by);
        move_on(&mut vm.stats, by);
        move_on(&mut vm.used, by);
        move_on(&mut vm.memory_limits, by);
        move_on(&mut vm.tracking, by);
        move_on(&mut vm.dedup, by);
        move_on(&mut vm.free_pages, by);
        move_on(&mut vm.cold, by);
    }
}

/// Carries a change out in the view. Returns the VM's memory before it.
fn resize(vm: &mut VmView, target: Bytes, by: Means) -> Bytes {
    if by == Means::Paging {
        let Some(Reading { value: cold, .. }) = &mut vm.cold else { return vm.ram };
        let before = cold.target.unwrap_or(vm.ram);
        let goes = cold.resident.minus(target);
        (cold.resident, cold.out) = (cold.resident.minus(goes), cold.out.plus(goes));
        cold.target = Some(target);
        vm.used.iter_mut().for_each(|used| used.value = used.value.minus(goes));
        return before;
    }
    let Some(Reading { value: balloon, .. }) = &mut vm.balloon else { return vm.ram };
    let before = std::mem::replace(balloon, target);
    let (taken, given) = (before.minus(target), target.minus(before));
    let moved = |size: Option<Bytes>| size.map(|size| size.minus(taken).plus(given));
    if let Some(Reading { value: stats, .. }) = &mut vm.stats {
        stats.total = moved(stats.total);
        stats.free = moved(stats.free);
        stats.available = moved(stats.available);
    }
    vm.used.iter_mut().for_each(|used| used.value = used.value.min(target));
    before
}
