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
use crate::fleet::HARD_DISK_IOPS;
use crate::hosts::Hosts;
use crate::kim::course::{self, SharingRun};
use crate::kim::jobs::{self, Job, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::ADAPTIVE_CSD;
use crate::kim::trial::{ROUNDS, in_turn};
use crate::remote_swap::{Disk, GROUP, RemoteSwap, near_share};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-fig17",
    summary: "jobs that swap, on a disk and into their group's memory on another host",
    file: file!(),
    measures: &[
        measured::POLICY,
        measured::DAEMON,
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::DISKS,
        measured::KIM,
    ],
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

/// The speeds of one job in one round, and the share of its reads that the repository answered.
#[derive(Clone, Copy)]
struct SwapPair {
    disk: f64,
    repository: f64,
    near: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut rounds = Vec::new();
    for round in 1..=ROUNDS {
        let pairs = JOBS.iter().map(|job| pair(context, round, *job));
        rounds.push(pairs.collect::<Result<Vec<SwapPair>, LabError>>()?);
    }
    let mut figures = context.figures(SCENARIO.name, ROUNDS);
    add_figures(&mut figures, &rounds);
    Ok(figures)
}

/// `rounds`: the pairs of each by [`JOBS`].
fn add_figures(figures: &mut Figures, rounds: &[Vec<SwapPair>]) {
    for (place, job) in JOBS.iter().enumerate() {
        let gain = |pairs: &Vec<SwapPair>| {
            pairs.get(place).map_or(f64::NAN, |pair| pair.repository / pair.disk)
        };
        let note = "speed with a repository to that without";
        let gains = rounds.iter().map(gain).collect();
        figures.tell_rounds(&format!("gain_{}", job.name), gains, "ratio", note);
    }
    let note = "of the reads of courses with a repository: answered by it";
    let near = rounds.iter().flatten().map(|pair| pair.near).collect();
    figures.tell_rounds("near", near, "ratio", note);
}

fn pair(context: &Context, round: u32, job: Job) -> Result<SwapPair, LabError> {
    let arms = [("a disk", Bytes::ZERO), ("a repository", SWAP)];
    let courses = in_turn(round, &arms, |(name, lent)| {
        context.say(&format!("round {round}: {} with {name} ...", job.name));
        let (course, status) = course(context, job, *lent)?;
        context.say(&course.in_words());
        Ok((course.speed(0), status))
    })?;
    let [(disk, _), (repository, status)] = &courses[..] else { unreachable!("two arms") };
    let near = status.as_ref().map(|status| near_share(&DiskReading::default(), status));
    Ok(SwapPair { disk: *disk, repository: *repository, near: near.unwrap_or(f64::NAN) })
}

/// The guest's course, and the readings of its disk; `None`: the disk's process did not answer.
fn course(
    context: &Context,
    job: Job,
    lent: Bytes,
) -> Result<(SharingRun, Option<DiskReading>), LabError> {
    let dir = context.dir.with_extension("swap");
    let read_delay_us = 1_000_000 / HARD_DISK_IOPS;
    let disk = Disk { size: SWAP, read_delay_us, lent, cache: false };
    let mut guests = jobs::group(GROUP, &[job], context.seed);
    let guest = guests.remove(0);
    let swap = RemoteSwap::start_apart(Hosts::start(LINK_MBIT)?, &dir, &guest.name, disk)?;
    if !lent.is_zero() {
        swap.wait_until_connected()?;
    }
    let lab = context.start(&[swap.given_to(guest)])?;
    let course = course::follow(lab, &ADAPTIVE_CSD, Duration::ZERO, WINDOW)?;
    let status = swap.status();
    swap.end()?;
    Ok((course, status))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: SwapPair = SwapPair { disk: 10.0, repository: 12.0, near: 1.0 };

    fn figures(rounds: &[Vec<SwapPair>]) -> Figures {
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, rounds))
    }

    /// Six rounds, of which one has another pair for the first job.
    fn rounds(first: SwapPair) -> Vec<Vec<SwapPair>> {
        let mut rounds = vec![vec![GOOD; JOBS.len()]; ROUNDS as usize];
        rounds[3][0] = first;
        rounds
    }

    #[test]
    fn a_gain_is_the_repository_over_the_disk_and_every_job_has_one() {
        let figures = figures(&rounds(GOOD));
        for job in JOBS {
            let figure = figures.get(&format!("gain_{}", job.name)).unwrap();
            assert!((figure.value - 1.2).abs() < 1e-9 && figure.met());
        }
        assert!(figures.passed(), "{}", figures.to_table());
    }

    #[test]
    fn the_lower_end_decides_and_swapped_speeds_miss() {
        let SwapPair { disk: repository, repository: disk, near } = GOOD;
        let swapped = SwapPair { disk, repository, near };
        let first = format!("gain_{}", JOBS[0].name);
        let one = figures(&rounds(swapped));
        assert!(one.value(&first) > 1.08 && !one.met(&first));
        let all = vec![vec![swapped; JOBS.len()]; ROUNDS as usize];
        assert!(!figures(&all).passed());
    }

    #[test]
    fn what_is_missing_or_was_not_read_is_no_number() {
        let unread = rounds(SwapPair { disk: f64::NAN, ..GOOD });
        let mut missing = rounds(GOOD);
        missing[5].clear();
        for rounds in [unread, missing, Vec::new()] {
            let figures = figures(&rounds);
            let first = figures.get(&format!("gain_{}", JOBS[0].name)).unwrap();
            assert!(first.value.is_nan() && !figures.passed());
        }
    }
}
