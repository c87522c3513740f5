//! `imr-table9` and `imr-table10`: the share of a guest's freed memory that comes back to the
//! host, and the cost of taking it.
//!
//! A guest fills 384 MB (the paper's 4·10⁸ bytes), frees them, rests, and begins again. When its
//! kernel has reported the free memory, all of that is taken. The share reclaimed is the fall of
//! QEMU's anonymous memory, relative to the memory that the guest has freed. So memory that QEMU
//! discards by itself counts, and memory that the guest has in use again does not. The first
//! round does not count, because the guest then also reports memory that it used while it booted.
//!
//! Guests' kernels report blocks from a configurable size on (`page_reporting_order`): smaller
//! free blocks stay unknown to the host. And they keep free pages on per-CPU lists first, up to
//! the zone's low watermark (some 44 MiB in a guest with transparent huge pages), and do not
//! report these. So each size is measured again where the guest keeps these lists short
//! (`vm.percpu_pagelist_high_fraction`).

use std::time::{Duration, Instant};

use model::{Bytes, FreePages};

use super::dedup_vs_ksm::anonymous_mib;
use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::{MachineSpec, USUAL_ORDER};
use crate::meb::pairs::Median;
use crate::threads;
use crate::worker_process::WorkerProcess;

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

const MEMORY: Bytes = Bytes::mib(1024);
const FREED_MB: u32 = 384;
/// Rounds that count.
const ROUNDS: usize = 2;
const HOLD_S: u32 = 3;
/// The time for which the guest leaves its freed memory alone. With small blocks there is more to
/// report, which takes longer.
const REST_LARGE_S: u32 = 30;
const REST_SMALL_S: u32 = 60;
/// A guest that has reported nothing for this long has reported all: it reports every two
/// seconds, if its CPU allows.
const QUIET: Duration = Duration::from_secs(10);
/// Time for taking to end, and for the worker to report.
const TAKE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(120);
/// Options for a guest with almost empty per-CPU lists.
const SHORT_LISTS: &str = "sysctl.vm.percpu_pagelist_high_fraction=1000";
const SAME: &str = "sysctl.vm.percpu_pagelist_high_fraction=1000 --same";
/// Blocks of this order and above are large.
const LARGE_ORDER: u32 = 7;

/// Medians of one setting.
struct Regained {
    /// Share of the guest's freed memory.
    reclaimed: Median,
    /// Memory handed over, as a share of the guest's freed memory.
    handed_over: f64,
    /// CPU time for each page of 4 KiB taken, in microseconds: of the shim's threads, and of the
    /// worker.
    us_per_page: Median,
    worker_us_per_page: Median,
}

/// One round.
struct RegainRound {
    reclaimed: f64,
    handed_over: f64,
    us_per_page: f64,
    worker_us_per_page: f64,
}

fn table_9(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(TABLE_9.name, 1);
    for (name, options, paper) in [("", SHORT_LISTS, 0.92), ("_duplicated", SAME, 0.89)] {
        let regained = regain(context, USUAL_ORDER, options)?;
        let figure = share(&regained).target(Target::AtLeast(paper));
        figures.add(&format!("reclaimed{name}"), figure);
        let Median { low, high, .. } = regained.us_per_page;
        let note = format!(
            "the shim's CPU time, {low:.3} to {high:.3}; the worker's beside it {:.3} (paper: 0.56 us, 0.54 of it to write zeros)",
            regained.worker_us_per_page.value
        );
        let figure = Figure::new(regained.us_per_page.value, "us", note);
        figures.add(&format!("take_us_per_page{name}"), figure.target(Target::AtMost(0.56)));
    }
    Ok(figures)
}

fn table_10(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(TABLE_10.name, 1);
    let sizes = [("4m", 10, "0.923"), ("2m", 9, "0.965"), ("1m", 8, "0.983"), ("512k", 7, "0.991")];
    for (name, order, paper) in sizes {
        let figure = share(&regain(context, order, "")?).paper(paper);
        figures.add(&format!("reclaimed_{name}"), figure);
    }
    for (name, order, paper) in sizes {
        let figure = share(&regain(context, order, SHORT_LISTS)?).paper(paper);
        let least = paper.parse().unwrap_or(f64::NAN);
        figures
            .add(&format!("reclaimed_{name}_short_lists"), figure.target(Target::AtLeast(least)));
    }
    for (name, order) in [("2m", USUAL_ORDER), ("4k", 0)] {
        let figure = share(&regain(context, order, "--scatter")?);
        figures.add(&format!("reclaimed_scattered_{name}"), figure);
    }
    Ok(figures)
}

fn share(regained: &Regained) -> Figure {
    let Median { low, high, .. } = regained.reclaimed;
    let note = format!(
        "of what the guest freed, {low:.3} to {high:.3}; handed over {:.3}",
        regained.handed_over
    );
    Figure::new(regained.reclaimed.value, "ratio", note)
}

