//! `kim-fig8`: the distribution of the memory that merging has saved (Kim 2014 §6.2.2, Fig. 8).
//!
//! Two guests that are short of memory run next to two that are short of CPU time, under the
//! three reprovisioning policies, all with Adaptive-CSD. `fair` gives all guests the same,
//! `entitlement` gives each its own contribution, `demand` gives all to those that swap.
//!
//! A guest that sorts in swap is at times several times faster than at others, so the claims rest
//! on six paired rounds. The other jobs, which have none, run once.

use super::prelude::*;
use crate::arms::ROUNDS;
use crate::kim::jobs::{CG, Job, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::POLICIES;
use crate::kim::trial::{Mix, Trial};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-fig8",
    summary: "guests short of memory beside guests short of CPU time, under three reprovisioning policies",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: claims! {
        "sort_demand_vs_fair" >= 1.0 => "ratio",
            "The policy `demand` serves a job that sorts better than `fair` does", "1.20";
        "sort_demand_vs_entitlement" >= 1.0 => "ratio",
            "The policy `demand` serves a job that sorts better than `entitlement` does", "1.11";
    },
    run,
};

const WINDOW: Duration = Duration::from_secs(40);
const OTHERS: [&str; 2] = ["fair", "entitlement"];

fn run(context: &Context) -> Result<Figures, LabError> {
    let mix = |job: Job| Mix { name: job.name, jobs: vec![job, job, CG, CG] };
    let trial = Trial::run(context, &[mix(SORT)], &POLICIES, WINDOW, ROUNDS)?;
    let others = Trial::run(context, &[WORDCOUNT, RECORDS].map(mix), &POLICIES, WINDOW, 1)?;
    let mut figures = context.figures(SCENARIO.name, ROUNDS);
    for trial in [&trial, &others] {
        trial.add_times(&mut figures, "0.6 to 1, demand least");
    }
    add_gains(&mut figures, &trial);
    Ok(figures)
}

/// The gain of `demand` over the other policies, for the guests that sort.
fn add_gains(figures: &mut Figures, trial: &Trial) {
    for against in OTHERS {
        let gains = trial.gains(SORT.name, "demand", against, |job| *job == SORT);
        let note = "speed of the guests that sort, to that under the other policy";
        figures.tell_rounds(&format!("sort_demand_vs_{against}"), gains, "ratio", note);
    }
}

#[cfg(test)]
mod tests;
