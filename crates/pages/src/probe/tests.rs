#![expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small test figures")]

use super::simulation::*;
use super::*;

/// The guests of the table, each with its name.
fn guests(granules: usize) -> Vec<(&'static str, Box<dyn AccessPattern>)> {
    let part = |share: f64| (granules as f64 * share) as usize;
    let steps = [0.1, 0.5, 0.3, 0.9, 0.2, 0.7, 0.4, 0.15, 0.8, 0.1].map(part).to_vec();
    let gentle = [0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.7, 0.55, 0.4, 0.25].map(part).to_vec();
    let array = |sizes, every_s| Box::new(RandomArray { sizes, every_s });
    let sweep = |share, period_s, hot| Box::new(Sweep { size: part(share), period_s, hot });
    let zipf = |exponent, top| Box::new(Rates::zipf(granules, exponent, top));
    let rates = |rate: &dyn Fn(usize) -> f64| Box::new(Rates::new((0..granules).map(rate)));
    let two_level = |i| {
        if i < part(0.1) {
            1000.0
        } else if i < part(0.5) {
            0.4
        } else {
            0.005
        }
    };
    let idle = |i| match i {
        0..30 => 20.0,
        30..180 => 0.5,
        180..480 => 0.05,
        _ => 0.0,
    };
    let phases: Vec<(f64, Box<dyn AccessPattern>)> = vec![
        (40.0, zipf(0.9, 1000.0)),
        (30.0, array(vec![part(0.6)], 1.0)),
        (35.0, sweep(0.3, 3.0, 50)),
        (25.0, rates(&|i| if i < part(0.125) { 30.0 } else { 0.02 })),
    ];
    vec![
        ("array, wild steps of 45 s", array(steps, 45.0)),
        ("array, stairs of 30 s", array(gentle, 30.0)),
        ("sweep, 0.5 s", sweep(0.6, 0.5, 10)),
        ("sweep, 2 s", sweep(0.6, 2.0, 10)),
        ("sweep, 5 s", sweep(0.4, 5.0, 5)),
        ("sweep, 20 s", sweep(0.6, 20.0, 2)),
        ("Zipf 0.6, slow", zipf(0.6, 100.0)),
        ("Zipf 0.8", zipf(0.8, 1000.0)),
        ("Zipf 1.0", zipf(1.0, 3000.0)),
        ("uniform, once a second", rates(&|i| if i < part(0.5) { 1.0 } else { 0.0 })),
        ("hot, warm and cold", rates(&two_level)),
        ("idle, housekeeping", rates(&idle)),
        ("phases", Box::new(Phases(phases))),
    ]
}

/// Prints the table of one setup; returns mean and worst error, and mean error of the curve.
fn table(setup: Setup) -> (f64, f64, f64) {
    println!("{} granules, {} probes/s", setup.granules, setup.probes_per_s);
    println!(
        "{:<26} {:>7} {:>7} {:>7} {:>7} {:>7}",
        "guest", "error", "worst", "known", "MAE", "traps/s"
    );
    let (mut mean, mut worst, mut curve) = (0.0, 0.0_f64, 0.0);
    let guests = guests(setup.granules);
    let count = guests.len() as f64;
    for (name, mut guest) in guests {
        let r = run(guest.as_mut(), setup);
        println!(
            "{name:<26} {:>7.3} {:>7.3} {:>7.3} {:>7.3} {:>7.0}",
            r.error_mean, r.error_worst, r.known_error_mean, r.curve_error, r.traps_per_s
        );
        mean += r.error_mean / count;
        worst = worst.max(r.error_mean);
        curve += r.curve_error / count;
    }
    println!("mean error {mean:.3}, worst guest {worst:.3}, mean MAE {curve:.3}");
    (mean, worst, curve)
}

#[test]
fn probes_meet_the_targets_over_all_guests_together() {
    let setup = Setup { granules: 1500, probes_per_s: 200.0, seconds: 150.0, seed: 5 };
    let (mean, worst, curve) = table(setup);
    assert!(mean <= 0.03 && worst <= 0.08 && curve <= 0.03);
}

/// A guest of `granules`, `hot` of which are touched all the time, from `from_ms` to `to_ms`.
fn keep_touching(tracker: &mut Tracker, hot: u32, from_ms: u64, to_ms: u64) {
    for ms in (from_ms..to_ms).step_by(20) {
        for granule in tracker.tick(Time(ms)).to_vec() {
            tracker.revoked(granule, Time(ms));
            if granule < hot {
                tracker.touched(granule, Time(ms + 1));
            }
        }
    }
}

