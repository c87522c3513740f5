//! A VM's amount of RAM is QEMU's claim, and changes while the VM runs.

mod world;

use model::{Bytes, Policy, Reading, Reason, spec::LimitsSpec};
use world::GroupFixture;

/// No limits are configured: a VM is guaranteed all its RAM.
fn unlimited() -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, None);
    world.spec.groups.values_mut().for_each(|group| group.limits = LimitsSpec::default());
    world
}

#[test]
fn a_dimm_is_its_guests_and_nothing_is_asked_of_the_balloon() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 128, 20);
    // The balloon had a request before.
    let plan = world.seconds(12);
    assert!(plan.actions().is_empty(), "{plan:?}");
    world.swap("a");
    world.seconds(20);
    let stood = world.stands_at("a");
    for (plugged, ram, stands) in [(true, 896, stood + 512), (false, 384, stood)] {
        let now = world.now;
        let vm = world.see("a");
        (vm.ram, vm.hotplugged) = (Bytes::mib(ram), Bytes::mib(ram - 384));
        vm.balloon = Some(Reading::new(Bytes::mib(stands), now));
        let stats = world.tell("a");
        let half = Some(Bytes::mib(stands / 2));
        (stats.total, stats.free, stats.available) = (Some(Bytes::mib(stands)), half, half);
        for _ in 0..20 {
            let plan = world.second();
            let decision = &plan.vms[&"a".into()];
            let blamed = decision.refusals.iter().any(|reason| {
                matches!(reason, Reason::MovedByOthers { .. } | Reason::ImplausibleStats { .. })
            });
            assert!(!blamed && decision.change.is_none(), "plugged: {plugged}: {decision:?}");
        }
    }
}

#[test]
fn memory_of_other_devices_is_believed_in_statistics_and_is_no_surplus() {
    let mut world = unlimited().vm("a", 384, 100);
    world.tell("a").total = Some(Bytes::mib(600));
    let doubts = |world: &mut GroupFixture| {
        let plan = world.second();
        let refusals = &plan.vms[&"a".into()].refusals;
        refusals.iter().any(|reason| matches!(reason, Reason::ImplausibleStats { .. }))
    };
    assert!(doubts(&mut world), "more than its RAM");
    world.see("a").devices = Bytes::mib(256);
    assert!(!doubts(&mut world));

    // The group pays for the RAM, and for the devices' memory on the host, and no more.
    let ledger = world.second().groups[&"g".into()];
    assert_eq!((ledger.budget, ledger.surplus), (Bytes::mib(384), Bytes::ZERO));
    let now = world.now;
    world.see("a").used = Some(Reading::new(Bytes::mib(600), now));
    let ledger = world.second().groups[&"g".into()];
    assert_eq!((ledger.budget, ledger.deficit), (Bytes::mib(600), Bytes::ZERO));
}

#[test]
fn ram_that_the_host_cannot_see_makes_its_group_no_richer() {
    let mut world = unlimited().vm("liar", 100, 50).vm("victim", 384, 100);
    let honest = world.second().groups[&"g".into()].budget;
    // A tebibyte of RAM, of which the balloon leaves only a little, and none of it can be
    // counted.
    let liar = world.see("liar");
    (liar.ram, liar.used) = (Bytes(1 << 40), None);
    let ledger = world.seconds(30).groups[&"g".into()];
    assert!(ledger.budget <= honest, "{ledger:?}");
    assert_eq!(ledger.surplus, Bytes::ZERO);
    // Where the RAM can be counted, it is bounded by the host's memory.
    let now = world.now;
    let liar = world.see("liar");
    (liar.ram, liar.used) = (Bytes(1 << 50), Some(Reading::new(Bytes::mib(100), now)));
    let ledger = world.second().groups[&"g".into()];
    assert!(ledger.budget <= Bytes((1 << 40) + (384 << 20)), "{ledger:?}");
}

#[test]
fn a_balloon_that_is_moved_by_another_program_is_noticed_though_nothing_was_asked_of_it() {
    let mut world = GroupFixture::new(Policy::Demand, Some(1024)).vm("a", 128, 20).vm("b", 128, 20);
    let others = |plan: &model::Plan| {
        let refusals = &plan.vms[&"a".into()].refusals;
        refusals.iter().any(|reason| matches!(reason, Reason::MovedByOthers { .. }))
    };
    assert!(!others(&world.seconds(20)));
    let now = world.now;
    world.see("a").balloon = Some(Reading::new(Bytes::mib(100), now));
    assert!(others(&world.second()));
    // The VM is left alone, even if it wants more and the group has it.
    for _ in 0..30 {
        let plan = world.second();
        assert!(others(&plan) && plan.vms[&"a".into()].change.is_none(), "{plan:?}");
    }
    assert!(!others(&world.seconds(60)), "not for ever");
}

#[test]
fn a_guest_that_still_boots_when_a_pause_ends_was_moved_by_no_other_program() {
    let mut world = GroupFixture::new(Policy::Demand, Some(1024)).vm("a", 128, 20).vm("b", 128, 20);
    let is_blamed = |world: &mut GroupFixture, stands| {
        let now = world.now;
        world.see("a").balloon = Some(Reading::new(Bytes::mib(stands), now));
        let plan = world.second();
        let refusals = &plan.vms[&"a".into()].refusals;
        refusals.iter().any(|reason| matches!(reason, Reason::MovedByOthers { .. }))
    };
    // Its driver inflates the balloon to the size that the VM was started with.
    for second in 0..24 {
        world.memory.paused = second < 12;
        assert!(!is_blamed(&mut world, 384 - 10 * second), "{second}");
    }
    assert!(!(0..12).any(|_| is_blamed(&mut world, 150)), "it rests");
    assert!(is_blamed(&mut world, 130));
}

#[test]
fn a_balloon_that_gives_the_host_nothing_back_is_given_back_what_was_taken() {
    let mut world =
        GroupFixture::new(Policy::Demand, Some(340)).vm("locked", 384, 250).vm("b", 128, 20);
    world.pinned = Some("locked");
    let mut least = 384;
    let mut said = false;
    for _ in 0..60 {
        let plan = world.second();
        least = least.min(world.stands_at("locked"));
        let change = plan.vms[&"locked".into()].change.as_ref();
        said |= change.is_some_and(|change| matches!(change.reason, Reason::Withheld { .. }));
    }
    assert!(said && least < 384);
    assert!(384 - least <= 100, "no more is taken than shows that it is useless: {least}");
    assert_eq!(world.stands_at("locked"), 384, "all of it went back");
    let plan = world.second();
    let refusals = &plan.vms[&"locked".into()].refusals;
    let says = |reason: &Reason| matches!(reason, Reason::GivesNothingBack { .. });
    assert!(refusals.iter().any(says), "{refusals:?}");
    // A VM whose balloon gives memory back is not affected.
    let plan = world.second();
    assert!(!plan.vms[&"b".into()].refusals.iter().any(says));
}
