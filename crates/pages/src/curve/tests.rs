use model::{Millis, Time};
use proptest::prelude::*;

use super::*;

fn curve(points: &[(f64, f64)]) -> MissRatioCurve {
    let points = points.iter().map(|&(size, ratio)| Point { size, ratio }).collect();
    MissRatioCurve::new(points).unwrap()
}

fn histogram(distances: &[u64]) -> Histogram {
    let mut histogram = Histogram::default();
    distances.iter().for_each(|distance| histogram.record(Some(*distance)));
    histogram
}

proptest! {
    #[test]
    fn a_curve_is_the_share_of_larger_distances(
        distances in proptest::collection::vec(1_u64..3000, 1..200),
        firsts in 0_usize..20,
        size in 0_u64..3000,
    ) {
        let mut histogram = histogram(&distances);
        (0..firsts).for_each(|_| histogram.record(None));
        let larger = distances.iter().filter(|distance| **distance > size).count();
        let misses = (larger + firsts) as f64 / (distances.len() + firsts) as f64;
        prop_assert!((histogram.curve().miss_ratio(size as f64) - misses).abs() < 1e-9);
    }

    #[test]
    fn large_distances_are_known_to_a_2048th(distance in 1_u64..u64::MAX / 2) {
        let curve = histogram(&[distance]).curve();
        let (distance, part) = (distance as f64, distance as f64 / 2048.0);
        prop_assert_eq!(curve.miss_ratio(distance - part - 1.0), 1.0);
        prop_assert_eq!(curve.miss_ratio(distance + part + 1.0), 0.0);
    }

    #[test]
    fn a_histogram_may_tell_all_distances_apart(distance in 1_u64..100_000) {
        let mut histogram = Histogram::exact_to(100_000);
        histogram.record(Some(distance));
        prop_assert_eq!(histogram.curve().least_size(0.0), Some(distance as f64));
    }

    #[test]
    fn the_least_size_is_where_the_ratio_becomes_tolerable(
        distances in proptest::collection::vec(1_u64..100_000, 1..300), tolerable in 0.0..1.0
    ) {
        let curve = histogram(&distances).curve();
        let size = curve.least_size(tolerable).unwrap();
        prop_assert!(curve.miss_ratio(size) <= tolerable + 1e-9);
        prop_assert!(size == 0.0 || curve.miss_ratio(size * 0.999 - 1e-3) >= tolerable - 1e-9);
    }

    #[test]
    fn few_points_stay_near_the_curve(
        distances in proptest::collection::vec(1_u64..1_000_000, 2..400), most in 2_usize..100
    ) {
        let curve = histogram(&distances).curve();
        let few = curve.resampled(most);
        prop_assert!(few.points().len() <= most.max(2));
        prop_assert!(MissRatioCurve::new(few.points().to_vec()).is_ok());
        prop_assert_eq!((few.end(), few.floor()), (curve.end(), curve.floor()));
        let error = curve.mean_absolute_error(&few, curve.end());
        prop_assert!(error <= 2.0 / (most - 1) as f64, "{}", error);
    }

    #[test]
    fn the_error_of_two_curves_is_what_sampling_them_finely_finds(
        left in proptest::collection::vec(1_u64..50, 1..30),
        right in proptest::collection::vec(1_u64..50, 1..30),
    ) {
        let (left, right) = (histogram(&left).curve(), histogram(&right).curve());
        let difference = |i: u32| {
            let size = (f64::from(i) + 0.5) / 100.0;
            (left.miss_ratio(size) - right.miss_ratio(size)).abs()
        };
        let sampled = (0..6000).map(difference).sum::<f64>() / 6000.0;
        prop_assert!((left.mean_absolute_error(&right, 60.0) - sampled).abs() < 1e-3);
    }

    #[test]
    fn ageing_counts_as_the_formula_says(
        steps in proptest::collection::vec((1_u64..100, 0_u64..5_000), 1..200), size in 0_u64..100
    ) {
        let mut aged = AgedHistogram::new(Histogram::default(), Millis(1000), Time(7));
        let (mut now, mut seen) = (Time(7), Vec::new());
        for (distance, after) in steps {
            now = now.after(Millis(after));
            aged.record(Some(distance), now);
            seen.push((distance, now));
        }
        let weight = |at: Time| (-(now.since(at).0 as f64) / 1000.0).exp();
        let total: f64 = seen.iter().map(|(_, at)| weight(*at)).sum();
        let misses = seen.iter().filter(|(distance, _)| *distance > size);
        let misses: f64 = misses.map(|(_, at)| weight(*at)).sum();
        prop_assert!((aged.references(now) - total).abs() < 1e-6 * total);
        prop_assert!((aged.curve().miss_ratio(size as f64) - misses / total).abs() < 1e-6);
    }
}

