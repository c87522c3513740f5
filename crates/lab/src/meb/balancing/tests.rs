//! Figures of invented courses, without guests.

use super::*;

const MEMBERS: [Member; 2] = [
    Member { name: "suite", command: "a", initial: Bytes::mib(300), high: Bytes::mib(500) },
    Member { name: "reversed", command: "b", initial: Bytes::mib(300), high: Bytes::mib(500) },
];

fn course(speeds: &[f64]) -> SharingRun {
    SharingRun { speeds: speeds.to_vec(), cpu_busy: 0.5, ticks: Vec::new() }
}

/// Speeds with fixed memory and the guest's own disk, with fixed memory and the same swap, under
/// balance, demand, entitlement and fair, and with enough memory.
type Round = [&'static [f64]; ARMS.len()];

const GOOD: Round = [
    &[10.0, 10.0],
    &[10.0, 20.0],
    &[40.0, 60.0],
    &[20.0, 30.0],
    &[10.0, 15.0],
    &[8.0, 12.0],
    &[40.0, 60.0],
];

fn result(rounds: &[Round]) -> BalanceResult {
    let table = Table {
        members: &MEMBERS,
        low: Bytes::mib(100),
        warm_up: Duration::ZERO,
        window: Duration::from_secs(60),
    };
    let names = ARMS.map(BalanceArm::name);
    let rounds = rounds.iter().map(|round| names.into_iter().zip(round.map(course)).collect());
    BalanceResult { table, courses: Arms(rounds.collect()) }
}

/// Those of `meb-table4`, which claims `speedup_mean`, `speedup_zram_mean` and `qos_mean`.
fn speeds(rounds: &[Round]) -> Figures {
    Figures::invented("meb-table4", |figures| result(rounds).add_speeds(figures))
}

const CLAIMED: [&str; 3] = ["speedup_mean", "speedup_zram_mean", "qos_mean"];

/// `GOOD` with other speeds in one arm.
fn with(arm: BalanceArm, speeds: &'static [f64]) -> Round {
    let mut round = GOOD;
    round[ARMS.iter().position(|known| *known == arm).unwrap()] = speeds;
    round
}

#[test]
fn each_policy_is_set_against_both_baselines_and_against_enough_memory() {
    let figures = speeds(&[GOOD]);
    let expected = [
        ("speedup_suite", 4.0),
        ("speedup_mean", 5.0),
        ("speedup_zram_reversed", 3.0),
        ("speedup_zram_mean", 3.5),
        ("qos_mean", 1.0),
        ("qos_min", 1.0),
        ("speedup_mean_demand", 2.5),
        ("speedup_zram_mean_demand", 1.75),
        ("qos_mean_demand", 0.5),
        ("qos_mean_entitlement", 0.25),
        ("qos_suite_fair", 0.2),
    ];
    figures.assert_near(&expected);
    for name in CLAIMED {
        assert!(figures.met(name) && figures.get(name).unwrap().target.is_some(), "{name}");
    }
}

#[test]
fn a_baseline_that_is_as_fast_fails_whichever_it_is() {
    let fast = GOOD[2];
    assert!(!speeds(&[with(BalanceArm::Baseline, fast)]).met("speedup_mean"));
    let same_swap = speeds(&[with(BalanceArm::SameSwap, fast)]);
    assert!(same_swap.met("speedup_mean") && !same_swap.met("speedup_zram_mean"));
    assert!(!speeds(&[with(BALANCE, &[40.0, 6.0])]).met("qos_mean"));
}

#[test]
fn the_median_of_the_rounds_means_counts() {
    let lucky = with(BALANCE, &[4_000.0, 4_000.0]);
    let slow = with(BALANCE, &[10.0, 10.0]);
    let figures = speeds(&[slow, lucky, slow]);
    assert_eq!(figures.get("speedup_mean").unwrap().rounds.len(), 3);
    assert!((figures.value("speedup_mean") - 1.0).abs() < 1e-9 && !figures.met("qos_mean"));
}

#[test]
fn a_guest_that_is_missing_or_silent_fails() {
    let bad = [
        with(BALANCE, &[40.0]),
        with(BalanceArm::Baseline, &[10.0]),
        with(BalanceArm::SameSwap, &[10.0, f64::NAN]),
        with(BALANCE, &[40.0, f64::NAN]),
        with(BalanceArm::Best, &[f64::NAN, 60.0]),
        with(BalanceArm::Baseline, &[0.0, 10.0]),
    ];
    for round in bad {
        let figures = speeds(&[GOOD, round, GOOD]);
        let all = CLAIMED.iter().all(|name| figures.met(name));
        assert!(!all, "{round:?}\n{}", figures.to_table());
    }
    assert!(CLAIMED.iter().all(|name| !speeds(&[]).met(name)));
}

#[test]
fn misses_are_compared_with_the_next_policy_of_the_same_round() {
    let of = |balance: &[f64], others: &[Vec<f64>]| misses_to_next(balance, others).value;
    let others = [vec![30.0, 10.0, 20.0], vec![20.0, 40.0, 20.0]];
    assert!((of(&[10.0, 10.0, 10.0], &others) - 2.0).abs() < 1e-9);
    assert!((of(&[40.0, 20.0, 20.0], &others) - 0.5).abs() < 1e-9);
    assert!(of(&[10.0, f64::NAN, 10.0], &others).is_nan());
    assert!(of(&[10.0, 10.0], &[vec![30.0, f64::NAN]]).is_nan());
    assert!(of(&[10.0, 10.0], &[vec![30.0]]).is_nan() && of(&[], &others).is_nan());
}
