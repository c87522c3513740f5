//! Synthetic guests, the exact curve of their touches, and the error of the probes.
//!
//! A guest moves in steps of 10 ms, ten to a tick, so a revoked granule is touched within its
//! step. The exact curve comes from the exact stack, which gets the touched granules tick by tick
//! and ages in the same way.

#![expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small test figures")]

use super::*;
use crate::{
    curve::{AgedHistogram, Histogram},
    lru::{DenseStack, StackDistance},
};

const STEP_MS: u64 = 10;
const STEP_S: f64 = 0.01;
/// Errors count from this time on, once a second.
const WARM_S: f64 = 30.0;

/// A guest's pattern of touches.
pub(super) trait AccessPattern {
    /// Marks the granules touched in the step that begins at `at_s`.
    fn step(&mut self, at_s: f64, random: &mut fastrand::Rng, touched: &mut [bool]);

    /// The size of its set, where it is known by construction.
    fn known(&self, _at_s: f64) -> Option<f64> {
        None
    }
}

/// A uniformly random pattern over a set whose size changes (the paper's RandomArray).
pub(super) struct RandomArray {
    pub(super) sizes: Vec<usize>,
    pub(super) every_s: f64,
}

impl RandomArray {
    fn size(&self, at_s: f64) -> usize {
        self.sizes[(at_s / self.every_s) as usize % self.sizes.len()]
    }
}

impl AccessPattern for RandomArray {
    fn step(&mut self, at_s: f64, _: &mut fastrand::Rng, touched: &mut [bool]) {
        touched[..self.size(at_s)].fill(true);
    }

    fn known(&self, at_s: f64) -> Option<f64> {
        Some(self.size(at_s) as f64)
    }
}

/// A loop over an array, with a few granules that are always in use.
pub(super) struct Sweep {
    pub(super) size: usize,
    pub(super) period_s: f64,
    pub(super) hot: usize,
}

impl AccessPattern for Sweep {
    fn step(&mut self, at_s: f64, _: &mut fastrand::Rng, touched: &mut [bool]) {
        let place = |at_s: f64| (at_s / self.period_s * self.size as f64) as usize;
        for i in place(at_s)..place(at_s + STEP_S) {
            touched[self.hot + i % self.size] = true;
        }
        touched[..self.hot].fill(true);
    }
}

/// Independent touches, each granule at its own rate.
pub(super) struct Rates {
    in_a_step: Vec<f32>,
}

impl Rates {
    pub(super) fn new(per_s: impl Iterator<Item = f64>) -> Self {
        Self { in_a_step: per_s.map(|r| -f64::exp_m1(-r * STEP_S) as f32).collect() }
    }

    /// Zipf: the i-th granule is touched `top / i^exponent` times a second.
    pub(super) fn zipf(granules: usize, exponent: f64, top: f64) -> Self {
        Self::new((1..=granules).map(|i| top / (i as f64).powf(exponent)))
    }
}

impl AccessPattern for Rates {
    fn step(&mut self, _: f64, random: &mut fastrand::Rng, touched: &mut [bool]) {
        for (chance, touched) in self.in_a_step.iter().zip(touched) {
            *touched |= *chance > 0.0 && (*chance >= 1.0 || random.f32() < *chance);
        }
    }
}

/// One guest after another, each for the given number of seconds, in rotation.
pub(super) struct Phases(pub(super) Vec<(f64, Box<dyn AccessPattern>)>);

impl AccessPattern for Phases {
    fn step(&mut self, at_s: f64, random: &mut fastrand::Rng, touched: &mut [bool]) {
        let mut left = at_s % self.0.iter().map(|phase| phase.0).sum::<f64>();
        for (length, guest) in &mut self.0 {
            if left < *length {
                return guest.step(at_s, random, touched);
            }
            left -= *length;
        }
    }
}

/// The exact curve by the definition in `probe`.
struct Exact {
    stack: DenseStack,
    aged: AgedHistogram,
}

impl Exact {
    fn new(granules: usize) -> Self {
        let largest = Histogram::exact_to(granules as u64);
        Self {
            stack: DenseStack::new(granules),
            aged: AgedHistogram::new(largest, AGEING, Time(0)),
        }
    }

