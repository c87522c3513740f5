//! The groups' workers, as the loop sees them. Every tick puts their reports into the view
//! ([`Workers::look`]), and sends them the plan's orders ([`Workers::send`]).
//!
//! A group has a worker while one of its VMs can be tracked, merged or paged out, or can hand
//! over its free pages: the group has such a mechanism on, and Overbook is not paused. VMs
//! without the shim are tracked and paged from outside. VMs without a group are only tracked, by
//! a worker of their own. Where dedup was switched off, the worker runs until its VMs share
//! nothing any more. Without such a VM no worker runs. Each worker has a task that starts it,
//! passes lines both ways and restarts it when it ends ([`keeper`]). The loop only leaves orders
//! and copies reports; it never waits.

mod cgroup;
mod keeper;
mod shared;
mod shims;

use api::verdict::HOST_PAUSED;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::LazyLock;

use model::view::{Mechanism, SWITCHED_OFF};
use model::{
    Action, AttachSpec, Bytes, GroupName, GroupSpec, Hold, HostView, Means, Migration, Pauses,
    Plan, Reading, Spec, Time, TrackingBudget, VmName, VmView,
};
use sys::clock::boot_now;
use sys::features::{self, Feature, Finding};
use sys::process::Identity;

use cgroup::CgroupRecord;
use drivers::{has_socket, identity::process_of};
use keeper::Keeper;
use shared::Shared;
use shims::Shims;
use worker::{FreedOrder, Order, VmReport};

/// A reading older than this is not shown: the worker is stuck or restarting.
const FRESH: model::Millis = model::Millis::secs(10);
/// Why workers do nothing with a VM without the shim.
pub(super) const NO_SHIM: &str = "QEMU was started without Overbook's shim";
/// Everything that workers do with a VM.
const ALL: [Mechanism; 4] =
    [Mechanism::Tracking, Mechanism::Dedup, Mechanism::FreePages, Mechanism::Cold];

/// Name of the worker for VMs without a group. No configured group can have this name.
static OF_NO_GROUP: LazyLock<GroupName> = LazyLock::new(|| GroupName::from("(no group)"));
const NO_GROUP: &str = "it belongs to no group";
const PAUSED: &str = "paused by the operator";
const RELEASED: &str = "released by the operator";

/// Mechanisms that are not applied to a VM, each with the reason.
type Limits = BTreeMap<Mechanism, String>;

/// All workers.
#[derive(Debug, Default)]
pub(super) struct Workers {
    groups: BTreeMap<GroupName, Keeper>,
    shims: Shims,
    shared: Shared,
    /// The VMs of the last tick whose QEMUs have the shim, by process.
    with_shim: BTreeMap<Identity, String>,
    /// The VMs of the last tick that a release is for ([`Workers::ours`]), by process.
    ours: BTreeMap<Identity, String>,
    /// Cost of tracking each VM by incarnation, as last reported by its worker. The next worker
    /// continues from it.
    spent: BTreeMap<VmName, (u64, Reading<f64>)>,
    /// This tick's orders, without what the plan decides.
    orders: BTreeMap<VmName, (GroupName, Order)>,
    /// The last decided limits of VMs' resident memory, by incarnation.
    resident: BTreeMap<VmName, (u64, Bytes)>,
    /// Why the host cannot page out. The outer `None`: not probed yet.
    why_not_paged: Option<Option<String>>,
    is_paused: bool,
    /// VMs and groups on which nothing is changed.
    pauses: Pauses,
    cgroups: CgroupRecord,
}

impl Workers {
    /// No workers yet. Removes the cgroups that workers of earlier daemons have left.
    pub(super) fn in_state(directory: &Path) -> Self {
        Self { cgroups: CgroupRecord::in_state(directory), ..Self::default() }
    }

    /// Finds the VMs to work on, and puts the workers' reports into the view.
    pub(super) fn look(&mut self, spec: &Spec, view: &mut HostView) {
        self.shims.look(view.vms.values().filter_map(process_of));
        let named = |(name, vm): (&VmName, &VmView)| Some((process_of(vm)?, name.to_string()));
        self.with_shim = view.vms.iter().filter_map(named).collect();
        self.with_shim.retain(|process, _| self.shims.has(*process));
        let is_ours = |(name, vm): &(&VmName, &VmView)| {
            let shares = self.shared.group_of(vm.incarnation).is_some();
            has_socket(vm) || spec.group_of(name).is_some() || shares
        };
        self.ours = view.vms.iter().filter(is_ours).filter_map(named).collect();
        self.why_not_paged.get_or_insert_with(|| match features::probe(Feature::MovesSwapped) {
            Finding::Works(_) => None,
            Finding::Missing(why) => Some(format!("what is being swapped cannot be moved: {why}")),
        });
        self.orders.clear();
        for (name, vm) in &mut view.vms {
            let (order, limits) = self.order_of(spec, name, vm);
            self.orders.extend(order.map(|order| (name.clone(), order)));
            limit(vm, limits);
        }
        self.show(view);
    }

