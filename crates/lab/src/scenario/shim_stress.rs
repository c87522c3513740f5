//! `shim-stress`: not a byte is lost while a hostile worker drives the shim ([`crate::stress`]).
//!
//! The first part runs for ten minutes with a program that stands in for QEMU: each of its
//! operations is checked and timed, and KVM runs its guests. A swap file takes the memory that is
//! paged out. The second part runs for ten minutes with real guests that verify their memory and
//! their disk. QEMU reads the disk past the host's page cache, by threads and by the kernel's
//! native asynchronous I/O, while the balloons go up and down.
//!
//! Each part lasts half of the requested minutes: with `--minutes 120`, an hour each.

use std::time::{Duration, Instant};

use model::Bytes;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::fleet;
use crate::lab::{Lab, LabError};
use crate::machine::{Direct, MachineSpec};
use crate::random::Random;
use crate::stress::{self, FuzzerCounts, StressResult};
use crate::swap_file::{SwapFile, Swapped};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "shim-stress",
    summary: "the worst of workers for 20 minutes, and not a byte of guest memory is lost",
    run,
};

const USUAL_MINUTES: u32 = 20;
const STAND_IN_MIB: u64 = 160;
/// Room for all of the stand-in's RAM.
const SWAP: Bytes = Bytes::mib(512);
const MEMORY: Bytes = Bytes::mib(224);
const LEAST_MEMORY: Bytes = Bytes::mib(176);
const WORKLOAD: &str = "verify --mb 64 --disk /dev/data --disk-mb 64";
const DISK: Bytes = Bytes::mib(64);
/// Slow enough that requests queue up.
const DISK_IOPS: u32 = 400;
const FILL_LIMIT: Duration = Duration::from_secs(120);

fn run(context: &Context) -> Result<Figures, LabError> {
    let half = Duration::from_secs(30) * context.minutes.unwrap_or(USUAL_MINUTES);
    context.say("Half of the time with a stand-in for QEMU ...");
    let (outcome, swapped_mib) = torment_stand_in(context, half)?;
    context.say("The other half with real guests ...");
    let guests = torment_guests(context, half)?;

    let mut figures = context.figures(SCENARIO.name, 1);
    add_stand_in(&mut figures, &outcome, swapped_mib);
    add_guests(&mut figures, &guests);
    Ok(figures)
}

/// Runs in a lab without guests, which holds the directory and cleans it up. Returns also the
/// memory that was swapped out meanwhile, `None` without a swap file.
fn torment_stand_in(
    context: &Context,
    duration: Duration,
) -> Result<(StressResult, Option<f64>), LabError> {
    let mut lab = Lab::start(&context.dir, &context.provisions, &[])?;
    let dir = lab.dir().join("disks");
    let swap = SwapFile::new(&context.dir, SWAP);
    if let Err(error) = &swap {
        context.say(&format!("skipped: paging out to swap: {error}"));
    }
    let before = Swapped::read()?;
    let outcome = stress::stand_in(&dir, context.seed, STAND_IN_MIB, duration)?;
    let swapped = Swapped::read()?.since(before);
    lab.stop()?;
    Ok((outcome, swap.is_ok().then_some(swapped.out_mib)))
}

/// Outcome of the part with guests.
struct Guests {
    bad_bytes: u64,
    longest_gap_ms: f64,
    tolls: Vec<FuzzerCounts>,
}

