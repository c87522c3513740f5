//! The orders for a VM's worker, the reports in the view, and the limits of a guest's claims.

use model::{ColdSpec, Dedup, DedupSpec, FreePages, FreePagesSpec, GuestStats, Scope, Tracking};

use super::*;
use crate::fixture;

/// The process of incarnation 7.
const QEMU: Identity = Identity { pid: 7, start_ticks: 0 };

fn world(change: impl FnOnce(&mut VmView)) -> (Workers, Spec, VmView) {
    let tick = fixture::published();
    let mut vm = tick.view.vms[&VmName::from("web-1")].clone();
    vm.pid = Some(7);
    change(&mut vm);
    let mut spec = (*tick.spec).clone();
    web(&mut spec).dedup = DedupSpec::Adaptive;
    (Workers::default(), spec, vm)
}

fn web(spec: &mut Spec) -> &mut GroupSpec {
    spec.groups.get_mut(&"web".into()).unwrap()
}

fn order(workers: &Workers, spec: &Spec, vm: &VmView) -> Option<(GroupName, Order)> {
    workers.order_of(spec, &"web-1".into(), vm).0
}

/// Why no mechanism is applied to the VM.
fn why(workers: &Workers, spec: &Spec, name: &str, vm: &VmView) -> String {
    let (order, limits) = workers.order_of(spec, &name.into(), vm);
    assert_eq!(order, None);
    assert_eq!(limits[&Mechanism::Tracking], limits[&Mechanism::Dedup]);
    limits[&Mechanism::Tracking].clone()
}

fn report(dedup: Option<Dedup>) -> VmReport {
    let tracking = Some(Reading::new(Tracking::default(), Time(0)));
    let dedup = dedup.map(|dedup| Reading::new(dedup, Time(3)));
    VmReport {
        incarnation: 7,
        shim: None,
        tracking,
        why_not: None,
        dedup,
        why_not_merged: None,
        free_pages: None,
        why_not_taken: None,
        cold: None,
        why_not_paged_out: None,
    }
}

fn sharing() -> Dedup {
    Dedup { shared: Bytes::mib(40), saved: Bytes::mib(30), ..Dedup::default() }
}

#[test]
fn a_vm_that_is_neither_tracked_nor_merged_says_why() {
    let (mut workers, mut spec, vm) = world(|_| {});
    spec.host.attach = AttachSpec::Off;
    assert_eq!(why(&workers, &spec, "db-1", &vm), "it belongs to no group");
    spec.host.attach = AttachSpec::On;
    web(&mut spec).attach = AttachSpec::Off;
    assert_eq!(why(&workers, &spec, "web-1", &vm), "QEMU was started without Overbook's shim");
    let unknown = VmView { pid: None, ..vm.clone() };
    assert_eq!(why(&workers, &spec, "web-1", &unknown), "QEMU's process is not known");
    workers.shims.assume(QEMU);
    let migrating = VmView { migration: Migration::Active, ..vm.clone() };
    assert_eq!(why(&workers, &spec, "web-1", &migrating), "a migration is running");
    workers.is_paused = true;
    assert_eq!(why(&workers, &spec, "web-1", &vm), "Overbook is paused");
    (web(&mut spec).tracking, web(&mut spec).dedup) = (TrackingBudget::Off, DedupSpec::Off);
    let (order, limits) = workers.order_of(&spec, &"web-1".into(), &vm);
    assert_eq!(order, None);
    assert!(limits[&Mechanism::Tracking].contains("`tracking = \"off\"`"), "{limits:?}");
    assert!(limits[&Mechanism::Dedup].contains("`dedup = \"off\"`"), "{limits:?}");
}

#[test]
fn a_vm_of_no_group_is_tracked_and_nothing_else() {
    let (workers, spec, vm) = world(|_| {});
    let (order, limits) = workers.order_of(&spec, &"db-1".into(), &vm);
    let (group, order) = order.unwrap();
    assert_eq!((group.as_str(), order.leaves), ("(no group)", false));
    assert_eq!((order.resident, order.freed), (None, FreedOrder::default()));
    let told: Vec<_> = limits.iter().collect();
    let why = "it belongs to no group".to_owned();
    let left_out = [Mechanism::Dedup, Mechanism::FreePages, Mechanism::Cold];
    assert!(left_out.iter().all(|it| told.contains(&(it, &why))), "{told:?}");
    assert!(!limits.contains_key(&Mechanism::Tracking), "{told:?}");
    let unknown = VmView { ram: Bytes::ZERO, ..vm };
    let (order, limits) = workers.order_of(&spec, &"db-1".into(), &unknown);
    assert_eq!((order, limits[&Mechanism::Tracking].as_str()), (None, "its RAM is not known yet"));
}

