//! Mixes under settings, round after round: normalised execution times, and their spread.

use std::time::Duration;

use super::course::{self, SharingRun};
use super::jobs::{self, Job};
use super::setting::{BASELINE, Setting};
use crate::arms::{ArmOrder, Arms, geometric_mean};
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
    pub jobs: Vec<Job>,
}

/// All courses.
#[derive(Debug)]
pub struct Trial {
    /// The settings other than the baseline.
    settings: Vec<Setting>,
    /// The courses of each mix, by the settings' names.
    mixes: Vec<(Mix, Arms<SharingRun>)>,
}

impl Trial {
    /// Runs all mixes under the baseline and under these settings, `rounds` times.
    pub fn run(
        context: &Context,
        mixes: &[Mix],
        settings: &[Setting],
        window: Duration,
        rounds: u32,
    ) -> Result<Self, LabError> {
        let all = [BASELINE].into_iter().chain(settings.iter().copied());
        let arms: Vec<_> = all.map(|setting| (setting.name, setting)).collect();
        let mut mixes: Vec<_> = mixes.iter().map(|mix| (mix.clone(), Arms::default())).collect();
        for round in 1..=rounds {
            for (mix, courses) in &mut mixes {
                let guests = jobs::group(GROUP, &mix.jobs, context.seed);
                courses.turn(ArmOrder::Alternating, &arms, |name, setting| {
                    context.say(&format!("round {round}: {} under {name} ...", mix.name));
                    course::run(context, &guests, setting, Duration::ZERO, window)
                })?;
            }
        }
        Ok(Self { settings: settings.to_vec(), mixes })
    }

    /// Courses that were not run: the guests' speeds, by round, mix and setting; the baseline is
    /// the first setting.
    #[cfg(test)]
    pub(crate) fn of_speeds(
        mixes: Vec<Mix>,
        settings: &[Setting],
        rounds: &[Vec<Vec<Vec<f64>>>],
    ) -> Self {
        let course = |speeds: &Vec<f64>| SharingRun {
            speeds: speeds.clone(),
            cpu_busy: 1.0,
            ticks: Vec::new(),
        };
        let names = || [BASELINE.name].into_iter().chain(settings.iter().map(|it| it.name));
        let of = |(place, mix): (usize, Mix)| {
            let rounds = rounds.iter().map(|round| names().zip(round[place].iter().map(course)));
            (mix, Arms(rounds.map(Iterator::collect).collect()))
        };
        Self { settings: settings.to_vec(), mixes: mixes.into_iter().enumerate().map(of).collect() }
    }

    /// The mixes, and their courses by the settings' names.
    pub fn mixes(&self) -> &[(Mix, Arms<SharingRun>)] {
        &self.mixes
    }

    /// The speed-up, by round, of a mix's guests under one setting against another: the geometric
    /// mean over the guests whose job `counts` chooses.
    pub fn gains(
        &self,
        mix: &str,
        setting: &str,
        against: &str,
        counts: impl Fn(&Job) -> bool,
    ) -> Vec<f64> {
        let found = self.mixes.iter().find(|(known, _)| known.name == mix);
        let Some((mix, courses)) = found else { return Vec::new() };
        courses.both(setting, against, |one, other| {
            let counted = mix.jobs.iter().enumerate().filter(|(_, job)| counts(job));
            geometric_mean(counted.map(|(guest, _)| one.speed(guest) / other.speed(guest)))
        })
    }

    /// Adds each mix's normalised execution time under each setting: the median of the rounds.
    pub fn add_times(&self, figures: &mut Figures, paper: &str) {
        for (mix, _) in &self.mixes {
            let mut jobs = mix.jobs.clone();
            jobs.dedup();
            for setting in &self.settings {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(rounds: Vec<Vec<Vec<f64>>>) -> Trial {
        let mixes = vec![Mix { name: "mix", jobs: vec![jobs::SORT, jobs::CG] }];
        let rounds: Vec<_> = rounds.into_iter().map(|round| vec![round]).collect();
        Trial::of_speeds(mixes, &[super::super::setting::ADAPTIVE_CSD], &rounds)
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
        for lacking in [vec![10.0, f64::NAN], vec![10.0]] {
            let trial = trial(vec![vec![lacking, vec![40.0, 8.0]]]);
            assert!(trial.gains("mix", "csd", "baseline", |_| true)[0].is_nan());
            assert!(trial.gains("mix", "baseline", "csd", |_| true)[0].is_nan());
        }
        let trial = trial(vec![vec![vec![10.0, 8.0], vec![40.0, 8.0]]]);
        assert!(trial.gains("mix", "fair", "baseline", |_| true)[0].is_nan());
    }
}