    /// Sends every worker the VMs to work on, with the plan's decisions about them, and how fast to
    /// scan for identical pages.
    pub(super) fn send(&mut self, spec: &Spec, plan: &Plan) {
        let mut orders = self.take_orders(plan);
        // A group without VMs to work on, or no longer configured, gets empty orders.
        for (group, keeper) in &self.groups {
            keeper.order(orders.remove(group).unwrap_or_default());
            match spec.groups.get(group) {
                Some(of_group) => keeper.know(&of_group.tables),
                None => keeper.scan(None, None),
            }
        }
        for (group, vms) in orders {
            let keeper = Keeper::start(group.clone(), self.cgroups.clone());
            keeper.order(vms);
            self.groups.insert(group, keeper);
        }
        for (group, scan) in &plan.scans {
            // A group without a worker has nothing to scan.
            if let Some(keeper) = self.groups.get(group) {
                keeper.scan(scan.rate, scan.payer.clone());
            }
        }
        self.groups.retain(|group, keeper| {
            let is_busy = !keeper.vms().is_empty() || keeper.reading().pid.is_some();
            spec.groups.contains_key(group) || is_busy
        });
    }

    /// This tick's orders, with what was decided about each VM.
    fn take_orders(&mut self, plan: &Plan) -> BTreeMap<GroupName, BTreeMap<VmName, Order>> {
        let mut orders: BTreeMap<GroupName, BTreeMap<VmName, Order>> = BTreeMap::new();
        for (name, (group, order)) in std::mem::take(&mut self.orders) {
            let order = self.decided(&name, order, plan);
            orders.entry(group).or_default().insert(name, order);
        }
        orders
    }

    /// The order with what was decided about the VM: the amount to take of its free pages, and the
    /// limit of its resident memory.
    fn decided(&self, name: &VmName, mut order: Order, plan: &Plan) -> Order {
        order.freed.keep = plan.takes.get(name).map(|take| take.keep);
        let target = self.resident.get(name).filter(|(life, _)| *life == order.incarnation);
        // Of a paused VM nothing more is paged out.
        let target = target.filter(|_| !order.keeps_shares);
        order.resident = order.resident.map(|all| target.map_or(all, |(_, target)| *target));
        order
    }

    /// The order for this VM and its group, and the mechanisms not applied to it, with the reasons.
    fn order_of(
        &self,
        spec: &Spec,
        name: &VmName,
        vm: &VmView,
    ) -> (Option<(GroupName, Order)>, Limits) {
        let sharer = self.shared.group_of(vm.incarnation);
        let own = spec.group_of(name);
        let hold = self.pauses.hold(name, own.map(|(group, _)| group));
        let own = own.filter(|_| hold != Some(Hold::Released));
        let (group, budget, mut limits) = match (own, sharer) {
            // Pages of two groups are never shared, also while a VM moves from one to the other.
            (_, Some(former)) if own.is_none_or(|(group, _)| group != former) => {
                let why = format!("what it shares with VMs of group {former} is unshared first");
                (former, TrackingBudget::Off, all_of(&why))
            }
            _ if hold == Some(Hold::Released) => return (None, all_of(RELEASED)),
            (None, _) if spec.host.attach == AttachSpec::Off => {
                return (None, all_of(NO_GROUP));
            }
            // Without a group the VM is only tracked, separately from other VMs.
            (None, _) => {
                let mut limits = all_of(NO_GROUP);
                limits.remove(&Mechanism::Tracking);
                (&*OF_NO_GROUP, TrackingBudget::default(), limits)
            }
            (Some((group, of_group)), _) => {
                let limits = switched_off(group, of_group);
                if limits.len() == ALL.len() && sharer != Some(group) {
                    return (None, limits);
                }
                (group, of_group.tracking, limits)
            }
        };
        let leaves = *group != *OF_NO_GROUP && own.is_none_or(|(own, _)| own != group);
        match self.reach(vm, own) {
            Ok((process, attach)) => {
                if attach.is_some() {
                    for mechanism in [Mechanism::Dedup, Mechanism::FreePages] {
                        limits.entry(mechanism).or_insert_with(|| NO_SHIM.to_owned());
                    }
                } else if let Some(Some(why)) = &self.why_not_paged {
                    limits.entry(Mechanism::Cold).or_insert_with(|| why.clone());
                }
                let keeps_shares = hold == Some(Hold::Kept);
                if keeps_shares {
                    for mechanism in [Mechanism::Dedup, Mechanism::FreePages, Mechanism::Cold] {
                        limits.entry(mechanism).or_insert_with(|| PAUSED.to_owned());
                    }
                }
                let order = Order {
                    incarnation: vm.incarnation,
                    pid: process.pid,
                    started: process.start_ticks,
                    swapped: swapped(vm),
                    memory: vm.balloon.map_or(vm.ram, |balloon| balloon.value.min(vm.ram)),
                    own: vm.own,
                    spent: self.spent(name, vm.incarnation),
                    budget,
                    attach,
                    leaves,
                    freed: FreedOrder {
                        is_lazy: own.is_some_and(|(_, group)| group.free_pages.is_lazy()),
                        keep: None,
                    },
                    resident: self.is_paged(own, attach.is_some()).then_some(vm.ram),
                    keeps_shares,
                };
                (Some((group.clone(), order)), limits)
            }
            Err(why) => {
                let mut none = all_of(why);
                none.extend(limits);
                (None, none)
            }
        }
    }

