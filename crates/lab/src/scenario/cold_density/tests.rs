//! Figures of invented courses, without guests.

use super::*;

#[test]
fn what_was_due_and_not_done_is_lost() {
    assert!((lost(150.0, 10.0, 20.0) - 0.25).abs() < 1e-9);
    assert!(lost(201.0, 10.0, 20.0).abs() < 1e-9);
    assert!((lost(0.0, 0.0, 20.0) - 1.0).abs() < 1e-9);
}

fn stage(guests: usize, loss: f64) -> Stage {
    let look = Look { used: Bytes::ZERO, compressed: Bytes::ZERO };
    let (worst, of_kinds) = (loss, [loss; MIX.len()]);
    Stage { guests, worst, loss, of_kinds, cpu_busy: 0.5, look }
}

/// A course that carried this number of guests, and lost too much with one more.
fn course(carried: usize) -> DensityRun {
    let mut stages: Vec<Stage> = (FIRST..=carried).map(|guests| stage(guests, 0.01)).collect();
    stages.push(stage(carried + 1, 0.4));
    DensityRun { stages, ..DensityRun::default() }
}

/// By [`WAYS`]: Overbook carries more than twice what plain does, and two more than the next.
fn good() -> Vec<(&'static str, DensityRun)> {
    WAYS.iter().map(|(name, _)| *name).zip([4, 12, 10, 8, 9].map(course)).collect()
}

fn of(courses: Vec<(&'static str, DensityRun)>) -> Figures {
    let courses = Arms(vec![courses]);
    figures(Figures::new(SCENARIO.name, "m".into(), 1, 1), &courses, &stage(13, 0.0))
}

#[test]
fn density_is_overbook_over_plain_and_more_is_over_the_best_of_the_others() {
    let figures = of(good());
    figures.assert_near(&[("density", 3.0), ("more_than_others", 2.0)]);
    assert!(figures.passed(), "{}", figures.to_table());
}

#[test]
fn a_peer_that_carries_as_many_or_the_reverse_ratio_fails() {
    for peer in 2..WAYS.len() {
        let mut courses = good();
        courses[peer].1 = course(12);
        assert!(!of(courses).met("more_than_others"), "{peer}");
    }
    let mut courses = good();
    (courses[0].1, courses[1].1) = (course(12), course(4));
    assert!(!of(courses).met("density"));
}

#[test]
fn a_course_that_is_missing_fails() {
    for (missing, (name, _)) in WAYS.iter().enumerate() {
        let mut courses = good();
        courses.remove(missing);
        assert!(!of(courses).passed(), "without {name}");
    }
}

#[test]
fn losses_and_bytes_that_are_no_number_fail() {
    let mut courses = good();
    courses[1].1.stages.iter_mut().for_each(|stage| stage.worst = f64::NAN);
    assert!(!of(courses).met("density"));
    for bad_bytes in [f64::NAN, 1.0] {
        let mut courses = good();
        courses[3].1.bad_bytes = bad_bytes;
        assert!(!of(courses).met("bad_bytes"));
    }
}

#[test]
fn the_middle_window_counts_and_the_guest_that_loses_most() {
    let window = |worst: f64| Stage { worst, ..stage(5, 0.01) };
    let of = |losses: [f64; WINDOWS]| middle(losses.map(window).into());
    assert!(!of([0.0, 0.2, 0.3]).is_carried());
    assert!(of([0.3, 0.04, 0.0]).is_carried());
    assert!(of([0.3, f64::NAN, 0.0]).worst > LOSS);
    assert!(!of([f64::NAN, 0.01, f64::NAN]).is_carried());
}
