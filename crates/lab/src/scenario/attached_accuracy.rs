//! `attached-accuracy`: working sets and miss-ratio curves of guests without code loaded into
//! their QEMU, against every access that the guests made, and the cost to them.
//!
//! The workloads, the truth and the comparison are those of `meb-accuracy`; the guests have no
//! shim. The worker's own code tracks them from outside, in single pages, within its 1 %. The
//! truth is of single pages, too. Four of the guests run once more with half of their memory paged
//! out, and once more with the shim, at the same budget.
//!
//! Speed is measured without the tracer, in two guests at full speed. In each of them, windows
//! with and without tracking alternate.
//!
//! Left out: guests in huge pages, of which tracking samples a part of the blocks, and KVM. The
//! virtual host covers both.

use super::meb_accuracy::{AccuracySource, OUT, Row, ZRAM, add_all, add_out, compare_all, page};
use super::prelude::*;
use crate::meb::watch::{Watch, wait_until_tracked};
use crate::meb::workloads::{ALL, Workload};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "attached-accuracy",
    summary: "working sets and curves of guests without the shim, against every access they made",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SYS, measured::TRACER],
    claims: claims! {
        "wss_accuracy_mean" >= 0.952 => "ratio",
            "The working set of ten workloads is right with nothing loaded, against every access",
            "0.952";
        "mrc_mae" <= 0.03 => "ratio", "The curve is right over all memory";
        "mrc_mae_out" <= 0.03 => "ratio", "The curve is right with half of the memory out";
        "cost" <= 0.01 => "vCPU", "It costs a vCPU no more than the budget";
    },
    run,
};

/// The guests whose speed is measured.
const QUICK: [&str; 2] = ["random", "kv"];
/// Number of windows with tracking.
const PAIRS: usize = 8;
/// Seconds after each change that are not measured, and seconds of a window; a guest prints one
/// line a second.
const BEGINNING: usize = 2;
const WINDOW: usize = 10;
const EVERY: Duration = Duration::from_secs(1);

fn run(context: &Context) -> Result<Figures, LabError> {
    let zram = Zram::new(ZRAM)?;
    let some = |names: &[&str]| -> Vec<Workload> {
        ALL.into_iter().filter(|workload| names.contains(&workload.name)).collect()
    };
    let rows = compare_all(context, &ALL, AccuracySource::Outside, false)?;
    let rows_out = compare_all(context, &some(&OUT), AccuracySource::Outside, true)?;
    let trapped = compare_all(context, &some(&OUT), AccuracySource::Traps, false)?;
    context.say("speed with and without tracking ...");
    let overheads = overheads(context, &some(&QUICK))?;
    drop(zram);

    let mut figures = context.figures(SCENARIO.name, 1);
    add_all(&mut figures, &rows);
    add_out(&mut figures, &rows_out);
    let overhead = Median::of(overheads);
    let note = overhead.interval_percent();
    figures.check("speed", 1.0 / (1.0 + overhead.value), "ratio", note, Target::AtLeast(0.99));
    let cost = rows.iter().map(|row| row.vcpu_share).largest();
    let note = "prober and touches, in the dearest half minute of all guests";
    figures.tell("cost", cost, "vCPU", note);
    let cpu = mean(rows.iter().map(|row| row.cpu_share));
    figures.tell("prober_cpu", cpu, "CPU", "the prober's own part, mean of all guests");
    let beside = |of: fn(&Row) -> f64| mean(trapped.iter().map(of));
    let note = "the same workloads by the shim's traps, at the same budget";
    figures.tell("traps_wss_accuracy", beside(Row::accuracy), "ratio", note);
    figures.tell("traps_mrc_mae", beside(Row::curve_error), "ratio", note);
    page(&rows).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// The increase in an operation's time while the guest is tracked.
fn overheads(context: &Context, workloads: &[Workload]) -> Result<Vec<f64>, LabError> {
    let guest = |(place, workload): (usize, &Workload)| {
        AccuracySource::Outside.guest(workload, place, context.seed)
    };
    let specs: Vec<_> = workloads.iter().enumerate().map(guest).collect();
    let mut lab = context.start(specs.clone())?;
    progress::wait_until_working(&lab)?;
    let mut pairs = vec![Pairs::default(); specs.len()];
    let rates = |lab: &Lab| progress::rates(lab, BEGINNING, WINDOW);
    for _ in 0..PAIRS {
        for (pair, rate) in pairs.iter_mut().zip(rates(&lab)?) {
            pair.add_without(rate);
        }
        let watch = |machine: &Machine| AccuracySource::Outside.watch(machine, EVERY);
        let watches = lab.machines().iter().map(watch).collect::<Result<Vec<Watch>, _>>()?;
        wait_until_tracked(&lab, &watches)?;
        for (pair, rate) in pairs.iter_mut().zip(rates(&lab)?) {
            pair.add_with(rate);
        }
        for watch in watches {
            watch.stop()?;
        }
    }
    for (pair, rate) in pairs.iter_mut().zip(rates(&lab)?) {
        pair.add_without(rate);
    }
    lab.stop()?;
    Ok(pairs.iter().flat_map(Pairs::overheads).collect())
}
