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
use crate::arms::ROUNDS;
use crate::kim::course::{self, SharingRun, Tick};
use crate::kim::jobs::{self, CG, Job, MASTER, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::ADAPTIVE_CSD;

pub(super) const HOG: Scenario = Scenario {
    name: "kim-fig11",
    summary: "a group beside one of memory hogs: its surplus stays its own, or is taken from it without groups",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
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
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
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
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
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

/// The arms: two groups, or all guests as one.
const GRP: &str = "two groups";
const NOGRP: &str = "no groups";

/// One MapReduce job next to the other group.
struct Beside {
    job: &'static str,
    /// The guests of both groups.
    guests: Vec<MachineSpec>,
    courses: Arms<SharingRun>,
}

fn run_hog(context: &Context) -> Result<Figures, LabError> {
    let all = rounds(context, MEMHOG)?;
    let mut figures = context.figures(HOG.name, ROUNDS);
    add_speeds(&mut figures, &all, "up to 1.4");
    add_hogs(&mut figures, &all);
    page(&all).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn run_swapper(context: &Context) -> Result<Figures, LabError> {
    let all = rounds(context, DT)?;
    let mut figures = context.figures(SWAPPER.name, ROUNDS);
    add_speeds(&mut figures, &all, "above 1");
    add_others(&mut figures, &all, "below 1");
    let gains = all.iter().flat_map(|beside| [beside.gains_of_job(), beside.gains_of_others()]);
    let gains = across(&gains.collect::<Vec<_>>(), geometric_mean);
    let note = "speed of both groups' working guests in groups, to that without, geometric mean";
    figures.tell_rounds("all_grp_vs_nogrp", gains, "ratio", note);
    add_taken(&mut figures, &all);
    page(&all).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn run_busy(context: &Context) -> Result<Figures, LabError> {
    let all = rounds(context, CG)?;
    let mut figures = context.figures(BUSY.name, ROUNDS);
    add_speeds(&mut figures, &all, "below 1: the others' surplus stays theirs");
    add_others(&mut figures, &all, "1: they need no memory");
    add_taken(&mut figures, &all);
    page(&all).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn add_hogs(figures: &mut Figures, all: &[Beside]) {
    let gains: Vec<_> = all.iter().map(Beside::gains_of_job).collect();
    let note = "speed of all that do a job in groups, to that without, geometric mean";
    figures.tell_rounds("mr_grp_vs_nogrp", across(&gains, geometric_mean), "ratio", note);
    let note = "the most that the hogs occupied beyond what they pay for";
    let (grp, nogrp) = (most(all, GRP, SECOND), most(all, NOGRP, SECOND));
    figures.tell_rounds("hog_taken_grp", grp, "MiB", format!("{note}, in groups"));
    figures.tell_rounds("hog_taken_nogrp", nogrp, "MiB", format!("{note}, without groups"));
}

fn add_taken(figures: &mut Figures, all: &[Beside]) {
    let note = "the most that the first group occupied beyond what it pays for";
    let grp = most(all, GRP, FIRST);
    figures.tell_rounds("mr_taken_grp", grp, "MiB", format!("{note}, in groups"));
    let nogrp = most(all, NOGRP, FIRST);
    let nogrp = Figure::of_rounds(nogrp, "MiB", format!("{note}, without groups"));
    figures.add("mr_taken_nogrp", nogrp.paper("all of the others' surplus"));
}

/// In each round, the most that a group occupied beyond what it pays for, in MiB.
fn most(all: &[Beside], arm: &str, group: &str) -> Vec<f64> {
    let of = |beside: &Beside| beside.courses.each(arm, |course| beside.beyond_mib(course, group));
    across(&all.iter().map(of).collect::<Vec<_>>(), |most| most.into_iter().largest())
}

fn add_speeds(figures: &mut Figures, all: &[Beside], paper: &str) {
    for beside in all {
        let note = "speed of the guests that do it in groups, to that without";
        let figure = Figure::of_rounds(beside.gains_of_job(), "ratio", note).paper(paper);
        figures.add(&format!("{}_grp_vs_nogrp", beside.job), figure);
    }
}

fn add_others(figures: &mut Figures, all: &[Beside], paper: &str) {
    for beside in all {
        let job = beside.job;
        let note = format!("speed of the other group beside {job} in groups, to that without");
        let figure = Figure::of_rounds(beside.gains_of_others(), "ratio", note).paper(paper);
        figures.add(&format!("others_grp_vs_nogrp_{job}"), figure);
    }
}

/// Each job next to guests that all do `other`, round after round.
fn rounds(context: &Context, other: Job) -> Result<Vec<Beside>, LabError> {
    let mut all = MAPREDUCE.map(|job| Beside {
        job: job.name,
        guests: guests(job, other, context.seed),
        courses: Arms::default(),
    });
    for round in 1..=ROUNDS {
        context.say(&format!("Round {round} of {ROUNDS} ..."));
        for Beside { job, guests, courses } in &mut all {
            let together = |it: &MachineSpec| MachineSpec { group: "all".to_owned(), ..it.clone() };
            let system: Vec<MachineSpec> = guests.iter().map(together).collect();
            let arms = [(GRP, &guests[..]), (NOGRP, &system[..])];
            courses.turn(ArmOrder::Alternating, &arms, |name, guests| {
                context.say(&format!("{job} beside {}, {name} ...", other.name));
                course::run(context, guests, &ADAPTIVE_CSD, Duration::ZERO, WINDOW)
            })?;
        }
    }
    Ok(all.into())
}

fn guests(job: Job, other: Job, seed: u64) -> Vec<MachineSpec> {
    let first = jobs::group(FIRST, &[job, job, MASTER, MASTER], seed);
    jobs::side_by_side([first, jobs::group(SECOND, &[other; OTHERS], seed + 100)])
}

impl Beside {
    /// In each round, the speed of these guests in groups, divided by their speed without: the
    /// geometric mean.
    fn gains(&self, guests: std::ops::Range<usize>) -> Vec<f64> {
        self.courses.both(GRP, NOGRP, |group, system| {
            geometric_mean(guests.clone().map(|guest| group.speed(guest) / system.speed(guest)))
        })
    }

    fn gains_of_job(&self) -> Vec<f64> {
        self.gains(0..WORKERS)
    }

    fn gains_of_others(&self) -> Vec<f64> {
        self.gains(self.guests.len() - OTHERS..self.guests.len())
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
}

/// The memory of both groups over time, in the first round.
fn page(all: &[Beside]) -> Page {
    let mut page = Page::default();
    for beside in all {
        let lines = [
            ("first group, in groups", GRP, FIRST),
            ("other group, in groups", GRP, SECOND),
            ("first group, without groups", NOGRP, FIRST),
            ("other group, without groups", NOGRP, SECOND),
        ];
        let lines = lines.into_iter().filter_map(|(name, arm, group)| {
            let course = beside.courses.of(arm).next()?;
            Some(course.line(name, |tick| beside.used_mib(tick, group)))
        });
        let heading = format!("Memory that the groups occupy: {}", beside.job);
        page.add(&heading, Chart::linear("MiB", "seconds", lines));
    }
    page
}

#[cfg(test)]
mod tests;
