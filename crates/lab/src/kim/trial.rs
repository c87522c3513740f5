//! Mixes under settings, round after round: normalised execution times, and their spread.
//!
//! A machine's speed drifts, so the settings of one mix follow each other, and courses are
//! compared within one round. Few rounds give no meaningful distribution, so the median counts,
//! and all rounds are shown.

use std::time::Duration;

use super::course::{self, SharingRun};
use super::jobs::{self, Job};
use super::setting::{BASELINE, Setting};
use crate::figures::{Figure, Figures};
use crate::lab::LabError;
use crate::recording::median;
use crate::scenario::Context;

/// The group of all mixes.
pub const GROUP: &str = "tenant";

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
                let mut courses = Vec::new();
                for setting in &trial.settings {
                    context.say(&format!("round {round}: {} under {} ...", mix.name, setting.name));
                    let course = course::run(context, &guests, setting, Duration::ZERO, window)?;
                    context.say(&course.in_words());
                    courses.push(course);
                }
                of_mixes.push(courses);
            }
            trial.rounds.push(of_mixes);
        }
        Ok(trial)
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
            let pairs = one.speeds.iter().zip(&other.speeds).zip(jobs.unwrap_or_default());
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
                let time = |counts: &dyn Fn(&Job) -> bool| {
                    let gains = self.gains(mix.name, setting.name, BASELINE.name, counts);
                    middle(gains.into_iter().map(f64::recip).collect())
                };
                let (all, rounds) = time(&|_| true);
                let mut parts = Vec::new();
                for job in &jobs {
                    parts.push(format!("{} {:.2}", job.name, time(&|other| other == job).0));
                }
                let note = format!("{}; rounds {rounds}", parts.join(", "));
                let name = format!("time_{}_{}", mix.name, setting.name);
                figures.add(&name, Figure::new(all, "of baseline", note).paper(paper));
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

/// The geometric mean of positive numbers; NaN when there are none.
#[must_use]
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values
        .into_iter()
        .fold((0.0, 0.0), |(sum, count), value| (sum + f64::ln(value), count + 1.0));
    if count > 0.0 { f64::exp(sum / count) } else { f64::NAN }
}

/// The median of the rounds, and a text that lists them all.
#[must_use]
pub fn middle(of_rounds: Vec<f64>) -> (f64, String) {
    let words: Vec<String> = of_rounds.iter().map(|value| format!("{value:.3}")).collect();
    (median(of_rounds), words.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(rounds: Vec<Vec<Vec<f64>>>) -> Trial {
        let course = |speeds| SharingRun { speeds, cpu_busy: 1.0, ticks: Vec::new() };
        let round = |settings: Vec<Vec<f64>>| vec![settings.into_iter().map(course).collect()];
        Trial {
            mixes: vec![Mix { name: "mix", jobs: vec![jobs::SORT, jobs::CG] }],
            settings: vec![BASELINE, super::super::setting::ADAPTIVE_CSD],
            rounds: rounds.into_iter().map(round).collect(),
        }
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
    fn what_was_not_measured_is_no_number() {
        let trial = trial(vec![vec![vec![10.0, f64::NAN], vec![40.0, 8.0]]]);
        assert!(trial.gains("mix", "csd", "baseline", |_| true)[0].is_nan());
        assert!(trial.gains("mix", "fair", "baseline", |_| true).is_empty());
        assert!(geometric_mean([]).is_nan());
    }
}