#[test]
fn a_vm_with_the_shim_is_tracked_within_its_groups_budget() {
    let (mut workers, spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    let (group, order) = order(&workers, &spec, &vm).unwrap();
    assert_eq!((group.as_str(), order.pid, order.incarnation), ("web", 7, 7));
    assert_eq!(order.budget, TrackingBudget::default());
    assert_eq!(order.swapped, Bytes::mib(20), "60 MiB out, 40 MiB back");
    assert_eq!(order.memory, Bytes::mib(192), "what the balloon leaves it");
}

#[test]
fn a_vm_without_the_shim_is_tracked_from_outside_and_says_why_no_more_is_done() {
    let (workers, mut spec, vm) = world(|_| {});
    let (order, limits) = workers.order_of(&spec, &"web-1".into(), &vm);
    assert_eq!(order.unwrap().1.attach, Some(vm.ram));
    assert!(!limits.contains_key(&Mechanism::Tracking), "{limits:?}");
    assert_eq!(limits[&Mechanism::Dedup], NO_SHIM);
    web(&mut spec).tracking = TrackingBudget::Off;
    assert_eq!(self::order(&workers, &spec, &vm), None, "merging needs the shim");
}

#[test]
fn a_paged_vm_is_to_have_in_memory_what_was_decided_for_this_life_of_it() {
    let (mut workers, mut spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    web(&mut spec).cold = ColdSpec::WhenNeeded;
    let name: VmName = "web-1".into();
    let resident = |workers: &Workers, spec: &Spec| {
        let (order, limits) = workers.order_of(spec, &name, &vm);
        let order = workers.decided(&name, order.unwrap().1, &Plan::default());
        (order.resident, limits.contains_key(&Mechanism::Cold))
    };
    workers.why_not_paged = Some(None);
    assert_eq!(resident(&workers, &spec), (Some(vm.ram), false), "nothing was decided yet");
    let decide = |workers: &mut Workers, incarnation, by| {
        let (vm, target) = (name.clone(), Bytes::mib(100));
        workers.act(&Action::Resize { vm, incarnation, target, by });
    };
    decide(&mut workers, 7, Means::Balloon);
    decide(&mut workers, 6, Means::Paging);
    assert_eq!(resident(&workers, &spec), (Some(vm.ram), false), "of an earlier life");
    decide(&mut workers, 7, Means::Paging);
    assert_eq!(resident(&workers, &spec), (Some(Bytes::mib(100)), false));
    workers.why_not_paged = Some(Some("an old kernel".to_owned()));
    assert_eq!(resident(&workers, &spec), (None, true));
    workers.why_not_paged = Some(None);
    web(&mut spec).tracking = TrackingBudget::Off;
    assert_eq!(resident(&workers, &spec).0, None, "nobody knows what it does not touch");
}

#[test]
fn a_vm_of_no_group_that_has_no_socket_here_is_not_released() {
    let (mut workers, mut spec, vm) = world(|_| {});
    spec.groups.clear();
    let name: VmName = "web-1".into();
    let look = |vm: &VmView, workers: &mut Workers| {
        let mut view = HostView { vms: [(name.clone(), vm.clone())].into(), ..HostView::default() };
        workers.look(&spec, &mut view);
        workers.ours().len()
    };
    assert_eq!(look(&vm, &mut workers), 1, "it has a socket");
    let mut found = vm.clone();
    let why = "no QMP socket of it is named in [host] `qmp`".to_owned();
    found.limits.insert(Mechanism::Balloon, why);
    assert_eq!(look(&found, &mut workers), 0);
    workers.shared.note(7, &"web".into(), Some(&sharing()));
    assert_eq!(look(&found, &mut workers), 1, "it shares pages with a group of ours");
}

#[test]
fn a_decision_leaves_in_the_tick_in_which_it_was_made() {
    let (mut workers, mut spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    workers.why_not_paged = Some(None);
    web(&mut spec).cold = ColdSpec::WhenNeeded;
    let name: VmName = "web-1".into();
    let mut view = HostView { vms: [(name.clone(), vm)].into(), ..HostView::default() };
    workers.look(&spec, &mut view);
    let (vm, target) = (name.clone(), Bytes::mib(100));
    workers.act(&Action::Resize { vm, incarnation: 7, target, by: Means::Paging });
    let reason = model::Reason::FreedOverBudget { deficit: Bytes::mib(9) };
    let take = model::Take { keep: Bytes::mib(7), reason };
    let plan = Plan { takes: [(name.clone(), take)].into(), ..Plan::default() };
    let orders = workers.take_orders(&plan);
    let order = &orders[&"web".into()][&name];
    assert_eq!((order.resident, order.freed.keep), (Some(target), Some(Bytes::mib(7))));
    assert!(workers.take_orders(&plan).is_empty(), "an order leaves once");
}

#[test]
fn a_vm_that_is_only_merged_costs_nothing_for_tracking() {
    let (mut workers, mut spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    web(&mut spec).tracking = TrackingBudget::Off;
    let (order, limits) = workers.order_of(&spec, &"web-1".into(), &vm);
    assert_eq!(order.unwrap().1.budget, TrackingBudget::Off);
    let off = [&Mechanism::Tracking, &Mechanism::FreePages, &Mechanism::Cold];
    assert_eq!(limits.keys().collect::<Vec<_>>(), off);
}

#[test]
fn a_vm_that_only_frees_is_told_what_becomes_of_that() {
    let (mut workers, mut spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    (web(&mut spec).tracking, web(&mut spec).dedup) = (TrackingBudget::Off, DedupSpec::Off);
    web(&mut spec).free_pages = FreePagesSpec::Lazy;
    let freed = |plan: &Plan| {
        let (_, order) = order(&workers, &spec, &vm).unwrap();
        workers.decided(&"web-1".into(), order, plan).freed
    };
    assert_eq!(freed(&Plan::default()), FreedOrder { is_lazy: true, keep: None });
    let reason = model::Reason::FreedOverBudget { deficit: Bytes::mib(9) };
    let take = model::Take { keep: Bytes::mib(7), reason };
    let plan = Plan { takes: [("web-1".into(), take)].into(), ..Plan::default() };
    assert_eq!(freed(&plan), FreedOrder { is_lazy: true, keep: Some(Bytes::mib(7)) });
}

#[test]
fn what_a_vm_has_freed_is_shown() {
    let mut vm = world(|_| {}).2;
    let free = FreePages { freed: Bytes::mib(60), lazy: Bytes::mib(50), ..FreePages::default() };
    let report = VmReport { free_pages: Some(Reading::new(free, Time(0))), ..report(None) };
    show_report(&mut vm, &Reading::new(report, model::Time(0)));
    assert_eq!(vm.free_pages.unwrap().value, free);
}

#[test]
fn a_worker_is_kept_until_what_it_has_merged_is_unshared() {
    let (mut workers, mut spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    (web(&mut spec).tracking, web(&mut spec).dedup) = (TrackingBudget::Off, DedupSpec::Off);
    assert_eq!(order(&workers, &spec, &vm), None);
    workers.shared.note(7, &"web".into(), Some(&sharing()));
    assert_eq!(order(&workers, &spec, &vm).unwrap().1.budget, TrackingBudget::Off);
    workers.shared.note(7, &"web".into(), Some(&Dedup::default()));
    assert_eq!(order(&workers, &spec, &vm), None);
}

#[test]
fn the_worker_of_a_group_that_is_no_more_unshares_before_another_takes_over() {
    let (mut workers, spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    workers.shared.note(7, &"shop".into(), Some(&sharing()));
    let (group, order) = order(&workers, &spec, &vm).unwrap();
    assert_eq!((group.as_str(), order.budget), ("shop", TrackingBudget::Off));
}

#[test]
fn the_worker_of_a_vms_former_group_unshares_before_the_new_groups_has_it() {
    let (mut workers, mut spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    spec.groups.insert("shop".into(), GroupSpec::default());
    workers.shared.note(7, &"shop".into(), Some(&sharing()));
    let (group, former) = order(&workers, &spec, &vm).unwrap();
    assert_eq!((group.as_str(), former.leaves), ("shop", true));
    workers.shared.note(7, &"shop".into(), Some(&Dedup::default()));
    let (group, own) = order(&workers, &spec, &vm).unwrap();
    assert_eq!((group.as_str(), own.leaves), ("web", false));
}

#[test]
fn what_a_worker_says_is_shown_but_the_configurations_reason_stands() {
    let (_, _, mut vm) = world(|vm| vm.tracking = None);
    limit(&mut vm, [(Mechanism::Tracking, "switched off".to_owned())].into());
    let why_not_merged = Some("resting".to_owned());
    let why_not = Some("no budget".to_owned());
    let report = VmReport { why_not, why_not_merged, ..report(Some(sharing())) };
    show_report(&mut vm, &Reading::new(report, model::Time(5)));
    assert_eq!(vm.dedup, Some(Reading::new(sharing(), Time(3))));
    assert_eq!(vm.limits[&Mechanism::Tracking], "switched off");
    assert_eq!(vm.limits[&Mechanism::Dedup], "resting");
}

#[test]
fn a_reading_is_as_old_as_it_says_and_as_its_report_at_least() {
    let (_, _, mut vm) = world(|_| {});
    for (says, reported, shown) in [(3, 5, 3), (5, 5, 5), (9, 5, 5), (u64::MAX, 5, 5)] {
        let tracking = Some(Reading::new(Tracking::default(), Time(says)));
        let report = VmReport { tracking, ..report(None) };
        show_report(&mut vm, &Reading::new(report, Time(reported)));
        assert_eq!(vm.tracking.as_ref().map(|reading| reading.at), Some(Time(shown)));
    }
}

#[test]
fn no_guest_swaps_more_than_it_has_memory() {
    let (_, _, vm) = world(|vm| {
        let claim = GuestStats { swap_out: Some(Bytes(u64::MAX)), ..GuestStats::default() };
        vm.stats = Some(Reading::new(claim, model::Time(0)));
    });
    assert_eq!(swapped(&vm), vm.ram);
}

#[test]
fn an_old_report_is_not_shown() {
    let report = Reading::new(report(None), model::Time(1_000));
    assert!(fresh(Some(&report), model::Time(2_000)).is_ok());
    assert!(fresh(Some(&report), model::Time(20_000)).unwrap_err().contains("for 19 s"));
    assert!(fresh(None, model::Time(0)).is_err());
}

#[test]
fn a_paused_vm_is_measured_and_nothing_more_is_paged_out_or_merged() {
    let (mut workers, mut spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    workers.why_not_paged = Some(None);
    web(&mut spec).cold = ColdSpec::WhenNeeded;
    let name: VmName = "web-1".into();
    workers.resident.insert(name.clone(), (vm.incarnation, Bytes::mib(64)));
    let mut pauses = Pauses::default();
    pauses.add(&Scope::Vm(name.clone()), Hold::Kept);
    workers.set_pauses(pauses);
    let (order, limits) = workers.order_of(&spec, &name, &vm);
    let order = workers.decided(&name, order.unwrap().1, &Plan::default());
    assert!(order.keeps_shares && !order.leaves);
    assert_eq!((order.resident, order.budget), (Some(vm.ram), TrackingBudget::default()));
    assert_eq!((&*limits[&Mechanism::Cold], &*limits[&Mechanism::Dedup]), (PAUSED, PAUSED));
    assert!(!limits.contains_key(&Mechanism::Tracking), "{limits:?}");
    workers.set_pauses(Pauses::default());
    let (_, order) = self::order(&workers, &spec, &vm).unwrap();
    let order = workers.decided(&name, order, &Plan::default());
    assert_eq!((order.resident, order.keeps_shares), (Some(Bytes::mib(64)), false));
}

#[test]
fn a_released_vm_unshares_and_is_then_left_alone() {
    let (mut workers, spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    let mut pauses = Pauses::default();
    pauses.add(&Scope::Group("web".into()), Hold::Released);
    workers.set_pauses(pauses);
    workers.shared.note(7, &"web".into(), Some(&sharing()));
    let (group, leaving) = order(&workers, &spec, &vm).unwrap();
    assert_eq!((group.as_str(), leaving.leaves, leaving.resident), ("web", true, None));
    assert_eq!(leaving.budget, TrackingBudget::Off);
    workers.shared.note(7, &"web".into(), Some(&Dedup::default()));
    assert_eq!(why(&workers, &spec, "web-1", &vm), RELEASED);
}

#[tokio::test]
async fn a_worker_that_has_nothing_to_do_is_not_missed() {
    let (mut workers, spec, vm) = world(|_| {});
    workers.shims.assume(QEMU);
    let (group, order) = order(&workers, &spec, &vm).unwrap();
    workers.groups.insert(group.clone(), Keeper::start(group.clone(), CgroupRecord::default()));
    let shown = |workers: &mut Workers| {
        let mut view = HostView::default();
        workers.show(&mut view);
        view.workers.contains_key(&group)
    };
    assert!(!shown(&mut workers), "no VM of the group needs it");
    let keeper = &workers.groups[&GroupName::from("web")];
    keeper.order([("web-1".into(), order)].into());
    // This thread has not yet let the task start a process.
    assert!(shown(&mut workers), "it is needed, and none runs");
    workers.set_paused(true);
    assert!(!shown(&mut workers), "a pause needs none");
}
