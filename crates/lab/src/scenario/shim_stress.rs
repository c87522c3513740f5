//! `shim-stress`: not a byte is lost while a hostile worker drives the shim ([`crate::stress`]).
//!
//! The first part runs for ten minutes with a program that stands in for QEMU: each of its
//! operations is checked and timed, and KVM runs its guests. A swap file takes the memory that is
//! paged out. The second part runs for ten minutes with real guests that verify their memory and
//! their disk. QEMU reads the disk past the host's page cache, by threads and by the kernel's
//! native asynchronous I/O, while the balloons go up and down.
//!
//! Each part lasts half of the requested minutes: with `--minutes 120`, an hour each. A run that
//! lacks a part has not passed: without KVM or without a swap file the figures of both are no
//! numbers.

use super::prelude::*;
use crate::stress::{self, FuzzerCounts, Report, StressResult};
use crate::swap_file::{SwapFile, Swapped};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "shim-stress",
    summary: "the worst of workers for 20 minutes, and not a byte of guest memory is lost",
    measures: &[&[file!()], measured::SHIM, measured::SYS],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "A program that misuses RAM as QEMU does loses no byte while it is tracked, merged, \
             taken, discarded and paged out";
        "kvm_accesses" >= 1.0 => "count",
            "The stand-in's vCPUs run small programs under KVM meanwhile";
        "guests_bad_bytes" == 0.0 => "B",
            "Real guests lose no byte under the same torment (disks without cache)";
        "stall_ms_max" <= HANG_MS => "ms", "The stand-in stands still for a moment only";
        "guests_stall_ms_max" <= HANG_MS => "ms", "Guests stand still for a moment only";
    },
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

/// The swap file, and the memory swapped out before.
struct Paging(Option<SwapFile>, Swapped);

impl Paging {
    fn begin(context: &Context) -> Result<Self, LabError> {
        let swap = SwapFile::new(&context.dir, SWAP);
        if let Err(error) = &swap {
            context.say(&format!("no memory is paged out, so this run cannot pass: {error}"));
        }
        Ok(Self(swap.ok(), Swapped::read()?))
    }

    /// The memory that was swapped out meanwhile; `None` without a swap file.
    fn end(self) -> Result<Option<f64>, LabError> {
        let Self(swap, before) = self;
        let out_mib = Swapped::read()?.since(before).out_mib;
        Ok(swap.map(|_| out_mib))
    }
}

/// Runs in a lab without guests, which holds the directory and cleans it up. Returns also the
/// memory that was swapped out meanwhile.
fn torment_stand_in(
    context: &Context,
    duration: Duration,
) -> Result<(StressResult, Option<f64>), LabError> {
    let mut lab = context.start([])?;
    let dir = lab.dir().join("disks");
    let paging = Paging::begin(context)?;
    let outcome = stress::stand_in(&dir, context.seed, STAND_IN_MIB, duration)?;
    let swapped = paging.end()?;
    lab.stop()?;
    Ok((outcome, swapped))
}

/// Outcome of the part with guests.
struct Guests {
    bad_bytes: u64,
    longest_gap_ms: f64,
    tolls: Vec<FuzzerCounts>,
    /// Memory that was swapped out; `None` without a swap file.
    swapped_mib: Option<f64>,
}

