//! The gain of lending for a group that is short of memory, and its cost to the lender.

use model::{Bytes, Plan, Policy, Reason};
use sim::{Fake, Load, Run, Scenario, limits};

const HUNGRY: &str = "shop-hungry";
const OWNER: &str = "lab-owner";

/// The second from which on a guest of the lender needs 150 MiB beyond its base.
const WAKES: u64 = 90;

/// The last second before that.
const LAST: usize = 89;

/// In `shop` one guest lacks 200 MiB that its group does not have. `lab` leaves more than that
/// idle, until one of its guests wakes.
fn neighbours() -> Scenario {
    let shop =
        [Fake::busy("hungry", 300).standing_at(128), Fake::busy("full", 90).standing_at(128)];
    let idle = |i: usize| Fake::idle(format!("{i}")).standing_at(128);
    let owner = Fake::idle("owner").standing_at(128).then(WAKES, 245);
    let limits = limits(64, 128, 384);
    Scenario::new(7).group("shop", Policy::Demand, limits, shop).group(
        "lab",
        Policy::Demand,
        limits,
        [idle(1), idle(2), idle(3), idle(4), owner],
    )
}

fn swapped(run: &Run, vm: &str, second: usize) -> Bytes {
    run.guest(vm, second).map_or(Bytes::ZERO, |guest| guest.swapped)
}

fn lent(plan: &Plan) -> Bytes {
    plan.groups[&"lab".into()].lent
}

#[test]
fn what_a_neighbour_leaves_idle_ends_a_guests_swapping() {
    let alone = neighbours().run(WAKES);
    let lending = neighbours().lending(["shop", "lab"]).run(WAKES);
    assert_eq!(lending.harm_report(), "");
    assert!(swapped(&alone, HUNGRY, LAST) > Bytes::mib(100));
    assert_eq!(swapped(&lending, HUNGRY, LAST), Bytes::ZERO);
}

#[test]
fn a_lender_that_comes_to_need_its_memory_is_served_as_if_it_had_not_lent() {
    let alone = neighbours().run(150);
    let lending = neighbours().lending(["shop", "lab"]).run(150);
    assert_eq!(lending.harm_report(), "");
    assert!(!lent(&lending.seconds[LAST].plan).is_zero());
    for second in 0..150 {
        let [with, without] = [&lending, &alone].map(|run| run.actual_mib(OWNER, second));
        assert!(with + 10 >= without, "more than a step behind in second {second}: {with} MiB");
    }
}

#[test]
fn a_loan_is_gone_in_the_second_in_which_its_owner_is_seen_swapping_and_returns_within_seconds() {
    let run = neighbours().lending(["shop", "lab"]).run(150);
    let is_recalled =
        |plan: &Plan| plan.loans.values().any(|l| matches!(l.reason, Reason::LoanRecalled { .. }));
    let recalled = run.seconds.iter().position(|second| is_recalled(&second.plan));
    let recalled = recalled.expect("the owner wakes and is short");
    assert!((LAST..LAST + 6).contains(&recalled), "{recalled}");
    assert_eq!(lent(&run.seconds[recalled].plan), Bytes::ZERO);
    let ledger = run.seconds[recalled + 15].plan.groups[&"shop".into()];
    assert!(ledger.used <= ledger.budget, "{ledger:?}");
}

#[test]
fn on_a_host_without_room_for_both_the_owner_waits_for_no_more_than_what_returns() {
    let room = |others| {
        neighbours().lending(["shop", "lab"]).host(1_000, 40, Load::steady(Bytes::mib(others)))
    };
    let run = room(170).run(150);
    assert_eq!(run.harm_report(), "");
    assert_eq!(swapped(&run, OWNER, 149), Bytes::ZERO);
    assert!(run.actual_mib(OWNER, 149) >= 280, "{}", run.actual_mib(OWNER, 149));
}

#[test]
fn nobody_borrows_from_a_group_that_does_not_consent() {
    let plans = |lending: [&'static str; 1]| {
        let run = neighbours().lending(lending).run(150);
        let of = |second: sim::Second| (second.plan.actions(), second.plan.groups);
        run.seconds.into_iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(plans(["shop"]), plans(["lab"]));
}

#[test]
fn a_daemon_that_forgets_its_loans_harms_nobody() {
    for seed in 0..20 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let restarts: Vec<u64> = (0..4).map(|_| rng.u64(0..200)).collect();
        let run = neighbours().lending(["shop", "lab"]).restarts_at(restarts).run(200);
        assert_eq!(run.harm_report(), "", "seed {seed}");
    }
}
