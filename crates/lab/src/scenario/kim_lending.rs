//! `kim-fig14`, `kim-fig15`: the benefit of lending between groups (Kim 2014 §7.2, Figs. 14 and
//! 15).
//!
//! Group A is bound by the CPU, leaves memory idle that merging has found, and runs short itself
//! after a while. Group B is short of memory from the beginning. The same runs in three ways:
//! groups by themselves (GRP), groups that lend (GRP-M), and one group of all guests (NOGRP),
//! where no memory belongs to either. `kim-fig14` compares the work done within a round, in six
//! rounds; `kim-fig15` shows the memory of both groups over time, once.

use model::{DedupSpec, GroupName, Policy};

use super::prelude::*;
use crate::arms::ROUNDS;
use crate::kim::course::{self, SharingRun, Tick};
use crate::kim::jobs::{self, LATER, RECORDS};
use crate::kim::setting::{Setting, settings};

pub(super) const SPEEDS: Scenario = Scenario {
    name: "kim-fig14",
    summary: "a group that is short beside one that will be: by themselves, lending, and as one group",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: claims! {
        "lending_vs_grp" >= 1.0 => "ratio",
            "Lending makes the whole system faster than groups by themselves", "1.22";
        "lending_vs_grp_a" >= 0.95 => "ratio",
            "Lending is not at the expense of the group that lends", "1.15";
        "lending_vs_grp_b" >= 1.0 => "ratio", "The group that borrows is faster", "1.28";
    },
    run: run_speeds,
};

pub(super) const MEMORY: Scenario = Scenario {
    name: "kim-fig15",
    summary: "who has how much memory when, beside a group that will need its own: three ways",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: claims! {
        "lent_most" >= 10.0 => "MiB", "A group that computes lends its saving";
        "returned_s" <= 15.0 => "s",
            "The borrower is within its budget soon after the loan has ended";
    },
    run: run_memory,
};

/// Long enough for A to be short for about half a minute.
const WINDOW: Duration = Duration::from_secs(140);
const A: &str = "a";
const B: &str = "b";

