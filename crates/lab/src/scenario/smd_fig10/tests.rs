//! Slopes of invented courses, without guests.

use super::*;

/// A stage whose two times are the same number of the clock's.
fn stage(vms: usize, time: f64) -> TableStage {
    let clock_us = 500.0;
    let mean_us = time * clock_us;
    TableStage { vms, in_clocks: time, mean_us, clock_us, faults: 0.0, taken_mib: 100.0 }
}

/// A round of these times, each with one VM and with all: without merging, with a table, by
/// scanning, by KSM.
fn round(times: [[f64; 2]; ARMS.len()]) -> Vec<(&'static str, Vec<TableStage>)> {
    let stages = times.map(|[alone, all]| vec![stage(1, alone), stage(ALL, all)]);
    ARMS.iter().zip(stages).map(|((name, _), stages)| (*name, stages)).collect()
}

/// The table adds 1 %, no merging 20 %.
const GOOD: [[f64; 2]; ARMS.len()] = [[1.0, 1.2], [2.0, 2.02], [1.0, 1.1], [1.0, 1.3]];

fn figures(timed: &Timed, rounds: &[Vec<(&'static str, Vec<TableStage>)>]) -> Figures {
    let courses = Arms(rounds.to_vec());
    Figures::invented(timed.scenario, |figures| add_slopes(figures, timed, &courses))
}

#[test]
fn a_table_is_set_against_no_merging_in_the_same_round() {
    for (timed, kinds) in
        [(&WEB, &["response_slope", "mean_slope"][..]), (&BUILD, &["run_time_slope"])]
    {
        let figures = figures(timed, &[round(GOOD), round(GOOD)]);
        for kind in kinds {
            assert!((figures.value(kind) - 0.01).abs() < 1e-9);
            let less = format!("{kind}_to_none");
            assert!((figures.value(&less) + 0.19).abs() < 1e-9);
            assert!(figures.met(kind) && figures.met(&less));
            assert!(figures.get(&less).unwrap().target.is_some());
        }
    }
}

#[test]
fn a_table_that_is_no_better_than_no_merging_misses_although_it_is_flat() {
    let both_flat = [[1.0, 1.01], [1.0, 1.01], [1.0, 1.0], [1.0, 1.0]];
    let figures = figures(&BUILD, &[round(both_flat)]);
    assert!(figures.met("run_time_slope"));
    assert!(!figures.met("run_time_slope_to_none"));
}

#[test]
fn arms_that_are_swapped_miss() {
    let mut swapped = GOOD;
    swapped.swap(0, 1);
    let figures = figures(&BUILD, &[round(swapped)]);
    assert!(!figures.met("run_time_slope"));
    assert!(!figures.met("run_time_slope_to_none"));
}

#[test]
fn the_differences_of_rounds_count_and_not_their_medians() {
    let times = |none: f64, table: f64| round([[1.0, none], [1.0, table], [1.0, 1.0], [1.0, 1.0]]);
    let rounds = [times(1.1, 1.2), times(1.2, 1.3), times(1.9, 1.0)];
    let figures = figures(&BUILD, &rounds);
    figures.assert_near(&[("run_time_slope_to_none", 0.1)]);
}

#[test]
fn a_stage_that_is_missing_or_was_not_read_is_no_number() {
    let mut missing = round(GOOD);
    missing[0].1.pop();
    let mut fewer = round(GOOD);
    fewer[1].1[1].vms = ALL - 1;
    let mut unread = round(GOOD);
    unread[1].1[0] = stage(1, f64::NAN);
    for bad in [missing, fewer, unread] {
        let figures = figures(&WEB, &[round(GOOD), bad]);
        for name in ["response_slope_to_none", "mean_slope_to_none"] {
            assert!(figures.value(name).is_nan() && !figures.met(name));
        }
    }
}
