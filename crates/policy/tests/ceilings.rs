//! Limits of QEMU's cgroups: no grant goes beyond them, at any level.

mod world;

use model::{Bytes, FreePages, Policy, Reading, Reason, Time, view::MemoryLimit};
use world::GroupFixture;

/// QEMU's own memory in these tests, in MiB.
const OWN: u64 = 40;

/// Places these VMs in a cgroup with a limit of `limit` MiB.
fn confine(world: &mut GroupFixture, vms: &[&str], limit: u64) {
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

fn used(world: &GroupFixture, vm: &str) -> u64 {
    world.view.vms[&vm.into()].used.map_or(0, |used| used.value.0)
}

/// A second in which each of the VMs swaps, and touches all its memory.
fn hungry_second(world: &mut GroupFixture, vms: &[&str]) -> model::Plan {
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
    let mut world = GroupFixture::new(Policy::Demand, Some(4096)).vm("a", 128, 0);
    let mut free = GroupFixture::new(Policy::Demand, Some(4096)).vm("a", 128, 0);
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
    let mut world = GroupFixture::new(Policy::Demand, Some(4096)).vm("a", 128, 0).vm("b", 128, 0);
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
    let mut world = GroupFixture::new(Policy::Demand, Some(4096)).vm("a", 100, 0);
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

/// VMs that have been at 200 MiB for a minute, below a limit that leaves the group room.
fn granted(vms: &[&'static str], limit: u64) -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, Some(4096));
    for vm in vms {
        world = world.vm(vm, 200, 150);
    }
    for _ in 0..70 {
        confine(&mut world, vms, limit);
        world.second();
    }
    world
}

fn is_taken(plan: &model::Plan, vm: &str) -> bool {
    let change = plan.vms[&vm.into()].change.as_ref();
    change.is_some_and(|change| matches!(change.reason, Reason::CgroupExceeded { .. }))
}

#[test]
fn a_vm_that_is_not_counted_costs_nobody_a_grant_or_its_base() {
    let mut world = granted(&["a"], 300);
    world.see("a").used = None;
    for _ in 0..20 {
        let plan = world.second();
        assert!(!is_taken(&plan, "a"), "{plan:?}");
    }
    assert_eq!(world.stands_at("a"), 200);
    // The cgroup's count includes all memory of the guest, and its base would fit.
    let mut world = GroupFixture::new(Policy::Demand, Some(4096)).vm("a", 100, 0);
    confine(&mut world, &["a"], 156);
    world.see("a").used = None;
    for _ in 0..3 {
        let now = world.now;
        world.see("a").memory_limits.iter_mut().for_each(|limits| limits.at = now);
        world.swap("a");
    }
    assert_eq!(world.stands_at("a"), 128);
}

#[test]
fn of_vms_below_one_limit_only_as_much_is_taken_as_is_too_much() {
    let both = ["a", "b"];
    let mut world = granted(&both, 600);
    let stands = |world: &GroupFixture| both.map(|vm| world.stands_at(vm));
    assert_eq!(stands(&world), [200, 200]);
    confine(&mut world, &both, 470);
    let plan = world.second();
    assert_eq!(both.map(|vm| is_taken(&plan, vm)), [true, false]);
    // The balloon moves slowly.
    let balloon = Some(Reading::new(Bytes::mib(200), world.now));
    world.see("a").balloon = balloon;
    world.see("a").used = balloon;
    for _ in 0..5 {
        confine(&mut world, &both, 470);
        let plan = world.second();
        assert!(!is_taken(&plan, "b"), "{plan:?}");
    }
}

#[test]
fn the_youngest_reading_of_a_limit_counts_and_an_old_one_does_not() {
    let both = ["a", "b"];
    let mut world = granted(&both, 600);
    for age in [5, 11] {
        // The first VM's old reading shows too little room.
        confine(&mut world, &both, 600);
        let at = world.now;
        let old = world.see("a").memory_limits.as_mut().expect("it was set");
        old.at = Time(at.0 - age * 1000);
        old.value[0].used = Bytes::mib(700);
        let plan = world.second();
        assert!(both.iter().all(|vm| !is_taken(&plan, vm)), "{plan:?}");
    }
    world.see("b").memory_limits = None;
    let plan = world.second();
    assert!(both.iter().all(|vm| !is_taken(&plan, vm)), "{plan:?}");
}

#[test]
fn memory_that_was_freed_lazily_is_in_the_cgroup_already() {
    let mut world = granted(&["a"], 300);
    confine(&mut world, &["a"], 270);
    let now = world.now;
    let freed = FreePages { lazy: Bytes::mib(100), freed: Bytes::mib(100), ..FreePages::default() };
    world.see("a").free_pages = Some(Reading::new(freed, now));
    world.see("a").used.iter_mut().for_each(|used| used.value = Bytes::mib(200));
    let plan = world.second();
    assert!(!is_taken(&plan, "a"), "{plan:?}");
}
