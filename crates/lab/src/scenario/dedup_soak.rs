//! `dedup-soak`: merging, breaking, tracking and ballooning at once, and not a byte is lost.
//!
//! Two guests of the same seed verify memory and a disk that QEMU reads past the host's page cache: what they
//! hold is the same until they rewrite it, so pages merge and break all the time. A third sorts, a fourth takes
//! memory and gives it back. The engine merges flat out, tracks within its budget, and is replaced by a new one
//! at random moments, which knows nothing of what is merged; balloons go up and down.

use std::time::{Duration, Instant};

use model::Bytes;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::fleet;
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::{Direct, MachineSpec};
use crate::merger::Merger;
use crate::random::Random;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-soak",
    summary: "half an hour of merging, breaking, tracking and ballooning, and no byte is lost",
    run,
};

const USUAL_MINUTES: u32 = 30;
const MEMORY: Bytes = Bytes::mib(224);
const LEAST_MEMORY: Bytes = Bytes::mib(176);
const DISK: Bytes = Bytes::mib(64);
const DISK_IOPS: u32 = 400;
const FILL_LIMIT: Duration = Duration::from_secs(120);
/// How long an engine lives.
const LIFE_MS: (u64, u64) = (500, 20_000);
/// How long a guest may stand still.
const HANG_MS: f64 = 10_000.0;

/// What came of it, over all engines.
#[derive(Default)]
struct Toll {
    engines: u32,
    merged: u64,
    broken: u64,
    dropped: u64,
    longest_gap_ms: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_MINUTES);
    let guest = |name: &str, workload: &str| MachineSpec {
        seed: context.seed,
        shim: true,
        ..MachineSpec::new(name, "soak", MEMORY, MEMORY, workload)
    };
    let witness = |name: &str, native: bool| MachineSpec {
        vcpus: 2,
        data_disk: Some(DISK),
        data_direct: Some(Direct { native, iops: DISK_IOPS }),
        ..guest(name, "verify --mb 64 --disk /dev/data --disk-mb 64")
    };
    let specs = [
        witness("native", true),
        witness("threads", false),
        guest("sort", "sort --mb 48"),
        guest("memhog", "memhog --mb 80 --hold 3 --rest 2 --rate 60"),
    ];
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    lab.wait_for("the guests to work", FILL_LIMIT, |lab| {
        Ok(lab.machines().iter().all(|machine| machine.reported("ops") > 0.0))
    })?;
    let pids: Vec<u32> = lab.machines().iter().map(|machine| machine.process().pid).collect();
    let mut random = Random::new(context.seed);
    let mut toll = Toll::default();
    let until = Instant::now() + length;
    while Instant::now() < until {
        let merger = Merger::start(&pids, None, Some(0.01))?;
        let life = Duration::from_millis(random.between(LIFE_MS.0, LIFE_MS.1));
        let end = (Instant::now() + life).min(until);
        while Instant::now() < end {
            for machine in lab.machines() {
                if !machine.alive() {
                    return Err(machine.death());
                }
                machine.set_balloon(Bytes(random.between(LEAST_MEMORY.0, MEMORY.0)))?;
                toll.longest_gap_ms = toll.longest_gap_ms.max(machine.reported("gap_ms"));
            }
            interrupt::sleep(Duration::from_millis(random.between(200, 1_500)))?;
        }
        toll.engines += 1;
        for reading in merger.stop() {
            toll.merged += reading.merged.0;
            toll.broken += reading.broken.0;
            toll.dropped += reading.dropped.0;
        }
    }
    for machine in lab.machines() {
        machine.set_balloon(MEMORY)?;
    }
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok(figures(context, &toll, bad_bytes))
}

fn figures(context: &Context, toll: &Toll, bad_bytes: u64) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut add = |name: &str, value: f64, unit: &'static str, note: &str, target: Target| {
        figures.add(name, Figure::new(value, unit, note).target(target));
    };
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    let some = Target::AtLeast(1.0);
    let note = "wrong bytes in memory and disks of the guests";
    add("bad_bytes", bad_bytes as f64, "B", note, Target::Equals(0.0));
    let note = "longest that a guest's work stood still";
    add("stall_ms_max", toll.longest_gap_ms, "ms", note, Target::AtMost(HANG_MS));
    add("engines", toll.engines.into(), "count", "one after the other", some);
    add("merged_mib", mib(toll.merged), "MiB", "shared with a slot of a pool", some);
    add("broken_mib", mib(toll.broken), "MiB", "of it written by guests and seen so", some);
    add("dropped_mib", mib(toll.dropped), "MiB", "pages of zeros", some);
    figures
}