/// `options`: the guest kernel's, which have a `=`, and its workload's.
fn regain(context: &Context, order: u32, options: &str) -> Result<Regained, LabError> {
    context.say(&format!("blocks of 2^{order} pages {options} ..."));
    let rest = if order >= LARGE_ORDER { REST_LARGE_S } else { REST_SMALL_S };
    let (of_kernel, of_work): (Vec<&str>, Vec<&str>) =
        options.split_whitespace().partition(|option| option.contains('='));
    let of_work = of_work.join(" ");
    let work = format!("memhog --mb {FREED_MB} --hold {HOLD_S} --rest {rest} {of_work}");
    let spec = MachineSpec {
        seed: context.seed,
        shim: true,
        reporting_order: Some(order),
        kernel_options: of_kernel.join(" "),
        ..MachineSpec::new("guest", "imr", MEMORY, MEMORY, work.trim_end())
    };
    let part = if of_work.contains("scatter") { 2.0 } else { 1.0 };
    let pages = f64::from(FREED_MB) * 256.0 / part;
    let mut lab = Lab::start(&context.dir, &context.provisions, &[spec])?;
    let mut worker = WorkerProcess::start("imr")?;
    let mut rounds = Vec::new();
    for number in 0..=ROUNDS {
        let round = round(&lab, &mut worker, pages, rest)?;
        context.say(&format!(
            "  {:.3} reclaimed, {:.3} handed over, {:.3} us of the shim's CPU time for each page and {:.3} of the worker's",
            round.reclaimed, round.handed_over, round.us_per_page, round.worker_us_per_page
        ));
        if number > 0 {
            rounds.push(round);
        }
    }
    worker.end()?;
    lab.stop()?;
    let median = |of: fn(&RegainRound) -> f64| Median::of(rounds.iter().map(of).collect());
    Ok(Regained {
        reclaimed: median(|round| round.reclaimed),
        handed_over: median(|round| round.handed_over).value,
        us_per_page: median(|round| round.us_per_page),
        worker_us_per_page: median(|round| round.worker_us_per_page),
    })
}

/// The guest fills its memory and frees it, and all memory that it reports is taken.
fn round(
    lab: &Lab,
    worker: &mut WorkerProcess,
    pages: f64,
    rest_s: u32,
) -> Result<RegainRound, LabError> {
    let pids = [lab.machines()[0].process().pid];
    worker.take(lab, None)?;
    let is_full = |lab: &Lab| Ok(lab.machines()[0].reported("mb") >= f64::from(FREED_MB));
    lab.wait_for("the guest to fill its memory", LIMIT, is_full)?;
    interrupt::sleep(Duration::from_secs(1))?;
    let (before, full_mib) = (worker.freed(), anonymous_mib(&pids)?);
    lab.wait_for("the guest to free it", LIMIT, |lab| is_full(lab).map(|is_full| !is_full))?;
    let most = Duration::from_secs(rest_s.into()) - 2 * TAKE;
    until_reported(worker, &before, most)?;
    let shim_before = threads::shims_cpu_s(&pids);
    let worker_before = threads::cpu_s(&[worker.identity().pid], "");
    worker.take(lab, Some(Bytes::ZERO))?;
    interrupt::sleep(TAKE)?;
    let shim_s = threads::shims_cpu_s(&pids) - shim_before;
    let worker_s = threads::cpu_s(&[worker.identity().pid], "") - worker_before;
    let after = worker.freed();
    let grown = |of: fn(&FreePages) -> Bytes| of(&after).minus(of(&before)).0 as f64 / 4096.0;
    let taken_pages = grown(|free| free.taken);
    let freed_mib = pages / 256.0;
    Ok(RegainRound {
        reclaimed: ((full_mib - anonymous_mib(&pids)?) / freed_mib).min(1.0),
        handed_over: grown(|free| free.handed_over) / pages,
        us_per_page: shim_s * 1e6 / taken_pages,
        worker_us_per_page: worker_s * 1e6 / taken_pages,
    })
}

/// Waits until the guest has begun to report and reports nothing more, but no longer than `most`.
fn until_reported(
    worker: &WorkerProcess,
    before: &FreePages,
    most: Duration,
) -> Result<(), LabError> {
    let (deadline, mut told) = (Instant::now() + most, before.handed_over);
    let mut since = Instant::now();
    while Instant::now() < deadline && (told == before.handed_over || since.elapsed() < QUIET) {
        let handed_over = worker.freed().handed_over;
        if std::mem::replace(&mut told, handed_over) != handed_over {
            since = Instant::now();
        }
        interrupt::sleep(Duration::from_millis(200))?;
    }
    Ok(())
}
