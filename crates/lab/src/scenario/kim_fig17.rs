//! `kim-fig17`: a group's surplus on another host as swap space (Kim 2014 §8.2, Fig. 17).
//!
//! A guest sorts, counts words or changes records in more memory than it has. Each job runs
//! twice, with fresh guests: with swap on a disk with moving heads, and on the same disk with a
//! repository. In both Adaptive-CSD merges identical pages, as in the paper. The repository is on
//! the same host, behind a unix socket; `overdriver-table1` measures the cost of a network.

use std::time::Duration;

use model::{Bytes, DiskReading};

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::fleet::HARD_DISK_IOPS;
use crate::kim::course::{self, SharingRun};
use crate::kim::jobs::{self, Job, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::ADAPTIVE_CSD;
use crate::kim::trial::middle;
use crate::lab::{Lab, LabError};
use crate::recording::median;
use crate::remote_swap::{Disk, GROUP, RemoteSwap, near_share};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-fig17",
    summary: "jobs that swap, on a disk and into their group's memory on another host",
    run,
};

const JOBS: [Job; 3] = [SORT, WORDCOUNT, RECORDS];
const SWAP: Bytes = Bytes::mib(512);
const WINDOW: Duration = Duration::from_secs(30);
const ROUNDS: u32 = 3;

fn run(context: &Context) -> Result<Figures, LabError> {
    let (mut gains, mut near) = (vec![Vec::new(); JOBS.len()], Vec::new());
    for round in 1..=ROUNDS {
        for (job, gains) in JOBS.iter().zip(&mut gains) {
            let mut speeds = Vec::new();
            for (name, lent) in [("a disk", Bytes::ZERO), ("a repository", SWAP)] {
                context.say(&format!("round {round}: {} with {name} ...", job.name));
                let (course, status) = course(context, *job, lent)?;
                context.say(&course.in_words());
                speeds.push(course.speeds[0]);
                if !lent.is_zero() {
                    near.push(near_share(&DiskReading::default(), &status));
                }
            }
            gains.push(speeds[1] / speeds[0]);
        }
    }
    let mut figures = context.figures(SCENARIO.name, ROUNDS);
    for (job, gains) in JOBS.iter().zip(gains) {
        let (gain, rounds) = middle(gains);
        let note = format!("speed with a repository to that without; rounds {rounds}");
        let figure = Figure::new(gain, "ratio", note).target(Target::AtLeast(1.08));
        figures.add(&format!("gain_{}", job.name), figure.paper("1.08 to 1.30"));
    }
    let note = "of the reads of courses with a repository: answered by it";
    figures.add("near", Figure::new(median(near), "ratio", note));
    Ok(figures)
}

/// The guest's course, and the readings of its disk.
fn course(context: &Context, job: Job, lent: Bytes) -> Result<(SharingRun, DiskReading), LabError> {
    let dir = context.dir.with_extension("swap");
    let read_delay_us = 1_000_000 / HARD_DISK_IOPS;
    let disk = Disk { size: SWAP, read_delay_us, lent, cache: false };
    let mut guests = jobs::group(GROUP, &[job], context.seed);
    let guest = guests.remove(0);
    let swap = RemoteSwap::start(&dir, &guest.name, disk)?;
    let lab = Lab::start(&context.dir, &context.provisions, &[swap.given_to(guest)])?;
    let course = course::follow(lab, &ADAPTIVE_CSD, Duration::ZERO, WINDOW)?;
    let status = swap.status().unwrap_or_default();
    swap.end()?;
    Ok((course, status))
}
