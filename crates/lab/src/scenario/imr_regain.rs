//! `imr-table9` and `imr-table10`: how much of what a guest has freed comes back to the host, and what taking it costs.
//!
//! A guest fills most of its memory, frees it, rests, and begins again. When its kernel has had the time to report what is
//! free, all of that is taken. What was taken is compared with what the guest has freed. The first round is not counted:
//! the guest also reports then what it has used while it booted.
//!
//! Guests' kernels report blocks from a size on that can be set (`page_reporting_order`): what is free in smaller
//! pieces stays unknown to the host.

use std::time::Duration;

use model::{Bytes, FreePages, TrackingBudget};
use overbook::worker::FreedOrder;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::{MachineSpec, USUAL_ORDER};
use crate::meb::pairs::Median;
use crate::merger;
use crate::worker_process::{Wanted, WorkerProcess};

pub(super) const TABLE_9: Scenario = Scenario {
    name: "imr-table9",
    summary: "taking back what a guest has freed, random and duplicated data: how much, at what cost",
    run: table_9,
};

pub(super) const TABLE_10: Scenario = Scenario {
    name: "imr-table10",
    summary: "how much of what a guest has freed comes back, by the size of what it reports",
    run: table_10,
};

const MEMORY: Bytes = Bytes::mib(384);
const FREED_MB: u32 = 192;
/// Rounds that count.
const ROUNDS: usize = 3;
const HOLD_S: u32 = 4;
/// How long a guest's kernel takes to report what is free in large blocks, and in small ones.
const REPORT_LARGE: Duration = Duration::from_secs(8);
const REPORT_SMALL: Duration = Duration::from_secs(40);
/// In which taking has ended, and the worker has reported.
const TAKE: Duration = Duration::from_secs(4);
const LIMIT: Duration = Duration::from_secs(120);
/// Blocks from so many pages on are large.
const LARGE_ORDER: u32 = 7;

/// What came of one setting: medians.
struct Regained {
    /// Of what the guest freed: reported, and taken.
    reported: f64,
    taken: Median,
    /// CPU time of the shim's threads for each page of 4 KiB taken, in microseconds.
    us_per_page: Median,
}

fn table_9(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(TABLE_9.name, 1);
    for (name, options, paper) in [
        ("random", "", "0.56 us: 0.54 to write, 0.02 to free"),
        ("duplicated", " --same", "0.56 us"),
    ] {
        let regained = regain(context, USUAL_ORDER, options)?;
        figures.add(&format!("reclaimed_{name}"), share(&regained));
        let Median { low, high, .. } = regained.us_per_page;
        let note = format!("the shim's CPU time, {low:.3} to {high:.3} (paper: {paper})");
        let figure = Figure::new(regained.us_per_page.value, "us", note);
        let figure = figure.target(Target::AtMost(0.56));
        let name =
            if name == "random" { "take_us_per_page" } else { "take_us_per_page_duplicated" };
        figures.add(name, figure);
    }
    let regained = regain(context, 0, " --scatter")?;
    let note = "the same where every second page was freed, so that none is part of a huge page";
    let figure = Figure::new(regained.us_per_page.value, "us", note);
    figures.add("take_us_per_small_page", figure);
    Ok(figures)
}

fn table_10(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(TABLE_10.name, 1);
    let sizes = [
        ("4m", 10, Some(0.923)),
        ("2m", 9, Some(0.965)),
        ("1m", 8, Some(0.983)),
        ("512k", 7, Some(0.991)),
        ("128k", 5, None),
        ("4k", 0, None),
    ];
    for (name, order, paper) in sizes {
        let figure = share(&regain(context, order, "")?);
        let figure = match paper {
            Some(paper) => figure.target(Target::AtLeast(paper)),
            None => figure,
        };
        figures.add(&format!("reclaimed_{name}"), figure);
    }
    for (name, order) in [("2m", USUAL_ORDER), ("4k", 0)] {
        let figure = share(&regain(context, order, " --scatter")?);
        figures.add(&format!("reclaimed_scattered_{name}"), figure);
    }
    Ok(figures)
}

fn share(regained: &Regained) -> Figure {
    let Median { low, high, .. } = regained.taken;
    let note = format!(
        "of what the guest freed, {low:.3} to {high:.3}; its kernel reported {:.3}",
        regained.reported
    );
    Figure::new(regained.taken.value, "ratio", note)
}

fn regain(context: &Context, order: u32, options: &str) -> Result<Regained, LabError> {
    context.say(&format!("blocks of 2^{order} pages{options} ..."));
    let report = if order >= LARGE_ORDER { REPORT_LARGE } else { REPORT_SMALL };
    let rest = (report + 2 * TAKE).as_secs();
    let work = format!("memhog --mb {FREED_MB} --hold {HOLD_S} --rest {rest}{options}");
    let spec = MachineSpec {
        seed: context.seed,
        shim: true,
        reporting_order: Some(order),
        ..MachineSpec::new("guest", "imr", MEMORY, MEMORY, &work)
    };
    let pages = f64::from(FREED_MB) * 256.0 / if options.contains("scatter") { 2.0 } else { 1.0 };
    let mut lab = Lab::start(&context.dir, &context.provisions, &[spec])?;
    let pids = [lab.machines()[0].process().pid];
    let mut worker = WorkerProcess::start("imr")?;
    let (mut reported, mut taken, mut cost) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        command(&mut worker, &lab, None)?;
        let is_full = |lab: &Lab| Ok(lab.machines()[0].reported("mb") >= f64::from(FREED_MB));
        lab.wait_for("the guest to fill its memory", LIMIT, is_full)?;
        let before = known(&worker);
        lab.wait_for("the guest to free it", LIMIT, |lab| is_full(lab).map(|is_full| !is_full))?;
        interrupt::sleep(report)?;
        let cpu_before = merger::shims_cpu_s(&pids);
        command(&mut worker, &lab, Some(Bytes::ZERO))?;
        interrupt::sleep(TAKE)?;
        let cpu_s = merger::shims_cpu_s(&pids) - cpu_before;
        let after = known(&worker);
        let grown = |of: fn(&FreePages) -> Bytes| of(&after).minus(of(&before)).0 as f64 / 4096.0;
        let taken_pages = grown(|free| free.taken);
        if round > 0 {
            reported.push((grown(|free| free.handed_over) / pages).min(1.0));
            taken.push((taken_pages / pages).min(1.0));
            cost.push(cpu_s * 1e6 / taken_pages);
        }
        context.say(&format!(
            "  {:.1} MiB handed over, {:.1} taken, {:.1} in use again, {:.2} us of CPU for each page",
            grown(|free| free.handed_over) / 256.0,
            taken_pages / 256.0,
            grown(|free| free.taken_back) / 256.0,
            cpu_s * 1e6 / taken_pages,
        ));
    }
    worker.end()?;
    lab.stop()?;
    Ok(Regained {
        reported: Median::of(reported).value,
        taken: Median::of(taken),
        us_per_page: Median::of(cost),
    })
}

fn command(worker: &mut WorkerProcess, lab: &Lab, keep: Option<Bytes>) -> Result<(), LabError> {
    let freed = FreedOrder { is_lazy: true, keep };
    worker.order(lab, Wanted { tracking: TrackingBudget::Off, scan_rate: None, freed })
}

fn known(worker: &WorkerProcess) -> FreePages {
    let report = worker.report().unwrap_or_default();
    report.vms.values().find_map(|vm| vm.free_pages).unwrap_or_default()
}
