//! `kim-fig5`, `kim-fig6`: the benefit of the controllers of the scan rate (Kim 2014 §6.2.1,
//! Figs. 5 and 6).
//!
//! Four guests of one group run on all CPUs; two or more of them have less memory than their
//! working set. `kim-fig5` has four guests that do the same, `kim-fig6` two that are short of
//! memory and two that are short of CPU time. Where some CPU time is left over, all adaptive
//! controllers scan fast. Where none is, Adaptive-C scans slowly, Adaptive-CS fast as long as
//! guests swap, and Adaptive-CSD fast as long as guests swap and scanning finds something.
//!
//! `kim-fig6` compares courses of one round, in six rounds. The mix whose interval begins lowest
//! stands for all mixes.

use super::prelude::*;
use crate::arms::ROUNDS;
use crate::kim::course::SharingRun;
use crate::kim::jobs::{CG, Job, PI, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::{ADAPTIVE_CSD, CONTROLLERS};
use crate::kim::trial::{GROUP, Mix, Trial};

pub(super) const SINGLE: Scenario = Scenario {
    name: "kim-fig5",
    summary: "guests that all do the same, under five controllers of the scan rate",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: &[],
    run: run_single,
};

pub(super) const MIXED: Scenario = Scenario {
    name: "kim-fig6",
    summary: "guests short of memory beside guests short of CPU time, under five controllers of the scan rate",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: claims! {
        "csd_vs_c_min" >= 1.0 => "ratio",
            "Adaptive-CSD is as good as Adaptive-C in every mix of two guests that swap and two \
             that compute",
            "1.0 to 1.19";
        "csd_vs_cs_min" >= 1.0 => "ratio", "Adaptive-CSD is as good as Adaptive-CS in every mix";
        "csd_vs_static_5" >= 1.0 => "ratio", "Adaptive-CSD is better than 5 pages/ms overall";
        "csd_vs_static_50" >= 1.0 => "ratio", "Adaptive-CSD is better than 50 pages/ms overall";
        "csd_vs_baseline" => "ratio",
            "Guests under Adaptive-CSD are faster than without Overbook", "up to 1.4";
    },
    run: run_mixed,
};

const WINDOW: Duration = Duration::from_secs(40);
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
    let trial = Trial::run(context, &mixes, &CONTROLLERS, WINDOW, ROUNDS)?;
    let mut figures = context.figures(MIXED.name, ROUNDS);
    trial.add_times(&mut figures, "0.6 to 1, Adaptive-CSD least");
    add_gains(&mut figures, &trial);
    add_cpu(&mut figures, &trial);
    Ok(figures)
}

fn add_gains(figures: &mut Figures, trial: &Trial) {
    for against in ["c", "cs"] {
        let (gains, note) = least_gain(trial, against);
        figures.tell_rounds(&format!("csd_vs_{against}_min"), gains, "ratio", note);
    }
    for against in ["static_5", "static_50", "baseline"] {
        let note = "speed of all guests of all mixes, geometric mean";
        let gains = across(&gains(trial, against), geometric_mean);
        figures.tell_rounds(&format!("csd_vs_{against}"), gains, "ratio", note);
    }
}

/// The speed of all guests of each mix together under Adaptive-CSD, divided by that under
/// `against`, by round.
fn gains(trial: &Trial, against: &str) -> Vec<Vec<f64>> {
    trial.mixes().iter().map(|(mix, _)| trial.gains(mix.name, CSD, against, |_| true)).collect()
}

/// The gains in the mix whose interval begins lowest; those of a mix that was not measured in all
/// rounds come before all others.
fn least_gain(trial: &Trial, against: &str) -> (Vec<f64>, String) {
    let gains = gains(trial, against);
    let names = trial.mixes().iter().map(|(mix, _)| mix.name);
    let words: Vec<String> = names
        .zip(&gains)
        .map(|(name, gains)| {
            let Median { value, low, high, .. } = Median::of(gains.clone());
            format!("{name} {value:.3} ({low:.3} to {high:.3})")
        })
        .collect();
    let low = |gains: &Vec<f64>| {
        let is_known = gains.iter().all(|gain| gain.is_finite());
        let low = Median::of(gains.clone()).low;
        if is_known && low.is_finite() { low } else { f64::NEG_INFINITY }
    };
    let least = gains.into_iter().min_by(|one, other| low(one).total_cmp(&low(other)));
    (least.unwrap_or_default(), format!("speed of all guests, worst of {}", words.join(", ")))
}

