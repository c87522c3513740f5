//! `cold-soak`: guests' memory goes to the host's swap and back while it is tracked, merged and
//! freed, and workers are killed; not a byte of it is lost.
//!
//! Two guests verify their memory, and a disk that QEMU reads past the host's page cache. One of
//! them works at a slow pace, so that most of its memory can be paged out; the other works as
//! fast as it can. A third frees memory and takes it back. A group's worker (the real process)
//! gets a new order about every second: how much memory each guest may have resident, from almost
//! nothing to all, and whether to merge or to unshare. After half a second to twenty the worker
//! is killed, and the next one takes over. In the end the last worker releases everything.
//!
//! `shim-stress` tests the shim with memory that a hostile worker pages out, also under KVM.

use model::PagesPerMs;
use worker::{FreedOrder, Report, VmReport};

use super::prelude::*;
use crate::lives;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cold-soak",
    summary: "30 minutes of paging out and back, merging, workers killed; no byte is lost",
    measures: &[&[file!()], measured::PAGES, measured::WORKER, measured::SHIM, measured::SYS],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "Paging out and reading back lose no byte while workers are killed (30 min)";
    },
    run,
};

const USUAL_MINUTES: u32 = 30;
const MEMORY: Bytes = Bytes::mib(256);
const DISK: Bytes = Bytes::mib(64);
const DISK_IOPS: u32 = 400;
const ZRAM: Bytes = Bytes::mib(1024);
const RATE: PagesPerMs = PagesPerMs(100);
const FILL_LIMIT: Duration = Duration::from_secs(120);
/// QEMU's own memory may stay in swap, since no process touches it.
const LEFT: Bytes = Bytes::mib(24);

/// Totals over all workers.
#[derive(Default)]
struct ColdSoakCounts {
    kills: u32,
    paged_out: Bytes,
    returned: Bytes,
    merged: Bytes,
    longest_gap_ms: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_MINUTES);
    let zram = Zram::new(ZRAM)?;
    let guest = |name: &str, workload: &str| {
        let guest = context.guest(name, "soak", MEMORY, workload).with_shim(true);
        guest.with_direct_disk(DISK, true, DISK_IOPS)
    };
    let specs = [
        guest("slow", "verify --mb 128 --rate 8 --disk /dev/data --disk-mb 64"),
        guest("fast", "verify --mb 96 --disk /dev/data --disk-mb 64"),
        guest("frees", "verify --mb 128 --breathe 20"),
    ];
    let mut lab = context.start(specs)?;
    progress::wait_until_working(&lab)?;
    let toll = soak(context, &lab, length)?;
    let left = release(&lab)?;
    let bad_bytes = fleet::bad_bytes(&lab)?;
    lab.stop()?;
    drop(zram);
    Ok(figures(context, &toll, left, bad_bytes))
}

fn soak(context: &Context, lab: &Lab, length: Duration) -> Result<ColdSoakCounts, LabError> {
    let mut random = Random::new(context.seed);
    let mut toll = ColdSoakCounts { longest_gap_ms: f64::NAN, ..ColdSoakCounts::default() };
    let own = own(lab)?;
    let order = |random: &mut Random| {
        let resident = match random.between(0, 4) {
            0 => None,
            1 => Some(MEMORY),
            _ => Some(Bytes(random.between(0, MEMORY.0))),
        };
        let scan_rate = (random.between(0, 2) > 0).then_some(RATE);
        let freed = FreedOrder { is_lazy: random.between(0, 1) == 1, keep: None };
        Wanted { scan_rate, freed, resident, own: Some(own), ..Wanted::default() }
    };
    let longest_gap_ms = &mut toll.longest_gap_ms;
    let beside = |machine: &Machine, _: &mut Random| {
        *longest_gap_ms = longest_gap_ms.max(machine.told("gap_ms"));
        Ok(())
    };
    let start = || WorkerProcess::start("soak");
    let last_words = lives::run(lab, length, &mut random, start, order, beside)?;
    last_words.iter().for_each(|report| toll.count(report));
    Ok(toll)
}

/// The QEMUs' own memory, without their guests' RAM: the least of all, since one order is for
/// all.
fn own(lab: &Lab) -> Result<Bytes, LabError> {
    let all = lab.machines().iter().map(|machine| Ok(machine.overhead()?.own));
    let all: Vec<Bytes> = all.collect::<Result<_, LabError>>()?;
    Ok(all.into_iter().min().unwrap_or_default())
}

/// Has everything given back; returns the memory of all QEMUs that is then in swap.
fn release(lab: &Lab) -> Result<Bytes, LabError> {
    let mut worker = WorkerProcess::start("soak")?;
    worker.order(lab, Wanted { resident: Some(MEMORY), ..Wanted::default() })?;
    lab.wait_for("the last worker to know the guests", FILL_LIMIT, |_| {
        let report = worker.report().unwrap_or_default();
        let is_known = |vm: &VmReport| vm.tracking.is_some();
        Ok(report.vms.len() == lab.machines().len() && report.vms.values().all(is_known))
    })?;
    worker.order(lab, Wanted::default())?;
    worker.end()?;
    lab.pids().into_iter().map(|pid| Ok(Counters::of(pid)?.swapped)).sum()
}

impl ColdSoakCounts {
    fn count(&mut self, report: &Report) {
        self.kills += 1;
        for vm in report.vms.values() {
            if let Some(cold) = vm.cold {
                self.paged_out = self.paged_out.plus(cold.value.paged_out);
                self.returned = self.returned.plus(cold.value.returned);
            }
            let merged = vm.dedup.map_or(Bytes::ZERO, |dedup| dedup.value.merged);
            self.merged = self.merged.plus(merged);
        }
    }
}

fn figures(context: &Context, toll: &ColdSoakCounts, left: Bytes, bad_bytes: u64) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut add = |name: &str, value: f64, unit: &'static str, note: &str, target: Target| {
        figures.check(name, value, unit, note, target);
    };
    let some = Target::AtLeast(1.0);
    let note = "wrong bytes in memory and disks of the guests";
    add("bad_bytes", bad_bytes as f64, "B", note, Target::Equals(0.0));
    add("kills", toll.kills.into(), "count", "workers killed, each followed by the next", some);
    let note = "paged out, as far as workers could say it before they were killed";
    add("paged_out_mib", toll.paged_out.as_mib(), "MiB", note, some);
    add("returned_mib", toll.returned.as_mib(), "MiB", "of it touched again, or read back", some);
    add("merged_mib", toll.merged.as_mib(), "MiB", "shared with a slot of a pool meanwhile", some);
    let note = "in swap after the release: QEMU's own memory, which nobody touches";
    add("left_mib", left.as_mib(), "MiB", note, Target::AtMost(LEFT.as_mib()));
    let note = "longest that a guest's work stood still";
    figures.tell("stall_ms_max", toll.longest_gap_ms, "ms", note);
    figures
}
