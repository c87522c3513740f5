//! `kim-fig14`, `kim-fig15`: the benefit of lending between groups (Kim 2014 §7.2, Figs. 14 and
//! 15).
//!
//! Group A is bound by the CPU, leaves memory idle that merging has found, and runs short itself
//! after a while. Group B is short of memory from the beginning. The same runs in three ways:
//! groups by themselves (GRP), groups that lend (GRP-M), and one group of all guests (NOGRP),
//! where no memory belongs to either. `kim-fig14` compares the work done, `kim-fig15` shows the
//! memory of both groups over time.

use std::time::Duration;

use model::{DedupSpec, GroupName, Policy};

use super::{Context, Scenario};
use crate::chart::{Chart, Line};
use crate::figures::{Figure, Figures, Target};
use crate::kim::course::{self, SharingRun, Tick};
use crate::kim::jobs::{self, LATER, RECORDS};
use crate::kim::setting::{Setting, settings};
use crate::kim::trial::geometric_mean;
use crate::lab::LabError;
use crate::machine::MachineSpec;
use crate::meb::page::Page;

pub(super) const SPEEDS: Scenario = Scenario {
    name: "kim-fig14",
    summary: "a group that is short beside one that will be: by themselves, lending, and as one group",
    run: run_speeds,
};

pub(super) const MEMORY: Scenario = Scenario {
    name: "kim-fig15",
    summary: "who has how much memory when, beside a group that will need its own: three ways",
    run: run_memory,
};

/// Long enough for A to be short for about half a minute.
const WINDOW: Duration = Duration::from_secs(140);
const A: &str = "a";
const B: &str = "b";

/// The groups of A's and B's guests, and whether groups lend.
struct LendingArm {
    name: &'static str,
    groups: [&'static str; 2],
    lend: bool,
}

const GRP: LendingArm = LendingArm { name: "grp", groups: [A, B], lend: false };
const GRP_M: LendingArm = LendingArm { name: "grp_m", groups: [A, B], lend: true };
const NOGRP: LendingArm = LendingArm { name: "nogrp", groups: ["all", "all"], lend: false };

/// A course, with the names of the guests of A and of B.
struct LendingResult {
    course: SharingRun,
    guests: [Vec<String>; 2],
}

fn outcome(context: &Context, way: &LendingArm) -> Result<LendingResult, LabError> {
    let [a, b] = way.groups;
    let of_a = jobs::group(a, &[LATER; 3], context.seed);
    let of_b = jobs::group(b, &[RECORDS; 2], context.seed + of_a.len() as u64);
    let names = |guests: &[MachineSpec]| guests.iter().map(|guest| guest.name.clone()).collect();
    let guests = [names(&of_a), names(&of_b)];
    let daemon = Some(settings(DedupSpec::Adaptive, Policy::Demand, way.lend));
    let setting = Setting { name: way.name, daemon };
    context.say(&format!("{} ...", way.name));
    let course =
        course::run(context, &jobs::side_by_side([of_a, of_b]), &setting, Duration::ZERO, WINDOW)?;
    context.say(&course.in_words());
    Ok(LendingResult { course, guests })
}

impl LendingResult {
    /// The speeds of the guests of A, in their second job, and of B: the geometric mean over each
    /// group.
    fn speeds(&self) -> [f64; 2] {
        let (a, b) = self.course.speeds.split_at(self.guests[0].len());
        [a, b].map(|speeds| geometric_mean(speeds.iter().copied()))
    }

    /// Speeds divided by those in `other`: A, B, and the geometric mean of both.
    fn gains(&self, other: &Self) -> [f64; 3] {
        let ([a, b], [other_a, other_b]) = (self.speeds(), other.speeds());
        let (a, b) = (a / other_a, b / other_b);
        [a, b, geometric_mean([a, b])]
    }

    /// Memory that A has lent, over time; zero where A is no group.
    fn lent(&self) -> impl Iterator<Item = (f64, f64)> {
        let lent = |tick: &Tick| {
            let ledger = tick.plan.groups.get(&GroupName::from(A));
            (tick.at_s, ledger.map_or(0.0, |ledger| ledger.lent.as_mib()))
        };
        self.course.ticks.iter().map(lent)
    }