fn working_set(tracker: &Tracker) -> f64 {
    tracker.reading().unwrap().working_set
}

#[test]
fn probes_meet_the_targets_on_guests_of_a_few_kinds() {
    let setup = Setup { granules: 600, probes_per_s: 200.0, seconds: 80.0, seed: 1 };
    for name in ["array, stairs of 30 s", "sweep, 5 s", "Zipf 0.8", "hot, warm and cold"] {
        let (_, mut guest) = guests(setup.granules).into_iter().find(|g| g.0 == name).unwrap();
        let report = run(guest.as_mut(), setup);
        assert!(report.error_mean < 0.08, "{name}: {}", report.error_mean);
        assert!(report.curve_error < 0.08, "{name}: {}", report.curve_error);
        assert!(report.known_error_mean < 0.06, "{name}: {}", report.known_error_mean);
        assert!(report.traps_per_s < 205.0, "{name}: {}", report.traps_per_s);
        assert!(report.first_s < 1.5, "{name}: {}", report.first_s);
    }
}

#[test]
fn growth_and_shrinkage_are_seen_within_seconds() {
    let mut tracker = Tracker::new(3200, MAX_TRACKED, budget(200.0), 1, Time(0));
    keep_touching(&mut tracker, 400, 0, 40_000);
    assert!((working_set(&tracker) - 400.0).abs() < 15.0);
    for granule in 400..2000 {
        tracker.touched(granule, Time(40_000));
    }
    keep_touching(&mut tracker, 2000, 40_000, 43_000);
    assert!(working_set(&tracker) > 1800.0, "{}", working_set(&tracker));
    keep_touching(&mut tracker, 2000, 43_000, 60_000);
    keep_touching(&mut tracker, 400, 60_000, 66_000);
    assert!(working_set(&tracker) < 500.0, "{}", working_set(&tracker));
}

#[test]
fn granules_that_cannot_be_revoked_count_as_what_the_others_are() {
    let mut tracker = Tracker::new(1000, MAX_TRACKED, budget(200.0), 1, Time(0));
    for ms in (0..60_000).step_by(20) {
        for granule in tracker.tick(Time(ms)).to_vec() {
            if granule < 50 {
                continue; // Pinned: the shim leaves it.
            }
            tracker.revoked(granule, Time(ms));
            if granule < 300 {
                tracker.touched(granule, Time(ms));
            }
        }
    }
    assert!((working_set(&tracker) - 300.0).abs() < 30.0, "{}", working_set(&tracker));
}

#[test]
fn a_trap_before_its_acknowledgement_is_a_touch_at_once() {
    let mut tracker = Tracker::new(100, MAX_TRACKED, budget(200.0), 1, Time(0));
    tracker.tick(Time(0));
    let granule = tracker.tick(Time(100))[0];
    tracker.touched(granule, Time(101));
    tracker.revoked(granule, Time(102));
    assert_eq!(tracker.revoked_count(), u32::try_from(tracker.asked.len()).unwrap() - 1);
}

#[test]
fn lost_traps_are_made_good_from_the_page_states() {
    let mut tracker = Tracker::new(1000, MAX_TRACKED, budget(200.0), 1, Time(0));
    keep_touching(&mut tracker, 300, 0, 20_000);
    assert!(tracker.revoked_count() > 500);
    tracker.resync(Time(20_000), |granule| granule >= 900);
    assert!(tracker.revoked_count() <= 100);
    keep_touching(&mut tracker, 900, 20_000, 40_000);
    assert!((working_set(&tracker) - 900.0).abs() < 30.0, "{}", working_set(&tracker));
}

#[test]
fn giving_everything_back_is_no_touch() {
    let mut tracker = Tracker::new(1000, MAX_TRACKED, budget(200.0), 1, Time(0));
    keep_touching(&mut tracker, 300, 0, 20_000);
    tracker.given_back(Time(20_000));
    assert_eq!(tracker.revoked_count(), 0);
    keep_touching(&mut tracker, 300, 20_020, 28_000);
    assert!((working_set(&tracker) - 300.0).abs() < 50.0, "{}", working_set(&tracker));
}