    fn tick(&mut self, touched: &[bool], now: Time) {
        for granule in (0..touched.len()).filter(|&g| touched[g]) {
            self.aged.record(self.stack.touch(granule as u64), now);
        }
    }
}

/// The error of the probes.
#[derive(Clone, Debug, Default)]
pub(super) struct ProbeAccuracy {
    /// Mean relative error of the working set against the exact one.
    pub(super) error_mean: f64,
    /// Largest relative error of the working set.
    pub(super) error_worst: f64,
    /// Mean relative error against the known set.
    pub(super) known_error_mean: f64,
    /// Mean absolute error of the curve, over all sizes.
    pub(super) curve_error: f64,
    /// Traps per second.
    pub(super) traps_per_s: f64,
    /// The time of the first reading.
    pub(super) first_s: f64,
    /// Exact and estimated working set, second by second.
    pub(super) series: Vec<(f64, f64)>,
}

/// The setup of a run.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) granules: usize,
    pub(super) probes_per_s: f64,
    pub(super) seconds: f64,
    pub(super) seed: u64,
}

/// A budget that bears this many probes a second.
pub(super) fn budget(probes_per_s: f64) -> Governor {
    let one = Governor::new(0.01);
    Governor::new(0.01 * probes_per_s / one.rate_per_s())
}

/// Runs a guest under probes.
pub(super) fn run(guest: &mut dyn AccessPattern, setup: Setup) -> ProbeAccuracy {
    let Setup { granules, seed, .. } = setup;
    let mut random = fastrand::Rng::with_seed(seed);
    let governor = budget(setup.probes_per_s);
    let mut tracker = Tracker::new(granules as u32, MAX_TRACKED, governor, seed ^ 77, Time(0));
    let mut exact = Exact::new(granules);
    let mut touched = vec![false; granules];
    let mut in_tick = vec![false; granules];
    let mut revoked: Vec<u32> = Vec::new();
    let mut report = ProbeAccuracy::default();
    for step in 0..(setup.seconds / STEP_S) as u64 {
        let (now, at_s) = (Time(step * STEP_MS), step as f64 * STEP_S);
        if step % 5 == 0 {
            let asked = tracker.tick(now).to_vec();
            asked.iter().for_each(|&granule| tracker.revoked(granule, now));
            revoked.extend(asked);
        }
        touched.fill(false);
        guest.step(at_s, &mut random, &mut touched);
        in_tick.iter_mut().zip(&touched).for_each(|(all, now)| *all |= *now);
        revoked.retain(|&granule| {
            if touched[granule as usize] {
                tracker.touched(granule, now.after(Millis(random.u64(0..STEP_MS))));
                report.traps_per_s += f64::from(at_s >= WARM_S);
            }
            !touched[granule as usize]
        });
        if step % 10 == 9 {
            exact.tick(&in_tick, now);
            in_tick.fill(false);
        }
        if step % 100 == 99 {
            let Some(reading) = tracker.reading() else { continue };
            if report.first_s == 0.0 {
                report.first_s = at_s;
            }
            if at_s >= WARM_S {
                report.take(&reading, &exact.aged.curve(), guest.known(at_s), granules as f64);
            }
        }
    }
    let samples = report.series.len() as f64;
    report.error_mean /= samples;
    report.known_error_mean /= samples;
    report.curve_error /= samples;
    report.traps_per_s /= setup.seconds - WARM_S;
    report
}

impl ProbeAccuracy {
    fn take(&mut self, reading: &Reading, exact: &MissRatioCurve, known: Option<f64>, all: f64) {
        let truth = exact.least_size(TOLERABLE_MISS_RATIO).unwrap_or(all);
        let error = (reading.working_set - truth).abs() / truth;
        self.error_mean += error;
        self.error_worst = self.error_worst.max(error);
        self.known_error_mean += known.map_or(0.0, |k| (reading.working_set - k).abs() / k);
        self.curve_error += reading.curve.mean_absolute_error(exact, all);
        self.series.push((truth, reading.working_set));
    }
}
