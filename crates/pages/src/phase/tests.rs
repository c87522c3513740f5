use super::*;

const MIB: f64 = (1 << 20) as f64;

/// A program of phases: each has its length in intervals, its working set and its event level.
struct PhasedProgram {
    phases: Vec<(usize, f64, f64)>,
    /// Relative noise of the working set and of the event.
    noise: (f64, f64),
}

impl PhasedProgram {
    /// A random program. Half of the programs repeat themselves; some changes do not show in the
    /// event, and some events change for no reason.
    fn random(random: &mut fastrand::Rng) -> Self {
        let base = 30.0 * MIB * 20.0_f64.powf(random.f64());
        let size = |r: &mut fastrand::Rng| base * 3.0_f64.powf(r.f64());
        let long = [12, 40, 100, 200][random.usize(..4)];
        let mut phases = Vec::new();
        let (mut now, mut event) = (size(random), 1e6);
        for _ in 0..[1, 3, 6][random.usize(..3)] {
            let length = random.usize(long / 2..=long * 3 / 2);
            let change = random.f64();
            if change > 0.05 {
                now = size(random);
            }
            if change < 0.95 {
                event = 1e6 * 10.0_f64.powf(random.f64());
            }
            phases.push((length, now, event));
        }
        let noise =
            ([0.002, 0.01, 0.02, 0.04][random.usize(..4)], [0.01, 0.03, 0.1][random.usize(..3)]);
        Self { phases, noise }
    }

    fn trace(&self, length: usize, random: &mut fastrand::Rng) -> Vec<Sample> {
        let mut normal = |spread: f64| {
            let sum: f64 = (0..12).map(|_| random.f64()).sum();
            1.0 + spread * (sum - 6.0)
        };
        let all = self.phases.iter().cycle().flat_map(|p| std::iter::repeat_n(p, p.0));
        all.take(length)
            .map(|&(_, size, event)| Sample {
                working_set: size * normal(self.noise.0),
                event: event * normal(self.noise.1),
            })
            .collect()
    }
}

/// Mean up ratio and error over many random programs.
fn programs(judgement: Judgement) -> (f64, f64) {
    let (mut up, mut error) = (0.0, 0.0);
    for seed in 0..60 {
        let mut random = fastrand::Rng::with_seed(seed);
        let trace = PhasedProgram::random(&mut random).trace(400, &mut random);
        let replay = replay(judgement, &trace);
        up += replay.up_ratio / 60.0;
        error += replay.mean_relative_error / 60.0;
    }
    println!("{judgement:?}: up {:.1} %, error {:.1} %", 100.0 * up, 100.0 * error);
    (up, error)
}

fn steady(length: usize) -> Vec<Sample> {
    vec![Sample { working_set: 100.0 * MIB, event: 1e6 }; length]
}

#[test]
fn the_anchored_detector_meets_the_targets_and_beats_both_of_the_papers() {
    for threshold in [0.05, 0.10, 0.20, 0.30] {
        programs(Judgement::Fixed(threshold));
    }
    let (paper_up, paper_error) = programs(Judgement::Adaptive);
    let (up, error) = programs(Judgement::Anchored);
    assert!(up <= 0.143 && error <= 0.042);
    assert!(up <= paper_up && error <= paper_error);
}

#[test]
fn in_a_steady_phase_tracking_is_on_for_checks_only() {
    for judgement in [Judgement::Adaptive, Judgement::Anchored] {
        let replay = replay(judgement, &steady(500));
        assert!(replay.up_ratio < 0.06, "{judgement:?}: {}", replay.up_ratio);
        assert_eq!(replay.mean_relative_error, 0.0);
    }
}

#[test]
fn a_change_that_the_event_shows_wakes_tracking_in_the_next_interval() {
    for judgement in [Judgement::Fixed(0.2), Judgement::Adaptive, Judgement::Anchored] {
        let mut trace = steady(60);
        trace[33..].fill(Sample { working_set: 300.0 * MIB, event: 5e6 });
        let replay = replay(judgement, &trace);
        assert!(replay.intervals[34].0, "{judgement:?}");
        assert!((replay.intervals[40].1 - 300.0 * MIB).abs() < MIB, "{judgement:?}");
    }
}

#[test]
fn a_change_that_the_event_hides_is_found_by_a_check() {
    let mut trace = steady(100);
    trace[30..].iter_mut().for_each(|s| s.working_set = 50.0 * MIB);
    for (judgement, found) in [(Judgement::Adaptive, 52), (Judgement::Anchored, 62)] {
        let replay = replay(judgement, &trace);
        assert!((replay.intervals[found].1 - 50.0 * MIB).abs() < MIB);
    }
}

#[test]
fn an_event_that_creeps_away_is_seen_by_the_anchor_and_not_by_a_moving_mean() {
    let trace: Vec<Sample> = (0..24)
        .map(|i| {
            let grown = 1.03_f64.powi((i - 8).max(0));
            Sample { working_set: 100.0 * MIB * grown, event: 1e6 * grown }
        })
        .collect();
    let error = |judgement| replay(judgement, &trace).mean_relative_error;
    assert!(error(Judgement::Anchored) < 0.05);
    assert!(error(Judgement::Anchored) < 0.5 * error(Judgement::Fixed(0.2)));
}

#[test]
fn a_working_set_that_never_stands_still_is_not_tracked_for_ever() {
    let trace: Vec<Sample> = (0..400_u32)
        .map(|i| Sample { working_set: f64::from(100 + 60 * (i % 3)) * MIB, event: 1e6 })
        .collect();
    assert!(replay(Judgement::Anchored, &trace).up_ratio < 0.45);
}

#[test]
fn changes_below_a_megabyte_are_none() {
    let trace: Vec<Sample> = (0..100_u32)
        .map(|i| Sample { working_set: f64::from(20 + i % 2) * 0.1 * MIB, event: 1e6 })
        .collect();
    for judgement in [Judgement::Fixed(0.2), Judgement::Adaptive, Judgement::Anchored] {
        assert!(replay(judgement, &trace).up_ratio < 0.1, "{judgement:?}");
    }
}

#[test]
fn an_empty_trace_and_an_empty_guest_are_no_trouble() {
    let nothing = vec![Sample { working_set: 0.0, event: 0.0 }; 50];
    for judgement in [Judgement::Fixed(0.05), Judgement::Adaptive, Judgement::Anchored] {
        assert_eq!(replay(judgement, &[]).up_ratio, 0.0);
        assert!(replay(judgement, &nothing).mean_relative_error.abs() < 1e-9);
    }
}