#[test]
fn calling_granules_back_is_no_touch() {
    let mut tracker = Tracker::new(100, MAX_TRACKED, Governor::new(0.01), 1, Time(0));
    keep_touching(&mut tracker, 10, 0, 30_000);
    let before = working_set(&tracker);
    let idle: Vec<u32> = (50..70).collect();
    for granule in idle {
        tracker.called_back(granule, Time(30_050));
        tracker.called_back(granule, Time(30_050));
    }
    assert_eq!(tracker.revoked_count(), 70, "ninety are idle, and twenty are not revoked now");
    tracker.called_back(u32::MAX, Time(30_050));
    keep_touching(&mut tracker, 10, 30_100, 40_000);
    assert!((working_set(&tracker) - before).abs() < 2.0, "{}", working_set(&tracker));
}

#[test]
fn a_large_guest_is_seen_through_a_part_of_its_granules() {
    let mut tracker = Tracker::new(1 << 20, MAX_TRACKED, budget(500.0), 1, Time(0));
    keep_touching(&mut tracker, 1 << 18, 0, 30_000);
    let reading = tracker.reading().unwrap();
    let share = reading.working_set / f64::from(1 << 18);
    assert!((0.9..1.1).contains(&share), "{share}");
    assert!((0.9..1.1).contains(&(reading.references_per_s / f64::from(10 << 18))));
    assert!(tracker.revoked_count() <= MAX_TRACKED);
}

#[test]
fn no_more_is_revoked_than_may_be_and_an_idle_guest_is_seen_all_the_same() {
    let mut tracker = Tracker::new(8_192, 512, budget(500.0), 1, Time(0));
    keep_touching(&mut tracker, 4_096, 0, 60_000);
    assert!(tracker.revoked_count() <= 512);
    let share = tracker.reading().unwrap().working_set / 4_096.0;
    assert!((0.85..1.15).contains(&share), "{share}");
}

#[test]
fn guests_of_one_granule_and_of_none_are_no_trouble() {
    for granules in [0, 1, 2] {
        let mut tracker = Tracker::new(granules, MAX_TRACKED, budget(200.0), 1, Time(0));
        keep_touching(&mut tracker, 2, 0, 10_000);
        assert!(tracker.reading().is_none_or(|r| r.working_set <= f64::from(granules)));
    }
}

#[test]
fn numbers_and_moments_that_cannot_be_are_harmless() {
    let mut tracker = Tracker::new(100, MAX_TRACKED, budget(200.0), 1, Time(1_000));
    keep_touching(&mut tracker, 50, 1_000, 5_000);
    tracker.touched(u32::MAX, Time(5_000));
    tracker.revoked(100, Time(5_000));
    tracker.touched(99, Time(0));
    tracker.touched(98, Time(u64::MAX));
    tracker.tick(Time(0));
    keep_touching(&mut tracker, 50, 5_000, 9_000);
    assert!((working_set(&tracker) - 50.0).abs() < 10.0, "{}", working_set(&tracker));
}

#[test]
fn sentinels_are_left_alone_and_the_others_stand_for_them() {
    let mut tracker = Tracker::new(1000, MAX_TRACKED, budget(200.0), 1, Time(0));
    let sentinels = Sentinels::new(1000, 100, Millis(5_000), 3, Time(0));
    tracker.exclude(sentinels.granules());
    for ms in (0..20_000).step_by(20) {
        for granule in tracker.tick(Time(ms)).to_vec() {
            assert!(!sentinels.granules().contains(&granule));
            tracker.revoked(granule, Time(ms));
            if granule < 400 {
                tracker.touched(granule, Time(ms));
            }
        }
    }
    assert!((working_set(&tracker) - 400.0).abs() < 20.0, "{}", working_set(&tracker));
}

#[test]
fn an_idle_guest_costs_nothing_once_it_is_revoked() {
    let mut tracker = Tracker::new(1000, MAX_TRACKED, budget(200.0), 1, Time(0));
    keep_touching(&mut tracker, 0, 0, 10_000);
    assert_eq!(tracker.revoked_count(), 1000);
    assert!(tracker.tick(Time(10_000)).is_empty());
    keep_touching(&mut tracker, 0, 10_000, 60_000);
    let reading = tracker.reading().unwrap();
    assert_eq!((reading.working_set, reading.references_per_s), (0.0, 0.0));
}

#[test]
fn twenty_bytes_per_tracked_granule() {
    assert_eq!(Granules::BYTES, 20);
}