    /// Whether a VM of this group is paged. Without a decision its limit of resident memory is all
    /// its RAM: nothing is paged out, and only the location of its memory is shown.
    fn is_paged(&self, own: Option<(&GroupName, &GroupSpec)>, is_attached: bool) -> bool {
        // The shim moves pages, and not every kernel can move pages that are being swapped.
        let is_possible = is_attached || self.why_not_paged == Some(None);
        own.is_some_and(|(_, group)| group.cold.is_on() && group.tracking.vcpu_share().is_some())
            && is_possible
    }

    /// Notes a decision about a VM's resident memory, until the next one.
    pub(super) fn act(&mut self, action: &Action) {
        if let Action::Resize { vm, incarnation, target, by: Means::Paging } = action {
            self.resident.insert(vm.clone(), (*incarnation, *target));
        }
    }

    /// Cost of tracking a VM, as last reported by a worker.
    fn spent(&self, name: &VmName, incarnation: u64) -> Option<Reading<f64>> {
        let (_, spent) = self.spent.get(name).filter(|(life, _)| *life == incarnation)?;
        Some(*spent)
    }

    /// QEMU's process if workers may act on it, and the VM's RAM if it has no shim; or why they
    /// may not.
    fn reach(
        &self,
        vm: &VmView,
        own: Option<(&GroupName, &GroupSpec)>,
    ) -> Result<(Identity, Option<Bytes>), &'static str> {
        let process = process_of(vm).ok_or("QEMU's process is not known")?;
        let attach = (!self.shims.has(process)).then_some(vm.ram);
        let may_attach = own.is_none_or(|(_, group)| {
            group.attach == AttachSpec::On && group.tracking.vcpu_share().is_some()
        });
        if attach.is_some() && !may_attach {
            return Err(NO_SHIM);
        }
        if attach == Some(Bytes::ZERO) {
            return Err("its RAM is not known yet");
        }
        if self.is_paused {
            return Err(HOST_PAUSED);
        }
        // The shim detaches by itself when it sees a migration, but should not have to.
        if vm.migration == Migration::Active {
            return Err("a migration is running");
        }
        Ok((process, attach))
    }

    /// Copies the workers' reports into the view.
    fn show(&mut self, view: &mut HostView) {
        let now = boot_now();
        for (group, keeper) in &self.groups {
            // A group whose VMs need no worker has none, which is no fault.
            let worker = keeper.reading();
            if worker.pid.is_some() || !keeper.vms().is_empty() {
                view.workers.insert(group.clone(), Reading::new(worker, now));
            }
            let reports = keeper.reports();
            for name in keeper.vms() {
                let Some(vm) = view.vms.get_mut(&name) else { continue };
                let report = reports.get(&name);
                let report = report.filter(|report| report.value.incarnation == vm.incarnation);
                match fresh(report, now) {
                    Ok(report) => {
                        let dedup = report.value.dedup.as_ref().map(|reading| &reading.value);
                        self.shared.note(vm.incarnation, group, dedup);
                        if let Some(tracking) = &report.value.tracking {
                            // The cost dates from the time of the report.
                            let cost = tracking.value.cost.vcpu_share;
                            let spent = (vm.incarnation, Reading::new(cost, report.at));
                            self.spent.insert(name, spent);
                        }
                        show_report(vm, report);
                    }
                    Err(why) => limit(vm, all_of(&why)),
                }
            }
        }
        self.shared.show(view);
        self.spent.retain(|name, _| view.vms.contains_key(name));
        self.resident.retain(|name, _| view.vms.contains_key(name));
    }

    /// The VMs whose QEMUs have the shim, by process.
    pub(super) const fn with_shim(&self) -> &BTreeMap<Identity, String> {
        &self.with_shim
    }

    /// The VMs whose memory this Overbook may have shared or paged out, by process. A VM of no
    /// group that was found by its process alone may be another Overbook's.
    pub(super) fn ours(&self) -> BTreeMap<Identity, String> {
        self.ours.clone()
    }

    /// While paused, workers act on no VM.
    pub(super) fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused {
            for keeper in self.groups.values() {
                keeper.order(BTreeMap::new());
            }
        }
    }

    /// From now on changes nothing on these VMs and groups. Measuring goes on, except of released
    /// VMs: their shared and paged-out memory becomes their own.
    pub(super) fn set_pauses(&mut self, pauses: Pauses) {
        self.pauses = pauses;
    }

    /// Forgets what was decided about these VMs' resident memory.
    pub(super) fn forget(&mut self, is_meant: impl Fn(&VmName) -> bool) {
        self.resident.retain(|name, _| !is_meant(name));
    }

    /// Ends every worker. Shared and paged-out memory stays as it is.
    pub(super) fn end(&self) {
        self.groups.values().for_each(Keeper::end);
    }

    /// Waits until every worker that was told to end has ended.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let all: Vec<_> = self.groups.values().map(Keeper::idle).collect();
        async move { drop(futures_util::future::join_all(all).await) }
    }
}

