//! `kim-fig11`, `kim-fig12`, `kim-fig13`: a group next to another one, each with its own memory
//! or both as one (Kim 2014 §6.3).
//!
//! Two guests of the first group do a MapReduce job for which they have too little memory. Two
//! others hold content that they have in common, and so make surplus. The second group consists
//! of hogs (`kim-fig11`), of guests that swap at times (`kim-fig12`), or of guests that only need
//! the CPU and have much in common (`kim-fig13`). GRP: each group has the surplus of its own
//! guests. NOGRP: the daemon treats all guests as one group, as if the whole system shared.
//!
//! Unlike in the paper, the window is fixed and jobs repeat: an execution time is the inverse of
//! the work done. Six rounds run every job both ways, every second one in the opposite order; both
//! ways are compared within a round. All memory that a group occupies beyond its own counts, page
//! tables included: nothing is nothing.

use model::VmName;

use super::prelude::*;
use crate::kim::course::{self, SharingRun, Tick};
use crate::kim::jobs::{self, CG, Job, MASTER, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::ADAPTIVE_CSD;
use crate::kim::trial::{ROUNDS, geometric_mean, in_turn};

pub(super) const HOG: Scenario = Scenario {
    name: "kim-fig11",
    summary: "a group beside one of memory hogs: its surplus stays its own, or is taken from it without groups",
    file: file!(),
    measures: measured::MANAGED_KIM,
    claims: claims! {
        "mr_grp_vs_nogrp" >= 1.0 => "ratio",
            "A group of its own keeps the memory that its merging saves from a memory hog",
            "up to 1.4";
        "hog_taken_grp" == 0.0 => "MiB",
            "The hogs get nothing of another group's saving", "0";
        "hog_taken_nogrp" >= 1.0 => "MiB",
            "The hogs get a part of it without groups", "most of SORT's surplus";
    },
    run: run_hog,
};

pub(super) const SWAPPER: Scenario = Scenario {
    name: "kim-fig12",
    summary: "a group beside one that swaps at times, with groups and without",
    file: file!(),
    measures: measured::MANAGED_KIM,
    claims: claims! {
        "mr_taken_grp" == 0.0 => "MiB",
            "The group that swaps all the time gets nothing of another group's saving", "0";
        "all_grp_vs_nogrp" => "ratio", "Both groups together are faster than without groups",
            "up to 1.2";
    },
    run: run_swapper,
};

pub(super) const BUSY: Scenario = Scenario {
    name: "kim-fig13",
    summary: "a group beside one that needs the CPU and no memory, with groups and without",
    file: file!(),
    measures: measured::MANAGED_KIM,
    claims: claims! {
        "mr_taken_grp" == 0.0 => "MiB",
            "A group that swaps gets nothing of the saving of one that needs the CPU only", "0";
    },
    run: run_busy,
};

const WINDOW: Duration = Duration::from_secs(40);
/// Writes random numbers to more memory than is available, frees it, and begins anew.
const MEMHOG: Job = Job { name: "hog", command: "memhog --mb 240 --hold 0.2 --rest 0.2" };
/// Swaps when it begins with another part of its memory, like NPB DT at its start.
const DT: Job = Job { name: "dt", command: "phases --mb 100 --parts 2 --length 10" };
const MAPREDUCE: [Job; 3] = [SORT, WORDCOUNT, RECORDS];
/// The number of guests of the first group that do the job: its first ones.
const WORKERS: usize = 2;
const FIRST: &str = "mapreduce";
const SECOND: &str = "others";
/// Guests of the other group.
const OTHERS: usize = 2;

/// One MapReduce job next to the other group, in both ways.
struct Pair {
    job: &'static str,
    guests: Vec<MachineSpec>,
    group: SharingRun,
    system: SharingRun,
}

/// The pairs of one round, by [`MAPREDUCE`].
type Round = Vec<Pair>;

fn run_hog(context: &Context) -> Result<Figures, LabError> {
    let rounds = rounds(context, MEMHOG)?;
    let mut figures = context.figures(HOG.name, ROUNDS);
    add_speeds(&mut figures, &rounds, "up to 1.4");
    add_hogs(&mut figures, &rounds);
    page(&rounds[0]).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn run_swapper(context: &Context) -> Result<Figures, LabError> {
    let rounds = rounds(context, DT)?;
    let mut figures = context.figures(SWAPPER.name, ROUNDS);
    add_speeds(&mut figures, &rounds, "above 1");
    add_others(&mut figures, &rounds, "below 1");
    let all = each(&rounds, |pairs| {
        let gains = pairs.iter().flat_map(|pair| [pair.gain_of_job(), pair.gain_of_others()]);
        geometric_mean(gains)
    });
    let note = "speed of both groups' working guests in groups, to that without, geometric mean";
    figures.tell_rounds("all_grp_vs_nogrp", all, "ratio", note);
    add_taken(&mut figures, &rounds);
    page(&rounds[0]).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn run_busy(context: &Context) -> Result<Figures, LabError> {
    let rounds = rounds(context, CG)?;
    let mut figures = context.figures(BUSY.name, ROUNDS);
    add_speeds(&mut figures, &rounds, "below 1: the others' surplus stays theirs");
    add_others(&mut figures, &rounds, "1: they need no memory");
    add_taken(&mut figures, &rounds);
    page(&rounds[0]).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// A number of each round.
fn each(rounds: &[Round], of: impl Fn(&[Pair]) -> f64) -> Vec<f64> {
    rounds.iter().map(|pairs| of(pairs)).collect()
}

/// In each round, the most that a group occupied beyond what it pays for, in MiB.
fn most(rounds: &[Round], course: fn(&Pair) -> &SharingRun, group: &str) -> Vec<f64> {
    each(rounds, |pairs| pairs.iter().map(|pair| pair.beyond_mib(course(pair), group)).largest())
}

fn add_hogs(figures: &mut Figures, rounds: &[Round]) {
    let gains = each(rounds, |pairs| geometric_mean(pairs.iter().map(Pair::gain_of_job)));
    let note = "speed of all that do a job in groups, to that without, geometric mean";
    figures.tell_rounds("mr_grp_vs_nogrp", gains, "ratio", note);
    let note = "the most that the hogs occupied beyond what they pay for";
    let grp = most(rounds, |pair| &pair.group, SECOND);
    figures.tell_rounds("hog_taken_grp", grp, "MiB", format!("{note}, in groups"));
    let nogrp = most(rounds, |pair| &pair.system, SECOND);
    figures.tell_rounds("hog_taken_nogrp", nogrp, "MiB", format!("{note}, without groups"));
}

fn add_taken(figures: &mut Figures, rounds: &[Round]) {
    let note = "the most that the first group occupied beyond what it pays for";
    let grp = most(rounds, |pair| &pair.group, FIRST);
    figures.tell_rounds("mr_taken_grp", grp, "MiB", format!("{note}, in groups"));
    let nogrp = most(rounds, |pair| &pair.system, FIRST);
    let nogrp = Figure::of_rounds(nogrp, "MiB", format!("{note}, without groups"));
    figures.add("mr_taken_nogrp", nogrp.paper("all of the others' surplus"));
}

/// The gains by round of the job at a place of [`MAPREDUCE`].
fn gains(rounds: &[Round], place: usize, of: fn(&Pair) -> f64) -> Vec<f64> {
    each(rounds, |pairs| pairs.get(place).map_or(f64::NAN, of))
}

fn add_speeds(figures: &mut Figures, rounds: &[Round], paper: &str) {
    for (place, job) in MAPREDUCE.iter().enumerate() {
        let note = "speed of the guests that do it in groups, to that without";
        let gains = gains(rounds, place, Pair::gain_of_job);
        let figure = Figure::of_rounds(gains, "ratio", note).paper(paper);
        figures.add(&format!("{}_grp_vs_nogrp", job.name), figure);
    }
}

fn add_others(figures: &mut Figures, rounds: &[Round], paper: &str) {
    for (place, job) in MAPREDUCE.iter().enumerate() {
        let note =
            format!("speed of the other group beside {} in groups, to that without", job.name);
        let gains = gains(rounds, place, Pair::gain_of_others);
        let figure = Figure::of_rounds(gains, "ratio", note).paper(paper);
        figures.add(&format!("others_grp_vs_nogrp_{}", job.name), figure);
    }
}

/// Each job next to guests that all do `other`, round after round.
fn rounds(context: &Context, other: Job) -> Result<Vec<Round>, LabError> {
    let pairs = |round: u32| {
        context.say(&format!("Round {round} of {ROUNDS} ..."));
        MAPREDUCE.iter().map(|job| pair(context, round, *job, other)).collect()
    };
    (1..=ROUNDS).map(pairs).collect()
}

fn pair(context: &Context, round: u32, job: Job, other: Job) -> Result<Pair, LabError> {
    let first = jobs::group(FIRST, &[job, job, MASTER, MASTER], context.seed);
    let second = jobs::group(SECOND, &[other; OTHERS], context.seed + 100);
    let guests = jobs::side_by_side([first, second]);
    let together = |guest: &MachineSpec| MachineSpec { group: "all".to_owned(), ..guest.clone() };
    let system: Vec<MachineSpec> = guests.iter().map(together).collect();
    let run = |(name, guests): &(&str, &[MachineSpec])| {
        context.say(&format!("{} beside {}, {name} ...", job.name, other.name));
        course::run(context, guests, &ADAPTIVE_CSD, Duration::ZERO, WINDOW)
    };
    let mut courses =
        in_turn(round, &[("two groups", &guests[..]), ("no groups", &system[..])], run)?;
    let (system, group) = (courses.remove(1), courses.remove(0));
    Ok(Pair { job: job.name, guests, group, system })
}

impl Pair {
    /// The speed of each of these guests in groups, divided by its speed without.
    fn gains(&self, guests: std::ops::Range<usize>) -> impl Iterator<Item = f64> {
        guests.map(|guest| self.group.speed(guest) / self.system.speed(guest))
    }

    fn gain_of_job(&self) -> f64 {
        geometric_mean(self.gains(0..WORKERS))
    }

    fn gain_of_others(&self) -> f64 {
        geometric_mean(self.gains(self.guests.len() - OTHERS..self.guests.len()))
    }

    /// The most that one of the two groups occupied beyond its own memory, in MiB; NaN when the
    /// memory of all its guests was never known. A group's own memory is what it occupied first,
    /// page tables included, but no less than what it pays for.
    fn beyond_mib(&self, course: &SharingRun, group: &str) -> f64 {
        let members = self.guests.iter().filter(|guest| guest.group == group);
        let budget = members.map(|guest| guest.memory_base).sum::<Bytes>().as_mib();
        let mut used = course.ticks.iter().filter_map(|tick| self.used_mib(tick, group));
        let own = used.next().map_or(f64::NAN, |first| first.max(budget));
        used.map(|used| (used - own).max(0.0)).largest()
    }

    /// Memory that one of the two groups occupied; `None`: not known of all its guests.
    fn used_mib(&self, tick: &Tick, group: &str) -> Option<f64> {
        let used = |guest: &MachineSpec| {
            let vm = tick.case.view.vms.get(&VmName::from(guest.name.as_str()))?;
            Some(vm.used?.value)
        };
        let members = self.guests.iter().filter(|guest| guest.group == group);
        Some(members.map(used).sum::<Option<Bytes>>()?.as_mib())
    }

    /// Memory that one of the two groups occupied over time.
    fn line(&self, name: &str, course: &SharingRun, group: &str) -> Line {
        course.line(name, |tick| self.used_mib(tick, group))
    }
}

fn page(pairs: &[Pair]) -> Page {
    let mut page = Page::default();
    for pair in pairs {
        let lines = vec![
            pair.line("first group, in groups", &pair.group, FIRST),
            pair.line("other group, in groups", &pair.group, SECOND),
            pair.line("first group, without groups", &pair.system, FIRST),
            pair.line("other group, without groups", &pair.system, SECOND),
        ];
        let chart = Chart::linear("MiB", "seconds", lines);
        page.add(&format!("Memory that the groups occupy: {}", pair.job), chart);
    }
    page
}

#[cfg(test)]
mod tests;
