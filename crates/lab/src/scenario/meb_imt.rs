//! `meb-imt`: intermittent tracking over recorded traces: how often it is on, and its error (MEB
//! §5.2.3, Table II).
//!
//! Each workload is recorded once, with tracking always on: its mean working set in every second,
//! and its event. Each way to judge the event is then replayed over the same trace: when it says
//! "on" the recorded working set is known, else the last known one stands. One second stands for
//! the paper's interval of five, because the workloads' phases are shorter by the same factor.
//! The paper's event is dTLB misses, where there is a counter for them. Here the event is the
//! touches of a small sample of granules that stays tracked, as the worker counts them.
//!
//! The traces are written next to the page (`meb-imt-<workload>.csv`).

use std::fmt::Write as _;

use pages::phase::{Judgement, Replay, Sample, replay};

use super::prelude::*;
use crate::meb::modes;
use crate::meb::page;
use crate::meb::watch::{self, Record, Watch};
use crate::meb::workloads::{ALL, SIDE_BY_SIDE, Workload};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "meb-imt",
    summary: "intermittent tracking replayed over recorded traces: how often on, and how wrong",
    measures: &[&[file!()], measured::PAGES, measured::MEB],
    claims: claims! {
        "up_ratio" <= 0.143 => "ratio",
            "Phase detection keeps tracking off most of the time", "0.143";
        "mre" <= 0.042 => "ratio", "Phase detection is little wrong meanwhile", "0.042";
    },
    run,
};

/// The paper's fixed thresholds with its results: up ratio and error, in percent.
const FIXED: [(f64, &str, &str); 4] =
    [(0.05, "37.3", "4.0"), (0.10, "25.1", "8.0"), (0.20, "17.0", "9.4"), (0.30, "14.8", "11.7")];
const SETTLE: Duration = Duration::from_secs(15);
const INTERVAL: Duration = Duration::from_secs(1);
/// Samples of the working set in an interval.
const LOOKS: u32 = 5;
/// Intervals of a trace.
const LENGTH: u32 = 180;

