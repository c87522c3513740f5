//! Mixes under settings, round after round: normalised execution times, and their spread.
//!
//! A machine's speed drifts, so the settings of one mix follow each other, and courses are
//! compared within one round. Every second round runs the settings backwards, so that none is
//! always first. A claim takes [`ROUNDS`] rounds, and holds where the worse end of their interval
//! does.

use std::time::Duration;

use super::course::{self, SharingRun};
use super::jobs::{self, Job};
use super::setting::{BASELINE, Setting};
use crate::figures::{Figure, Figures};
use crate::lab::LabError;
use crate::meb::pairs::LEAST_COUNT;
use crate::recording::median;
use crate::scenario::Context;

/// The group of all mixes.
pub const GROUP: &str = "tenant";

/// The rounds of a claim: the fewest whose median has a 95 % interval (five have none).
pub const ROUNDS: u32 = 6;
const _: () = assert!(ROUNDS as usize == LEAST_COUNT);

/// Guests that run at the same time.
#[derive(Debug, Clone)]
pub struct Mix {
    /// Its name in figures.
    pub name: &'static str,
    /// The jobs of its guests.
    pub jobs: Vec<Job>,
}

/// All courses.
#[derive(Debug)]
pub struct Trial {
    mixes: Vec<Mix>,
    /// The settings; the first one is the baseline.
    settings: Vec<Setting>,
    /// Courses by round, mix and setting.
    rounds: Vec<Vec<Vec<SharingRun>>>,
}

impl Trial {
    /// Runs all mixes under the baseline and under these settings, `rounds` times.
    ///
    /// # Errors
    /// As for [`course::run`].
    pub fn run(
        context: &Context,
        mixes: &[Mix],
        settings: &[Setting],
        window: Duration,
        rounds: u32,
    ) -> Result<Self, LabError> {
        let settings = [&[BASELINE], settings].concat();
        let mut trial = Self { mixes: mixes.to_vec(), settings, rounds: Vec::new() };
        for round in 1..=rounds {
            let mut of_mixes = Vec::new();
            for mix in mixes {
                let guests = jobs::group(GROUP, &mix.jobs, context.seed);
                let run = |setting: &Setting| {
                    context.say(&format!("round {round}: {} under {} ...", mix.name, setting.name));
                    course::run(context, &guests, setting, Duration::ZERO, window)
                };
                of_mixes.push(in_turn(round, &trial.settings, run)?);
            }
            trial.rounds.push(of_mixes);
        }
        Ok(trial)
    }

    /// Courses that were not run: the guests' speeds, by round, mix and setting.
    #[cfg(test)]
    pub(crate) fn of_speeds(
        mixes: Vec<Mix>,
        settings: Vec<Setting>,
        rounds: Vec<Vec<Vec<Vec<f64>>>>,
    ) -> Self {
        let course = |speeds| SharingRun { speeds, cpu_busy: 1.0, ticks: Vec::new() };
        let courses = |speeds: Vec<Vec<f64>>| speeds.into_iter().map(course).collect();
        let round = |mixes: Vec<Vec<Vec<f64>>>| mixes.into_iter().map(courses).collect();
        Self { mixes, settings, rounds: rounds.into_iter().map(round).collect() }
    }

    /// Number of rounds.
    #[must_use]
    pub fn rounds(&self) -> usize {
        self.rounds.len()
    }

    /// The mixes.
    #[must_use]
    pub fn mixes(&self) -> &[Mix] {
        &self.mixes
    }

