//! `balance`: memory goes where it saves the most misses, and stays there.

use model::{Bytes, Policy, Reason};
use sim::{Access, Fake, Load, Run, Scenario, limits};

/// A budget of two bases of 256 MiB; each VM may have from 64 to 512 MiB.
fn pair(policy: Policy, fakes: [Fake; 2]) -> Scenario {
    let fakes = fakes.map(|fake| fake.with_ram(512).standing_at(256).hoarding());
    Scenario::new(3).group("shop", policy, limits(64, 128, 512), fakes).paying("shop", 512)
}

fn misses(run: &Run) -> f64 {
    let guests = run.seconds.last().map(|second| &second.guests);
    guests.map_or(0.0, |guests| guests.iter().map(|guest| guest.misses).sum())
}

fn at_end(run: &Run, vm: &str) -> u64 {
    run.actual_mib(vm, run.seconds.len() - 1)
}

#[test]
fn memory_goes_to_who_misses_most_within_half_a_minute() {
    let small = Fake::busy("small", 60).accessing(Access::even(2_000.0));
    let large = Fake::busy("large", 330).accessing(Access::even(2_000.0));
    let run = pair(Policy::Balance, [small, large]).run(60);
    assert_eq!(run.harm_report(), "");
    assert!(run.actual_mib("shop-large", 30) >= 360, "{}", run.actual_mib("shop-large", 30));
    assert!(at_end(&run, "shop-small") >= 90);
}

#[test]
fn where_not_all_fits_one_that_fits_is_better_than_two_that_thrash() {
    let fakes = ["one", "other"].map(|name| {
        Fake::busy(name, 300).accessing(Access::cyclic(if name == "one" { 3e3 } else { 2e3 }))
    });
    let run = pair(Policy::Balance, fakes.clone()).run(300);
    assert_eq!(run.harm_report(), "");
    assert!(at_end(&run, "shop-one") >= 330, "{}", at_end(&run, "shop-one"));
    let still = misses(&run);
    let demand = misses(&pair(Policy::Demand, fakes).run(300));
    assert!(still < 0.6 * demand, "{still} and {demand}");
}

#[test]
fn in_mixed_fleets_balance_misses_least() {
    let fleets: [[Fake; 4]; 3] = [
        [
            Fake::busy("a", 400).accessing(Access::even(5e3)),
            Fake::busy("b", 60).accessing(Access::even(5e3)),
            Fake::busy("c", 250).accessing(Access::cyclic(2e3)),
            Fake::idle("d").accessing(Access::even(10.0)),
        ],
        [
            Fake::busy("a", 350).accessing(Access::cyclic(1e3)),
            Fake::busy("b", 350).accessing(Access::cyclic(2e3)),
            Fake::busy("c", 350).accessing(Access::cyclic(3e3)),
            Fake::busy("d", 100).accessing(Access::even(4e3)),
        ],
        [
            Fake::busy("a", 100).then(150, 400).accessing(Access::even(3e3)),
            Fake::busy("b", 400).then(150, 100).accessing(Access::even(3e3)),
            Fake::busy("c", 200).accessing(Access::even(1e3)),
            Fake::busy("d", 300).accessing(Access::cyclic(500.0)),
        ],
    ];
    for (index, fleet) in fleets.into_iter().enumerate() {
        let missed =
            [Policy::Balance, Policy::Demand, Policy::Entitlement, Policy::Fair].map(|policy| {
                let fakes =
                    fleet.clone().map(|fake| fake.with_ram(512).standing_at(256).hoarding());
                let run = Scenario::new(3)
                    .group("shop", policy, limits(64, 128, 512), fakes)
                    .paying("shop", 1024)
                    .run(300);
                assert_eq!(run.harm_report(), "", "fleet {index}, {policy:?}");
                misses(&run)
            });
        println!("fleet {index}: {missed:.0?}");
        assert!(missed[1..].iter().all(|other| missed[0] < *other), "fleet {index}: {missed:.0?}");
    }
}

#[test]
fn moves_do_not_chase_oscillating_demand() {
    for period in [10, 20, 30, 60, 120, 240] {
        let load = |low, high| {
            let (low, high) = (Bytes::mib(low), Bytes::mib(high));
            Load::Oscillating { low, high, period, busy: period / 2 }
        };
        let fakes = [
            Fake::new("up", load(40, 300)).accessing(Access::even(2e3)),
            Fake::new("down", load(300, 40)).accessing(Access::even(2e3)),
        ];
        let run = pair(Policy::Balance, fakes).run(1_200);
        assert_eq!(run.harm_report(), "", "period {period}");
        let reversals = [run.reversals("shop-up"), run.reversals("shop-down")];
        println!(
            "period {period}: reversals in 20 minutes {reversals:?}, misses {:.0}",
            misses(&run)
        );
        assert!(reversals.iter().all(|count| *count <= 10), "period {period}: {reversals:?}");
    }
}

#[test]
fn each_move_says_what_it_is_to_save_and_shows_what_it_saved() {
    let small = Fake::busy("small", 60).accessing(Access::even(2_000.0));
    let large = Fake::busy("large", 330).accessing(Access::even(2_000.0));
    let run = pair(Policy::Balance, [small, large]).run(90);
    let of = |second: usize| &run.seconds[second].plan.vms[&"shop-large".into()];
    let gifts = (0..90).filter_map(|second| of(second).change.as_ref());
    assert!(
        gifts
            .filter(|gift| !gift.is_take)
            .any(|gift| { matches!(gift.reason, Reason::Balance { saves } if saves > 1_000) })
    );
    let outcome = of(89).outcome.unwrap();
    assert!(outcome.to > outcome.from && outcome.expected > 0 && outcome.saved > 0, "{outcome:?}");
}

#[test]
fn weight_and_priority_decide_between_equals() {
    let scenario = || {
        let fakes =
            ["one", "other"].map(|name| Fake::busy(name, 300).accessing(Access::cyclic(2e3)));
        pair(Policy::Balance, fakes)
    };
    let weighty = scenario().weighing("shop-other", 5, 0).run(200);
    assert!(at_end(&weighty, "shop-other") >= 330, "{}", at_end(&weighty, "shop-other"));
    let prior = scenario().weighing("shop-one", 5, 0).weighing("shop-other", 1, 1).run(200);
    assert!(at_end(&prior, "shop-other") >= 330, "{}", at_end(&prior, "shop-other"));
}

#[test]
fn who_is_not_tracked_keeps_its_memory_and_is_given_more_while_it_swaps() {
    let tracked = Fake::busy("tracked", 60).accessing(Access::even(2_000.0));
    let run = pair(Policy::Balance, [tracked, Fake::busy("other", 330)]).run(120);
    assert_eq!(run.harm_report(), "");
    assert!(at_end(&run, "shop-other") >= 340, "{}", at_end(&run, "shop-other"));
    let idle = Fake::busy("other", 60);
    let hungry = Fake::busy("tracked", 400).accessing(Access::even(2_000.0));
    let run = pair(Policy::Balance, [hungry, idle]).run(120);
    assert_eq!(run.harm_report(), "");
    assert!(at_end(&run, "shop-other") >= 100, "it was taken more than it leaves free");
}
