//! `free-soak`: guests free and take memory, and verify every byte of it, while what they free is
//! taken at random.
//!
//! Each guest frees half of its memory and takes it again, every few seconds; what is new to it
//! must be zeros. Two kernels clear pages when they are freed and rely on their staying so
//! (`init_on_free`), one of them reports the smallest blocks. Orders change at random: hand over or
//! not, take all or a part or nothing, merge or unshare, track or not; balloons move; the worker is
//! killed at random moments.

use std::time::{Duration, Instant};

use model::{Bytes, FreePages, PagesPerMs, TrackingBudget};
use overbook::worker::FreedOrder;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::fleet;
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::random::Random;
use crate::worker_process::{Wanted, WorkerProcess};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "free-soak",
    summary: "ten minutes of guests that free, take and verify memory under random takes; no byte is lost",
    run,
};

const MINUTES: u32 = 10;
const MEMORY: Bytes = Bytes::mib(256);
const LEAST_MEMORY: Bytes = Bytes::mib(224);
/// How long a worker lives.
const LIFE_MS: (u64, u64) = (500, 20_000);
const ORDER_MS: (u64, u64) = (200, 1_500);
const FILL_LIMIT: Duration = Duration::from_secs(120);
const RATE: PagesPerMs = PagesPerMs(50);

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60 * u64::from(context.minutes.unwrap_or(MINUTES)));
    let guest = |number: u64, every: &str, order: u32, kernel_options: &str| MachineSpec {
        // Pairs hold the same.
        seed: context.seed + number / 2,
        shim: true,
        reporting_order: Some(order),
        kernel_options: kernel_options.to_owned(),
        ..MachineSpec::new(
            &format!("guest-{number}"),
            "soak",
            MEMORY,
            MEMORY,
            // Not all of its CPU: its kernel is to report what is free.
            &format!("verify --mb 128 --rate 40 --breathe {every}"),
        )
    };
    let specs = [
        guest(0, "6", 9, ""),
        guest(1, "8", 9, "init_on_free=1"),
        guest(2, "10", 5, ""),
        guest(3, "14", 0, "init_on_free=1"),
    ];
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    lab.wait_for("the guests to work", FILL_LIMIT, |lab| {
        Ok(lab.machines().iter().all(|machine| machine.reported("ops") > 0.0))
    })?;
    let mut random = Random::new(context.seed);
    let (mut kills, mut all) = (0_u32, FreePages::default());
    let until = Instant::now() + length;
    while Instant::now() < until {
        let mut worker = WorkerProcess::start("soak")?;
        let life = Duration::from_millis(random.between(LIFE_MS.0, LIFE_MS.1));
        let end = (Instant::now() + life).min(until);
        while Instant::now() < end {
            worker.order(&lab, any_orders(&mut random))?;
            for machine in lab.machines() {
                if !machine.alive() {
                    return Err(machine.death());
                }
                machine.set_balloon(Bytes(random.between(LEAST_MEMORY.0, MEMORY.0)))?;
            }
            interrupt::sleep(Duration::from_millis(random.between(ORDER_MS.0, ORDER_MS.1)))?;
        }
        kills += 1;
        let report = worker.report().unwrap_or_default();
        for free in report.vms.values().filter_map(|vm| Some(vm.free_pages?.value)) {
            all.handed_over = all.handed_over.plus(free.handed_over);
            all.taken = all.taken.plus(free.taken);
            all.taken_back = all.taken_back.plus(free.taken_back);
        }
        worker.kill()?;
    }
    for machine in lab.machines() {
        machine.set_balloon(MEMORY)?;
    }
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok(figures(context, bad_bytes, kills, &all))
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
    // What is merged is not handed over.
    let scan_rate = is_once_in(2, random).then_some(RATE);
    Wanted { tracking, scan_rate, freed, ..Wanted::default() }
}

fn figures(context: &Context, bad_bytes: u64, kills: u32, all: &FreePages) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let note = format!(
        "in {} of memory handed over, {} of it taken and {} found in use again; {kills} workers killed",
        all.handed_over, all.taken, all.taken_back
    );
    let figure = Figure::new(bad_bytes as f64, "B", note).target(Target::AtMost(0.0));
    figures.add("bad_bytes", figure);
    let note = "it was really taken";
    let figure = Figure::new(all.taken.as_mib(), "MiB", note);
    figures.add("taken_mib", figure.target(Target::AtLeast(500.0)));
    figures
}
