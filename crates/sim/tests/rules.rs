//! Each safety rule has a scenario that does harm when only that rule is off.
//!
//! A rule is useless if its absence does no harm. The harm is judged inside the fake guests
//! (`sim::Harm`), never by the policy's words.

use model::{Bytes, Policy};
use policy::{Rule, Rules};
use sim::{Fake, Lie, Load, Nature, Scenario, limits};

const SECONDS: u64 = 600;

/// The scenario that shows the purpose of `rule`.
fn scenario(rule: Rule) -> Scenario {
    match rule {
        Rule::FreshStats => guest_that_wakes_after_its_statistics_froze(),
        Rule::PlausibleStats => guest_with_impossible_statistics(),
        Rule::Minimum => idle_guest_beside_a_hungry_one(),
        Rule::Pressure => grant_still_being_filled_beside_one_full_of_cache(),
        Rule::Margin => guests_without_swap_that_allocate_in_bursts(),
        Rule::Swapless => swapless_guest_at_work_in_its_grant(),
        Rule::InflationCap => large_grants_when_the_host_runs_short(),
        Rule::GiveBack => idle_guest_that_wakes_beside_a_hungry_one(),
        Rule::Calm => slow_balloon_of_a_guest_that_has_just_booted(),
        Rule::BackOff => guest_that_fills_slowly_again_and_again(),
        Rule::Migration => idle_guest_that_migrates(),
        Rule::Uncooperative => stuck_grant_beside_one_that_can_come_back(),
        Rule::TakeFirst => slow_balloons_beside_a_hungry_guest(),
        Rule::HostReserve => others_growing_on_an_oversold_host(),
        Rule::CgroupLimit => hungry_guest_in_a_small_cgroup(),
        Rule::GivesBack => idle_guest_with_locked_memory_beside_a_hungry_one(),
    }
}

/// A guest that never gets enough memory, so its group is always short.
fn hungry() -> Fake {
    Fake::busy("hungry", 400)
}

/// An idle guest whose unused memory only its balloon can free.
fn hoarder(name: &str) -> Fake {
    Fake::idle(name).standing_at(128).preallocated()
}

fn shop(fakes: impl IntoIterator<Item = Fake>) -> Scenario {
    Scenario::new(7).group("shop", Policy::Demand, limits(64, 128, 384), fakes)
}

fn guest_that_wakes_after_its_statistics_froze() -> Scenario {
    let frozen = hoarder("frozen").then(22, 98).that(Nature::FrozenStats { from: 20 });
    shop([frozen, hungry().standing_at(128).then(22, 400)])
}

fn guest_with_impossible_statistics() -> Scenario {
    let liar = Fake::busy("liar", 90).standing_at(128).preallocated();
    shop([liar.that(Nature::LyingStats(Lie::Impossible)), hungry().standing_at(128)])
}

fn idle_guest_beside_a_hungry_one() -> Scenario {
    let idle = Fake::busy("idle", 5).standing_at(128).preallocated();
    shop([idle, hungry().standing_at(128)])
}

fn grant_still_being_filled_beside_one_full_of_cache() -> Scenario {
    shop([
        Fake::busy("cached", 80).standing_at(228).caching(200).hoarding(),
        Fake::busy("filling", 400).standing_at(128),
        Fake::idle("sleeper").standing_at(128).then(15, 98),
        Fake::idle("sleeper2").standing_at(128).then(15, 98),
    ])
}

fn swapless_guest_at_work_in_its_grant() -> Scenario {
    shop([
        Fake::busy("worker", 120).standing_at(178).then(60, 140).that(Nature::Swapless),
        Fake::busy("cached", 20).standing_at(228).caching(150),
        Fake::idle("a").standing_at(128),
        Fake::idle("sleeper").standing_at(128).then(15, 98),
        Fake::idle("sleeper2").standing_at(128).then(15, 98),
        Fake::idle("sleeper3").standing_at(128).then(15, 98),
    ])
}

fn guests_without_swap_that_allocate_in_bursts() -> Scenario {
    shop([
        Fake::bursting("sudden", 250, 300, 20, 150),
        Fake::bursting("brisk", 250, 100, 40, 170),
        Fake::bursting("slow", 250, 10, 30, 190),
        Fake::idle("quiet").that(Nature::Swapless),
    ])
}

