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
    measures: &[
        &[file!()],
        measured::POLICY,
        measured::DAEMON,
        measured::DISKS,
        measured::POOL,
        measured::ARMS,
    ],
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

fn run(context: &Context) -> Result<Figures, LabError> {
    let bursts = BURSTS.map(|(seconds, _)| seconds);
    let all = trials(context, &bursts, &WAYS)?;
    let mut figures = figures(context, &all);
    plot(&bursts, &all).write(&context.dir.join("a"), &mut figures)?;
    Ok(figures)
}

/// Runs each burst with each remedy, and prints a table of all.
pub(super) fn trials(
    context: &Context,
    bursts: &[u64],
    ways: &[(&'static str, Remedy)],
) -> Result<Arms<OverloadSample>, LabError> {
    let mut all = Arms::default();
    let mut table = format!(
        "{:<11}{:>7}{:>12}{:>14}{:>13}{:>13}{:>11}{:>7}\n",
        "", "burst", "answered", "response", "overloaded", "traffic", "space", "moved"
    );
    for seconds in bursts {
        let burst = Duration::from_secs(*seconds);
        all.turn(ArmOrder::Listed, ways, |name, remedy| {
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
                one.traffic.as_mib(),
                one.space.as_mib(),
                if one.moved { "yes" } else { "no" },
            );
            Ok(one)
        })?;
    }
    eprint!("{table}");
    Ok(all)
}

/// Answers over time, the longest burst first.
pub(super) fn plot(bursts: &[u64], all: &Arms<OverloadSample>) -> Page {
    let mut page = Page::default();
    for (seconds, seen) in bursts.iter().zip(&all.0).rev() {
        let lines = seen.iter().map(|(name, one)| Line::new(name, one.rates.iter().copied()));
        let chart = Chart::linear("answers per second", "seconds", lines);
        page.add(&format!("A burst of {seconds} s"), chart);
    }
    page
}

/// `all`: by bursts.
fn figures(context: &Context, all: &Arms<OverloadSample>) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let loss = |way: &str| {
        let loss = |one: &OverloadSample, memory: &OverloadSample| {
            (1.0 - one.answered / memory.answered) * 100.0
        };
        all.both(way, "memory", loss).into_iter().largest()
    };
    let note = "answers fewer than with enough memory, the worst burst length";
    figures.tell("loss_max", loss("overbook"), "%", note);
    let slow = all.both("overbook", "memory", |ours, memory| {
        ours.response_ms / f64::max(1_000.0, 2.0 * memory.response_ms)
    });
    let note = "mean response to 1 s or twice that with enough memory, the worst burst length";
    figures.tell("response_max", slow.into_iter().largest(), "ratio", note);
    for (name, _) in &WAYS[1..] {
        if *name != "overbook" {
            let note = "the same, this remedy alone";
            figures.tell(&format!("loss_max_{name}"), loss(name), "%", note);
        }
        let ms = all.each(name, |seen| seen.response_ms).into_iter().largest();
        figures.tell(&format!("response_ms_{name}"), ms, "ms", "mean, worst");
    }
    let mixed = |way: &str, of: fn(&OverloadSample) -> f64| -> f64 {
        BURSTS.iter().zip(all.each(way, of)).map(|((_, share), value)| share * value).sum()
    };
    let ratio = |of| mixed("overbook", of) / mixed("migration", of);
    let note = "sent and received for a mix of bursts as in Fig. 3, to migration alone (Fig. 9)";
    let traffic = |seen: &OverloadSample| seen.traffic.as_mib();
    figures.tell("traffic_vs_migration", ratio(traffic), "ratio", note);
    // The paper moves another VM, which has all that it was promised.
    let note = "the same, to moves of VMs that have all that they were promised, as the paper's";
    let moved = mixed("migration", |seen| if seen.moved { PROMISED.as_mib() } else { 0.0 });
    figures.tell("traffic_vs_promised", mixed("overbook", traffic) / moved, "ratio", note);
    let note = "others' memory taken at most, for the same mix, to migration alone (Fig. 10)";
    figures.tell("excess_vs_migration", ratio(|seen| seen.space.as_mib()), "ratio", note);
    for way in ["migration", "overbook"] {
        let moves = all.each(way, OverloadSample::moves).into_iter().sum();
        let note = format!("burst lengths of {} at which it was moved", BURSTS.len());
        figures.tell(&format!("moved_{way}"), moves, "count", note);
    }
    // A burst that was never sustained takes no more than the withheld memory.
    let note = "others' memory taken in a burst that ended by itself, at most (Fig. 10)";
    let transient = all.of("overbook").filter(|seen| !seen.moved);
    let most = Figure::new(transient.map(|seen| seen.space.as_mib()).largest(), "MiB", note);
    let most = most.target(Target::AtMost(PROMISED.as_mib() / 2.0));
    figures.add("transient_space_max", most.paper("at most what was withheld"));
    let note = "overloaded for so much longer than the burst, network memory, mean (Fig. 7)";
    let overloaded = all.each("network", |seen| seen.overloaded_s);
    let longer = BURSTS.iter().zip(overloaded).map(|((seconds, _), s)| s - *seconds as f64);
    figures.tell("overload_longer_s", mean(longer), "s", note);
    figures
}
