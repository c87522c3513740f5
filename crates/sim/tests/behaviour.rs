//! The behaviour of a host with Overbook: convergence, its speed, and its cost to other guests.

use model::{Bytes, Policy, Reason};
use sim::{Fake, Harm, Lie, Load, Nature, Run, Scenario, limits};

const HUNGRY: &str = "shop-hungry";

fn shop(policy: Policy, fakes: impl IntoIterator<Item = Fake>) -> Scenario {
    Scenario::new(3).group("shop", policy, limits(64, 128, 384), fakes)
}

/// One guest lacks 100 MiB, and three idle ones use 60 MiB of 128. Two guests of another group
/// work within their base.
fn quickstart() -> Scenario {
    let idle = |i: usize| Fake::idle(format!("{i}")).standing_at(128);
    shop(Policy::Demand, [idle(1), idle(2), idle(3), Fake::busy("hungry", 190).standing_at(128)])
        .group(
            "research",
            Policy::Demand,
            limits(64, 128, 384),
            [Fake::busy("verify", 80).standing_at(128), Fake::busy("pi", 10).standing_at(128)],
        )
}

fn swapped_mib(run: &Run, vm: &str, second: usize) -> u64 {
    run.guest(vm, second).map_or(0, |guest| guest.swapped.0 >> 20)
}

fn said(run: &Run, second: usize, vm: &str) -> Vec<Reason> {
    run.seconds[second].plan.vms[&vm.into()].refusals.clone()
}

#[test]
fn the_quickstart_fleet_converges_within_twenty_seconds_and_leaks_nothing() {
    let run = quickstart().run(120);
    assert_eq!(run.harm_report(), "");
    assert!(run.guest(HUNGRY, 0).is_some_and(sim::Guest::suffers));
    assert_eq!(swapped_mib(&run, HUNGRY, 20), 0);
    assert_eq!([run.leaked_max("shop"), run.leaked_max("research")], [Bytes::ZERO; 2]);
    for vm in ["shop-1", "shop-2", "shop-3", "research-verify", "research-pi"] {
        assert!((0..120).all(|s| run.actual_mib(vm, s) == 128), "{vm} was touched for nothing");
    }
}

#[test]
fn guests_that_boot_with_all_their_ram_come_down_to_what_the_group_pays_for() {
    let idle = |i: usize| Fake::idle(format!("{i}"));
    let run = shop(Policy::Demand, (0..4).map(idle)).run(60);
    assert_eq!(run.harm_report(), "");
    let held: u64 = (0..4).map(|i| run.actual_mib(&format!("shop-{i}"), 59)).sum();
    // Untouched base is lent softly, so it may cover grants that idle guests keep.
    assert!((512..=512 + 4 * 68).contains(&held), "{held} MiB");
    let ledger = run.seconds[59].plan.groups[&"shop".into()];
    assert_eq!(ledger.deficit, Bytes::ZERO);
}

#[test]
fn a_waking_guest_gets_its_memory_back_at_once_and_the_deficit_goes_soon() {
    let sleeper = Fake::idle("sleeper").standing_at(128).preallocated().then(60, 98);
    let others = (0..2).map(|i| Fake::idle(format!("{i}")).standing_at(128).preallocated());
    let hungry = Fake::busy("hungry", 400).standing_at(128);
    let run = shop(Policy::Demand, others.chain([sleeper, hungry])).run(120);
    assert_eq!(run.harm_report(), "");
    assert!(run.actual_mib("shop-sleeper", 59) < 90, "it was not shrunk while it slept");
    assert!(run.actual_mib("shop-sleeper", 63) >= 128, "not back within 3 s");
    assert_eq!(swapped_mib(&run, "shop-sleeper", 70), 0);
    let deficit = |second: &sim::Second| second.plan.groups[&"shop".into()].deficit;
    assert!(run.seconds[70..].iter().all(|second| deficit(second).is_zero()));
}

#[test]
fn a_swapless_guest_finds_its_base_when_it_wakes() {
    let sleeper = Fake::idle("sleeper").standing_at(168).preallocated().then(1_800, 95);
    let sleeper = sleeper.that(Nature::Swapless);
    let others = (0..2).map(|i| Fake::idle(format!("{i}")).standing_at(128));
    let hungry = Fake::busy("hungry", 400).standing_at(128);
    let run = shop(Policy::Demand, others.chain([sleeper, hungry])).run(1_900);
    assert_eq!(run.harm_report(), "");
    assert_eq!(run.actual_mib("shop-sleeper", 1_799), 128, "its idle grant stayed with it");
}

