//! Figures of invented speeds, without guests: two that sort and two that compute.

use super::*;

/// One round: speeds under the baseline and the three policies.
type Round = [[f64; 4]; 4];

/// `demand` is three times as fast as `fair` and six times as fast as `entitlement`.
const GOOD: Round = [
    [10.0, 10.0, 5.0, 5.0],
    [20.0, 20.0, 5.0, 5.0],
    [10.0, 10.0, 5.0, 5.0],
    [60.0, 60.0, 4.0, 4.0],
];

fn figures(rounds: &[Vec<Vec<f64>>]) -> Figures {
    let mixes = vec![Mix { name: SORT.name, jobs: vec![SORT, SORT, CG, CG] }];
    let rounds: Vec<_> = rounds.iter().map(|round| vec![round.clone()]).collect();
    let trial = Trial::of_speeds(mixes, &POLICIES, &rounds);
    Figures::invented(SCENARIO.name, |figures| add_gains(figures, &trial))
}

fn round(change: impl Fn(&mut Vec<Vec<f64>>)) -> Vec<Vec<f64>> {
    let mut round = GOOD.map(Vec::from).to_vec();
    change(&mut round);
    round
}

/// Places of `fair`, `entitlement` and `demand` in a round.
fn place(policy: &str) -> usize {
    1 + POLICIES.iter().position(|setting| setting.name == policy).unwrap()
}

#[test]
fn a_gain_is_demand_over_the_other_policy_and_counts_who_sorts() {
    let figures = figures(&vec![round(|_| ()); 3]);
    let [fair, entitlement] = ["fair", "entitlement"].map(|name| GOOD[place(name)][0]);
    let demand = GOOD[place("demand")][0];
    figures.assert_near(&[
        ("sort_demand_vs_fair", demand / fair),
        ("sort_demand_vs_entitlement", demand / entitlement),
    ]);
    assert!(figures.passed());
}

#[test]
fn a_demand_that_is_slower_fails() {
    let slower = round(|round| round.swap(place("demand"), place("fair")));
    let figures = figures(&vec![slower; 3]);
    assert!(!figures.met("sort_demand_vs_fair") && !figures.passed());
}

#[test]
fn the_median_of_the_rounds_counts() {
    let lucky = round(|round| round[place("demand")] = vec![900.0; 4]);
    let slow = round(|round| round[place("demand")] = vec![1.0; 4]);
    assert!(!figures(&[slow.clone(), lucky, slow]).passed());
}

#[test]
fn six_rounds_hold_by_the_lower_end_of_their_interval() {
    let slow = round(|round| round[place("demand")] = vec![19.0; 4]);
    let mut rounds = vec![round(|_| ()); 6];
    assert!(figures(&rounds).passed());
    rounds[2] = slow;
    assert!(!figures(&rounds).met("sort_demand_vs_fair"));
}

#[test]
fn a_guest_that_is_missing_or_silent_fails() {
    let missing = round(|round| round[place("demand")].truncate(1));
    let silent = round(|round| round[place("demand")][1] = f64::NAN);
    let stopped = round(|round| round[place("fair")][0] = 0.0);
    for bad in [missing, silent, stopped] {
        let figures = figures(&[bad]);
        assert!(!figures.met("sort_demand_vs_fair"), "{}", figures.to_table());
    }
    assert!(!figures(&[]).passed());
}
