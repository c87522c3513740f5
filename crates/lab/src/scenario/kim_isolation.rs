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
//! the work done.

use std::time::Duration;

use model::{Bytes, VmName};

use super::{Context, Scenario};
use crate::chart::{Chart, Line};
use crate::figures::{Figure, Figures, Target};
use crate::kim::course::{self, SharingRun, Tick};
use crate::kim::jobs::{self, CG, Job, MASTER, RECORDS, SORT, WORDCOUNT};
use crate::kim::setting::ADAPTIVE_CSD;
use crate::kim::trial::geometric_mean;
use crate::lab::LabError;
use crate::machine::MachineSpec;
use crate::meb::page::Page;

pub(super) const HOG: Scenario = Scenario {
    name: "kim-fig11",
    summary: "a group beside one of memory hogs: its surplus stays its own, or is taken from it without groups",
    run: run_hog,
};

pub(super) const SWAPPER: Scenario = Scenario {
    name: "kim-fig12",
    summary: "a group beside one that swaps at times, with groups and without",
    run: run_swapper,
};

pub(super) const BUSY: Scenario = Scenario {
    name: "kim-fig13",
    summary: "a group beside one that needs the CPU and no memory, with groups and without",
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
/// Growth of a group's page tables.
const PAGE_TABLES_MIB: f64 = 0.5;
/// Guests of the other group.
const OTHERS: usize = 2;

/// One MapReduce job next to the other group, in both ways.
struct Pair {
    job: &'static str,
    guests: Vec<MachineSpec>,
    group: SharingRun,
    system: SharingRun,
}

fn run_hog(context: &Context) -> Result<Figures, LabError> {
    let pairs = pairs(context, MEMHOG)?;
    let mut figures = context.figures(HOG.name, 1);
    add_speeds(&mut figures, &pairs, "up to 1.4");
    let gain = geometric_mean(pairs.iter().map(Pair::gain_of_job));
    let note = "speed of all that do a job in groups, to that without, geometric mean";
    let figure = Figure::new(gain, "ratio", note).target(Target::AtLeast(1.0));
    figures.add("mr_grp_vs_nogrp", figure.paper("above 1 for each job"));
    let note = "the most that the hogs occupied beyond what they pay for";
    let (grp, nogrp) = (most(&pairs, |pair| &pair.group), most(&pairs, |pair| &pair.system));
    let figure = Figure::new(grp, "MiB", format!("{note}, in groups"));
    figures.add("hog_taken_grp", figure.target(Target::AtMost(PAGE_TABLES_MIB)).paper("0"));
    let figure = Figure::new(nogrp, "MiB", format!("{note}, without groups"));
    figures.add(
        "hog_taken_nogrp",
        figure.target(Target::AtLeast(1.0)).paper("most of SORT's surplus"),
    );
    page(&pairs).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn run_swapper(context: &Context) -> Result<Figures, LabError> {
    let pairs = pairs(context, DT)?;
    let mut figures = context.figures(SWAPPER.name, 1);
    add_speeds(&mut figures, &pairs, "above 1");
    add_others(&mut figures, &pairs, "below 1");
    let all =
        geometric_mean(pairs.iter().flat_map(|pair| [pair.gain_of_job(), pair.gain_of_others()]));
    let note = "speed of both groups' working guests in groups, to that without, geometric mean";
    figures.add("all_grp_vs_nogrp", Figure::new(all, "ratio", note).paper("up to 1.2"));
    page(&pairs).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn run_busy(context: &Context) -> Result<Figures, LabError> {
    let pairs = pairs(context, CG)?;
    let mut figures = context.figures(BUSY.name, 1);
    add_speeds(&mut figures, &pairs, "below 1: the others' surplus stays theirs");
    add_others(&mut figures, &pairs, "1: they need no memory");
    let beyond = |course: fn(&Pair) -> &SharingRun| {
        let of = |pair: &Pair| pair.beyond_mib(course(pair), FIRST);
        pairs.iter().map(of).fold(f64::NAN, f64::max)
    };
    let note = "the most that the first group occupied beyond what it pays for";
    let grp = Figure::new(beyond(|pair| &pair.group), "MiB", format!("{note}, in groups"));
    figures.add("mr_taken_grp", grp.target(Target::AtMost(PAGE_TABLES_MIB)).paper("0"));
    let nogrp = Figure::new(beyond(|pair| &pair.system), "MiB", format!("{note}, without groups"));
    figures.add("mr_taken_nogrp", nogrp.paper("all of the others' surplus"));
    page(&pairs).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// The most that the other group occupied beyond what it pays for, in MiB.
fn most(pairs: &[Pair], course: fn(&Pair) -> &SharingRun) -> f64 {
    let beyond = |pair: &Pair| pair.beyond_mib(course(pair), SECOND);
    pairs.iter().map(beyond).fold(f64::NAN, f64::max)
}

fn add_speeds(figures: &mut Figures, pairs: &[Pair], paper: &str) {
    for pair in pairs {
        let note = "speed of the guests that do it in groups, to that without";
        let figure = Figure::new(pair.gain_of_job(), "ratio", note).paper(paper);
        figures.add(&format!("{}_grp_vs_nogrp", pair.job), figure);
    }
}

fn add_others(figures: &mut Figures, pairs: &[Pair], paper: &str) {
    for pair in pairs {
        let note =
            format!("speed of the other group beside {} in groups, to that without", pair.job);
        let figure = Figure::new(pair.gain_of_others(), "ratio", note).paper(paper);
        figures.add(&format!("others_grp_vs_nogrp_{}", pair.job), figure);
    }
}

/// Each job next to guests that all do `other`.
fn pairs(context: &Context, other: Job) -> Result<Vec<Pair>, LabError> {
    let mut pairs = Vec::new();
    for job in MAPREDUCE {
        let first = jobs::group(FIRST, &[job, job, MASTER, MASTER], context.seed);
        let second = jobs::group(SECOND, &[other; OTHERS], context.seed + 100);
        let guests = jobs::side_by_side([first, second]);
        let run = |name: &str, guests: &[MachineSpec]| {
            context.say(&format!("{} beside {}, {name} ...", job.name, other.name));
            let course = course::run(context, guests, &ADAPTIVE_CSD, Duration::ZERO, WINDOW)?;
            context.say(&course.in_words());
            Ok::<_, LabError>(course)
        };
        let group = run("two groups", &guests)?;
        let together =
            |guest: &MachineSpec| MachineSpec { group: "all".to_owned(), ..guest.clone() };
        let system = run("no groups", &guests.iter().map(together).collect::<Vec<_>>())?;
        pairs.push(Pair { job: job.name, guests, group, system });
    }
    Ok(pairs)
}

impl Pair {
    /// The speed of each of these guests in groups, divided by its speed without.
    fn gains(&self, guests: std::ops::Range<usize>) -> impl Iterator<Item = f64> {
        let speeds = self.group.speeds.iter().zip(&self.system.speeds);
        speeds.skip(guests.start).take(guests.len()).map(|(group, system)| group / system)
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
        used.map(|used| (used - own).max(0.0)).fold(f64::NAN, f64::max)
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
        let point = |tick: &Tick| Some((tick.at_s, self.used_mib(tick, group)?));
        Line { name: name.to_owned(), points: course.ticks.iter().filter_map(point).collect() }
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
        let chart =
            Chart { unit: "MiB", across: "seconds", is_log: false, lines, marks: Vec::new() };
        page.add(&format!("Memory that the groups occupy: {}", pair.job), chart);
    }
    page
}