#[test]
fn a_group_within_its_budget_shares_idle_memory_where_the_host_has_no_more() {
    let idle = Fake::idle("idle").standing_at(256).preallocated();
    let hungry = Fake::busy("hungry", 190).standing_at(128);
    let nothing_else = Load::steady(Bytes::ZERO);
    let full = shop(Policy::Demand, [idle, hungry]).paying("shop", 1_000);
    let run = full.host(480, 100, nothing_else).run(60);
    assert_eq!(run.harm_report(), "");
    assert!(run.seconds.iter().all(|it| it.plan.groups[&"shop".into()].surplus >= Bytes::mib(500)));
    assert_eq!(swapped_mib(&run, HUNGRY, 59), 0);
    assert!(run.actual_mib("shop-idle", 59) < 200, "it keeps what it does not use");
}

#[test]
fn oscillating_demand_moves_memory_back_and_forth_at_most_five_times_in_ten_minutes() {
    for period in [8, 15, 22, 30, 45, 70] {
        let (low, high) = (Bytes::mib(10), Bytes::mib(96));
        let load = Load::Oscillating { low, high, period, busy: 5 };
        let bursty = Fake::new("bursty", load).standing_at(128).hoarding();
        let run =
            shop(Policy::Demand, [bursty, Fake::busy("hungry", 400).standing_at(128)]).run(600);
        assert_eq!(run.harm_report(), "", "period {period}");
        assert!(run.reversals("shop-bursty") <= 5, "period {period}");
    }
}

#[test]
fn a_stuck_balloon_is_flagged_and_planned_around() {
    let stuck = Fake::idle("stuck").standing_at(128).preallocated();
    let other = Fake::idle("other").standing_at(128).preallocated();
    let hungry = Fake::busy("hungry", 150).standing_at(128);
    let stuck = stuck.that(Nature::StuckBalloon { from: 0 });
    let run = shop(Policy::Demand, [stuck, other, hungry]).run(60);
    assert_eq!(run.harm_report(), "");
    let is_flagged = |r: &Reason| matches!(r, Reason::Uncooperative { .. });
    assert!((18..40).all(|s| said(&run, s, "shop-stuck").iter().any(is_flagged)));
    assert!(run.actual_mib("shop-other", 40) < 100, "nobody stood in for it");
    assert!(run.actual_mib(HUNGRY, 59) >= 160);
}

#[test]
fn a_slow_balloon_is_waited_for_and_not_flagged() {
    let slow = Nature::SlowBalloon { per_second: Bytes::mib(2) };
    let idle = Fake::idle("slow").standing_at(128).preallocated().that(slow);
    let run = shop(Policy::Demand, [idle, Fake::busy("hungry", 150).standing_at(128)]).run(90);
    assert_eq!(run.harm_report(), "");
    let is_flagged = |r: &Reason| matches!(r, Reason::Uncooperative { .. });
    assert!((0..90).all(|s| !said(&run, s, "shop-slow").iter().any(is_flagged)));
    assert!(run.actual_mib("shop-slow", 89) < 100);
}

#[test]
fn demand_serves_a_hungry_guest_better_than_fair_and_entitlement() {
    let swap_after_a_minute = |policy| {
        let idle = (0..5).map(|i| Fake::idle(format!("{i}")).standing_at(128));
        let hungry = Fake::busy("hungry", 340).standing_at(128);
        let run = shop(policy, idle.chain([hungry])).run(60);
        assert_eq!(run.harm_report(), "", "{policy:?}");
        swapped_mib(&run, HUNGRY, 59)
    };
    let [demand, fair, entitlement] =
        [Policy::Demand, Policy::Fair, Policy::Entitlement].map(swap_after_a_minute);
    assert_eq!(demand, 0);
    assert!(fair > 50 && entitlement > 50, "fair {fair} MiB, entitlement {entitlement} MiB");
}

#[test]
fn a_daemon_that_forgets_everything_at_random_moments_harms_nobody() {
    for seed in 0..20 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let restarts: Vec<u64> = (0..20).map(|_| rng.u64(0..300)).collect();
        let sleeper = Fake::idle("sleeper").standing_at(128).preallocated();
        let sleeper = sleeper.then(rng.u64(40..120), 98).then(200, 30);
        let run = shop(Policy::Demand, [sleeper, Fake::busy("hungry", 190).standing_at(128)])
            .group(
                "lab",
                Policy::Fair,
                limits(64, 128, 384),
                [Fake::idle("a"), Fake::busy("b", 250)],
            )
            .restarts_at(restarts)
            .run(300);
        assert_eq!(run.harm_report(), "", "seed {seed}");
    }
}

#[test]
fn lost_commands_are_said_again_until_they_are_heard() {
    let run = quickstart().losing(40).run(120);
    assert_eq!(run.harm_report(), "");
    assert_eq!(swapped_mib(&run, HUNGRY, 60), 0);
}

