//! `free-soak`: guests free and take memory, and verify every byte of it, while a worker takes
//! their freed memory at random.
//!
//! Every few seconds each guest frees half of its memory and takes it again; new memory must be
//! zeros. Two guest kernels clear pages when they are freed and rely on their staying so
//! (`init_on_free`); one of them reports the smallest blocks. Orders change at random: hand over
//! or not, take all or a part or nothing, merge or unshare, track or not. Balloons move, and the
//! worker is killed at random moments.

use model::{FreePages, PagesPerMs, TrackingBudget};
use worker::{FreedOrder, Report};

use super::prelude::*;
use crate::lives;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "free-soak",
    summary: "ten minutes of guests that free, take and verify memory under random takes; no byte is lost",
    measures: &[&[file!()], measured::SHIM, measured::WORKER, measured::PAGES],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "Taking, freeing, verifying, merging, tracking and ballooning lose no byte, workers \
             killed at random (10 min)";
        "taken_mib" >= 500.0 => "MiB", "Memory was really taken meanwhile";
    },
    run,
};

const MINUTES: u32 = 10;
const MEMORY: Bytes = Bytes::mib(256);
const LEAST_MEMORY: Bytes = Bytes::mib(224);
const RATE: PagesPerMs = PagesPerMs(50);

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60 * u64::from(context.minutes.unwrap_or(MINUTES)));
    let guest = |number: u64, every: &str, order: u32, kernel_options: &str| MachineSpec {
        // Pairs of guests hold the same content.
        // The rate leaves CPU time for the guest's kernel to report free memory.
        reporting_order: Some(order),
        kernel_options: kernel_options.to_owned(),
        ..context
            .guest(
                &format!("guest-{number}"),
                "soak",
                MEMORY,
                &format!("verify --mb 128 --rate 40 --breathe {every}"),
            )
            .seeded(number / 2)
            .with_shim(true)
    };
    let specs = [
        guest(0, "6", 9, ""),
        guest(1, "8", 9, "init_on_free=1"),
        guest(2, "10", 5, ""),
        guest(3, "14", 0, "init_on_free=1"),
    ];
    let mut lab = context.start(specs)?;
    progress::wait_until_working(&lab)?;
    let mut random = Random::new(context.seed);
    let start = || WorkerProcess::start("soak");
    let beside = |machine: &Machine, random: &mut Random| {
        machine.set_balloon(Bytes(random.between(LEAST_MEMORY.0, MEMORY.0)))
    };
    let last_words = lives::run(&lab, length, &mut random, start, any_orders, beside)?;
    for machine in lab.machines() {
        machine.set_balloon(MEMORY)?;
    }
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok(figures(context, bad_bytes, &last_words))
}

fn any_orders(random: &mut Random) -> Wanted {
    let is_once_in = |n: u64, random: &mut Random| random.between(1, n) == 1;
    let keep = match random.between(0, 3) {
        0 => None,
        1 => Some(Bytes(random.between(0, Bytes::mib(64).0))),
        _ => Some(Bytes::ZERO),
    };
    let freed = FreedOrder { is_lazy: !is_once_in(8, random), keep };
    let tracking =
        if is_once_in(3, random) { TrackingBudget::Off } else { TrackingBudget::default() };
    // Merged pages are not handed over.
    let scan_rate = is_once_in(2, random).then_some(RATE);
    Wanted { tracking, scan_rate, freed, ..Wanted::default() }
}

fn figures(context: &Context, bad_bytes: u64, last_words: &[Report]) -> Figures {
    let (kills, mut all) = (last_words.len(), FreePages::default());
    let vms = last_words.iter().flat_map(|report| report.vms.values());
    for free in vms.filter_map(|vm| Some(vm.free_pages?.value)) {
        all.handed_over = all.handed_over.plus(free.handed_over);
        all.taken = all.taken.plus(free.taken);
        all.taken_back = all.taken_back.plus(free.taken_back);
    }
    let mut figures = context.figures(SCENARIO.name, 1);
    let note = format!(
        "in {} of memory handed over, {} of it taken and {} found in use again; {kills} workers killed",
        all.handed_over, all.taken, all.taken_back
    );
    figures.tell("bad_bytes", bad_bytes as f64, "B", note);
    figures.tell("taken_mib", all.taken.as_mib(), "MiB", "it was really taken");
    figures
}
