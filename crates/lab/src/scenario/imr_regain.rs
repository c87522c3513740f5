//! `imr-table9` and `imr-table10`: how much of what a guest has freed comes back to the host, and
//! what taking it costs.
//!
//! A guest fills 384 MB (the paper's 4·10⁸ bytes), frees them, rests, and begins again. When its
//! kernel has reported what is free, all of that is taken. What the host has then to what the guest
//! has freed is the share that was reclaimed, by the anonymous memory of QEMU: so what QEMU
//! discards by itself counts, and what the guest took back in use does not. The first round is not
//! counted: the guest also reports then what it has used while it booted.
//!
//! Guests' kernels report blocks from a size on that can be set (`page_reporting_order`): what is
//! free in smaller pieces stays unknown to the host. And they keep what is free on lists for each
//! CPU first, up to the zone's low watermark (some 44 MiB in a guest with transparent huge pages),
//! of which they report nothing: so each size is measured again where the guest keeps these lists
//! short (`vm.percpu_pagelist_high_fraction`).

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
/// How long the guest leaves alone what it has freed: in small blocks more is to be reported, and
/// that takes longer.
const REST_LARGE_S: u32 = 30;
const REST_SMALL_S: u32 = 60;
/// A guest that has reported nothing for so long has reported all: it does so every two seconds, if
/// its CPU lets it.
const QUIET: Duration = Duration::from_secs(10);
/// In which taking has ended, and the worker has reported.
const TAKE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(120);
/// A guest that keeps next to nothing on its lists for each CPU.
const SHORT_LISTS: &str = "sysctl.vm.percpu_pagelist_high_fraction=1000";
const SAME: &str = "sysctl.vm.percpu_pagelist_high_fraction=1000 --same";
/// Blocks from so many pages on are large.
const LARGE_ORDER: u32 = 7;

/// What came of one setting: medians.
struct Regained {
    /// Of what the guest freed.
    reclaimed: Median,
    /// What was taken with the whole block handed over before, of what the guest freed.
    handed_over: f64,
    /// CPU time of the shim's threads for each page of 4 KiB taken, in microseconds, and of the
    /// worker beside.
    us_per_page: Median,
    worker_us_per_page: Median,
}

/// One round.
struct Round {
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

/// `options`: of the guest's kernel, where they have a `=`, and of its workload.
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
    let median = |of: fn(&Round) -> f64| Median::of(rounds.iter().map(of).collect());
    Ok(Regained {
        reclaimed: median(|round| round.reclaimed),
        handed_over: median(|round| round.handed_over).value,
        us_per_page: median(|round| round.us_per_page),
        worker_us_per_page: median(|round| round.worker_us_per_page),
    })
}

/// The guest fills its memory and frees it, and all that it reports is taken.
fn round(
    lab: &Lab,
    worker: &mut WorkerProcess,
    pages: f64,
    rest_s: u32,
) -> Result<Round, LabError> {
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
    Ok(Round {
        reclaimed: ((full_mib - anonymous_mib(&pids)?) / freed_mib).min(1.0),
        handed_over: grown(|free| free.handed_over) / pages,
        us_per_page: shim_s * 1e6 / taken_pages,
        worker_us_per_page: worker_s * 1e6 / taken_pages,
    })
}

/// Waits until the guest has begun to report and reports nothing more, for so long at most.
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