fn torment_guests(context: &Context, duration: Duration) -> Result<Guests, LabError> {
    let guest = |name: &str, native: bool| MachineSpec {
        seed: context.seed,
        shim: true,
        vcpus: 2,
        data_disk: Some(DISK),
        data_direct: Some(Direct { native, iops: DISK_IOPS }),
        ..MachineSpec::new(name, "stress", MEMORY, MEMORY, WORKLOAD)
    };
    let specs = [guest("native", true), guest("threads", false)];
    let swap = SwapFile::new(&context.dir, SWAP);
    if let Err(error) = &swap {
        context.say(&format!("skipped: paging out to swap: {error}"));
    }
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    lab.wait_for("the guests to verify", FILL_LIMIT, |lab| {
        Ok(lab.machines().iter().all(|machine| machine.reported("ops") > 0.0))
    })?;
    for machine in lab.machines() {
        stress::wait_for_shim(machine.process().pid)?;
    }
    let until = Instant::now() + duration;
    let mut longest_gap_ms: f64 = 0.0;
    let tolls = std::thread::scope(|scope| {
        let hands: Vec<_> = lab
            .machines()
            .iter()
            .zip(context.seed..)
            .map(|(machine, seed)| {
                let process = machine.process();
                scope.spawn(move || {
                    stress::torment(process, seed, until, || {
                        if process.is_alive() { Ok(()) } else { Err(machine.death()) }
                    })
                })
            })
            .collect();
        let moved = move_balloons(&lab, context.seed, until, &mut longest_gap_ms);
        let tolls: Result<Vec<FuzzerCounts>, LabError> =
            hands.into_iter().map(|hand| hand.join().unwrap_or_else(|_| Err(panicked()))).collect();
        moved.and(tolls)
    })?;
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok(Guests { bad_bytes, longest_gap_ms, tolls })
}

fn panicked() -> LabError {
    std::io::Error::other("a thread of the scenario panicked").into()
}

/// Moves balloons up and down until `until`, which discards memory; notes the longest stall that
/// guests report.
fn move_balloons(
    lab: &Lab,
    seed: u64,
    until: Instant,
    longest_gap_ms: &mut f64,
) -> Result<(), LabError> {
    let mut random = Random::new(seed);
    while Instant::now() < until {
        for machine in lab.machines() {
            machine.set_balloon(Bytes(random.between(LEAST_MEMORY.0, MEMORY.0)))?;
        }
        let next = Instant::now() + Duration::from_millis(random.between(500, 3_000));
        lab.wait_for("the next move", Duration::from_secs(10), |lab| {
            for machine in lab.machines() {
                *longest_gap_ms = longest_gap_ms.max(machine.reported("gap_ms"));
            }
            Ok(Instant::now() >= next)
        })?;
    }
    for machine in lab.machines() {
        machine.set_balloon(MEMORY)?;
    }
    Ok(())
}

fn add_stand_in(figures: &mut Figures, outcome: &StressResult, swapped_mib: Option<f64>) {
    let StressResult { report, words, toll, left } = outcome;
    if !words.is_empty() {
        figures.preface = format!("The stand-in said:\n{words}\n");
    }
    let none = Target::Equals(0.0);
    let bad = count(report.bad_bytes);
    figures.add("bad_bytes", Figure::new(bad, "B", "wrong bytes in the stand-in").target(none));
    let operations = count(report.operations_done());
    figures.add("operations", Figure::new(operations, "count", "of the stand-in, each checked"));
    let accesses = count(report.done("kvm_access"));
    let figure = match &report.kvm_obstacle {
        None => {
            let rounds = report.done("kvm_round");
            let note = format!(
                "pages that guests under KVM checked, or checked and wrote, in {rounds} rounds"
            );
            Figure::new(accesses, "count", note).target(Target::AtLeast(1.0))
        }
        Some(why) => Figure::new(accesses, "count", format!("skipped: vCPUs under KVM: {why}")),
    };
    figures.add("kvm_accesses", figure);
    let figure = match swapped_mib {
        Some(mib) => {
            Figure::new(mib, "MiB", "paged out to swap by the host").target(Target::AtLeast(1.0))
        }
        None => Figure::new(0.0, "MiB", "skipped: no swap file could be made"),
    };
    figures.add("swapped_out", figure);
    let (kind, longest) = report.longest();
    let stall_ms = longest.as_secs_f64() * 1000.0;
    figures.add(
        "stall_ms_max",
        Figure::new(stall_ms, "ms", format!("the operation that took longest: {kind}"))
            .target(Target::AtMost(HANG_MS)),
    );
    figures.add(
        "left_in_staging_bytes",
        Figure::new(count(left.0), "B", "of staging, by the kernel's count").target(none),
    );
    add_toll(figures, "", std::slice::from_ref(toll));
}

/// The longest that an operation may wait: the machine is far too small for this load.
const HANG_MS: f64 = 10_000.0;