fn torment_guests(context: &Context, duration: Duration) -> Result<Guests, LabError> {
    let guest = |name: &str, native: bool| {
        let guest = context.guest(name, "stress", MEMORY, WORKLOAD).with_shim(true);
        guest.with_direct_disk(DISK, native, DISK_IOPS)
    };
    let specs = [guest("native", true), guest("threads", false)];
    let paging = Paging::begin(context)?;
    let mut lab = context.start(specs)?;
    progress::wait_until_working(&lab)?;
    for machine in lab.machines() {
        stress::wait_for_shim(machine.process().pid)?;
    }
    let until = Instant::now() + duration;
    let mut longest_gap_ms = f64::NAN;
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
    let swapped_mib = paging.end()?;
    Ok(Guests { bad_bytes, longest_gap_ms, tolls, swapped_mib })
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
        let next = Instant::now() + random.millis((500, 3_000));
        lab.wait_for("the next move", Duration::from_secs(10), |lab| {
            for machine in lab.machines() {
                *longest_gap_ms = longest_gap_ms.max(machine.told("gap_ms"));
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
    figures.tell("bad_bytes", bad, "B", "wrong bytes in the stand-in");
    let operations = count(report.operations_done());
    figures.tell("operations", operations, "count", "of the stand-in, each checked");
    figures.add("kvm_accesses", kvm_accesses(report));
    figures.add("swapped_out", swapped_out(swapped_mib));
    let (kind, longest) = report.longest();
    let stall_ms = longest.as_secs_f64() * 1000.0;
    let note = format!("the operation that took longest: {kind}");
    figures.tell("stall_ms_max", stall_ms, "ms", note);
    let note = "of staging, by the kernel's count";
    figures.check("left_in_staging_bytes", count(left.0), "B", note, none);
    add_toll(figures, "", std::slice::from_ref(toll));
}

/// Pages that guests under KVM looked at; no number where KVM ran none.
fn kvm_accesses(report: &Report) -> Figure {
    if let Some(why) = &report.kvm_obstacle {
        return Figure::new(f64::NAN, "count", format!("no vCPU ran under KVM: {why}"));
    }
    let rounds = report.done("kvm_round");
    let note =
        format!("pages that guests under KVM checked, or checked and wrote, in {rounds} rounds");
    Figure::new(count(report.done("kvm_access")), "count", note)
}

/// Memory that the host paged out; no number without a swap file.
fn swapped_out(mib: Option<f64>) -> Figure {
    let note = match mib {
        Some(_) => "paged out to swap by the host",
        None => "no swap file could be made",
    };
    let some = Target::AtLeast(1.0);
    Figure::new(mib.unwrap_or(f64::NAN), "MiB", note).target(some)
}

/// The longest that an operation may wait: the machine is far too small for this load.
const HANG_MS: f64 = 10_000.0;

fn add_guests(figures: &mut Figures, guests: &Guests) {
    let bad = count(guests.bad_bytes);
    figures.tell("guests_bad_bytes", bad, "B", "wrong bytes in memory and disks of the guests");
    let note = "longest that a guest's work stood still";
    figures.tell("guests_stall_ms_max", guests.longest_gap_ms, "ms", note);
    figures.add("guests_swapped_out", swapped_out(guests.swapped_mib));
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
    let some = Target::AtLeast(1.0);
    add("moved_out", Figure::new(moved, "pages", "moved out of the guest's memory").target(some));
    let merged = sum(&|toll| toll.deeds.merged);
    add("merged", Figure::new(merged, "pages", "put into a pool").target(some));
    let unshared = sum(&|toll| toll.deeds.unshared);
    add("unshared", Figure::new(unshared, "pages", "given copies again").target(some));
    let handed_over = sum(&|toll| toll.deeds.total(|counters| counters.handed_over));
    add(
        "handed_over",
        Figure::new(handed_over, "pages", "to the kernel, when the guest freed them"),
    );
    // Guests may free too little for it.
    let of_stand_in = prefix.is_empty().then_some(some);
    let taken = sum(&|toll| toll.deeds.taken);
    let taken = Figure::new(taken, "pages", "of those, before the guest had them in use again");
    add("taken", Figure { target: of_stand_in, ..taken });
    let discarded = sum(&|toll| toll.deeds.total(|counters| counters.discarded));
    let discarded = Figure::new(discarded, "pages", "discarded while they were moved out");
    add("discarded", Figure { target: of_stand_in, ..discarded });
    add("releases", Figure::new(sum(&|toll| toll.deeds.releases), "count", "by the worker"));
    add("requests", Figure::new(sum(&|toll| toll.deeds.requests), "count", "to the shim"));
    let longest = |of: &dyn Fn(&FuzzerCounts) -> f64| tolls.iter().map(of).largest();
    let wait_ms = longest(&|toll| {
        let waits = toll.deeds.counters.values().map(|counters| counters.longest_wait_ns);
        waits.max().map_or(f64::NAN, |ns| count(ns) / 1e6)
    });
    add("qemu_wait_ms_max", Figure::new(wait_ms, "ms", "a thread of QEMU's waited for the shim"));
    let give_back_ms = longest(&|toll| toll.longest_give_back.as_secs_f64() * 1000.0);
    let note = "from a worker's end to everything back";
    add("give_back_ms_max", Figure::new(give_back_ms, "ms", note));
    let answer_ms = longest(&|toll| count(toll.deeds.longest_answer_us) / 1000.0);
    add("answer_ms_max", Figure::new(answer_ms, "ms", "the answer that took longest"));
}

fn count(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stress::{DeedCounters, Deeds, Operation};

    /// Tormentors that have done some of all.
    fn toll() -> FuzzerCounts {
        let counters = DeedCounters {
            traps: 9,
            moved_out: 9,
            discarded: 9,
            handed_over: 9,
            ..DeedCounters::default()
        };
        let counters = [(1, counters)].into();
        let deeds = Deeds { merged: 9, unshared: 9, taken: 9, counters, ..Deeds::default() };
        FuzzerCounts { kills: 3, deeds, ..FuzzerCounts::default() }
    }

    fn figures(report: Report, swapped_mib: Option<f64>) -> Figures {
        let mut figures = Figures::new(SCENARIO.name, "m".into(), 1, 1);
        let left = Bytes::ZERO;
        let outcome = StressResult { report, words: String::new(), toll: toll(), left };
        add_stand_in(&mut figures, &outcome, swapped_mib);
        let (bad_bytes, longest_gap_ms, tolls) = (0, 5.0, vec![toll()]);
        add_guests(&mut figures, &Guests { bad_bytes, longest_gap_ms, tolls, swapped_mib });
        figures
    }

    fn report() -> Report {
        let operations = [("kvm_access".to_owned(), Operation { done: 7, longest_us: 5 })].into();
        Report { is_final: true, operations, ..Report::default() }
    }

    #[test]
    fn a_run_with_all_of_its_parts_passes() {
        let figures = figures(report(), Some(20.0));
        assert!(figures.passed(), "{}", figures.to_table());
    }

    #[test]
    fn a_run_that_lacks_a_part_does_not_pass() {
        let obstacle = Some("no /dev/kvm".to_owned());
        let without_kvm = Report { kvm_obstacle: obstacle, ..report() };
        let lacking = [
            ("kvm_accesses", without_kvm, Some(20.0)),
            ("kvm_accesses", Report { operations: [].into(), ..report() }, Some(20.0)),
            ("swapped_out", report(), None),
            ("guests_swapped_out", report(), Some(0.0)),
            ("bad_bytes", Report { bad_bytes: 1, ..report() }, Some(20.0)),
        ];
        for (name, report, swapped) in lacking {
            let figures = figures(report, swapped);
            assert!(!figures.met(name) && !figures.passed(), "{name}");
        }
    }
}
