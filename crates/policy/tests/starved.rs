//! Memory that a guest must not lose, second by second: kills are answered, steps are confirmed,
//! and a guest that has no place for its pages is not squeezed.

mod world;

use model::{Bytes, Millis, Policy, Reading, Reason, VmLimits, reason::KillSign};

use world::{GroupFixture, target_mib};

const MIB: fn(u64) -> Bytes = Bytes::mib;

/// A group with almost no budget and one guest without swap that has 300 MiB, 200 of them free.
fn swapless() -> GroupFixture {
    let mut world = GroupFixture::new(Policy::Demand, Some(16)).vm("a", 300, 200);
    world.spec.vms.entry("a".into()).or_default().swap = Some(false);
    world
}

/// Runs a second in which the guest's statistics follow its balloon.
fn follow(world: &mut GroupFixture, in_use: u64) -> model::Plan {
    let total = world.stands_at("a");
    let stats = world.tell("a");
    let free = Some(MIB(total.saturating_sub(in_use)));
    (stats.total, stats.free, stats.available) = (Some(MIB(total)), free, free);
    world.second()
}

/// Runs seconds until memory is taken.
fn until_taken(world: &mut GroupFixture) -> u64 {
    (0..1_000)
        .find(|_| target_mib(&follow(world, 100), "a").is_some())
        .expect("nothing is ever taken")
}

fn refusals(plan: &model::Plan) -> &[Reason] {
    &plan.vms[&"a".into()].refusals
}

#[test]
fn without_swap_nothing_is_taken_before_a_minute_was_seen() {
    let mut world = swapless();
    let plan = world.seconds(59);
    assert_eq!(world.stands_at("a"), 300);
    let is_unwatched = |reason: &Reason| matches!(reason, Reason::NotWatched { .. });
    assert!(refusals(&plan).iter().any(is_unwatched), "{:?}", refusals(&plan));
    assert!(until_taken(&mut world) < 60);
}

#[test]
fn a_guest_that_has_never_swapped_is_not_said_to_have_no_swap() {
    let mut world = GroupFixture::new(Policy::Demand, Some(16)).vm("a", 300, 24);
    // It may have swap that it has not needed yet.
    world.tell("a").swap_out = Some(Bytes::ZERO);
    (0..89).for_each(|_| drop(follow(&mut world, 276)));
    let plan = follow(&mut world, 276);
    let words: Vec<String> = refusals(&plan).iter().map(ToString::to_string).collect();
    let said = words.iter().find(|words| words.starts_with("it is not known to have swap: "));
    let said = said.unwrap_or_else(|| panic!("{words:?}"));
    assert!(said.contains(" and the 24 MiB available, it keeps "), "{said}");
    assert!(!words.iter().any(|words| words.contains("no swap")), "{words:?}");
}

#[test]
fn without_swap_a_step_is_small_and_waits_for_what_the_one_before_has_done() {
    let mut world = swapless();
    until_taken(&mut world);
    let after_one = world.stands_at("a");
    assert!((288..300).contains(&after_one), "{after_one}");
    // The statistics stay those from before the arrival of the step.
    world.silent = Some("a");
    for _ in 0..4 {
        world.second();
        assert_eq!(world.stands_at("a"), after_one);
    }
    world.silent = None;
    (0..5).for_each(|_| drop(follow(&mut world, 100)));
    assert!(world.stands_at("a") < after_one, "confirmed, and still no next step");
}

#[test]
fn a_counted_kill_brings_back_all_that_was_taken_and_the_pauses_double() {
    for has_swap in [false, true] {
        let mut world = swapless();
        world.spec.vms.entry("a".into()).or_default().swap = Some(has_swap);
        world.tell("a").oom_kills = Some(2);
        until_taken(&mut world);
        let mut pauses = Vec::new();
        for kills in [3, 4] {
            world.tell("a").oom_kills = Some(kills);
            let plan = follow(&mut world, 20);
            assert_eq!(target_mib(&plan, "a"), (kills == 3).then_some(300), "{plan:?}");
            let change = plan.vms[&"a".into()].change.as_ref();
            let sign = KillSign::Counted { kills };
            if let Some(change) = change {
                assert_eq!(change.reason, Reason::KilledGiveBack { sign });
            }
            // Memory that the kill left free is not taken, in any amount.
            let plan = follow(&mut world, 20);
            let wait = refusals(&plan).iter().find_map(|reason| match reason {
                Reason::Killed { sign: told, wait } if *told == sign => Some(*wait),
                _ => None,
            });
            pauses.push(wait.expect("it is told"));
            for _ in 0..pauses[0].0 / 1_000 - 10 {
                assert_eq!(target_mib(&follow(&mut world, 20), "a"), None);
            }
        }
        assert_eq!(pauses, [299, 599].map(Millis::secs));
    }
}

