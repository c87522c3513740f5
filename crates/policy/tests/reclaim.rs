//! Takes of freed memory: none while there is plenty, and never more than is needed.

mod world;

use model::{Bytes, FreePages, Plan, Policy, Reading, Reason};

use world::GroupFixture;

/// Three VMs, each of which has freed 10 GiB.
fn world() -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, None);
    for name in ["a", "b", "c"] {
        world = world.vm(name, 128, 40);
        free(&mut world, name, 10, 10);
    }
    world
}

/// Sets `name`'s freed memory, and the part that the kernel still has, in GiB.
fn free(world: &mut GroupFixture, name: &str, freed: u64, lazy: u64) {
    let gib = |gib| Bytes::mib(gib << 10);
    let before = world.see(name).free_pages.map_or(Bytes::ZERO, |free| free.value.handed_over);
    let handed_over = before.plus(gib(freed));
    let free =
        FreePages { freed: gib(freed), lazy: gib(lazy), handed_over, ..FreePages::default() };
    let now = world.now;
    let vm = world.see(name);
    let lazy_before = vm.free_pages.map_or(Bytes::ZERO, |free| free.value.lazy);
    vm.free_pages = Some(Reading::new(free, now));
    vm.used.iter_mut().for_each(|used| used.value = used.value.minus(lazy_before).plus(gib(lazy)));
}

/// The amount taken from each VM, in MiB.
fn taken(plan: &Plan) -> Vec<(&str, u64)> {
    let taken = |keep: Bytes| (10 << 10) - (keep.0 >> 20);
    plan.takes.iter().map(|(name, take)| (name.as_str(), taken(take.keep))).collect()
}

#[test]
fn nothing_is_taken_while_the_host_has_plenty_without_it() {
    let mut world = world();
    assert_eq!(taken(&world.seconds(5)), []);
    // The reserve is 51.2 GiB, and one and a half times that should be available.
    world.available = Bytes::mib(107 << 10);
    assert_eq!(taken(&world.second()), []);
}

#[test]
fn as_much_is_taken_as_the_host_would_lack_from_whom_has_freed_nothing_for_the_longest_time() {
    let mut world = world();
    world.seconds(3);
    free(&mut world, "a", 10, 10);
    world.second();
    free(&mut world, "b", 10, 10);
    // Without the 30 GiB of freed memory, 60 GiB are available, and 76.8 should be.
    world.available = Bytes::mib(90 << 10);
    let plan = world.second();
    assert_eq!(taken(&plan), [("a", 16 * 1024 + 820 - 10 * 1024), ("c", 10 << 10)]);
    let words = plan.takes[&"c".into()].reason.to_string();
    assert_eq!(
        words,
        "without what VMs have freed the host has 60 GiB left, less than 76.8 GiB: as much is taken, the oldest first"
    );
}

#[test]
fn who_has_taken_it_back_already_counts_as_what_the_kernel_says() {
    let mut world = world();
    for name in ["a", "b", "c"] {
        free(&mut world, name, 10, 0);
    }
    world.available = Bytes::mib(78 << 10);
    assert_eq!(taken(&world.second()), []);
}

#[test]
fn when_the_host_is_short_a_group_over_its_budget_gives_first() {
    let mut world = world();
    world.spec.groups.get_mut(&"g".into()).expect("the group").budget = Some(Bytes::mib(256));
    assert_eq!(taken(&world.second()), [], "nobody needs it");
    // Of the 76.8 GiB that should be available, 16.8 are missing.
    world.available = Bytes::mib(90 << 10);
    let plan = world.second();
    assert_eq!(taken(&plan), [("a", 10 << 10), ("b", 16 * 1024 + 820 - 10 * 1024)]);
    let deficit = Bytes::mib(128);
    assert_eq!(plan.takes[&"a".into()].reason, Reason::FreedOverBudget { deficit });
}

#[test]
fn who_cannot_give_does_not_stand_in_for_those_who_can() {
    let mut world = world();
    let why = "Overbook is not to take it".to_owned();
    world.see("a").limits.insert(model::view::Mechanism::FreePages, why);
    world.available = Bytes::mib(80 << 10);
    // That VM's freed memory does not count as available either: without the rest there are 60
    // GiB.
    assert_eq!(taken(&world.second()), [("b", 10 << 10), ("c", 6 * 1024 + 820)]);
}

#[test]
fn a_host_whose_tasks_wait_for_memory_takes_a_part_each_second() {
    let mut world = world();
    world.pressure = Some(9.9);
    assert_eq!(taken(&world.second()), []);
    world.pressure = Some(25.0);
    let plan = world.second();
    // One percent of 1 TiB.
    assert_eq!(taken(&plan).iter().map(|(_, mib)| mib).sum::<u64>(), 10486);
    assert_eq!(plan.takes[&"a".into()].reason, Reason::FreedHostPressed { percent: 25 });
}

#[test]
fn nothing_is_taken_on_stale_readings_nor_while_paused() {
    let mut world = world();
    world.available = Bytes::mib(60 << 10);
    world.memory = policy::Memory::fresh(true, Default::default(), model::Learned::default());
    assert_eq!(taken(&world.second()), []);
    world.memory = policy::Memory::default();
    world.see("a").link = model::Link::Down { since: world.now, why: "gone".into() };
    let plan = world.seconds(35);
    assert_eq!(taken(&plan).iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["b", "c"]);
}
