//! Limits of QEMU's cgroups: no grant goes beyond them, at whichever level they stand.

mod world;

use model::{Bytes, Policy, Reading, Reason, view::MemoryLimit};
use world::World;

/// QEMU's memory in addition to its guest's in these tests, in MiB.
const OWN: u64 = 40;

/// These VMs are in the cgroup, which may have `limit` MiB.
fn confine(world: &mut World, vms: &[&str], limit: u64) {
    let used: u64 = vms.iter().map(|vm| OWN + (used(world, vm) >> 20)).sum();
    let now = world.now;
    for vm in vms {
        let limit = MemoryLimit {
            cgroup: "/machine.slice".to_owned(),
            file: "memory.max".to_owned(),
            limit: Bytes::mib(limit),
            used: Bytes::mib(used),
        };
        world.see(vm).memory_limits = Some(Reading::new(vec![limit], now));
    }
}

fn used(world: &World, vm: &str) -> u64 {
    world.view.vms[&vm.into()].used.map_or(0, |used| used.value.0)
}

/// A second in which each of them swaps, and touches all that it has.
fn hungry_second(world: &mut World, vms: &[&str]) -> model::Plan {
    for vm in vms {
        let stands = Bytes::mib(world.stands_at(vm));
        let stats = world.tell(vm);
        stats.swap_in = stats.swap_in.map(|sum| sum.plus(Bytes::mib(10)));
        world.see(vm).used.iter_mut().for_each(|used| used.value = stands);
    }
    world.second()
}

fn refused(plan: &model::Plan, vm: &str) -> bool {
    let refusals = &plan.vms[&vm.into()].refusals;
    refusals.iter().any(|reason| matches!(reason, Reason::CgroupLimit { .. }))
}

#[test]
fn a_grant_stays_below_the_limit_of_its_cgroup_and_says_so() {
    let mut world = World::new(Policy::Demand, Some(4096)).vm("a", 128, 0);
    let mut free = World::new(Policy::Demand, Some(4096)).vm("a", 128, 0);
    for _ in 0..60 {
        confine(&mut world, &["a"], 300);
        hungry_second(&mut world, &["a"]);
        hungry_second(&mut free, &["a"]);
    }
    assert_eq!(free.stands_at("a"), 384, "without a limit it gets all");
    let stands = world.stands_at("a");
    assert!(stands > 200 && stands + OWN <= 300, "{stands}");
    confine(&mut world, &["a"], 300);
    let plan = hungry_second(&mut world, &["a"]);
    assert!(refused(&plan, "a"), "{plan:?}");
}

#[test]
fn vms_under_one_limit_do_not_get_the_same_memory_twice() {
    let mut world = World::new(Policy::Demand, Some(4096)).vm("a", 128, 0).vm("b", 128, 0);
    let both = ["a", "b"];
    for _ in 0..60 {
        confine(&mut world, &both, 480);
        hungry_second(&mut world, &both);
    }
    let sum: u64 = both.iter().map(|vm| world.stands_at(vm) + OWN).sum();
    assert!(sum > 400 && sum <= 480, "{sum}");
}

#[test]
fn base_that_does_not_fit_is_not_given_back_and_a_limit_that_is_lowered_takes_grants_back() {
    let mut world = World::new(Policy::Demand, Some(4096)).vm("a", 100, 0);
    for _ in 0..20 {
        confine(&mut world, &["a"], 130);
        let plan = hungry_second(&mut world, &["a"]);
        assert_eq!(world.stands_at("a"), 100, "{plan:?}");
    }
    for _ in 0..60 {
        confine(&mut world, &["a"], 1000);
        hungry_second(&mut world, &["a"]);
    }
    assert_eq!(world.stands_at("a"), 384);
    let stats = world.tell("a");
    stats.total = Some(Bytes::mib(384));
    (stats.free, stats.available) = (Some(Bytes::mib(250)), Some(Bytes::mib(250)));
    for _ in 0..60 {
        confine(&mut world, &["a"], 300);
        world.second();
    }
    assert!(world.stands_at("a") + OWN <= 300, "{}", world.stands_at("a"));
    assert!(world.stands_at("a") >= 128, "nothing below base");
}
