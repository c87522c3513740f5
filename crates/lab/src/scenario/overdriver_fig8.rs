//! `overdriver-fig8`: the cost of a burst of clients to a web server and the network, by remedy
//! and by length of the burst (Overdriver §5, Figs. 7 to 10).
//!
//! All trials run on real guests, one after the other; [`overload`] describes the scaling. A mix
//! of bursts is weighted by the paper's text on its Fig. 3 at 640 of 1,024 MB: 58.9 % last 10 s,
//! 96 % less than a minute, 96.9 % less than two. Each share counts as its longest burst, and
//! longer bursts as five minutes.

use std::fmt::Write as _;

use super::prelude::*;
use crate::overload::{self, OverloadSample, PROMISED, Remedy, Threshold};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "overdriver-fig8",
    summary: "a web server in a burst: well-provisioned, disk, network memory, migration, Overbook",
    measures: &[&[file!()], measured::POLICY, measured::DAEMON, measured::DISKS, measured::POOL],
    claims: claims! {
        "loss_max" <= 8.0 => "%",
            "A web server with half of its memory answers as many requests in a burst as one \
             with all of it (bursts a tenth as long as the paper's, a quarter of the memory)",
            "8 %";
        "response_max" <= 1.0 => "ratio",
            "It answers as soon: within 1 s, or twice its own time", "< 1 s";
        "excess_vs_migration" <= 0.15 => "ratio",
            "Bursts at that scale take little memory of other hosts, compared with migration",
            "0.15";
        "traffic_vs_migration" <= 0.25 => "ratio",
            "Bursts at that scale, which flatters traffic, send little, compared with moving the \
             guest as it is",
            "0.25";
        "traffic_vs_promised" <= 0.25 => "ratio",
            "Bursts at that scale send little, compared with moving a guest that has all of its \
             memory",
            "0.25";
        "overload_longer_s" => "s",
            "Overloads last longer than the bursts by this", "roughly as long";
    },
    run,
};

/// The length of each burst in seconds, a tenth of the paper's, and its share of all bursts.
const BURSTS: [(u64, f64); 4] = [(1, 0.589), (6, 0.371), (12, 0.009), (30, 0.031)];
/// The paper's 8 of 12 intervals of 10 s. An interval of 2 s stands for 20 s here.
pub(super) const PAPERS: Threshold = Threshold { window: 6, sustained: 4 };
const WAYS: [(&str, Remedy); 5] = [
    ("memory", Remedy::Memory),
    ("disk", Remedy::Disk),
    ("network", Remedy::Network),
    ("migration", Remedy::Migration),
    ("overbook", Remedy::Both(PAPERS)),
];
const MEMORY: usize = 0;
const NETWORK: usize = 2;
const MIGRATION: usize = 3;
const OVERBOOK: usize = 4;

fn run(context: &Context) -> Result<Figures, LabError> {
    let bursts = BURSTS.map(|(seconds, _)| seconds);
    let all = trials(context, &bursts, &WAYS)?;
    let mut figures = figures(context, &all);
    plot(&bursts, &WAYS, &all).write(&context.dir.join("a"), &mut figures)?;
    Ok(figures)
}

/// Runs each burst with each remedy, and prints a table of all.
pub(super) fn trials(
    context: &Context,
    bursts: &[u64],
    ways: &[(&str, Remedy)],
) -> Result<Vec<Vec<OverloadSample>>, LabError> {
    let mut all = Vec::new();
    let mut table = format!(
        "{:<11}{:>7}{:>12}{:>14}{:>13}{:>13}{:>11}{:>7}\n",
        "", "burst", "answered", "response", "overloaded", "traffic", "space", "moved"
    );
    for seconds in bursts {
        let burst = Duration::from_secs(*seconds);
        let mut seen = Vec::new();
        for (name, remedy) in ways {
            context.say(&format!("{name}, {seconds} s ..."));
            let one = overload::run(context, *remedy, burst)?;
            // Writing to a string cannot fail.
            let _ = writeln!(
                table,
                "{name:<11}{seconds:>5} s{:>10.1} %{:>11.1} ms{:>11.1} s{:>9.1} MiB\
                 {:>7.1} MiB{:>7}",
                one.answered / overload::asked(burst) * 100.0,
                one.response_ms,
                one.overloaded_s,
                mib(one.traffic),
                mib(one.space),
                if one.moved { "yes" } else { "no" },
            );
            seen.push(one);
        }
        all.push(seen);
    }
    eprint!("{table}");
    Ok(all)
}