fn all_of(why: &str) -> Limits {
    ALL.map(|mechanism| (mechanism, why.to_owned())).into()
}

/// Mechanisms that the configuration switches off for a group's VMs.
fn switched_off(group: &GroupName, spec: &GroupSpec) -> Limits {
    let is_tracked = spec.tracking.vcpu_share().is_some();
    let keys = [
        (Mechanism::Tracking, is_tracked, "tracking"),
        (Mechanism::Dedup, spec.dedup.is_on(), "dedup"),
        (Mechanism::FreePages, spec.free_pages.is_lazy(), "free_pages"),
        (Mechanism::Cold, spec.cold.is_on(), "cold"),
    ];
    let off = keys.into_iter().filter(|(_, is_on, _)| !is_on);
    off.map(|(mechanism, _, key)| {
        (mechanism, format!("{SWITCHED_OFF} for group {group} (`{key} = \"off\"`)"))
    })
    .collect()
}

/// Records why mechanisms are not applied to a VM, unless a reason is already there.
fn limit(vm: &mut VmView, limits: Limits) {
    for (mechanism, why) in limits {
        vm.limits.entry(mechanism).or_insert(why);
    }
}

/// The report, if it is recent enough.
fn fresh(report: Option<&Reading<VmReport>>, now: Time) -> Result<&Reading<VmReport>, String> {
    let report = report.ok_or("the group's worker has not reported on it yet")?;
    if report.age(now) > FRESH {
        return Err(format!("the group's worker has not reported for {}", report.age(now)));
    }
    Ok(report)
}

/// Copies a report into its VM's view.
fn show_report(vm: &mut VmView, report: &Reading<VmReport>) {
    let VmReport { tracking, why_not, dedup, why_not_merged, free_pages, why_not_taken, .. } =
        report.value.clone();
    let VmReport { cold, why_not_paged_out, .. } = report.value.clone();
    vm.shim.clone_from(&report.value.shim);
    vm.cold = cold.map(|reading| no_younger(reading, report.at));
    vm.tracking = tracking.map(|reading| no_younger(reading, report.at));
    vm.dedup = dedup.map(|reading| no_younger(reading, report.at));
    vm.free_pages = free_pages.map(|reading| no_younger(reading, report.at));
    let whys = [
        (Mechanism::Tracking, why_not.clone()),
        (Mechanism::Cold, why_not_paged_out.or(why_not)),
        (Mechanism::Dedup, why_not_merged),
        (Mechanism::FreePages, why_not_taken),
    ];
    limit(vm, whys.into_iter().filter_map(|(mechanism, why)| Some((mechanism, why?))).collect());
}

/// Makes a reading at least as old as its report.
fn no_younger<T>(reading: Reading<T>, reported: Time) -> Reading<T> {
    Reading { at: reading.at.min(reported), ..reading }
}

/// Memory that the guest has swapped out and not read back. Pages of ended processes count until
/// their swap slots are reused. The result is at most the VM's RAM, because the counters are the
/// guest's claim.
fn swapped(vm: &VmView) -> Bytes {
    let stats = vm.stats.map(|reading| reading.value).unwrap_or_default();
    let (out, back) = (stats.swap_out.unwrap_or_default(), stats.swap_in.unwrap_or_default());
    out.minus(back).min(vm.ram)
}

#[cfg(test)]
mod tests;