fn add_guests(figures: &mut Figures, guests: &Guests) {
    let bad = count(guests.bad_bytes);
    figures.add(
        "guests_bad_bytes",
        Figure::new(bad, "B", "wrong bytes in memory and disks of the guests")
            .target(Target::Equals(0.0)),
    );
    figures.add(
        "guests_stall_ms_max",
        Figure::new(guests.longest_gap_ms, "ms", "longest that a guest's work stood still")
            .target(Target::AtMost(HANG_MS)),
    );
    add_toll(figures, "guests_", &guests.tolls);
}

/// Adds what the shims went through; complaints appear in full above the figures.
fn add_toll(figures: &mut Figures, prefix: &str, tolls: &[FuzzerCounts]) {
    let sum = |of: &dyn Fn(&FuzzerCounts) -> u64| count(tolls.iter().map(of).sum());
    for complaint in tolls.iter().flat_map(|toll| &toll.deeds.complaints) {
        figures.preface += &format!("complaint: {complaint}\n");
    }
    let mut add = |name: &str, figure| figures.add(&format!("{prefix}{name}"), figure);
    let complaints = sum(&|toll| toll.deeds.complaints.len() as u64);
    let note = "answers that may not be, pages staged after a release or without a worker";
    add("complaints", Figure::new(complaints, "count", note).target(Target::Equals(0.0)));
    let kills = sum(&|toll| toll.kills);
    add("kills", Figure::new(kills, "count", "workers killed").target(Target::AtLeast(1.0)));
    let traps = sum(&|toll| toll.deeds.total(|counters| counters.traps));
    add("traps", Figure::new(traps, "count", "faults served").target(Target::AtLeast(1.0)));
    let pinned = sum(&|toll| toll.deeds.total(|counters| counters.pinned));
    add("pinned", Figure::new(pinned, "count", "pages that the kernel refused to move"));
    let moved = sum(&|toll| toll.deeds.total(|counters| counters.moved_out));
    add("moved_out", Figure::new(moved, "pages", "taken out of reach"));
    let some = Target::AtLeast(1.0);
    let merged = sum(&|toll| toll.deeds.merged);
    add("merged", Figure::new(merged, "pages", "put into a pool").target(some));
    let unshared = sum(&|toll| toll.deeds.unshared);
    add("unshared", Figure::new(unshared, "pages", "given copies again").target(some));
    let handed_over = sum(&|toll| toll.deeds.total(|counters| counters.handed_over));
    add(
        "handed_over",
        Figure::new(handed_over, "pages", "to the kernel, when the guest freed them"),
    );
    let taken = sum(&|toll| toll.deeds.taken);
    add("taken", Figure::new(taken, "pages", "of those, before the guest had them in use again"));
    let discarded = sum(&|toll| toll.deeds.total(|counters| counters.discarded));
    add("discarded", Figure::new(discarded, "pages", "discarded while out of reach"));
    add("releases", Figure::new(sum(&|toll| toll.deeds.releases), "count", "by the worker"));
    add("requests", Figure::new(sum(&|toll| toll.deeds.requests), "count", "to the shim"));
    let longest = |of: &dyn Fn(&FuzzerCounts) -> f64| tolls.iter().map(of).fold(0.0, f64::max);
    let wait_ms = longest(&|toll| {
        let waits = toll.deeds.counters.values().map(|counters| counters.longest_wait_ns);
        count(waits.max().unwrap_or(0)) / 1e6
    });
    add("qemu_wait_ms_max", Figure::new(wait_ms, "ms", "a thread of QEMU's waited for the shim"));
    let give_back_ms = longest(&|toll| toll.longest_give_back.as_secs_f64() * 1000.0);
    let note = "from a worker's end to everything back";
    add("give_back_ms_max", Figure::new(give_back_ms, "ms", note));
    let answer_ms = longest(&|toll| count(toll.deeds.longest_answer_us) / 1000.0);
    add("answer_ms_max", Figure::new(answer_ms, "ms", "the answer that took longest"));
}

#[expect(clippy::cast_precision_loss, reason = "a figure is a float, and zero is exact")]
fn count(number: u64) -> f64 {
    number as f64
}