/// The groups of A's and B's guests, and whether groups lend.
struct LendingArm {
    groups: [&'static str; 2],
    lend: bool,
}

/// The arms of a round.
const ARMS: [(&str, LendingArm); 3] = [
    ("grp", LendingArm { groups: [A, B], lend: false }),
    ("grp_m", LendingArm { groups: [A, B], lend: true }),
    ("nogrp", LendingArm { groups: ["all", "all"], lend: false }),
];

/// A course, with the names of the guests of A and of B.
struct LendingResult {
    course: SharingRun,
    guests: [Vec<String>; 2],
}

fn outcome(
    context: &Context,
    name: &'static str,
    arm: &LendingArm,
) -> Result<LendingResult, LabError> {
    let [a, b] = arm.groups;
    let of_a = jobs::group(a, &[LATER; 3], context.seed);
    let of_b = jobs::group(b, &[RECORDS; 2], context.seed + of_a.len() as u64);
    let names = |guests: &[MachineSpec]| guests.iter().map(|guest| guest.name.clone()).collect();
    let guests = [names(&of_a), names(&of_b)];
    let daemon = Some(settings(DedupSpec::Adaptive, Policy::Demand, arm.lend));
    let setting = Setting { name, daemon };
    context.say(&format!("{name} ..."));
    let course =
        course::run(context, &jobs::side_by_side([of_a, of_b]), &setting, Duration::ZERO, WINDOW)?;
    Ok(LendingResult { course, guests })
}

impl LendingResult {
    /// The speeds of the guests of A, in their second job, and of B: the geometric mean over each
    /// group.
    fn speeds(&self) -> [f64; 2] {
        let [of_a, of_b] = self.guests.each_ref().map(Vec::len);
        if self.course.speeds.len() != of_a + of_b {
            return [f64::NAN; 2];
        }
        let (a, b) = self.course.speeds.split_at(of_a);
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
        self.lent().map(|(_, mib)| mib).largest()
    }
}

fn run_speeds(context: &Context) -> Result<Figures, LabError> {
    let mut results = Arms::default();
    for round in 1..=ROUNDS {
        context.say(&format!("Round {round} of {ROUNDS} ..."));
        results.turn(ArmOrder::Alternating, &ARMS, |name, arm| outcome(context, name, arm))?;
    }
    let mut figures = context.figures(SPEEDS.name, ROUNDS);
    add_speeds(&mut figures, &results);
    Ok(figures)
}

fn add_speeds(figures: &mut Figures, results: &Arms<LendingResult>) {
    let gains = |one: &str, other: &str, which: usize| {
        results.both(one, other, |one, other| one.gains(other)[which])
    };
    let [grp, grp_m, nogrp] = ARMS.map(|(name, _)| name);
    let [a, b, all] = [0, 1, 2];
    let note = "speed, lending to not lending: geometric mean of both groups";
    figures.tell_rounds("lending_vs_grp", gains(grp_m, grp, all), "ratio", note);
    let note = "the group that is short from the beginning";
    figures.tell_rounds("lending_vs_grp_b", gains(grp_m, grp, b), "ratio", note);
    let note = "the group that lends, once it is short itself; 5 % are noise";
    figures.tell_rounds("lending_vs_grp_a", gains(grp_m, grp, a), "ratio", note);
    for (name, which, paper) in [("a", a, "0.73"), ("b", b, "1.32")] {
        let note = format!("group {}, when all are one group", name.to_uppercase());
        let figure = Figure::of_rounds(gains(nogrp, grp, which), "ratio", note);
        figures.add(&format!("nogrp_vs_grp_{name}"), figure.paper(paper));
    }
    let note = "speed, lending to one group of all: geometric mean of both groups";
    let figure = Figure::of_rounds(gains(grp_m, nogrp, all), "ratio", note).paper("1.15");
    figures.add("lending_vs_nogrp", figure);
    let most = results.each(grp_m, LendingResult::most_lent);
    figures.tell_rounds("lent_most", most, "MiB", "the most at once");
}

fn run_memory(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(MEMORY.name, 1);
    let (mut of_a, mut of_b, mut page) = (Vec::new(), Vec::new(), Page::default());
    for (name, arm) in &ARMS {
        let outcome = outcome(context, name, arm)?;
        for (lines, guests) in [&mut of_a, &mut of_b].into_iter().zip(&outcome.guests) {
            lines.push(outcome.course.line(name, |tick| tick.allocated_to_all_mib(guests)));
        }
        if arm.lend {
            add_loan(&mut figures, &outcome);
            let points = outcome.lent();
            page.add("What A lends", chart(vec![Line::new("lent", points)]));
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
    figures.tell("lent_most", most, "MiB", "the most at once");
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
    figures.tell("returned_s", seconds, "s", note);
}

fn chart(lines: Vec<Line>) -> Chart {
    Chart::linear("MiB", "seconds", lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(speeds: &[f64]) -> LendingResult {
        let names = |count: usize| (0..count).map(|number| format!("g-{number}")).collect();
        let course = SharingRun { speeds: speeds.to_vec(), cpu_busy: 1.0, ticks: Vec::new() };
        LendingResult { course, guests: [names(3), names(2)] }
    }

    /// A's three guests, then B's two: by themselves, lending, and as one group.
    const GOOD: [&[f64]; 3] = [
        &[10.0, 10.0, 10.0, 5.0, 5.0],
        &[10.0, 10.0, 10.0, 20.0, 20.0],
        &[8.0, 8.0, 8.0, 10.0, 10.0],
    ];

    fn figures(rounds: &[[&[f64]; 3]]) -> Figures {
        let names = ARMS.map(|(name, _)| name);
        let rounds = rounds.iter().map(|round| names.into_iter().zip(round.map(result)).collect());
        let results = Arms(rounds.collect());
        Figures::invented(SPEEDS.name, |figures| add_speeds(figures, &results))
    }

    const CLAIMED: [&str; 3] = ["lending_vs_grp", "lending_vs_grp_a", "lending_vs_grp_b"];

    #[test]
    fn lending_is_set_against_groups_by_themselves() {
        let figures = figures(&[GOOD; 6]);
        figures.assert_near(&[
            ("lending_vs_grp", 2.0),
            ("lending_vs_grp_a", 1.0),
            ("lending_vs_grp_b", 4.0),
            ("nogrp_vs_grp_b", 2.0),
        ]);
        assert!(CLAIMED.iter().all(|name| figures.met(name)));
    }

    #[test]
    fn arms_that_are_swapped_and_a_group_that_pays_for_it_miss() {
        let [grp, grp_m, nogrp] = GOOD;
        let swapped = figures(&[[grp_m, grp, nogrp]; 6]);
        assert!(!swapped.met("lending_vs_grp_b"));
        let slow: &[f64] = &[9.0, 9.0, 9.0, 20.0, 20.0];
        let mut rounds = [GOOD; 6];
        rounds[0] = [grp, slow, nogrp];
        let figures = figures(&rounds);
        assert!(!figures.met("lending_vs_grp_a"));
        assert!(figures.met("lending_vs_grp_b"));
    }

    #[test]
    fn a_guest_that_is_missing_or_silent_is_no_number() {
        let [grp, grp_m, nogrp] = GOOD;
        let bad: [&[f64]; 2] = [&[10.0, 10.0, 10.0, 20.0], &[10.0, 10.0, 10.0, 20.0, f64::NAN]];
        for speeds in bad {
            let figures = figures(&[GOOD, [grp, speeds, nogrp], [grp, grp_m, nogrp]]);
            assert!(figures.value("lending_vs_grp").is_nan());
        }
    }
}