    /// The most that A has lent, in MiB.
    fn most_lent(&self) -> f64 {
        self.lent().map(|(_, mib)| mib).fold(0.0, f64::max)
    }
}

fn run_speeds(context: &Context) -> Result<Figures, LabError> {
    let grp = outcome(context, &GRP)?;
    let grp_m = outcome(context, &GRP_M)?;
    let nogrp = outcome(context, &NOGRP)?;
    let mut figures = context.figures(SPEEDS.name, 1);
    let [a, b, all] = grp_m.gains(&grp);
    let note = "speed, lending to not lending: geometric mean of both groups";
    let figure = Figure::new(all, "ratio", note).target(Target::AtLeast(1.0));
    figures.add("lending_vs_grp", figure.paper("1.22"));
    let note = "the group that is short from the beginning";
    let figure = Figure::new(b, "ratio", note).target(Target::AtLeast(1.0));
    figures.add("lending_vs_grp_b", figure.paper("1.28"));
    let note = "the group that lends, once it is short itself; 5 % are noise";
    let figure = Figure::new(a, "ratio", note).target(Target::AtLeast(0.95));
    figures.add("lending_vs_grp_a", figure.paper("1.15"));
    let [a, b, _] = nogrp.gains(&grp);
    for (name, gain, paper) in [("a", a, "0.73"), ("b", b, "1.32")] {
        let note = format!("group {}, when all are one group", name.to_uppercase());
        figures.add(&format!("nogrp_vs_grp_{name}"), Figure::new(gain, "ratio", note).paper(paper));
    }
    let [_, _, all] = grp_m.gains(&nogrp);
    let note = "speed, lending to one group of all: geometric mean of both groups";
    figures.add("lending_vs_nogrp", Figure::new(all, "ratio", note).paper("1.15"));
    figures.add("lent_most", Figure::new(grp_m.most_lent(), "MiB", "the most at once"));
    Ok(figures)
}

fn run_memory(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(MEMORY.name, 1);
    let (mut of_a, mut of_b, mut page) = (Vec::new(), Vec::new(), Page::default());
    for way in [GRP, GRP_M, NOGRP] {
        let outcome = outcome(context, &way)?;
        for (lines, guests) in [&mut of_a, &mut of_b].into_iter().zip(&outcome.guests) {
            lines.push(allocated(way.name, &outcome.course, guests));
        }
        if way.lend {
            add_loan(&mut figures, &outcome);
            let points = outcome.lent().collect();
            page.add("What A lends", chart(vec![Line { name: "lent".to_owned(), points }]));
        }
    }
    page.add("What the guests of A may use", chart(of_a));
    page.add("What the guests of B may use", chart(of_b));
    page.write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// Adds the most that was lent, and the time until it came back when A needed it.
fn add_loan(figures: &mut Figures, outcome: &LendingResult) {
    let most = outcome.most_lent();
    let figure = Figure::new(most, "MiB", "the most at once").target(Target::AtLeast(10.0));
    figures.add("lent_most", figure);
    let lent: Vec<(f64, f64)> = outcome.lent().collect();
    let last = lent.iter().rposition(|(_, mib)| *mib > 0.0);
    let ticks = last.map_or(&[][..], |last| &outcome.course.ticks[last + 1..]);
    let over = |tick: &&Tick| {
        let ledger = tick.plan.groups.get(&GroupName::from(B));
        ledger.is_some_and(|ledger| !ledger.deficit.is_zero())
    };
    let came_back = ticks.iter().find(|tick| !over(tick)).zip(ticks.first());
    let seconds = came_back.map_or(f64::NAN, |(back, recalled)| back.at_s - recalled.at_s);
    let note = "from the end of the loan until B is within its budget again";
    figures.add("returned_s", Figure::new(seconds, "s", note).target(Target::AtMost(15.0)));
}

/// Memory that these guests may use together, over time.
fn allocated(name: &str, course: &SharingRun, guests: &[String]) -> Line {
    let held =
        |tick: &Tick| guests.iter().map(|guest| tick.allocated_mib(guest)).sum::<Option<f64>>();
    let points = course.ticks.iter().filter_map(|tick| Some((tick.at_s, held(tick)?)));
    Line { name: name.to_owned(), points: points.collect() }
}

fn chart(lines: Vec<Line>) -> Chart {
    Chart { unit: "MiB", across: "seconds", is_log: false, lines, marks: Vec::new() }
}
