//! Each group's scan rate for identical pages, second by second.

mod world;

use model::{
    Bytes, Dedup, DedupSpec, GroupSpec, Mode, NamePattern, PagesPerMs, Plan, Policy, Reading,
    Reason,
};

use world::GroupFixture;

/// Group `g` with a VM and the setting `dedup`, on a host with this CPU utilization.
fn world(dedup: DedupSpec, cpu_busy: f32) -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 128, 40);
    group(&mut world).dedup = dedup;
    world.cpu_busy = Some(cpu_busy);
    world
}

fn group(world: &mut GroupFixture) -> &mut GroupSpec {
    world.spec.groups.get_mut(&"g".into()).expect("the world's group")
}

fn rate(plan: &Plan, group: &str) -> Option<u32> {
    plan.scans[&group.into()].rate.map(|rate| rate.0)
}

fn reason(plan: &Plan) -> &Reason {
    &plan.scans[&"g".into()].reason
}

/// A second in which `a` swaps 10 MiB in, and its worker reports these totals of merged and
/// broken memory.
fn swap_and_merge(world: &mut GroupFixture, merged: u64, broken: u64) -> Plan {
    let (merged, broken) = (Bytes::mib(merged), Bytes::mib(broken));
    let dedup = Dedup { merged, broken, ..Dedup::default() };
    let now = model::Time(world.now.0 + 1000);
    world.see("a").dedup = Some(Reading::new(dedup, now));
    world.swap("a")
}

#[test]
fn scanning_gets_faster_by_steps_while_cpus_are_idle_and_slower_by_halves() {
    let mut world = world(DedupSpec::Adaptive, 0.3);
    let rates: Vec<_> = (0..3).map(|_| rate(&world.second(), "g")).collect();
    assert_eq!(rates, [Some(10), Some(15), Some(20)]);
    assert_eq!(rate(&world.seconds(20), "g"), Some(50));
    world.cpu_busy = Some(0.95);
    assert_eq!(rate(&world.second(), "g"), Some(25));
    world.cpu_busy = None;
    let plan = world.seconds(5);
    assert_eq!((rate(&plan, "g"), reason(&plan)), (Some(5), &Reason::CpuUnknown));
}

#[test]
fn a_busy_host_scans_for_vms_that_swap_as_long_as_that_saves_enough() {
    let mut world = world(DedupSpec::Adaptive, 1.0);
    swap_and_merge(&mut world, 0, 0);
    let plan = swap_and_merge(&mut world, 3, 1);
    let (swapped, saved) = (Bytes::mib(10), Bytes::mib(2));
    assert_eq!(reason(&plan), &Reason::ScanProductive { swapped, saved });
    assert_eq!(rate(&plan, "g"), Some(10));
    let plan = swap_and_merge(&mut world, 4, 1);
    assert_eq!(reason(&plan), &Reason::ScanSlow { swapped, saved: Bytes::mib(1) });
    let plan = swap_and_merge(&mut world, 9, 9);
    assert_eq!(reason(&plan), &Reason::ScanUnproductive { swapped });
}

#[test]
fn counters_that_run_backwards_count_nothing() {
    let mut world = world(DedupSpec::Adaptive, 1.0);
    swap_and_merge(&mut world, 100, 50);
    let plan = swap_and_merge(&mut world, 2, 0);
    assert_eq!(reason(&plan), &Reason::ScanUnproductive { swapped: Bytes::mib(10) });
    let plan = swap_and_merge(&mut world, 5, 0);
    assert!(matches!(reason(&plan), Reason::ScanProductive { .. }), "{plan:?}");
    world.tell("a").swap_in = Some(Bytes::ZERO);
    assert_eq!(reason(&world.second()), &Reason::CpuBusy { busy_percent: 100 });
}

#[test]
fn a_guest_that_says_nothing_new_does_not_swap() {
    let mut world = world(DedupSpec::Adaptive, 1.0);
    swap_and_merge(&mut world, 0, 0);
    let plan = swap_and_merge(&mut world, 5, 0);
    assert!(matches!(reason(&plan), Reason::ScanProductive { .. }), "{plan:?}");
    world.silent = Some("a");
    assert_eq!(reason(&world.seconds(6)), &Reason::CpuBusy { busy_percent: 100 });
}

#[test]
fn one_groups_rate_does_not_depend_on_another_group() {
    let alone = swap_and_merge_beside(false);
    assert_eq!(alone, swap_and_merge_beside(true));
    assert_eq!(alone, [5, 10, 15, 20, 25].map(Some));
}

/// The rates of group `g`, whose VM swaps and merges, next to a group whose VM does neither, or
/// merges much.
fn swap_and_merge_beside(is_other_merging: bool) -> [Option<u32>; 5] {
    let mut world = world(DedupSpec::Adaptive, 1.0).vm("other", 128, 40);
    let of = |pattern: &str| vec![NamePattern::new(pattern)];
    group(&mut world).vms = of("a");
    let other = GroupSpec { vms: of("other"), dedup: DedupSpec::Adaptive, ..GroupSpec::default() };
    world.spec.groups.insert("other".into(), other);
    [0, 1, 2, 3, 4].map(|second| {
        if is_other_merging {
            let merged = Bytes::mib(100 * second);
            let dedup = Dedup { merged, ..Dedup::default() };
            let stats = world.tell("other");
            stats.swap_out = Some(Bytes::mib(1000 * second));
            let now = model::Time(world.now.0 + 1000);
            world.see("other").dedup = Some(Reading::new(dedup, now));
        }
        rate(&swap_and_merge(&mut world, 3 * second, 0), "g")
    })
}

#[test]
fn off_is_no_rate_and_a_number_is_that_rate_in_every_mode() {
    let plan = world(DedupSpec::Off, 0.0).second();
    assert_eq!((rate(&plan, "g"), reason(&plan)), (None, &Reason::DedupOff));
    for mode in [Mode::Observe, Mode::Recommend, Mode::Enforce] {
        let mut world = world(DedupSpec::Fixed(PagesPerMs(1000)), 1.0);
        world.spec.modes.balloon = mode;
        let plan = world.seconds(3);
        assert_eq!((rate(&plan, "g"), reason(&plan)), (Some(1000), &Reason::ScanFixed));
    }
}

#[test]
fn what_was_remembered_before_there_was_dedup_still_reads() {
    let mut world = world(DedupSpec::Adaptive, 0.3);
    world.second();
    let mut memory = serde_json::to_value(&world.memory).unwrap();
    memory.as_object_mut().unwrap().remove("scan_rates").unwrap();
    let vm = memory["vms"]["a"].as_object_mut().unwrap();
    vm.remove("dedup").unwrap();
    vm.remove("merging").unwrap();
    world.memory = serde_json::from_value(memory).unwrap();
    assert_eq!(rate(&world.second(), "g"), Some(10));
}

#[test]
fn a_paused_overbook_looks_for_nothing_and_begins_anew() {
    let mut world = world(DedupSpec::Adaptive, 0.3);
    world.seconds(5);
    world.memory.paused = true;
    let plan = world.second();
    assert_eq!((rate(&plan, "g"), reason(&plan)), (None, &Reason::Paused));
    world.memory.paused = false;
    assert_eq!(rate(&world.second(), "g"), Some(10));
}