/// Answers over time, the longest burst first.
pub(super) fn plot(bursts: &[u64], ways: &[(&str, Remedy)], all: &[Vec<OverloadSample>]) -> Page {
    let mut page = Page::default();
    for (seconds, seen) in bursts.iter().zip(all).rev() {
        let lines =
            ways.iter().zip(seen).map(|((name, _), one)| Line::new(name, one.rates.clone()));
        let (unit, across) = ("answers per second", "seconds");
        let chart = Chart::linear(unit, across, lines);
        page.add(&format!("A burst of {seconds} s"), chart);
    }
    page
}

pub(super) fn mib(size: model::Bytes) -> f64 {
    size.0 as f64 / f64::from(1 << 20)
}

fn figures(context: &Context, all: &[Vec<OverloadSample>]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let loss =
        |seen: &[OverloadSample], way: usize| 1.0 - seen[way].answered / seen[MEMORY].answered;
    // NaN is the worst.
    let worse = |one: f64, other: f64| if other.is_nan() || other > one { other } else { one };
    let worst = |of: &dyn Fn(&[OverloadSample]) -> f64| {
        all.iter().map(|seen| of(seen)).fold(f64::NEG_INFINITY, worse)
    };
    let percent = |way: usize| worst(&|seen| loss(seen, way) * 100.0);
    let note = "answers fewer than with enough memory, the worst burst length";
    figures.tell("loss_max", percent(OVERBOOK), "%", note);
    let slow = |seen: &[OverloadSample]| {
        let limit = f64::max(1_000.0, 2.0 * seen[MEMORY].response_ms);
        seen[OVERBOOK].response_ms / limit
    };
    let note = "mean response to 1 s or twice that with enough memory, the worst burst length";
    figures.tell("response_max", worst(&slow), "ratio", note);
    for (way, (name, _)) in WAYS.iter().enumerate().skip(1) {
        if way != OVERBOOK {
            let figure = Figure::new(percent(way), "%", "the same, this remedy alone");
            figures.add(&format!("loss_max_{name}"), figure);
        }
        let ms = worst(&|seen| seen[way].response_ms);
        figures.tell(&format!("response_ms_{name}"), ms, "ms", "mean, worst");
    }
    let mixed = |of: &dyn Fn(&OverloadSample) -> f64, way: usize| -> f64 {
        BURSTS.iter().zip(all).map(|((_, share), seen)| share * of(&seen[way])).sum()
    };
    let traffic = |way| mixed(&|seen| mib(seen.traffic), way);
    let note = "sent and received for a mix of bursts as in Fig. 3, to migration alone (Fig. 9)";
    figures.tell("traffic_vs_migration", traffic(OVERBOOK) / traffic(MIGRATION), "ratio", note);
    // The paper moves another VM, which has all that it was promised.
    let note = "the same, to moves of VMs that have all that they were promised, as the paper's";
    let moved = mixed(&|seen| if seen.moved { mib(PROMISED) } else { 0.0 }, MIGRATION);
    figures.tell("traffic_vs_promised", traffic(OVERBOOK) / moved, "ratio", note);
    let space = |way| mixed(&|seen| mib(seen.space), way);
    let note = "others' memory taken at most, for the same mix, to migration alone (Fig. 10)";
    figures.tell("excess_vs_migration", space(OVERBOOK) / space(MIGRATION), "ratio", note);
    let moves = |way: usize| {
        let moved = all.iter().filter(|seen| seen[way].moved).count();
        u32::try_from(moved).map_or(f64::NAN, f64::from)
    };
    let note = format!("burst lengths of {} at which it was moved", BURSTS.len());
    figures.tell("moved_migration", moves(MIGRATION), "count", note.clone());
    figures.tell("moved_overbook", moves(OVERBOOK), "count", note);
    // A burst that was never sustained takes no more than the withheld memory.
    let note = "others' memory taken in a burst that ended by itself, at most (Fig. 10)";
    let transient = all.iter().filter(|seen| !seen[OVERBOOK].moved);
    let most = transient.map(|seen| mib(seen[OVERBOOK].space)).reduce(worse).unwrap_or(f64::NAN);
    let withheld = mib(PROMISED) / 2.0;
    let most = Figure::new(most, "MiB", note).target(Target::AtMost(withheld));
    figures.add("transient_space_max", most.paper("at most what was withheld"));
    let note = "overloaded for so much longer than the burst, network memory, mean (Fig. 7)";
    let longer = BURSTS.iter().zip(all).map(|((seconds, _), seen)| {
        seen[NETWORK].overloaded_s - Duration::from_secs(*seconds).as_secs_f64()
    });
    figures.tell("overload_longer_s", mean(longer), "s", note);
    figures
}
