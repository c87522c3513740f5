//! Paged VMs take part as other VMs do, and need no statistics of their own.

mod world;

use model::{Bytes, ColdSpec, Means, Policy, Reading, Reason};

use world::{GroupFixture, target_mib};

/// A group whose VMs are paged.
fn world(cold: ColdSpec, budget_mib: Option<u64>) -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, budget_mib);
    world.spec.groups.get_mut(&"g".into()).expect("the group").cold = cold;
    world
}

/// Sets the pieces of paged-out memory that a VM touches per second.
fn refault(world: &mut GroupFixture, name: &str, per_s: u32) {
    let cold = world.cold(name);
    cold.refaults_per_s = per_s.into();
    cold.refaulted_per_s = Bytes::kib(128).share(per_s.into(), 1);
}

fn resident_mib(world: &mut GroupFixture, name: &str) -> u64 {
    world.cold(name).resident.0 >> 20
}

#[test]
fn a_vm_begins_with_what_its_balloon_leaves_it_and_its_balloon_is_deflated() {
    let mut world = world(ColdSpec::WhenNeeded, Some(400)).paged_vm("a", 200, 0);
    let plan = world.second();
    let change = plan.vms[&"a".into()].change.clone().expect("a change");
    let model::Action::Resize { target, by, .. } = change.action;
    assert_eq!((target, by, change.reason), (Bytes::mib(200), Means::Paging, Reason::Paged));
    assert_eq!(world.stands_at("a"), 384);
    let plan = world.seconds(20);
    assert!(plan.vms[&"a".into()].change.is_none(), "nobody needs anything");
    assert_eq!(plan.vms[&"a".into()].target, Some(Bytes::mib(200)));
}

#[test]
fn it_is_said_again_until_the_balloon_is_deflated() {
    let mut world = world(ColdSpec::WhenNeeded, Some(400)).paged_vm("a", 200, 0);
    let mut said = 0;
    for _ in 0..10 {
        let plan = world.second();
        let change = plan.vms[&"a".into()].change.as_ref();
        said += u32::from(change.is_some_and(|change| change.reason == Reason::Paged));
        // The command was lost.
        let now = world.now;
        world.see("a").balloon = Some(Reading::new(Bytes::mib(200), now));
    }
    assert_eq!(said, 4, "every three seconds");
}

#[test]
fn who_wakes_beyond_its_target_was_moved_by_nobody() {
    let mut world = world(ColdSpec::Ahead(20), None).paged_vm("a", 128, 100);
    world.seconds(60);
    let asleep = resident_mib(&mut world, "a");
    assert!(asleep < 110, "{asleep}");
    // The VM's worker does not page it out for some seconds.
    world.cold("a").resident = Bytes::mib(120);
    let plan = world.second();
    let is_left_alone = |reason: &Reason| matches!(reason, Reason::MovedByOthers { .. });
    assert!(!plan.vms[&"a".into()].refusals.iter().any(is_left_alone));
    refault(&mut world, "a", 500);
    assert_eq!(target_mib(&world.second(), "a"), Some(128));
}

#[test]
fn what_the_group_lacks_is_paged_out_of_who_does_not_touch_it_whatever_the_guest_says() {
    // The VM has no swap of its own, and sends no statistics.
    let mut world =
        world(ColdSpec::WhenNeeded, Some(320)).paged_vm("a", 200, 120).paged_vm("b", 128, 0);
    world.see("a").stats = None;
    world.see("b").stats = None;
    world.seconds(30);
    assert!(resident_mib(&mut world, "a") < 196, "{}", resident_mib(&mut world, "a"));
    assert_eq!(resident_mib(&mut world, "b"), 128);
}

#[test]
fn who_waits_for_what_is_out_gets_its_base_back_at_once() {
    let mut world = world(ColdSpec::Ahead(20), None).paged_vm("a", 128, 100);
    world.seconds(60);
    assert!(
        resident_mib(&mut world, "a") < 110,
        "it goes ahead: {}",
        resident_mib(&mut world, "a")
    );
    refault(&mut world, "a", 500);
    let plan = world.second();
    assert_eq!(target_mib(&plan, "a"), Some(128));
}

#[test]
fn ahead_of_need_goes_what_was_not_touched_until_more_comes_back_than_is_allowed() {
    let mut world = world(ColdSpec::Ahead(20), None).paged_vm("a", 128, 100);
    world.seconds(30);
    let before = resident_mib(&mut world, "a");
    assert!((64..128).contains(&before), "not below its min: {before}");
    // One piece in four seconds: a negligible wait, and 2 MiB in a minute.
    world.cold("a").refaulted_per_s = Bytes::kib(32);
    let plan = world.seconds(3);
    let decision = &plan.vms[&"a".into()];
    assert!(resident_mib(&mut world, "a") == before && decision.target >= Some(Bytes::mib(before)));
}

#[test]
fn nothing_goes_ahead_where_it_is_not_asked_for() {
    let mut world = world(ColdSpec::WhenNeeded, None).paged_vm("a", 128, 100);
    world.seconds(60);
    assert_eq!(resident_mib(&mut world, "a"), 128);
}

#[test]
fn of_whom_nothing_is_known_any_more_nothing_is_taken_and_base_goes_back() {
    let mut world =
        world(ColdSpec::Ahead(20), Some(200)).paged_vm("a", 128, 100).paged_vm("b", 128, 0);
    world.seconds(30);
    let before = resident_mib(&mut world, "a");
    assert!(before < 128);
    world.see("a").cold = None;
    let plan = world.second();
    let refusals = &plan.vms[&"a".into()].refusals;
    assert!(refusals.contains(&Reason::NotPaged), "{refusals:?}");
    let plan = world.seconds(10);
    assert_eq!(plan.vms[&"a".into()].target, Some(Bytes::mib(128)));
}

#[test]
fn what_is_out_counts_with_what_its_swap_takes() {
    let mut world = world(ColdSpec::WhenNeeded, None).paged_vm("a", 100, 0);
    world.cold("a").out = Bytes::mib(100);
    assert_eq!(world.second().groups[&"g".into()].used, Bytes::mib(100), "a disk takes none");
    world.swap_cost = 0.3;
    assert_eq!(world.second().groups[&"g".into()].used, Bytes::mib(130));
}

#[test]
fn where_it_is_switched_off_the_balloon_has_its_say_again() {
    let mut world = world(ColdSpec::WhenNeeded, Some(400)).paged_vm("a", 200, 0);
    world.seconds(3);
    world.spec.groups.get_mut(&"g".into()).expect("the group").cold = ColdSpec::Off;
    let plan = world.second();
    assert_eq!(
        plan.vms[&"a".into()].target,
        Some(Bytes::mib(384)),
        "all that its balloon leaves it"
    );
}