#[test]
fn every_group_is_deflated_towards_base_when_the_host_is_short() {
    let others = Load::Steps(vec![(0, Bytes::ZERO), (40, Bytes::mib(1_200))]);
    let cached = |name: &str| Fake::busy(name, 20).caching(300).standing_at(128);
    let group = || [cached("a"), Fake::idle("b").standing_at(128), cached("c")];
    let run = shop(Policy::Fair, group())
        .group("lab", Policy::Fair, limits(64, 128, 384), group())
        .host(1_800, 200, others)
        .run(80);
    let held = |second| run.actual_mib("shop-a", second) + run.actual_mib("lab-c", second);
    assert!(held(39) > 270, "nothing was granted before");
    assert_eq!(held(79), 256);
}

#[test]
fn a_guest_that_claims_hunger_gets_no_more_than_the_surplus_of_its_own_group() {
    let liar = Fake::idle("liar").standing_at(128).that(Nature::LyingStats(Lie::Hungry));
    let run = shop(Policy::Demand, [liar, Fake::idle("a").standing_at(128)])
        .group("lab", Policy::Demand, limits(64, 128, 384), [Fake::busy("b", 80).standing_at(128)])
        .run(120);
    assert_eq!(run.harm_report(), "");
    assert!(run.actual_mib("shop-liar", 119) <= 384);
    assert_eq!(run.leaked_max("shop"), Bytes::ZERO);
    assert_eq!(run.actual_mib("lab-b", 119), 128);
}

#[test]
fn a_guest_that_claims_to_be_idle_harms_only_itself() {
    let liar = Fake::busy("liar", 90).standing_at(128).preallocated();
    let liar = liar.that(Nature::LyingStats(Lie::Idle));
    let run = shop(Policy::Demand, [liar, Fake::busy("hungry", 400).standing_at(128)]).run(120);
    let victims: Vec<_> = run.harms().filter_map(|(_, harm)| harm.victim()).collect();
    assert!(victims.iter().all(|vm| vm.as_str() == "shop-liar"), "{victims:?}");
    assert!(run.actual_mib("shop-liar", 119) >= 64);
    assert_eq!(run.leaked_max("shop"), Bytes::ZERO);
}

#[test]
fn a_swap_storm_gets_the_surplus_and_nothing_of_what_others_use() {
    let storm = Fake::idle("storm").standing_at(128).that(Nature::SwapStorm);
    let run = shop(Policy::Demand, [storm, Fake::busy("a", 90).standing_at(128)]).run(300);
    assert_eq!(run.harm_report(), "");
    assert_eq!(run.guest("shop-a", 299).map(|guest| guest.swapped), Some(Bytes::ZERO));
}

#[test]
fn a_vm_that_returns_under_its_old_name_starts_with_a_clean_slate() {
    let back = Fake::idle("back").standing_at(128).preallocated();
    let back = back.that(Nature::VanishingVm { at: 40, away: 5 });
    let run = shop(Policy::Demand, [back, Fake::busy("hungry", 400).standing_at(128)]).run(120);
    assert_eq!(run.harm_report(), "");
    assert!(run.actual_mib("shop-back", 39) < 100);
    assert!((45..54).all(|s| run.actual_mib("shop-back", s) == 128), "taken before it was known");
}

#[test]
fn a_guest_without_a_balloon_driver_is_left_as_it_is() {
    let fixed = Fake::idle("fixed").with_ram(128).that(Nature::NoBalloonDriver).preallocated();
    let run = shop(Policy::Demand, [fixed, Fake::busy("hungry", 400).standing_at(128)]).run(60);
    assert_eq!(run.harm_report(), "");
    assert!(run.seconds.iter().all(|s| s.plan.vms[&"shop-fixed".into()].change.is_none()));
}

#[test]
fn the_same_seed_replays_the_same_run() {
    let run = |seed| {
        let fakes = [Fake::idle("a").preallocated(), Fake::busy("hungry", 300)];
        let scenario = Scenario::new(seed).losing(20);
        scenario.group("shop", Policy::Demand, limits(64, 128, 384), fakes).run(120)
    };
    let plans = |run: Run| run.seconds.into_iter().map(|s| (s.view, s.plan)).collect::<Vec<_>>();
    assert_eq!(plans(run(5)), plans(run(5)));
    assert_ne!(plans(run(5)), plans(run(6)));
}

#[test]
fn harm_says_whose_it_is() {
    let doomed = Fake::busy("doomed", 400).standing_at(128).that(Nature::Swapless);
    let run = shop(Policy::Demand, [doomed]).run(1);
    let harms: Vec<&Harm> = run.harms().map(|(_, harm)| harm).collect();
    assert_eq!(harms, [&Harm::Killed { vm: "shop-doomed".into() }]);
}
