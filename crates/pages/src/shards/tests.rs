use super::*;

/// References to `ids` ids; small ids are the hot ones.
fn trace(ids: u64, length: usize) -> Vec<u64> {
    let mut random = fastrand::Rng::with_seed(5);
    let mut reference = || {
        let most = random.u64(0..ids);
        random.u64(0..=most).wrapping_mul(0x9e37_79b9)
    };
    (0..length).map(|_| reference()).collect()
}

fn exact(trace: &[u64]) -> MissRatioCurve {
    let (mut stack, mut histogram) =
        (HashedStack::<crate::lru::Bitmap>::new(), Histogram::default());
    stack.touch_all(trace, |distance| histogram.record(distance));
    histogram.curve()
}

#[test]
fn a_full_sample_is_exact() {
    let trace = trace(3_000, 40_000);
    let mut shards = Shards::fixed_rate(1.0).unwrap();
    shards.touch_all(&trace);
    let exact = exact(&trace);
    assert!(shards.curve().mean_absolute_error(&exact, exact.end()) < 1e-9);
    assert!((shards.distinct() - shards.stack.len() as f64).abs() < 0.5);
}

#[test]
fn a_tenth_of_the_ids_tells_the_curve() {
    let trace = trace(50_000, 400_000);
    let mut shards = Shards::fixed_rate(0.1).unwrap();
    shards.touch_all(&trace);
    let exact = exact(&trace);
    let error = shards.curve().mean_absolute_error(&exact, exact.end());
    assert!(error < 0.01, "{error}");
    let distinct = std::collections::HashSet::<&u64>::from_iter(&trace).len() as f64;
    assert!(
        (shards.distinct() / distinct - 1.0).abs() < 0.05,
        "{} of {distinct}",
        shards.distinct()
    );
    assert_eq!(shards.references(), 400_000);
}

#[test]
fn a_sample_of_fixed_size_keeps_its_size_and_tells_the_curve() {
    let trace = trace(50_000, 400_000);
    let mut shards = Shards::fixed_size(4_000).unwrap();
    for batch in trace.chunks(777) {
        shards.touch_all(batch);
        assert!(shards.stack.len() <= 4_000);
    }
    assert!(shards.rate() < 0.1, "{}", shards.rate());
    assert!(shards.bytes() < 4_000 * 60, "{}", shards.bytes());
    let exact = exact(&trace);
    let error = shards.curve().mean_absolute_error(&exact, exact.end());
    assert!(error < 0.015, "{error}");
}

#[test]
fn a_hot_id_outside_the_sample_is_counted_all_the_same() {
    let hot = (0..).find(|id| hash(*id) > threshold_of(0.1)).unwrap();
    let trace: Vec<u64> = (0..400_000).map(|i| if i % 2 == 0 { hot } else { i % 40_000 }).collect();
    let mut shards = Shards::fixed_rate(0.1).unwrap();
    shards.touch_all(&trace);
    let exact = exact(&trace);
    let error = shards.curve().mean_absolute_error(&exact, exact.end());
    // Half of the references are the hot id's: without the correction the error is near a half.
    assert!(error < 0.05, "{error}");
}

#[test]
fn rates_and_sizes_that_tell_nothing_are_refused() {
    for rate in [0.0, -1.0, 1.1, f64::NAN] {
        assert!(Shards::fixed_rate(rate).is_err(), "{rate}");
    }
    let error = Shards::fixed_size(3).unwrap_err().to_string();
    assert_eq!(error, "sample of 3 ids: it must hold at least 16");
}