#[test]
fn memory_that_jumps_free_in_a_short_guest_counts_as_a_kill_where_its_kernel_counts_none() {
    let mut world = swapless();
    (0..5).for_each(|_| drop(follow(&mut world, 290)));
    let plan = follow(&mut world, 100);
    let jumped = KillSign::Jumped { freed: MIB(190) };
    let is_told =
        |reason: &Reason| matches!(reason, Reason::Killed { sign, .. } if *sign == jumped);
    assert!(refusals(&plan).iter().any(is_told), "{:?}", refusals(&plan));
    for _ in 0..280 {
        assert_eq!(target_mib(&follow(&mut world, 100), "a"), None);
    }
}

#[test]
fn below_its_base_a_guest_that_kills_gets_all_of_it_at_once() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 80, 8).vm("short", 128, 8);
    world.tell("a").oom_kills = Some(0);
    world.second();
    world.tell("a").oom_kills = Some(1);
    assert_eq!(target_mib(&world.second(), "a"), Some(128));
}

#[test]
fn what_comes_back_after_a_kill_is_no_more_than_it_had_and_may_have() {
    let mut world = swapless();
    world.tell("a").oom_kills = Some(0);
    until_taken(&mut world);
    let limits = VmLimits { min: MIB(64), base: MIB(128), max: MIB(290) };
    world.spec.vms.entry("a".into()).or_default().limits.max = Some(limits.max);
    world.tell("a").oom_kills = Some(1);
    follow(&mut world, 20);
    assert!(world.stands_at("a") <= 290, "{}", world.stands_at("a"));
}

#[test]
fn a_host_that_is_short_gives_nothing_back_beyond_base() {
    let mut world = swapless();
    world.tell("a").oom_kills = Some(0);
    until_taken(&mut world);
    let stands = world.stands_at("a");
    world.available = MIB(100);
    world.tell("a").oom_kills = Some(1);
    follow(&mut world, 20);
    assert_eq!(world.stands_at("a"), stands);
}

#[test]
fn of_a_guest_that_takes_memory_back_by_itself_the_balloon_is_no_allocation() {
    // Linux leaves the total unchanged where the balloon deflates by itself.
    let mut world = swapless();
    world.see("a").deflates_on_oom = Some(true);
    let mut least = 300;
    for _ in 0..600 {
        let stands = world.stands_at("a");
        let stats = world.tell("a");
        let free = Some(MIB(stands - 100));
        (stats.total, stats.free, stats.available) = (Some(MIB(384)), free, free);
        world.second();
        least = least.min(world.stands_at("a"));
    }
    assert!(least < 240, "its own balloon was taken for hunger: {least} MiB");
    assert_eq!(world.stands_at("a"), least, "it went to and fro");
}

#[test]
fn a_kernel_that_deflates_its_balloon_itself_was_about_to_kill_a_program() {
    let mut world = swapless();
    world.see("a").deflates_on_oom = Some(true);
    until_taken(&mut world);
    follow(&mut world, 100);
    let stands = world.stands_at("a");
    world.see("a").balloon = Some(Reading::new(MIB(stands + 6), world.now));
    let plan = follow(&mut world, stands - 4);
    assert_eq!(target_mib(&plan, "a"), Some(300), "all that was taken: {plan:?}");
    let plan = follow(&mut world, 100);
    let took = KillSign::TookBack { taken: MIB(6) };
    let is_told = |reason: &Reason| matches!(reason, Reason::Killed { sign, .. } if *sign == took);
    assert!(refusals(&plan).iter().any(is_told), "{:?}", refusals(&plan));
}

