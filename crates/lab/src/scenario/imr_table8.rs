//! `imr-table8`: the cost to a guest when memory that it had freed was taken meanwhile: to write
//! to it again, and to sort in it.
//!
//! A guest writes a word to each page of its memory, then random numbers to all of it, sorts
//! them, frees the memory and waits until that is reported; it repeats this. After every second
//! round all freed memory is taken, after the others none. Each round that finds its memory taken
//! is compared with the rounds before and after it, which find it kept.

use super::prelude::*;
use crate::steps;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "imr-table8",
    summary: "writing and sorting in memory that was freed before, and taken meanwhile or not",
    measures: &[&[file!()], measured::SHIM, measured::WORKER],
    claims: claims! {
        "write_extra_us_per_page" <= 1.6 => "us",
            "A guest pays little to write again to memory that was taken", "1.6";
        "sort_ratio" <= 1.03 => "ratio", "A guest sorts as fast in such memory", "1.00";
    },
    run,
};

const MEMORY: Bytes = Bytes::mib(512);
const WRITTEN_MB: u32 = 256;
const PAGES: f64 = WRITTEN_MB as f64 * 256.0;
/// Rounds in which memory was taken.
const PAIRS: usize = 7;
/// The time that the guest's kernel takes to report free memory.
const REPORT: Duration = Duration::from_secs(8);
/// Time for taking to end, and for the worker to report.
const TAKE: Duration = Duration::from_secs(3);
const LIMIT: Duration = Duration::from_secs(60);

fn run(context: &Context) -> Result<Figures, LabError> {
    let spec = MachineSpec {
        seed: context.seed,
        shim: true,
        ..steps::guest("guest", "imr", MEMORY, WRITTEN_MB)
    };
    let mut lab = context.start([spec])?;
    let mut worker = WorkerProcess::start("imr")?;
    worker.take(&lab, None)?;
    // The first round does not count: it writes to memory for the first time.
    round(&lab.machines()[0])?;
    let (mut touching, mut writing, mut sorting) = (Vec::new(), Vec::new(), Vec::new());
    let mut taken_mib = Vec::new();
    for number in 0..=2 * PAIRS {
        let is_taken = number % 2 == 1;
        interrupt::sleep(REPORT)?;
        let before = worker.freed();
        worker.take(&lab, is_taken.then_some(Bytes::ZERO))?;
        interrupt::sleep(TAKE)?;
        let taken = worker.freed().taken.minus(before.taken).as_mib();
        worker.take(&lab, None)?;
        let [touch_s, write_s, sort_s] = round(&lab.machines()[0])?;
        context.say(&format!(
            "  {taken:.0} MiB taken: touched in {touch_s:.3} s, written in {write_s:.3}, sorted in {sort_s:.3}"
        ));
        touching.push(touch_s);
        writing.push(touch_s + write_s);
        sorting.push(sort_s);
        if is_taken {
            taken_mib.push(taken);
        }
    }
    worker.end()?;
    lab.stop()?;
    Ok(figures(context, [&touching, &writing, &sorting], taken_mib))
}

/// Touches, writes, sorts, frees; returns the times of the first three.
fn round(machine: &Machine) -> Result<[f64; 3], LabError> {
    let touch_s = steps::order(machine, "touch", LIMIT)?;
    let write_s = steps::order(machine, "write", LIMIT)?;
    let sort_s = steps::order(machine, "sort+free", LIMIT)?;
    Ok([touch_s, write_s, sort_s])
}

fn figures(context: &Context, times: [&[f64]; 3], taken_mib: Vec<f64>) -> Figures {
    let [touching, writing, sorting] = times;
    let mut figures = context.figures(SCENARIO.name, u32::try_from(PAIRS).unwrap_or(u32::MAX));
    let taken = Median::of(taken_mib).value;
    let extra = |times, what: &str| {
        let us = |(with, without): (f64, f64)| (with - without) * 1e6 / PAGES;
        let Median { value, low, high, .. } =
            Median::of(compared(times).into_iter().map(us).collect());
        let note = format!("{what}, of {taken:.0} MiB taken, {low:.2} to {high:.2}");
        Figure::new(value, "us", note)
    };
    let what = "longer to write a page of 4 KiB for the first time";
    figures.add("write_extra_us_per_page", extra(writing, what));
    let what = "the same for one word of each page";
    figures.add("touch_extra_us_per_page", extra(touching, what));
    let ratio = |times| {
        let ratios = compared(times).into_iter().map(|(with, without)| with / without);
        Median::of(ratios.collect())
    };
    let of = |ratio: Median| {
        let note = "time where it was taken, to that where it was kept";
        Figure::new(ratio.value, "ratio", format!("{note}, {:.3} to {:.3}", ratio.low, ratio.high))
    };
    figures.add("write_ratio", of(ratio(writing)).paper("1.11 with EPT"));
    figures.add("sort_ratio", of(ratio(sorting)));
    figures
}

/// The time of each round in which memory was taken, and the mean of its neighbours without.
fn compared(times: &[f64]) -> Vec<(f64, f64)> {
    let rounds = times.windows(3).step_by(2);
    rounds.map(|round| (round[1], f64::midpoint(round[0], round[2]))).collect()
}
