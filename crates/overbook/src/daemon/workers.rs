//! The groups' workers, as the loop sees them: in every tick they are told which VMs to work on,
//! and what they have found out goes into the view.
//!
//! A group has a worker while one of its VMs can be tracked or merged, or can hand over what it
//! frees: its group has tracking, dedup or free pages on, and Overbook is not paused. VMs without
//! the shim are tracked and paged from outside. VMs of no group are tracked only, by a worker of
//! their own. Where dedup was switched off it also has one until its VMs share nothing
//! any more. Where that holds for no VM nothing is started. Each worker has a task that starts it,
//! passes lines both ways and starts it again when it ends ([`keeper`]); the loop only leaves
//! orders and copies reports, and waits for nobody.

mod cgroup;
mod keeper;
mod shared;
mod shims;

use std::collections::BTreeMap;
use std::sync::LazyLock;

use model::view::Mechanism;
use model::{
    Action, AttachSpec, Bytes, GroupName, GroupSpec, HostView, Means, Migration, Reading, Scan,
    Spec, Take, Time, TrackingBudget, VmName, VmView,
};
use policy::tuning;
use sys::clock::boot_now;
use sys::features::{self, Feature, Finding};
use sys::process::Identity;

use crate::drivers::identity::process_of;
use crate::worker::{FreedOrder, Order, VmReport};
use keeper::Keeper;
use shared::Shared;
use shims::Shims;

/// A reading that is older than this is not shown: the worker is stuck, or starts anew.
const FRESH: model::Millis = model::Millis::secs(10);
/// Why a VM without the shim has no part in what workers do.
pub(super) const NO_SHIM: &str = "QEMU was started without Overbook's shim";
/// What workers do with a VM.
const ALL: [Mechanism; 4] =
    [Mechanism::Tracking, Mechanism::Dedup, Mechanism::FreePages, Mechanism::Cold];

/// The worker that looks at VMs of no group is called so; no configured group can be.
static OF_NO_GROUP: LazyLock<GroupName> = LazyLock::new(|| GroupName::from("(no group)"));
const NO_GROUP: &str = "it belongs to no group";

/// What is not done with a VM, each with the reason.
type Limits = BTreeMap<Mechanism, String>;

/// All workers.
#[derive(Debug, Default)]
pub(super) struct Workers {
    groups: BTreeMap<GroupName, Keeper>,
    shims: Shims,
    shared: Shared,
    /// The VMs of the last tick whose QEMUs have the shim, by process.
    with_shim: BTreeMap<Identity, String>,
    /// Those that are looked after from outside, alike.
    attached: BTreeMap<Identity, String>,
    /// What tracking took of VMs, by incarnation, as their workers said last: the next one goes on
    /// from there.
    spent: BTreeMap<VmName, (u64, Reading<f64>)>,
    /// What is taken of what VMs have freed, by the last plan.
    takes: BTreeMap<VmName, Take>,
    /// What VMs are to have in memory at most, by incarnation, as was decided last.
    resident: BTreeMap<VmName, (u64, Bytes)>,
    /// Why the host can page out nothing, as far as that was looked at.
    why_not_paged: Option<Option<String>>,
    is_paused: bool,
}

impl Workers {
    /// Tells every worker which VMs to work on, and the view what they have found out.
    pub(super) fn tick(&mut self, spec: &Spec, view: &mut HostView) {
        self.shims.look(view.vms.values().filter_map(process_of));
        let all =
            view.vms.iter().filter_map(|(name, vm)| Some((process_of(vm)?, name.to_string())));
        (self.with_shim, self.attached) = all.partition(|(process, _)| self.shims.has(*process));
        self.why_not_paged.get_or_insert_with(|| match features::probe(Feature::MovesSwapped) {
            Finding::Works(_) => None,
            Finding::Missing(why) => Some(format!("what is being swapped cannot be moved: {why}")),
        });
        let mut orders: BTreeMap<GroupName, BTreeMap<VmName, Order>> = BTreeMap::new();
        for (name, vm) in &mut view.vms {
            let (order, limits) = self.order_of(spec, name, vm);
            if let Some((group, order)) = order {
                orders.entry(group).or_default().insert(name.clone(), order);
            }
            limit(vm, limits);
        }
        // A group without VMs to work on, or none of the configuration any more, is told so.
        for (group, keeper) in &self.groups {
            keeper.order(orders.remove(group).unwrap_or_default());
            match spec.groups.get(group) {
                Some(of_group) => keeper.know(&of_group.tables),
                None => keeper.scan(None, None),
            }
        }
        for (group, vms) in orders {
            let keeper = Keeper::start(group.clone());
            keeper.order(vms);
            self.groups.insert(group, keeper);
        }
        self.groups.retain(|group, keeper| {
            let is_busy = !keeper.vms().is_empty() || keeper.reading().pid.is_some();
            spec.groups.contains_key(group) || is_busy
        });
        self.show(view);
    }

