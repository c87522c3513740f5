//! `dedup-soak`: merging, breaking, unsharing, tracking and ballooning at once, and not a byte is
//! lost.
//!
//! Two guests of the same seed verify memory and a disk that QEMU reads past the host's page cache:
//! what they hold is the same until they rewrite it, so pages merge and break all the time. A third
//! sorts, a fourth takes memory and gives it back. The group's worker merges as fast as it can,
//! tracks within its budget, unshares now and then, and is killed at random moments; the next one
//! takes over. Balloons go up and down. At the end all is unshared, and nothing may be left.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::{Bytes, Dedup, PagesPerMs};
use overbook::worker::SLOTS;
use sys::pool_file::PoolFile;
use sys::pool_maps;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::fleet;
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::{Direct, MachineSpec};
use crate::random::Random;
use crate::worker_process::{Wanted, WorkerProcess};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-soak",
    summary: "half an hour of merging, breaking, unsharing, tracking and ballooning; no byte is lost, nothing is left",
    run,
};

const USUAL_MINUTES: u32 = 30;
const MEMORY: Bytes = Bytes::mib(224);
const LEAST_MEMORY: Bytes = Bytes::mib(176);
const DISK: Bytes = Bytes::mib(64);
const DISK_IOPS: u32 = 400;
const FILL_LIMIT: Duration = Duration::from_secs(120);
/// What it is told: faster than any worker.
const RATE: PagesPerMs = PagesPerMs(1000);
/// One of so many moments it is told to unshare.
const UNSHARE: u64 = 8;
const UNSHARE_LIMIT: Duration = Duration::from_secs(60);
const GROUP: &str = "soak";
/// How long a worker lives.
const LIFE_MS: (u64, u64) = (500, 20_000);
/// What four QEMUs may grow by: by themselves, and by pieces larger than a huge page, of which each
/// has 112 at most.
const MOST_GROWN: f64 = 256.0;
/// How long a guest may stand still.
const HANG_MS: f64 = 10_000.0;

/// What came of it, over all workers.
#[derive(Default)]
struct Toll {
    kills: u32,
    /// How often what is shared was to be unshared.
    unshared: u32,
    merged: u64,
    broken: u64,
    dropped: u64,
    longest_gap_ms: f64,
}

/// What is left when all has been unshared.
#[derive(Default)]
struct Left {
    shared_pages: usize,
    pool_bytes: u64,
    mappings: u32,
    /// What QEMUs have more mappings than before, of whatever.
    grown: u32,
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
    let before = count_mappings(&pids)?;
    let mut random = Random::new(context.seed);
    let mut toll = Toll::default();
    let until = Instant::now() + length;
    while Instant::now() < until {
        let mut worker = WorkerProcess::start(GROUP)?;
        let life = Duration::from_millis(random.between(LIFE_MS.0, LIFE_MS.1));
        let end = (Instant::now() + life).min(until);
        while Instant::now() < end {
            let unshares = random.between(0, UNSHARE) == 0;
            toll.unshared += u32::from(unshares);
            let scan_rate = (!unshares).then_some(RATE);
            worker.order(&lab, Wanted { scan_rate, ..Wanted::default() })?;
            for machine in lab.machines() {
                if !machine.alive() {
                    return Err(machine.death());
                }
                machine.set_balloon(Bytes(random.between(LEAST_MEMORY.0, MEMORY.0)))?;
                toll.longest_gap_ms = toll.longest_gap_ms.max(machine.reported("gap_ms"));
            }
            interrupt::sleep(Duration::from_millis(random.between(200, 1_500)))?;
        }
        toll.kills += 1;
        let report = worker.report().unwrap_or_default();
        for reading in report.vms.values().filter_map(|vm| Some(vm.dedup?.value)) {
            toll.merged += reading.merged.0;
            toll.broken += reading.broken.0;
            toll.dropped += reading.dropped.0;
        }
        worker.kill()?;
    }
    for machine in lab.machines() {
        machine.set_balloon(MEMORY)?;
    }
    let mut left = unshare(&lab, &pids)?;
    left.grown = count_mappings(&pids)?.saturating_sub(before);
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    Ok(figures(context, &toll, &left, bad_bytes))
}

fn count_mappings(pids: &[u32]) -> Result<u32, LabError> {
    let counts: std::io::Result<Vec<u32>> = pids.iter().map(|&pid| pool_maps::count(pid)).collect();
    Ok(counts?.into_iter().sum())
}

/// Has everything unshared, and looks what the kernel still knows of it.
fn unshare(lab: &Lab, pids: &[u32]) -> Result<Left, LabError> {
    let mut worker = WorkerProcess::start(GROUP)?;
    worker.order(lab, Wanted::default())?;
    lab.wait_for("nothing to be shared any more", UNSHARE_LIMIT, |_| {
        let report = worker.report().unwrap_or_default();
        let is_unshared = |dedup: Dedup| dedup.passes > 1 && dedup.shared == Bytes::ZERO;
        Ok(!report.vms.is_empty()
            && report.vms.values().all(|vm| vm.dedup.is_some_and(|dedup| is_unshared(dedup.value))))
    })?;
    worker.end()?;
    let mut left = Left::default();
    let mut pools = BTreeMap::new();
    for &pid in pids {
        for mapping in pool_maps::mappings(pid)? {
            left.mappings += 1;
            pools.entry(mapping.file).or_insert((pid, mapping));
        }
    }
    for (file, (pid, mapping)) in pools {
        let pool = PoolFile::adopt(pid, &mapping, SLOTS).map_err(std::io::Error::other)?;
        left.pool_bytes += pool.bytes().map_err(std::io::Error::from)?;
        for &pid in pids {
            left.shared_pages += pool_maps::sharers(pid, file)?.len();
        }
    }
    Ok(left)
}

fn figures(context: &Context, toll: &Toll, left: &Left, bad_bytes: u64) -> Figures {
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
    add("kills", toll.kills.into(), "count", "workers killed, each followed by the next", some);
    let note = "times that all was to be unshared";
    add("unshared", toll.unshared.into(), "count", note, some);
    add("merged_mib", mib(toll.merged), "MiB", "shared with a slot of a pool", some);
    add("broken_mib", mib(toll.broken), "MiB", "of it written by guests and seen so", some);
    add("dropped_mib", mib(toll.dropped), "MiB", "pages of zeros", some);
    let none = Target::Equals(0.0);
    let note = "shared when all was unshared, by the kernel's count";
    add("left_shared_pages", left.shared_pages as f64, "pages", note, none);
    add("left_in_pools", left.pool_bytes as f64, "B", "that the pools take then", none);
    add("left_mappings", left.mappings.into(), "count", "mappings of pools then", none);
    let note =
        "mappings that QEMUs have more than before: their own, and pieces that could not be joined";
    add("left_pieces", left.grown.into(), "count", note, Target::AtMost(MOST_GROWN));
    figures
}
