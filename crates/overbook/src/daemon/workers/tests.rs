//! What a VM is told about its tracking, and what its guest may claim.

use model::{GuestStats, TrackingBudget};

use super::*;
use crate::fixture;

fn world(change: impl FnOnce(&mut VmView)) -> (Workers, Spec, VmView) {
    let tick = fixture::published();
    let mut vm = tick.view.vms[&VmName::from("web-1")].clone();
    vm.pid = Some(7);
    change(&mut vm);
    (Workers::default(), (*tick.spec).clone(), vm)
}

fn why(workers: &Workers, spec: &Spec, name: &str, vm: &VmView) -> String {
    workers.order_of(spec, &name.into(), vm).unwrap_err()
}

#[test]
fn a_vm_that_is_not_tracked_says_why() {
    let (mut workers, mut spec, vm) = world(|_| {});
    assert_eq!(why(&workers, &spec, "db-1", &vm), "it belongs to no group");
    assert_eq!(why(&workers, &spec, "web-1", &vm), "QEMU was started without Overbook's shim");
    let unknown = VmView { pid: None, ..vm.clone() };
    assert_eq!(why(&workers, &spec, "web-1", &unknown), "QEMU's process is not known");
    workers.shims.assume(7);
    let migrating = VmView { migration: Migration::Active, ..vm.clone() };
    assert_eq!(why(&workers, &spec, "web-1", &migrating), "a migration is running");
    workers.is_paused = true;
    assert_eq!(why(&workers, &spec, "web-1", &vm), "Overbook is paused");
    spec.groups.get_mut(&"web".into()).unwrap().tracking = TrackingBudget::Off;
    assert!(why(&workers, &spec, "web-1", &vm).contains("`tracking = \"off\"`"));
}

#[test]
fn a_vm_with_the_shim_is_tracked_within_its_groups_budget() {
    let (mut workers, spec, vm) = world(|_| {});
    workers.shims.assume(7);
    let (group, order) = workers.order_of(&spec, &"web-1".into(), &vm).unwrap();
    assert_eq!((group.as_str(), order.pid, order.incarnation), ("web", 7, 7));
    assert_eq!(order.budget, TrackingBudget::default());
    assert_eq!(order.swapped, Bytes::mib(20), "60 MiB out, 40 MiB back");
    assert_eq!(order.memory, Bytes::mib(192), "what the balloon leaves it");
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
    let tracking = Some(Tracking::default());
    let report =
        VmReport { incarnation: 1, tracking, why_not: None, dedup: None, why_not_merged: None };
    let report = Reading::new(report, model::Time(1_000));
    assert!(fresh(Some(&report), model::Time(2_000)).unwrap().0.is_some());
    assert!(fresh(Some(&report), model::Time(20_000)).unwrap_err().contains("for 19 s"));
    assert!(fresh(None, model::Time(0)).is_err());
}