    /// Tells a group's worker how fast to look for identical pages, and who pays for it.
    pub(super) fn scan(&self, group: &GroupName, scan: &Scan) {
        // A group without a worker has nothing to look through.
        if let Some(keeper) = self.groups.get(group) {
            keeper.scan(scan.rate, scan.payer.clone());
        }
    }

    /// What is taken of what VMs have freed; their workers are told in the next tick.
    pub(super) fn take(&mut self, takes: &BTreeMap<VmName, Take>) {
        self.takes.clone_from(takes);
    }

    /// What a worker is to do with this VM, and whose; and what is not done with it, and why.
    fn order_of(
        &self,
        spec: &Spec,
        name: &VmName,
        vm: &VmView,
    ) -> (Option<(GroupName, Order)>, Limits) {
        let sharer = self.shared.group_of(vm.incarnation);
        let own = spec.group_of(name);
        let (group, budget, mut limits) = match (own, sharer) {
            // The pages of two groups never meet, also while a VM goes from one to the other.
            (_, Some(former)) if own.is_none_or(|(group, _)| group != former) => {
                let why = format!("what it shares with VMs of group {former} is unshared first");
                (former, TrackingBudget::Off, all_of(&why))
            }
            (None, _) if spec.host.attach == AttachSpec::Off => {
                return (None, all_of(NO_GROUP));
            }
            // It is only looked at, each by itself.
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
                    freed: self.freed_order(own, name),
                    resident: self.resident(own, name, vm, attach.is_some()),
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

    /// What it is to have in memory at most; without a decision, all: then nothing is paged out,
    /// and it is shown where its memory is.
    fn resident(
        &self,
        own: Option<(&GroupName, &GroupSpec)>,
        name: &VmName,
        vm: &VmView,
        is_attached: bool,
    ) -> Option<Bytes> {
        let (_, group) = own?;
        // Its shim moves pages, and not every kernel can move those that are being swapped.
        let is_possible = is_attached || self.why_not_paged == Some(None);
        let is_paged = group.cold.is_on() && group.tracking.vcpu_share().is_some() && is_possible;
        let decided = self.resident.get(name).filter(|(life, _)| *life == vm.incarnation);
        is_paged.then(|| decided.map_or(vm.ram, |(_, target)| *target))
    }

    /// Carries out a decision on how much of a VM is in memory; its worker is told in the next
    /// tick.
    pub(super) fn act(&mut self, action: &Action) {
        if let Action::Resize { vm, incarnation, target, by: Means::Paging } = action {
            self.resident.insert(vm.clone(), (*incarnation, *target));
        }
    }

    /// What is to become of what the VM frees.
    fn freed_order(&self, own: Option<(&GroupName, &GroupSpec)>, name: &VmName) -> FreedOrder {
        FreedOrder {
            is_lazy: own.is_some_and(|(_, group)| group.free_pages.is_lazy()),
            keep: self.takes.get(name).map(|take| take.keep),
        }
    }

    /// What tracking took of a VM, as a worker said last.
    fn spent(&self, name: &VmName, incarnation: u64) -> Option<Reading<f64>> {
        let (_, spent) = self.spent.get(name).filter(|(life, _)| *life == incarnation)?;
        Some(*spent)
    }

    /// QEMU's process, if it may be worked on, and, where it has no shim, its RAM; or why not.
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
            return Err("Overbook is paused");
        }
        // The shim lets go by itself as soon as it sees one; it should not have to.
        if vm.migration == Migration::Active {
            return Err("a migration is running");
        }
        Ok((process, attach))
    }

