//! A group's spare memory is its cache, which gives way to all other uses.

mod world;

use std::path::PathBuf;

use model::{Bytes, CacheReading, Plan, Policy, Reading, Reason, spec::DiskSpec};
use world::GroupFixture;

/// Two VMs of a group that pays for 1000 MiB, one of which has a data disk with a cache.
fn world() -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, Some(1000)).vm("a", 128, 40).vm("b", 128, 40);
    let disk = DiskSpec {
        vm: "a".into(),
        file: PathBuf::from("/srv/a"),
        size: Bytes::mib(4096),
        repositories: Vec::new(),
        tls: None,
        cache: true,
        shared: 1,
        read_delay_us: 0,
    };
    world.spec.disks.insert("a-data".to_owned(), disk);
    world
}

fn quota(plan: &Plan) -> Bytes {
    plan.caches[&"g".into()].amount
}

/// Sets the memory that the cache holds now.
fn hold(world: &mut GroupFixture, held: Bytes) {
    let reading = CacheReading { held, ..CacheReading::default() };
    world.view.caches.insert("g".into(), Reading::new(reading, world.now));
}

#[test]
fn it_may_hold_what_is_left_of_the_surplus() {
    let mut world = world();
    let plan = world.seconds(3);
    let surplus = plan.groups[&"g".into()].surplus;
    assert!(surplus > Bytes::mib(600), "{surplus}");
    assert_eq!(quota(&plan), surplus);
    assert_eq!(plan.caches[&"g".into()].reason, Reason::Spare { surplus });
}

#[test]
fn a_group_whose_disks_have_none_has_no_quota() {
    let mut world = world();
    world.spec.disks.clear();
    assert!(world.seconds(3).caches.is_empty());
}

#[test]
fn what_a_vm_is_granted_it_may_not_hold_in_the_same_tick() {
    let mut world = world();
    world.seconds(12);
    let plan = world.swap("b");
    let ledger = plan.groups[&"g".into()];
    let given = plan.vms[&"b".into()].target.unwrap().minus(Bytes::mib(128));
    assert!(given > Bytes::ZERO);
    assert_eq!(quota(&plan), ledger.surplus.minus(given));
}

#[test]
fn a_host_that_has_less_than_the_surplus_bounds_it_and_memory_in_caches_counts_as_available() {
    let mut world = world();
    // The reserve is 5 % of 1 TiB, and 100 MiB more are left.
    let reserve = Bytes(1 << 40).percent(5);
    world.available = reserve.plus(Bytes::mib(100));
    let plan = world.seconds(3);
    assert_eq!(quota(&plan), Bytes::mib(100));
    assert!(matches!(plan.caches[&"g".into()].reason, Reason::HostReserve { .. }));
    // The cache has filled itself: that is no shortage.
    world.available = reserve;
    hold(&mut world, Bytes::mib(100));
    let plan = world.second();
    assert_eq!((quota(&plan), plan.host.len()), (Bytes::mib(100), 0));
    // Another program has taken memory: the cache gives way first.
    world.available = reserve.minus(Bytes::mib(60));
    hold(&mut world, Bytes::mib(100));
    let plan = world.second();
    assert_eq!((quota(&plan), plan.host.len()), (Bytes::mib(40), 0));
    // An old reading of the cache does not count.
    let plan = world.seconds(20);
    assert_eq!((quota(&plan), plan.host.len()), (Bytes::ZERO, 1));
}

#[test]
fn while_paused_it_holds_nothing() {
    let mut world = world();
    world.memory.paused = true;
    assert!(world.seconds(3).caches.is_empty());
}
