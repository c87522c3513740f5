//! `kim-fig17`: a group's surplus on another host as swap space (Kim 2014 §8.2, Fig. 17).
//!
//! A guest sorts, counts words or changes records in more memory than it has. Each job runs
//! twice in each of six rounds, with fresh guests: with swap on a disk with moving heads, and on
//! the same disk with a repository. In both Adaptive-CSD merges identical pages, as in the paper.
//! The repository is on another host: in a network namespace of its own, behind a cable of 1 Gbit/s
//! and TLS, as in `overdriver-table1`. The process that serves the disk is at the cable's other
//! end in both.

use model::DiskReading;

use super::prelude::*;
use crate::arms::ROUNDS;
use crate::fleet::HARD_DISK_IOPS;
use crate::hosts::Hosts;
use crate::kim::course;
use crate::kim::jobs::{self, Job, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::ADAPTIVE_CSD;
use crate::remote_swap::{Disk, GROUP, RemoteSwap, near_share};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-fig17",
    summary: "jobs that swap, on a disk and into their group's memory on another host",
    measures: &[&[file!()], measured::MANAGED, measured::DISKS, measured::KIM],
    claims: claims! {
        "gain_sort" >= 1.08 => "ratio",
            "A sorting job that swaps to another host's memory is faster than on a disk with \
             moving heads",
            "1.08 to 1.30";
        "gain_wordcount" >= 1.08 => "ratio",
            "A job that counts words there is faster", "1.08 to 1.30";
        "gain_records" >= 1.08 => "ratio",
            "A job that changes records there is faster", "1.08 to 1.30";
    },
    run,
};

const JOBS: [Job; 3] = [SORT, WORDCOUNT, RECORDS];
const SWAP: Bytes = Bytes::mib(512);
const WINDOW: Duration = Duration::from_secs(30);
/// The rate of the cable between both hosts.
const LINK_MBIT: u32 = 1000;

/// The arms: memory that the repository lends.
const ARMS: [(&str, Bytes); 2] = [("disk", Bytes::ZERO), ("repository", SWAP)];

/// One course.
#[derive(Clone, Copy)]
struct SwapRun {
    speed: f64,
    /// The share of the guest's reads that the repository answered.
    near: f64,
}

/// The courses of each of [`JOBS`].
type Courses = [Arms<SwapRun>; JOBS.len()];

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut all = Courses::default();
    for round in 1..=ROUNDS {
        for (job, courses) in JOBS.into_iter().zip(&mut all) {
            courses.turn(ArmOrder::Alternating, &ARMS, |name, lent| {
                context.say(&format!("round {round}: {} with a {name} ...", job.name));
                course(context, job, *lent)
            })?;
        }
    }
    let mut figures = context.figures(SCENARIO.name, ROUNDS);
    add_figures(&mut figures, &all);
    Ok(figures)
}

fn add_figures(figures: &mut Figures, all: &Courses) {
    for (job, courses) in JOBS.iter().zip(all) {
        let gains = courses.ratios("repository", "disk", |course| course.speed);
        let note = "speed with a repository to that without";
        figures.tell_rounds(&format!("gain_{}", job.name), gains, "ratio", note);
    }
    let note = "of the reads of courses with a repository: answered by it";
    let near = all.iter().flat_map(|courses| courses.each("repository", |course| course.near));
    figures.tell_rounds("near", near.collect(), "ratio", note);
}

/// Without an answer of the disk's process it is not known from where reads came.
fn course(context: &Context, job: Job, lent: Bytes) -> Result<SwapRun, LabError> {
    let dir = context.dir.with_extension("swap");
    let read_delay_us = 1_000_000 / HARD_DISK_IOPS;
    let disk = Disk { size: SWAP, read_delay_us, lent, cache: false };
    let mut guests = jobs::group(GROUP, &[job], context.seed);
    let guest = guests.remove(0);
    let swap = RemoteSwap::start_apart(Hosts::start(LINK_MBIT)?, &dir, &guest.name, disk)?;
    if !lent.is_zero() {
        swap.wait_until_connected()?;
    }
    let lab = context.start([swap.given_to(guest)])?;
    let course = course::follow(lab, &ADAPTIVE_CSD, Duration::ZERO, WINDOW)?;
    let status = swap.status();
    swap.end()?;
    context.say(&course.in_words());
    let near = status.map_or(f64::NAN, |status| near_share(&DiskReading::default(), &status));
    Ok(SwapRun { speed: course.speed(0), near })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round of these speeds.
    fn round(disk: f64, repository: f64) -> Vec<(&'static str, SwapRun)> {
        let run = |speed| SwapRun { speed, near: 1.0 };
        vec![("disk", run(disk)), ("repository", run(repository))]
    }

    /// Figures of six good rounds of each job; one of the first job's is another one.
    fn figures(first: Vec<(&'static str, SwapRun)>) -> Figures {
        let mut all = Courses::default();
        all.iter_mut().for_each(|courses| courses.0 = vec![round(10.0, 12.0); ROUNDS as usize]);
        all[0].0[3] = first;
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, &all))
    }

    const FIRST: &str = "gain_sort";

    #[test]
    fn a_gain_is_the_repository_over_the_disk_and_every_job_has_one() {
        let figures = figures(round(10.0, 12.0));
        for job in JOBS {
            let name = format!("gain_{}", job.name);
            assert!((figures.value(&name) - 1.2).abs() < 1e-9 && figures.met(&name));
        }
        assert!(figures.passed(), "{}", figures.to_table());
    }

    #[test]
    fn the_lower_end_decides() {
        let swapped = figures(round(12.0, 10.0));
        assert!(swapped.value(FIRST) > 1.08 && !swapped.met(FIRST) && !swapped.passed());
    }

    #[test]
    fn what_is_missing_or_was_not_read_is_no_number() {
        for bad in [round(f64::NAN, 12.0), Vec::new()] {
            let figures = figures(bad);
            assert!(figures.value(FIRST).is_nan() && !figures.passed());
        }
    }
}