    /// Puts into the view what the workers know.
    fn show(&mut self, view: &mut HostView) {
        let now = boot_now();
        for (group, keeper) in &self.groups {
            view.workers.insert(group.clone(), Reading::new(keeper.reading(), now));
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
                            // The cost is of when the report was made.
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
        self.shared.count(view);
        self.spent.retain(|name, _| view.vms.contains_key(name));
        self.resident.retain(|name, _| view.vms.contains_key(name));
    }

    /// The VMs whose QEMUs have the shim, by process.
    pub(super) const fn with_shim(&self) -> &BTreeMap<Identity, String> {
        &self.with_shim
    }

    /// All VMs that memory may be out of, by process.
    pub(super) fn all(&self) -> BTreeMap<Identity, String> {
        let both = self.with_shim.iter().chain(&self.attached);
        both.map(|(process, name)| (*process, name.clone())).collect()
    }

    /// While paused no VM is worked on.
    pub(super) fn set_paused(&mut self, is_paused: bool) {
        self.is_paused = is_paused;
        if is_paused {
            for keeper in self.groups.values() {
                keeper.order(BTreeMap::new());
            }
        }
    }

    /// Waits until every worker has ended that is told to: what it held is back in its guest.
    pub(super) fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let all: Vec<_> = self.groups.values().map(Keeper::idle).collect();
        async move { drop(futures_util::future::join_all(all).await) }
    }
}

fn all_of(why: &str) -> Limits {
    ALL.map(|mechanism| (mechanism, why.to_owned())).into()
}

/// What the configuration leaves out for a group's VMs.
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
        (mechanism, format!("switched off for group {group} (`{key} = \"off\"`)"))
    })
    .collect()
}

/// Says why something is not done with a VM, unless another reason was said before.
fn limit(vm: &mut VmView, limits: Limits) {
    for (mechanism, why) in limits {
        vm.limits.entry(mechanism).or_insert(why);
    }
}

/// The report, if it is young enough.
fn fresh(report: Option<&Reading<VmReport>>, now: Time) -> Result<&Reading<VmReport>, String> {
    let report = report.ok_or("the group's worker has not reported on it yet")?;
    if report.age(now) > FRESH {
        return Err(format!("the group's worker has not reported for {}", report.age(now)));
    }
    Ok(report)
}

/// Puts into the view what a report says of its VM.
fn show_report(vm: &mut VmView, report: &Reading<VmReport>) {
    let VmReport { tracking, why_not, dedup, why_not_merged, free_pages, why_not_taken, .. } =
        report.value.clone();
    let VmReport { cold, why_not_paged_out, .. } = report.value.clone();
    vm.cold = cold.map(|reading| no_younger(reading, report.at));
    vm.tracking = tracking.map(|reading| no_younger(reading, report.at));
    vm.dedup = dedup.map(|reading| no_younger(reading, report.at));
    vm.free_pages = free_pages.map(|reading| no_younger(reading, report.at));
    let free = vm
        .free_pages
        .filter(|free| vm.used.is_some_and(|used| free.age(used.at) <= tuning::FREED_STALE_AFTER));
    if let (Some(used), Some(free)) = (&mut vm.used, free) {
        used.value = used.value.minus(free.value.lazy);
    }
    let whys = [
        (Mechanism::Tracking, why_not.clone()),
        (Mechanism::Cold, why_not_paged_out.or(why_not)),
        (Mechanism::Dedup, why_not_merged),
        (Mechanism::FreePages, why_not_taken),
    ];
    limit(vm, whys.into_iter().filter_map(|(mechanism, why)| Some((mechanism, why?))).collect());
}

/// A reading is as old as the worker says, and as its report at least.
fn no_younger<T>(reading: Reading<T>, reported: Time) -> Reading<T> {
    Reading { at: reading.at.min(reported), ..reading }
}

/// How much of the guest lies in its swap: written there and not read back. Pages of ended
/// processes count until their swap is used again; never more than the VM has RAM, for it is the
/// guest's word.
fn swapped(vm: &VmView) -> Bytes {
    let stats = vm.stats.map(|reading| reading.value).unwrap_or_default();
    let (out, back) = (stats.swap_out.unwrap_or_default(), stats.swap_in.unwrap_or_default());
    out.minus(back).min(vm.ram)
}

#[cfg(test)]
mod tests;