#[test]
fn first_references_miss_at_every_size() {
    let mut histogram = histogram(&[1, 2, 2]);
    histogram.record(None);
    let curve = histogram.curve();
    assert_eq!((curve.floor(), curve.end()), (0.25, 2.0));
    assert_eq!((curve.miss_ratio(0.0), curve.miss_ratio(1.0)), (1.0, 0.75));
    assert_eq!((curve.least_size(0.3), curve.least_size(0.2)), (Some(1.9), None));
    assert_eq!(curve.misses(2.0, 1000.0), 250.0);
}

#[test]
fn nothing_counted_means_that_everything_may_miss() {
    let curve = Histogram::default().curve();
    assert_eq!((curve.miss_ratio(1e9), curve.least_size(0.05)), (1.0, None));
}

#[test]
fn sizes_scale_to_bytes() {
    let curve = histogram(&[10]).curve().scaled(4096.0);
    assert_eq!(curve.least_size(0.0), Some(40_960.0));
}

#[test]
fn points_that_are_no_curve_are_refused_with_their_place() {
    let error = |points: &[(f64, f64)]| {
        let points = points.iter().map(|&(size, ratio)| Point { size, ratio }).collect();
        MissRatioCurve::new(points).unwrap_err()
    };
    assert_eq!(error(&[]), CurveError::Start(None));
    assert_eq!(error(&[(1.0, 1.0)]), CurveError::Start(Some(1.0)));
    assert_eq!(error(&[(0.0, 1.0), (0.0, 0.5)]), CurveError::Size { index: 1, size: 0.0 });
    assert_eq!(error(&[(0.0, 0.5), (1.0, 0.6)]), CurveError::Ratio { index: 1, ratio: 0.6 });
    assert!(matches!(error(&[(0.0, f64::NAN)]), CurveError::Ratio { index: 0, .. }));
    assert!(matches!(error(&[(0.0, 1.0), (f64::NAN, 0.5)]), CurveError::Size { index: 1, .. }));
}

#[test]
fn the_rate_is_right_from_the_first_second_on() {
    let mut aged = AgedHistogram::new(Histogram::default(), Millis::secs(60), Time(0));
    for ms in 0..300_000 {
        aged.record(Some(1), Time(ms));
        if ms == 1_000 || ms == 299_000 {
            let rate = aged.references_per_second(Time(ms));
            assert!((rate - 1000.0).abs() < 20.0, "{rate}");
        }
    }
    let silent = aged.references_per_second(Time(360_000));
    assert!((silent / 1000.0 - (-1.0_f64).exp()).abs() < 0.02, "{silent}");
}

#[test]
fn a_set_that_shrank_is_forgotten() {
    let mut aged = AgedHistogram::new(Histogram::default(), Millis::secs(10), Time(0));
    (0..60_000).for_each(|ms| aged.record(Some(1000), Time(ms)));
    assert_eq!(aged.curve().least_size(0.05).map(f64::ceil), Some(1000.0));
    (60_000..95_000).for_each(|ms| aged.record(Some(100), Time(ms)));
    assert_eq!(aged.curve().least_size(0.05).map(f64::ceil), Some(100.0));
}

#[test]
fn a_curve_of_one_point_can_be_read_everywhere() {
    let curve = curve(&[(0.0, 0.4)]);
    assert_eq!((curve.miss_ratio(0.0), curve.miss_ratio(9.0)), (0.4, 0.4));
    assert_eq!((curve.least_size(0.4), curve.least_size(0.3)), (Some(0.0), None));
    assert_eq!(curve.resampled(2), curve);
}