fn large_grants_when_the_host_runs_short() -> Scenario {
    let others = Load::Steps(vec![(0, Bytes::ZERO), (20, Bytes::mib(900))]);
    let large = Fake::busy("large", 40).standing_at(384).caching(300);
    let fakes = [large, Fake::idle("a"), Fake::idle("b"), Fake::idle("c"), Fake::idle("d")];
    shop(fakes.map(|fake| if fake.balloon.is_none() { fake.standing_at(128) } else { fake }))
        .host(1600, 300, others)
}

fn idle_guest_that_wakes_beside_a_hungry_one() -> Scenario {
    shop([hoarder("sleeper").then(40, 98), hungry().standing_at(128)])
}

fn slow_balloon_of_a_guest_that_has_just_booted() -> Scenario {
    let slow = Nature::SlowBalloon { per_second: Bytes::mib(5) };
    let booting = Fake::busy("booting", 5).then(11, 95).standing_at(128).preallocated();
    shop([booting.that(slow), hungry().standing_at(128)])
}

fn guest_that_fills_slowly_again_and_again() -> Scenario {
    let [low, high, per_second] = [10, 96, 8].map(Bytes::mib);
    let fills = Load::Bursts { low, high, per_second, from: 0, period: 70 };
    shop([Fake::new("filling", fills).standing_at(128).hoarding(), hungry().standing_at(128)])
}

fn idle_guest_that_migrates() -> Scenario {
    let migrating = hoarder("migrating").that(Nature::Migrating { from: 5, until: 60 });
    shop([migrating, hungry().standing_at(128)])
}

fn stuck_grant_beside_one_that_can_come_back() -> Scenario {
    let stuck = Fake::idle("stuck").standing_at(190).preallocated();
    shop([
        stuck.that(Nature::StuckBalloon { from: 0 }),
        Fake::busy("worker", 170).standing_at(200),
        Fake::idle("a").standing_at(128),
        Fake::idle("sleeper").standing_at(128).then(15, 98),
        Fake::idle("sleeper2").standing_at(128).then(15, 98),
    ])
}

fn slow_balloons_beside_a_hungry_guest() -> Scenario {
    let slow = Nature::SlowBalloon { per_second: Bytes::kib(512) };
    let fakes = (0..8).map(|i| hoarder(&format!("slow{i}")).that(slow));
    shop(fakes.chain([hungry().standing_at(128)]))
}

fn others_growing_on_an_oversold_host() -> Scenario {
    let others = Load::Steps(vec![(0, Bytes::mib(100)), (60, Bytes::mib(350))]);
    let group = || [hungry().standing_at(128), Fake::idle("a"), Fake::idle("b"), Fake::idle("c")];
    let calm = |fake: Fake| if fake.balloon.is_none() { fake.standing_at(128) } else { fake };
    shop(group().map(calm))
        .group("lab", Policy::Demand, limits(64, 128, 384), group().map(calm))
        .host(1200, 200, others)
}

fn hungry_guest_in_a_small_cgroup() -> Scenario {
    let confined = hungry().standing_at(128).that(Nature::Confined { limit: Bytes::mib(250) });
    let idle = ["a", "b", "c", "d"].map(|name| Fake::idle(name).standing_at(128));
    shop([confined].into_iter().chain(idle))
}

fn idle_guest_with_locked_memory_beside_a_hungry_one() -> Scenario {
    let locked = hoarder("locked").that(Nature::PinnedMemory);
    shop([locked, hungry().standing_at(128)])
}

#[test]
fn every_rule_has_a_scenario_that_does_harm_only_without_it() {
    let mut faults = String::new();
    for rule in Rule::ALL {
        let scenario = scenario(rule);
        let with = scenario.run(SECONDS).harm_report();
        let without = scenario.run_with(Rules::ALL.without(rule), SECONDS).harm_report();
        println!("{rule:?}\n  with all rules:\n{with}  without it:\n{without}");
        if !with.is_empty() {
            faults += &format!("{rule:?}: harm with every rule on:\n{with}");
        }
        if without.is_empty() {
            faults += &format!("{rule:?}: no harm without it\n");
        }
    }
    assert!(faults.is_empty(), "{faults}");
}