struct Trace {
    workload: &'static str,
    samples: Vec<Sample>,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut traces = Vec::new();
    for workloads in ALL.chunks(SIDE_BY_SIDE) {
        let names: Vec<&str> = workloads.iter().map(|workload| workload.name).collect();
        context.say(&format!("Recording {} for three minutes ...", names.join(" beside ")));
        traces.extend(record(context, workloads)?);
    }
    let mut figures = figures(context, &traces);
    for trace in &traces {
        let path = context.dir.join("log").join(format!("meb-imt-{}.csv", trace.workload));
        page::save(&path, trace.to_csv().as_bytes())?;
    }
    page(&traces).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn record(context: &Context, workloads: &[Workload]) -> Result<Vec<Trace>, LabError> {
    let guest =
        |(n, w): (usize, &Workload)| MachineSpec { hot_set: true, ..w.guest(n, context.seed) };
    let mut lab = context.start(workloads.iter().enumerate().map(guest))?;
    let track =
        |m: &Machine| Watch::start(m.process().pid, modes::always_on(), &[], INTERVAL / LOOKS);
    let watches = lab.machines().iter().map(track).collect::<Result<Vec<Watch>, _>>()?;
    watch::wait_until_tracked(&lab, &watches)?;
    progress::wait_until_working(&lab)?;
    interrupt::sleep(SETTLE)?;
    let from_us = watch::now_us();
    interrupt::sleep(INTERVAL * LENGTH)?;
    lab.ensure_alive()?;
    let mut traces = Vec::new();
    for (workload, watch) in workloads.iter().zip(watches) {
        let samples = samples(&watch.stop()?, from_us);
        traces.push(Trace { workload: workload.name, samples });
    }
    lab.stop()?;
    Ok(traces)
}

/// Leaves out samples in which the working set or the event is not known.
fn samples(record: &Record, from_us: u64) -> Vec<Sample> {
    let seen = record.seen.iter().filter(|seen| seen.at_us >= from_us);
    let known =
        |seen: &watch::TrackingSample| Some((seen.tracking.working_set?.0 as f64, seen.event?));
    let looks: Vec<(f64, f64)> = seen.filter_map(known).collect();
    let interval = |looks: &[(f64, f64)]| {
        let working_set = looks.iter().map(|look| look.0).sum::<f64>() / f64::from(LOOKS);
        Sample { working_set, event: looks[looks.len() - 1].1 }
    };
    looks.chunks_exact(LOOKS as usize).map(interval).collect()
}

impl Trace {
    fn to_csv(&self) -> String {
        let mut text = "second,working_set_bytes,event\n".to_owned();
        for (second, sample) in self.samples.iter().enumerate() {
            let _ = writeln!(text, "{second},{:.0},{}", sample.working_set, sample.event);
        }
        text
    }
}

/// Means over the traces: up ratio and error. Without a trace both are NaN.
fn means(traces: &[Trace], judgement: Judgement) -> (f64, f64) {
    let all: Vec<Replay> = traces.iter().map(|trace| replay(judgement, &trace.samples)).collect();
    let mean = |of: fn(&Replay) -> f64| mean(all.iter().map(of));
    (mean(|replay| replay.up_ratio), mean(|replay| replay.mean_relative_error))
}

fn figures(context: &Context, traces: &[Trace]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let shortest = traces.iter().map(|trace| trace.samples.len()).min().unwrap_or(0);
    let (up, error) = means(traces, Judgement::Anchored);
    let note = format!("share of {} intervals in which tracking is on, as shipped", LENGTH);
    figures.tell("up_ratio", up, "ratio", note);
    figures.tell("mre", error, "ratio", "mean of |working set gone by - recorded| / recorded");
    let least = Target::AtLeast(f64::from(LENGTH) * 0.8);
    let note = "seconds in the shortest trace";
    figures.check("samples_min", shortest as f64, "count", note, least);
    let (up, error) = means(traces, Judgement::Adaptive);
    let figure = Figure::new(up, "ratio", "the paper's adaptive way");
    figures.add("up_ratio_adaptive", figure.paper("0.143"));
    figures.add("mre_adaptive", Figure::new(error, "ratio", "the same").paper("0.042"));
    for (threshold, paper_up, paper_error) in FIXED {
        let (up, error) = means(traces, Judgement::Fixed(threshold));
        let name = format!("{threshold:.2}").replace("0.", "");
        let figure = |value, paper: &str| {
            Figure::new(value, "ratio", format!("fixed threshold {threshold}"))
                .paper(format!("{paper} %"))
        };
        figures.add(&format!("up_ratio_fixed_{name}"), figure(up, paper_up));
        figures.add(&format!("mre_fixed_{name}"), figure(error, paper_error));
    }
    for trace in traces {
        let replay = replay(Judgement::Anchored, &trace.samples);
        let note =
            format!("error {:.3}, over {} s", replay.mean_relative_error, trace.samples.len());
        let name = format!("up_ratio_{}", trace.workload);
        figures.tell(&name, replay.up_ratio, "ratio", note);
    }
    figures
}

/// As Figures 11 and 12: the recorded working set, the assumed one, and when tracking was on.
fn page(traces: &[Trace]) -> Page {
    let mut page = Page::default();
    for trace in traces {
        let replay = replay(Judgement::Anchored, &trace.samples);
        let mib = |bytes: f64| bytes / f64::from(1 << 20);
        let at = |second: usize| second as f64;
        let recorded = trace.samples.iter().enumerate().map(|(s, x)| (at(s), mib(x.working_set)));
        let gone_by = replay.intervals.iter().enumerate().map(|(s, x)| (at(s), mib(x.1)));
        let on = replay.intervals.iter().enumerate();
        let on = on.map(|(s, x)| (at(s), if x.0 { 10.0 } else { 0.0 }));
        let line = |name: &str, points: Vec<_>| Line::new(name, points);
        let lines = vec![
            line("recorded", recorded.collect()),
            line("gone by", gone_by.collect()),
            line("on", on.collect()),
        ];
        let chart = Chart::linear("MiB", "seconds", lines);
        page.add(trace.workload, chart);
    }
    page
}