#[test]
fn a_guest_short_above_its_base_that_does_not_swap_keeps_its_grant() {
    let mut world = GroupFixture::new(Policy::Demand, Some(128)).vm("a", 300, 4);
    let plan = world.seconds(30);
    assert_eq!(world.stands_at("a"), 300);
    let is_pressed = |reason: &Reason| matches!(reason, Reason::UnderPressure { .. });
    assert!(refusals(&plan).iter().any(is_pressed), "{:?}", refusals(&plan));
    assert!(plan.over.contains_key(&"g".into()), "nobody is told");
    // A guest that swaps has a place for its pages, and its group pays for no more.
    let plan = (0..3).map(|_| world.swap("a")).last().expect("three seconds");
    assert!(world.stands_at("a") < 300, "{plan:?}");
    assert!(!plan.over.contains_key(&"g".into()));
}

#[test]
fn nothing_is_taken_while_nobody_knows_how_a_guest_without_swap_does() {
    let mut world = swapless();
    (0..50).for_each(|_| drop(follow(&mut world, 100)));
    let stats = world.see("a").stats;
    world.see("a").stats = None;
    world.seconds(12);
    world.see("a").stats = stats.map(|stats| Reading::new(stats.value, world.now));
    world.seconds(50);
    assert_eq!(world.stands_at("a"), 300, "a minute of which a part was not seen");
}

fn is_killed(plan: &model::Plan) -> bool {
    refusals(plan).iter().any(|reason| matches!(reason, Reason::Killed { .. }))
}

#[test]
fn a_balloon_that_is_deflated_by_others_or_by_a_reboot_is_no_kill() {
    for reboots in [false, true] {
        let mut world = swapless();
        world.see("a").deflates_on_oom = Some(true);
        until_taken(&mut world);
        follow(&mut world, 100);
        let stands = world.stands_at("a");
        world.see("a").balloon = Some(Reading::new(MIB(stands + 6), world.now));
        let mut in_use = 100;
        if reboots {
            // The guest is short, and freshly booted.
            in_use = stands - 4;
            world.tell("a").minor_faults = Some(5);
        }
        for _ in 0..10 {
            let plan = follow(&mut world, in_use);
            assert!(!is_killed(&plan), "{plan:?}");
            in_use = 100;
        }
    }
}

#[test]
fn statistics_that_are_older_than_a_move_of_the_balloon_show_no_allocation() {
    let mut world = swapless();
    world.see("a").deflates_on_oom = Some(true);
    world.silent = Some("a");
    let mut stood = std::collections::VecDeque::from([300, 300]);
    let mut most = 0;
    for second in 0..1_800 {
        stood.push_back(world.stands_at("a"));
        // After a long rest the guest takes 30 MiB, slowly.
        let in_use = 100 + (second.max(1_500) - 1_500).min(30);
        let free = Some(MIB(stood.pop_front().expect("three of them") - in_use));
        let at = model::Time(world.now.0 - 1_000);
        let stats = world.see("a").stats.as_mut().expect("statistics");
        stats.at = at;
        let stats = &mut stats.value;
        (stats.total, stats.free, stats.available) = (Some(MIB(384)), free, free);
        let plan = world.second();
        assert!(!is_killed(&plan), "{plan:?}");
        most = if second < 1_500 { 0 } else { most.max(world.stands_at("a")) };
    }
    assert!((160..240).contains(&most), "its balloon was taken for hunger: {most} MiB");
}

#[test]
fn a_kill_counts_once_however_often_its_statistics_are_looked_at() {
    let mut world = swapless();
    world.tell("a").oom_kills = Some(2);
    world.second();
    world.silent = Some("a");
    world.tell("a").oom_kills = Some(3);
    (0..3).for_each(|_| drop(world.second()));
    world.silent = None;
    world.second();
    let plan = world.second();
    let wait = refusals(&plan).iter().find_map(|reason| match reason {
        Reason::Killed { wait, .. } => Some(*wait),
        _ => None,
    });
    assert_eq!(wait, Some(Millis::secs(299)), "{plan:?}");
}

#[test]
fn after_a_kill_base_comes_back_even_where_somebody_else_has_moved_the_balloon() {
    let mut world = GroupFixture::new(Policy::Demand, None).vm("a", 128, 60);
    world.tell("a").oom_kills = Some(0);
    world.seconds(70);
    world.see("a").balloon.iter_mut().for_each(|balloon| balloon.value = MIB(90));
    let plan = world.seconds(2);
    assert_eq!(target_mib(&plan, "a"), None, "it is left alone");
    world.tell("a").oom_kills = Some(1);
    assert_eq!(target_mib(&world.second(), "a"), Some(128));
}