    /// The courses of a mix under a setting, by round.
    pub fn courses<'a>(&'a self, mix: &str, setting: &str) -> impl Iterator<Item = &'a SharingRun> {
        let mix = self.mixes.iter().position(|known| known.name == mix);
        let setting = self.settings.iter().position(|known| known.name == setting);
        self.rounds.iter().filter_map(move |round| round.get(mix?)?.get(setting?))
    }

    /// The speed-up, by round, of a mix's guests under one setting against another: the geometric
    /// mean over the guests whose job `counts` chooses.
    #[must_use]
    pub fn gains(
        &self,
        mix: &str,
        setting: &str,
        against: &str,
        counts: impl Fn(&Job) -> bool,
    ) -> Vec<f64> {
        let jobs = self.mixes.iter().find(|known| known.name == mix).map(|mix| &mix.jobs[..]);
        let of = |(one, other): (&SharingRun, &SharingRun)| {
            let jobs = jobs.unwrap_or_default();
            if [&one.speeds, &other.speeds].iter().any(|speeds| speeds.len() != jobs.len()) {
                return f64::NAN;
            }
            let pairs = one.speeds.iter().zip(&other.speeds).zip(jobs);
            let counted = pairs.filter(|(_, job)| counts(job));
            geometric_mean(counted.map(|((one, other), _)| one / other))
        };
        self.courses(mix, setting).zip(self.courses(mix, against)).map(of).collect()
    }

    /// Adds each mix's normalised execution time under each setting: the median of the rounds.
    pub fn add_times(&self, figures: &mut Figures, paper: &str) {
        for mix in &self.mixes {
            let mut jobs = mix.jobs.clone();
            jobs.dedup();
            for setting in self.settings.iter().filter(|setting| **setting != BASELINE) {
                let times = |counts: &dyn Fn(&Job) -> bool| -> Vec<f64> {
                    let gains = self.gains(mix.name, setting.name, BASELINE.name, counts);
                    gains.into_iter().map(f64::recip).collect()
                };
                let part =
                    |job: &Job| format!("{} {:.2}", job.name, median(times(&|it| it == job)));
                let note = jobs.iter().map(part).collect::<Vec<_>>().join(", ");
                let all = Figure::of_rounds(times(&|_| true), "of baseline", note);
                figures.add(&format!("time_{}_{}", mix.name, setting.name), all.paper(paper));
            }
        }
    }

    /// The least and the greatest share of CPU time that was used in a course.
    #[must_use]
    pub fn cpu_busy(&self) -> (f64, f64) {
        let all = self.rounds.iter().flatten().flatten().map(|course| course.cpu_busy);
        all.fold((f64::INFINITY, 0.0), |(low, high), busy| (low.min(busy), high.max(busy)))
    }
}

/// Runs all of `arms`, in every second round backwards; returns the results in the order of `arms`.
///
/// # Errors
/// The first error of `run`.
pub fn in_turn<A, R>(
    round: u32,
    arms: &[A],
    run: impl FnMut(&A) -> Result<R, LabError>,
) -> Result<Vec<R>, LabError> {
    if round % 2 == 1 {
        return arms.iter().map(run).collect();
    }
    let mut results = arms.iter().rev().map(run).collect::<Result<Vec<R>, LabError>>()?;
    results.reverse();
    Ok(results)
}

/// The geometric mean of positive numbers; NaN when there are none.
#[must_use]
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values
        .into_iter()
        .fold((0.0, 0.0), |(sum, count), value| (sum + f64::ln(value), count + 1.0));
    if count > 0.0 { f64::exp(sum / count) } else { f64::NAN }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(rounds: Vec<Vec<Vec<f64>>>) -> Trial {
        let mixes = vec![Mix { name: "mix", jobs: vec![jobs::SORT, jobs::CG] }];
        let settings = vec![BASELINE, super::super::setting::ADAPTIVE_CSD];
        Trial::of_speeds(mixes, settings, rounds.into_iter().map(|round| vec![round]).collect())
    }

    #[test]
    fn a_gain_is_the_geometric_mean_over_the_guests_that_count_in_each_round() {
        let trial = trial(vec![
            vec![vec![10.0, 8.0], vec![40.0, 8.0]],
            vec![vec![10.0, 8.0], vec![10.0, 4.0]],
        ]);
        let near = |gains: Vec<f64>, expected: [f64; 2]| {
            assert_eq!(gains.len(), 2);
            assert!(
                gains.iter().zip(expected).all(|(gain, e)| (gain - e).abs() < 1e-9),
                "{gains:?}"
            );
        };
        near(trial.gains("mix", "csd", "baseline", |_| true), [2.0, 0.5_f64.sqrt()]);
        near(trial.gains("mix", "csd", "baseline", |job| *job == jobs::SORT), [4.0, 1.0]);
        near(trial.gains("mix", "baseline", "csd", |job| *job == jobs::CG), [1.0, 2.0]);
    }

    #[test]
    fn every_second_round_runs_backwards_and_its_results_are_in_order() {
        for (round, expected) in [(1, ["a", "b", "c"]), (2, ["c", "b", "a"])] {
            let mut ran = Vec::new();
            let run = |arm: &&'static str| {
                ran.push(*arm);
                Ok(*arm)
            };
            let results = in_turn(round, &["a", "b", "c"], run).unwrap();
            assert_eq!((results, &ran[..]), (vec!["a", "b", "c"], &expected[..]));
        }
    }

    #[test]
    fn what_was_not_measured_is_no_number() {
        for lacking in [vec![10.0, f64::NAN], vec![10.0]] {
            let trial = trial(vec![vec![lacking, vec![40.0, 8.0]]]);
            assert!(trial.gains("mix", "csd", "baseline", |_| true)[0].is_nan());
            assert!(trial.gains("mix", "baseline", "csd", |_| true)[0].is_nan());
        }
        let trial = trial(vec![vec![vec![10.0, 8.0], vec![40.0, 8.0]]]);
        assert!(trial.gains("mix", "fair", "baseline", |_| true).is_empty());
        assert!(geometric_mean([]).is_nan());
    }
}
