//! `kim-fig8`: the distribution of the memory that merging has saved (Kim 2014 §6.2.2, Fig. 8).
//!
//! Two guests that are short of memory run next to two that are short of CPU time, under the
//! three reprovisioning policies, all with Adaptive-CSD. `fair` gives all guests the same,
//! `entitlement` gives each its own contribution, `demand` gives all to those that swap.

use std::time::Duration;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::kim::jobs::{CG, Job, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::POLICIES;
use crate::kim::trial::{Mix, Trial, middle};
use crate::lab::LabError;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-fig8",
    summary: "guests short of memory beside guests short of CPU time, under three reprovisioning policies",
    run,
};

const WINDOW: Duration = Duration::from_secs(40);
/// Rounds of a figure with a target; the middle one counts. A guest that sorts in swap is at
/// times several times faster than at others.
const SORT_ROUNDS: u32 = 3;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mix = |job: Job| Mix { name: job.name, jobs: vec![job, job, CG, CG] };
    let trial = Trial::run(context, &[mix(SORT)], &POLICIES, WINDOW, SORT_ROUNDS)?;
    let others = Trial::run(context, &[WORDCOUNT, RECORDS].map(mix), &POLICIES, WINDOW, 1)?;
    let mut figures = context.figures(SCENARIO.name, 1);
    for trial in [&trial, &others] {
        trial.add_times(&mut figures, "0.6 to 1, demand least");
    }
    for (against, paper) in [("fair", "1.20"), ("entitlement", "1.11")] {
        let gains = trial.gains(SORT.name, "demand", against, |job| *job == SORT);
        let note = "speed of the guests that sort, to that under the other policy";
        let figure = Figure::new(middle(gains).0, "ratio", note).target(Target::AtLeast(1.0));
        figures.add(&format!("sort_demand_vs_{against}"), figure.paper(paper));
    }
    Ok(figures)
}
