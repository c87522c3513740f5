//! `kim-fig5`, `kim-fig6`: the benefit of the controllers of the scan rate (Kim 2014 §6.2.1,
//! Figs. 5 and 6).
//!
//! Four guests of one group run on all CPUs; two or more of them have less memory than their
//! working set. `kim-fig5` has four guests that do the same, `kim-fig6` two that are short of
//! memory and two that are short of CPU time. Where some CPU time is left over, all adaptive
//! controllers scan fast. Where none is, Adaptive-C scans slowly, Adaptive-CS fast as long as
//! guests swap, and Adaptive-CSD fast as long as guests swap and scanning finds something.

use std::time::Duration;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::kim::jobs::{CG, Job, PI, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::{ADAPTIVE_CSD, CONTROLLERS, Setting};
use crate::kim::trial::{GROUP, Mix, Trial, geometric_mean, middle};
use crate::lab::LabError;

pub(super) const SINGLE: Scenario = Scenario {
    name: "kim-fig5",
    summary: "guests that all do the same, under five controllers of the scan rate",
    run: run_single,
};

pub(super) const MIXED: Scenario = Scenario {
    name: "kim-fig6",
    summary: "guests short of memory beside guests short of CPU time, under five controllers of the scan rate",
    run: run_mixed,
};

const WINDOW: Duration = Duration::from_secs(40);
/// Adaptive-CSD once more: the difference between two equal courses.
const AGAIN: Setting = Setting { name: "csd_again", ..ADAPTIVE_CSD };
/// The most noise that a target may allow for.
const MOST_NOISE: f64 = 0.05;
const CSD: &str = ADAPTIVE_CSD.name;

fn run_single(context: &Context) -> Result<Figures, LabError> {
    let mix = |job: Job| Mix { name: job.name, jobs: vec![job; 4] };
    let mixes = [SORT, CG, PI].map(mix);
    let trial = Trial::run(context, &mixes, &CONTROLLERS, WINDOW, 1)?;
    let mut figures = context.figures(SINGLE.name, 1);
    trial.add_times(
        &mut figures,
        "MapReduce: far below 1 at any rate; NPB: above 1 at fixed rates, 1 at adaptive ones",
    );
    Ok(figures)
}

fn run_mixed(context: &Context) -> Result<Figures, LabError> {
    let mix = |job: Job| Mix { name: job.name, jobs: vec![job, job, CG, CG] };
    let mixes = [SORT, WORDCOUNT, RECORDS].map(mix);
    let settings = [&CONTROLLERS[..], &[AGAIN]].concat();
    let trial = Trial::run(context, &mixes, &settings, WINDOW, 1)?;
    let mut figures = context.figures(MIXED.name, 1);
    trial.add_times(&mut figures, "0.6 to 1, Adaptive-CSD least");
    let noise = add_noise(&mut figures, &trial);
    for (against, paper) in [("c", "up to 1.19"), ("cs", "about 1; CG up to 1.06")] {
        let (least, note) = least_gain(&trial, against);
        let will_do = format!("{note}; 1 less `noise`, {MOST_NOISE} at most, will do");
        let figure = Figure::new(least, "ratio", will_do)
            .target(Target::AtLeast(1.0 - noise.min(MOST_NOISE)))
            .paper(paper);
        figures.add(&format!("csd_vs_{against}_min"), figure);
    }
    for against in ["static_5", "static_50"] {
        let note = "speed of all guests of all mixes, geometric mean";
        let figure = Figure::new(overall_gain(&trial, against), "ratio", note);
        figures.add(&format!("csd_vs_{against}"), figure.target(Target::AtLeast(1.0)));
    }
    let note = "speed of all guests of all mixes, geometric mean, to that without Overbook";
    let figure = Figure::new(overall_gain(&trial, "baseline"), "ratio", note);
    figures.add("csd_vs_baseline", figure.paper("up to 1.4"));
    add_cpu(&mut figures, &trial);
    Ok(figures)
}

/// The speed of all guests of a mix together under Adaptive-CSD, divided by that under `against`:
/// the middle of the rounds.
fn gain(trial: &Trial, mix: &Mix, against: &str) -> f64 {
    middle(trial.gains(mix.name, CSD, against, |_| true)).0
}

/// The least gain of all mixes; NaN if one was not measured.
fn least_gain(trial: &Trial, against: &str) -> (f64, String) {
    let gains: Vec<f64> = trial.mixes().iter().map(|mix| gain(trial, mix, against)).collect();
    let words: Vec<String> = trial
        .mixes()
        .iter()
        .zip(&gains)
        .map(|(mix, gain)| format!("{} {gain:.3}", mix.name))
        .collect();
    let least =
        gains.into_iter().fold(f64::INFINITY, |a, b| if a.is_nan() || a < b { a } else { b });
    (least, format!("speed of all guests, worst of {}", words.join(", ")))
}

fn overall_gain(trial: &Trial, against: &str) -> f64 {
    geometric_mean(trial.mixes().iter().map(|mix| gain(trial, mix, against)))
}

/// The difference between the two courses under Adaptive-CSD, in the mix where it is largest.
fn add_noise(figures: &mut Figures, trial: &Trial) -> f64 {
    let apart = |mix: &Mix| (gain(trial, mix, AGAIN.name).ln().abs().exp() - 1.0, mix.name);
    let all: Vec<(f64, &str)> = trial.mixes().iter().map(apart).collect();
    let words: Vec<String> = all.iter().map(|(noise, name)| format!("{name} {noise:.3}")).collect();
    let noise = all.iter().map(|(noise, _)| *noise).fold(0.0, f64::max);
    let (low, high) = trial.cpu_busy();
    let note = format!(
        "the same again under `csd`, most of {}; CPUs {:.0} to {:.0} % busy",
        words.join(", "),
        low * 100.0,
        high * 100.0
    );
    figures.add("noise", Figure::new(noise, "ratio", note));
    noise
}

/// Adds the CPU time that scanning and merging themselves took.
fn add_cpu(figures: &mut Figures, trial: &Trial) {
    for setting in CONTROLLERS {
        let mut seconds = 0.0;
        for mix in trial.mixes() {
            for course in trial.courses(mix.name, setting.name) {
                let last = course.ticks.last().and_then(|tick| tick.worker_cpu_s(GROUP));
                seconds += last.unwrap_or(f64::NAN);
            }
        }
        let share = seconds / (WINDOW.as_secs_f64() * trial.mixes().len() as f64);
        let note = "of one CPU: the group's worker, all mixes";
        let name = format!("worker_cpu_{}", setting.name);
        figures.add(&name, Figure::new(share * 100.0, "%", note));
    }
}
