//! A daemon that has just started must not act on incomplete data.

mod world;

use model::{Bytes, Policy, Reading, Reason, spec::HostSpec};

use world::{GroupFixture, target_mib};

/// One guest with a grant of 100 MiB, and three that occupy 76 of their 128 MiB; none is counted
/// yet.
fn uncounted() -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("grantee", 228, 60);
    world = ["a", "b", "c"].into_iter().fold(world, |world, name| world.vm(name, 128, 40));
    world.view.vms.values_mut().for_each(|vm| vm.used = None);
    world
}

#[test]
fn no_grant_is_revoked_over_a_deficit_that_is_only_a_guess() {
    let mut world = uncounted();
    for second in 1..5 {
        let plan = world.second();
        assert!(plan.actions().is_empty(), "{second}: {:?}", plan.actions());
    }
    for (name, used) in [("grantee", 228), ("a", 76), ("b", 76), ("c", 76)] {
        world.see(name).used = Some(Reading::new(Bytes::mib(used), world.now));
    }
    assert!(world.second().actions().is_empty());
}

#[test]
fn a_vm_that_cannot_be_counted_at_all_is_taken_to_use_what_it_may() {
    let mut world = uncounted();
    world.seconds(20);
    assert!(world.stands_at("grantee") < 228);
}

#[test]
fn a_guest_below_base_has_a_moment_to_speak_before_it_counts_as_silent() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("silent", 90, 40);
    world.see("silent").stats = None;
    let given_at = (1..20).find(|_| target_mib(&world.second(), "silent").is_some());
    assert_eq!(given_at, Some(7));
}

/// A group that holds 100 MiB more than it pays for.
fn over_budget() -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, Some(256)).vm("a", 228, 60).vm("b", 128, 40);
    world.seconds(20);
    world
}

fn takes(world: &mut GroupFixture) -> bool {
    world.second().vms.values().any(|vm| vm.change.as_ref().is_some_and(|change| change.is_take))
}

#[test]
fn nothing_is_taken_for_a_minute_after_the_operator_lets_overbook_act() {
    let mut world = GroupFixture::new(Policy::Demand, Some(256)).vm("a", 228, 60).vm("b", 128, 40);
    world.memory.begin_grace(HostSpec::GRACE, world.now);
    let seconds = HostSpec::GRACE.0 / 1_000;
    for second in 1..seconds {
        let plan = world.second();
        assert!(plan.actions().is_empty(), "{second}: {:?}", plan.actions());
        let refusals = &plan.vms[&"a".into()].refusals;
        let is_told = |reason: &Reason| matches!(reason, Reason::Grace { .. });
        assert!(refusals.iter().any(is_told), "{second}: {refusals:?}");
    }
    assert!((0..20).any(|_| takes(&mut world)), "afterwards what is over the budget comes back");
    assert!(over_budget().stands_at("a") < 228, "and at once where no grace was begun");
}

#[test]
fn nothing_is_taken_for_a_minute_from_a_vm_that_was_just_found() {
    let mut world = over_budget_with_grace();
    for second in 1..HostSpec::GRACE.0 / 1_000 {
        let plan = world.second();
        assert!(plan.actions().is_empty(), "{second}: {:?}", plan.actions());
        let is_told = |reason: &Reason| matches!(reason, Reason::NewVm { .. });
        assert!(plan.vms[&"a".into()].refusals.iter().any(is_told), "{second}");
    }
    assert!((0..20).any(|_| takes(&mut world)), "afterwards what is over the budget comes back");
    // A restarted guest is another one.
    world.see("a").incarnation += 1;
    assert!((1..HostSpec::GRACE.0 / 1_000).all(|_| {
        let plan = world.second();
        plan.vms[&"a".into()].change.as_ref().is_none_or(|change| !change.is_take)
    }));
}

fn over_budget_with_grace() -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, Some(256)).vm("a", 228, 60).vm("b", 128, 40);
    world.spec.host.grace = HostSpec::GRACE;
    world
}

#[test]
fn a_host_that_runs_short_waits_for_no_grace() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 228, 60).vm("b", 128, 40);
    world.memory.begin_grace(HostSpec::GRACE, world.now);
    world.available = Bytes::mib(1);
    assert!((0..20).any(|_| takes(&mut world)));
}
