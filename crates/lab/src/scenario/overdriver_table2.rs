//! `overdriver-table2`: the cost of a sustained overload, by the threshold at which it counts as
//! one (Overdriver §5, Tables 2 and 3); and `overload-demo`: a short burst and a long one.
//!
//! The burst lasts five minutes in the paper's time, which is ten times the lab's. A threshold is
//! a number of overloaded intervals of 20 s. The daemon learns the learned one from a guest whose
//! overloads have lasted one interval each so far.

use super::overdriver_fig8::{PAPERS, plot, trials};
use super::prelude::*;
use crate::overload::{OverloadSample, Remedy, Threshold, asked};

pub(super) const TABLE_2: Scenario = Scenario {
    name: "overdriver-table2",
    summary: "what a sustained overload costs, by when it is taken for one",
    measures: &[
        &[file!()],
        measured::POLICY,
        measured::DAEMON,
        measured::DISKS,
        measured::POOL,
        measured::ARMS,
    ],
    claims: claims! {
        "response_learned" < 1.0 => "ratio",
            "A long burst is answered sooner where the daemon has learned that bursts are short";
        "overloaded_learned" < 1.0 => "ratio",
            "A long burst is in overload for a shorter time there";
        "traffic_learned" < 1.0 => "ratio", "A long burst sends less there";
    },
    run: table_2,
};
pub(super) const DEMO: Scenario = Scenario {
    name: "overload-demo",
    summary: "a short burst goes to another host's memory, a long one is migrated, beside a disk",
    measures: &[
        &[file!()],
        measured::POLICY,
        measured::DAEMON,
        measured::DISKS,
        measured::POOL,
        measured::ARMS,
    ],
    claims: claims! {
        "short_vs_disk" >= 1.0 => "ratio",
            "A short burst stays, and is answered better than on a disk";
        "long_vs_disk" >= 1.0 => "ratio",
            "A long burst is moved, and is answered better than on a disk";
    },
    run: demo,
};

const LONG: u64 = 30;
const SHORT: u64 = 4;
const WAYS: [(&str, Remedy); 5] = [
    ("100", Remedy::Both(Threshold { window: 5, sustained: 3 })),
    ("120", Remedy::Both(PAPERS)),
    ("160", Remedy::Both(Threshold { window: 8, sustained: 5 })),
    ("200", Remedy::Both(Threshold { window: 10, sustained: 7 })),
    ("learned", Remedy::Learned(PAPERS)),
];

const PAPERS_RESULTS: [&str; 5] = ["946 ms, 2.1 GB", "1249 ms, 3.6 GB", "", "1344 ms, 6.1 GB", ""];

fn table_2(context: &Context) -> Result<Figures, LabError> {
    let all = trials(context, &[LONG], &WAYS)?;
    let mut figures = context.figures(TABLE_2.name, 1);
    let mut ratio = |name: &str, of: fn(&OverloadSample) -> f64, what: &str| {
        let note = format!("{what}, with the learned threshold to 120 s");
        figures.tell(name, all.number("learned", of) / all.number("120", of), "ratio", note);
    };
    ratio("response_learned", |seen| seen.response_ms, "mean response");
    ratio("overloaded_learned", |seen| seen.overloaded_s, "time in overload");
    ratio("traffic_learned", |seen| seen.traffic.as_mib(), "traffic");
    for ((name, seen), paper) in all.iter().zip(PAPERS_RESULTS) {
        let answered = seen.answered / asked(Duration::from_secs(LONG)) * 100.0;
        let note = "of the requests answered meanwhile";
        figures.tell(&format!("answered_{name}"), answered, "%", note);
        let figure = Figure::new(seen.response_ms, "ms", "mean response");
        let figure = if paper.is_empty() { figure } else { figure.paper(paper) };
        figures.add(&format!("response_ms_{name}"), figure);
        let traffic = seen.traffic.as_mib();
        figures.tell(&format!("traffic_{name}"), traffic, "MiB", "sent and received");
    }
    Ok(figures)
}

fn demo(context: &Context) -> Result<Figures, LabError> {
    let bursts = [SHORT, LONG];
    let ways = [("disk", Remedy::Disk), ("overbook", Remedy::Both(PAPERS))];
    let all = trials(context, &bursts, &ways)?;
    let mut figures = context.figures(DEMO.name, 1);
    let ratios = all.ratios("overbook", "disk", |seen| seen.answered);
    let moves = all.each("overbook", OverloadSample::moves);
    let wanted = [("short", 0.0), ("long", 1.0)];
    for ((ratio, moves), (name, wanted)) in ratios.into_iter().zip(moves).zip(wanted) {
        let note = "answers to those with the disk alone";
        figures.tell(&format!("{name}_vs_disk"), ratio, "ratio", note);
        let (name, target) = (format!("{name}_moved"), Target::Equals(wanted));
        figures.check(&name, moves, "count", "times it was moved", target);
    }
    plot(&bursts, &all).write(&context.dir.join("a"), &mut figures)?;
    Ok(figures)
}
