//! The shipped optimum against the paper's dynamic programming, over random curves of every kind.

use fastrand::Rng;
use policy::optimum::{Choice, place, place_within};
use sim::dynamic_programming::least_misses;

const INSTANCES: u64 = 6_000;

/// A curve of misses over `sizes` sizes: convex, with cliffs, flat, or any other falling curve.
fn any_curve(sizes: usize, rng: &mut Rng) -> Vec<f64> {
    let height = 10f64.powf(rng.f64() * 6.0 - 1.0);
    let mut drops: Vec<f64> = match rng.u8(0..5) {
        0 => (0..sizes).map(|_| rng.f64()).collect(),
        1 => (0..sizes).map(|_| if rng.u8(0..10) == 0 { rng.f64() } else { 0.0 }).collect(),
        2 => (0..sizes).map(|_| f64::from(rng.u8(0..3))).collect(),
        3 => vec![1.0; sizes],
        _ => vec![0.0; sizes],
    };
    if rng.bool() {
        drops.sort_by(|a, b| b.total_cmp(a));
    }
    let floor = if rng.bool() { rng.f64() * height } else { 0.0 };
    let all: f64 = drops.iter().sum::<f64>().max(1.0);
    let mut left = floor + height;
    drops
        .iter()
        .map(|drop| {
            let here = left;
            left = (left - drop / all * height).max(0.0);
            here
        })
        .collect()
}

fn any_choices(rng: &mut Rng) -> Vec<Choice> {
    let most = rng.choice([3, 12, 40]).unwrap_or(3);
    let any = |rng: &mut Rng| {
        let sizes = rng.usize(1..most);
        Choice { least: rng.u32(0..30), misses: any_curve(sizes, rng) }
    };
    (0..rng.usize(1..14)).map(|_| any(rng)).collect()
}

#[test]
fn the_placement_is_the_optimum_whatever_the_curves() {
    let mut with_units_left = 0;
    for seed in 0..INSTANCES {
        let mut rng = Rng::with_seed(seed);
        let choices = any_choices(&mut rng);
        let least: usize = choices.iter().map(|c| c.least as usize).sum();
        let most: usize = choices.iter().map(|c| c.misses.len() - 1).sum();
        let units = least + rng.usize(0..=most + 2);
        let placed = place(&choices, units as u64);
        let reference = least_misses(&choices, units).unwrap();
        let tolerance = 1e-9 * reference.max(1.0);
        assert!(
            (placed.misses - reference).abs() <= tolerance,
            "{seed}: {placed:?}, least {reference}"
        );
        assert_eq!(placed.excess.to_bits(), 0, "{seed}");
        let taken: usize = placed.units.iter().map(|units| *units as usize).sum();
        assert!(taken <= units, "{seed}: {taken} of {units}");
        with_units_left += u64::from(taken < units);
        let misses: f64 = placed
            .units
            .iter()
            .zip(&choices)
            .map(|(units, choice)| choice.misses[(units - choice.least) as usize])
            .sum();
        assert!((misses - placed.misses).abs() <= tolerance, "{seed}");
    }
    assert!(with_units_left > 0, "units that save nothing are nobody's");
}

#[test]
fn what_does_not_fit_gets_the_fewest() {
    let choices = vec![Choice { least: 5, misses: vec![9.0, 3.0] }; 2];
    assert_eq!(place(&choices, 9).units, [5, 5]);
    assert_eq!(least_misses(&choices, 9), None);
    assert_eq!(place(&[], 7).units, []);
}

#[test]
fn a_search_that_is_cut_short_says_how_far_it_may_be_off() {
    let mut cut = 0;
    for seed in 0..1_000 {
        let mut rng = Rng::with_seed(seed);
        let choices = any_choices(&mut rng);
        let units: usize = choices.iter().map(|c| c.least as usize + c.misses.len() / 2).sum();
        let placed = place_within(&choices, units as u64, rng.usize(0..100));
        let reference = least_misses(&choices, units).unwrap();
        let tolerance = 1e-9 * reference.max(1.0);
        assert!(placed.misses >= reference - tolerance, "{seed}");
        assert!(placed.misses <= reference + placed.excess + tolerance, "{seed}: {placed:?}");
        let worst = choices.iter().map(|c| c.misses[0] - c.misses[c.misses.len() - 1]);
        assert!(placed.excess <= worst.fold(0.0, f64::max), "{seed}: more than one curve's own");
        cut += u64::from(placed.excess > 0.0);
    }
    assert!(cut > 50, "only {cut} were cut short");
}
