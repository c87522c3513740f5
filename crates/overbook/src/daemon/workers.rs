//! The groups' workers, as the loop sees them: in every tick they are told which VMs to track, and what
//! they have found out goes into the view.
//!
//! A group has a worker while one of its VMs can be tracked: it was started with the shim, its group's
//! tracking is on, and nobody has paused Overbook. Where that holds for no VM nothing is started. Each
//! worker has a task that starts it, passes lines both ways and starts it again when it ends
//! ([`keeper`]); the loop only leaves orders and copies reports, and waits for nobody.

mod cgroup;
mod keeper;
mod shims;

use std::collections::BTreeMap;

use model::view::Mechanism;
use model::{
    Action, Bytes, GroupName, HostView, Migration, Reading, Spec, Tracking, VmName, VmView,
    ports::{Act, Sense},
};
use sys::clock::boot_now;

use crate::drivers::Drivers;
use crate::worker::{Order, Orders, VmReport};
use keeper::Keeper;
use shims::Shims;

/// A reading that is older than this is not shown: the worker is stuck, or starts anew.
const FRESH: model::Millis = model::Millis::secs(10);

/// All workers.
#[derive(Debug, Default)]
pub(super) struct Workers {
    groups: BTreeMap<GroupName, Keeper>,
    shims: Shims,
    is_paused: bool,
}

/// Drivers and workers together are the world that the policy sees.
pub(super) struct World<'a> {
    pub(super) drivers: &'a mut Drivers,
    pub(super) workers: &'a mut Workers,
    pub(super) spec: &'a Spec,
}

impl Sense for World<'_> {
    fn view(&mut self) -> HostView {
        let mut view = self.drivers.view();
        self.workers.tick(self.spec, &mut view);
        view
    }
}

impl Act for World<'_> {
    fn act(&mut self, action: &Action) {
        self.drivers.act(action);
    }
}

impl Workers {
    /// Tells every worker what to track, and the view what they have found out.
    fn tick(&mut self, spec: &Spec, view: &mut HostView) {
        self.shims.look(view.vms.values().filter_map(|vm| vm.pid));
        let mut orders: BTreeMap<GroupName, Orders> = BTreeMap::new();
        for (name, vm) in &mut view.vms {
            match self.order_of(spec, name, vm) {
                Ok((group, order)) => {
                    orders.entry(group).or_default().vms.insert(name.clone(), order);
                }
                Err(why) => drop(vm.limits.insert(Mechanism::Tracking, why)),
            }
        }
        // A group without VMs to track, or none of the configuration any more, is told so.
        for (group, keeper) in &self.groups {
            keeper.order(orders.remove(group).unwrap_or_default());
        }
        for (group, orders) in orders {
            let keeper = Keeper::start(group.clone());
            keeper.order(orders);
            self.groups.insert(group, keeper);
        }
        self.groups.retain(|group, keeper| {
            spec.groups.contains_key(group) || keeper.reading().pid.is_some()
        });
        self.show(view);
    }

    /// What a worker is to do with this VM, and whose; or why none is.
    fn order_of(
        &self,
        spec: &Spec,
        name: &VmName,
        vm: &VmView,
    ) -> Result<(GroupName, Order), String> {
        let (group, of_group) = spec.group_of(name).ok_or("it belongs to no group")?;
        if of_group.tracking.vcpu_share().is_none() {
            return Err(format!("switched off for group {group} (`tracking = \"off\"`)"));
        }
        let pid = vm.pid.ok_or("QEMU's process is not known")?;
        if !self.shims.has(pid) {
            return Err("QEMU was started without Overbook's shim".to_owned());
        }
        if self.is_paused {
            return Err("Overbook is paused".to_owned());
        }
        // The shim lets go by itself as soon as it sees one; it should not have to.
        if vm.migration == Migration::Active {
            return Err("a migration is running".to_owned());
        }
        let order = Order {
            incarnation: vm.incarnation,
            pid,
            swapped: swapped(vm),
            memory: vm.balloon.map_or(vm.ram, |balloon| balloon.value.min(vm.ram)),
            budget: of_group.tracking,
        };
        Ok((group.clone(), order))
    }

    /// Puts into the view what the workers know.
    fn show(&self, view: &mut HostView) {
        let now = boot_now();
        for (group, keeper) in &self.groups {
            view.workers.insert(group.clone(), Reading::new(keeper.reading(), now));
            let reports = keeper.reports();
            for (name, _) in keeper.orders().vms {
                let Some(vm) = view.vms.get_mut(&name) else { continue };
                let report = reports.get(&name);
                let report = report.filter(|report| report.value.incarnation == vm.incarnation);
                match fresh(report, now) {
                    Ok((tracking, why_not)) => {
                        vm.tracking = tracking;
                        vm.limits.extend(why_not.map(|why| (Mechanism::Tracking, why)));
                    }
                    Err(why) => drop(vm.limits.insert(Mechanism::Tracking, why)),
                }
            }
        }
    }

    /// While paused no VM is tracked.
    pub(super) fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused {
            for keeper in self.groups.values() {
                keeper.order(Orders::default());
            }
        }
    }

    /// Waits until every worker has ended that is told to: what it held is back in its guest.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let all: Vec<_> = self.groups.values().map(Keeper::idle).collect();
        async move { drop(futures_util::future::join_all(all).await) }
    }
}

type Known = (Option<Reading<Tracking>>, Option<String>);

/// What a report says, if it is young enough.
fn fresh(report: Option<&Reading<VmReport>>, now: model::Time) -> Result<Known, String> {
    let report = report.ok_or("the group's worker has not reported on it yet")?;
    if report.age(now) > FRESH {
        return Err(format!("the group's worker has not reported for {}", report.age(now)));
    }
    let tracking = report.value.tracking.clone();
    Ok((tracking.map(|value| Reading::new(value, report.at)), report.value.why_not.clone()))
}

/// How much of the guest lies in its swap: written there and not read back. Pages of ended processes
/// count until their swap is used again; never more than the VM has RAM, for it is the guest's word.
fn swapped(vm: &VmView) -> Bytes {
    let stats = vm.stats.map(|reading| reading.value).unwrap_or_default();
    let (out, back) = (stats.swap_out.unwrap_or_default(), stats.swap_in.unwrap_or_default());
    out.minus(back).min(vm.ram)
}

#[cfg(test)]
mod tests;