/// Adds the CPU time that scanning and merging themselves took.
fn add_cpu(figures: &mut Figures, trial: &Trial) {
    for setting in CONTROLLERS {
        let seconds = |course: &SharingRun| {
            let last = course.ticks.last().and_then(|tick| tick.worker_cpu_s(GROUP));
            last.unwrap_or(f64::NAN)
        };
        let all = trial.mixes().iter().flat_map(|(_, courses)| courses.each(setting.name, seconds));
        let share = mean(all) / WINDOW.as_secs_f64();
        let note = "of one CPU: the group's worker, all mixes and rounds";
        let name = format!("worker_cpu_{}", setting.name);
        figures.tell(&name, share * 100.0, "%", note);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Speeds of four guests under the baseline and each controller, of which Adaptive-CSD is the
    /// last.
    type Round = [f64; 1 + CONTROLLERS.len()];

    const GOOD: Round = [1.0, 1.0, 1.5, 1.8, 1.9, 2.0];

    /// `rounds`: of each mix.
    fn trial(rounds: &[[Round; 2]]) -> Trial {
        let mixes =
            [SORT, WORDCOUNT].map(|job| Mix { name: job.name, jobs: vec![job, job, CG, CG] });
        let of_mix = |mix: &Round| mix.iter().map(|speed| vec![*speed; 4]).collect();
        let rounds: Vec<_> =
            rounds.iter().map(|round| round.iter().map(of_mix).collect()).collect();
        Trial::of_speeds(mixes.to_vec(), &CONTROLLERS, &rounds)
    }

    fn figures(rounds: &[[Round; 2]]) -> Figures {
        Figures::invented(MIXED.name, |figures| add_gains(figures, &trial(rounds)))
    }

    fn met(rounds: &[[Round; 2]], name: &str) -> bool {
        figures(rounds).met(name)
    }

    const CLAIMED: [&str; 4] =
        ["csd_vs_c_min", "csd_vs_cs_min", "csd_vs_static_5", "csd_vs_static_50"];

    #[test]
    fn a_gain_is_adaptive_csd_over_the_other_controller() {
        let figures = figures(&[[GOOD; 2]; 6]);
        figures.assert_near(&[
            ("csd_vs_c_min", 2.0 / 1.8),
            ("csd_vs_static_50", 2.0 / 1.5),
            ("csd_vs_baseline", 2.0),
        ]);
        assert!(CLAIMED.iter().all(|name| figures.met(name)));
    }

    #[test]
    fn the_lower_end_of_the_worst_mix_decides() {
        let slow = [1.0, 1.0, 1.5, 1.8, 1.9, 1.7];
        let mut rounds = [[GOOD; 2]; 6];
        rounds[4][1] = slow;
        let sound = figures(&rounds);
        assert!(sound.value("csd_vs_c_min") > 1.0);
        assert!(!sound.met("csd_vs_c_min"));
        assert!(sound.met("csd_vs_static_5"));
    }

    #[test]
    fn controllers_that_are_swapped_miss() {
        let mut swapped = GOOD;
        swapped.swap(3, 5);
        assert!(!met(&[[swapped; 2]; 6], "csd_vs_c_min"));
    }

    #[test]
    fn a_round_that_was_not_measured_is_no_number() {
        let mut unread = [[GOOD; 2]; 6];
        unread[3][0][5] = f64::NAN;
        for rounds in [&unread[..], &[]] {
            let figures = figures(rounds);
            for name in CLAIMED {
                assert!(figures.value(name).is_nan(), "{name}");
            }
        }
    }
}
