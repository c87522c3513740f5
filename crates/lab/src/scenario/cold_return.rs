//! `cold-return`: a VM wakes up while 256 MiB of it are paged out. Measured is the time until it
//! has touched all of them once and runs at full speed.
//!
//! A guest sweeps over all of its 256 MiB, in an order in which no two consecutive pages are
//! neighbours, then rests, again and again. While it rests, that memory is paged out in one of
//! four ways: by a group's worker to compressed memory; by the kernel's own reclaim of 256 MiB
//! from QEMU's memory cgroup, to compressed memory; to the guest's own swap on a disk of 3,000
//! operations per second; to its own swap on a disk as fast as QEMU is. For the last two its
//! balloon inflates, and deflates before the guest wakes. The guest's program times its sweeps
//! itself.

use std::time::{Duration, Instant};

use model::Bytes;
use sys::memory_of::{Counters, Overhead};

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::meb::pairs::Median;
use crate::memory_group::MemoryGroup;
use crate::worker_process::{Wanted, WorkerProcess};
use crate::zram::Zram;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cold-return",
    summary: "a VM wakes, 256 MiB of it out: paged by the host, by its own swap, by balloon",
    run,
};

const RAM: Bytes = Bytes::mib(448);
const MIB: u64 = 256;
const WORK: &str = "scan --mb 256 --stride 64 --shuffled --period";
/// Operations of the guest's disk per second, as in the paper's tables of balancing.
const DISK_IOPS: u32 = 3_000;
const GUEST_SWAP: Bytes = Bytes::mib(512);
const ZRAM: Bytes = Bytes::mib(1024);
/// Almost all of it, which counts as all.
const NEARLY: Bytes = Bytes::mib(230);
/// Seconds from one sweep to the next. The memory must be out before the next sweep; paging to
/// the guest's own swap takes longer.
const PERIOD_S: u64 = 25;
const GUEST_PERIOD_S: u64 = 60;
/// The guest's own need is not known. So its balloon takes [`STEP`] more at each sample, until
/// the memory is in its swap, but leaves [`LEAST`].
const STEP: Bytes = Bytes::mib(1);
const LEAST: Bytes = Bytes::mib(88);
const SWEEP_LIMIT: Duration = Duration::from_secs(300);
const OUT_LIMIT: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, PartialEq, Eq)]
enum ReturnArm {
    Ours,
    Kernel,
    Guest(Option<u32>),
}

const WAYS: [(&str, ReturnArm, usize); 4] = [
    ("paged", ReturnArm::Ours, 3),
    ("kernel", ReturnArm::Kernel, 3),
    ("guest", ReturnArm::Guest(Some(DISK_IOPS)), 1),
    ("guest_fast", ReturnArm::Guest(None), 1),
];

/// Times of sweeps in seconds: after the memory was out, and otherwise.
struct Sweeps {
    woken: Vec<f64>,
    usual: Vec<f64>,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let zram = Zram::new(ZRAM)?;
    let mut figures = context.figures(SCENARIO.name, 1);
    let mut seconds = Vec::new();
    for (name, way, rounds) in WAYS {
        context.say(&format!("{name} ..."));
        let sweeps = measure(context, way, rounds)?;
        let (woken, usual) = (Median::of(sweeps.woken), Median::of(sweeps.usual));
        context.say(&format!("  {:.3} s, else {:.3} s", woken.value, usual.value));
        seconds.push((name, woken, usual));
    }
    drop(zram);
    let of = |wanted: &str| {
        let found = seconds.iter().find(|(name, ..)| *name == wanted);
        found.map_or(f64::NAN, |(_, woken, _)| woken.value)
    };
    for (name, woken, usual) in &seconds {
        let note = format!(
            "until all {MIB} MiB were touched once, median, {:.2} to {:.2}; when none is out {:.3}",
            woken.low, woken.high, usual.value
        );
        let figure = Figure::new(woken.value, "s", note);
        if *name == "paged" {
            figures.add("return_s", figure.target(Target::AtMost(0.5)));
        } else {
            figures.add(&format!("return_s_{name}"), figure);
        }
    }
    let note = "to the guest's own swap on a disk of 3,000 operations per second";
    let figure = Figure::new(of("paged") / of("guest"), "ratio", note);
    figures.add("return_vs_guest", figure.target(Target::AtMost(0.02)));
    let note = "to its own swap on a disk as fast as QEMU is";
    figures.add("return_vs_guest_fast", Figure::new(of("paged") / of("guest_fast"), "ratio", note));
    Ok(figures)
}

fn measure(context: &Context, way: ReturnArm, rounds: usize) -> Result<Sweeps, LabError> {
    let group = (way == ReturnArm::Kernel).then(|| MemoryGroup::new("cold")).transpose()?;
    let period = if matches!(way, ReturnArm::Guest(_)) { GUEST_PERIOD_S } else { PERIOD_S };
    let guest = MachineSpec::new("sleeper", "cold", RAM, RAM, &format!("{WORK} {period}"));
    let guest = MachineSpec {
        shim: way == ReturnArm::Ours,
        cgroup: group.as_ref().map(|group| group.dir().to_owned()),
        // Both sides move memory page by page; huge pages would have to be split first.
        kernel_options: "transparent_hugepage=never".to_owned(),
        ..guest
    };
    let guest = match way {
        ReturnArm::Guest(iops) => guest.with_swap(GUEST_SWAP, iops),
        ReturnArm::Ours | ReturnArm::Kernel => guest,
    };
    let mut lab = Lab::start(&context.dir, &context.provisions, &[guest])?;
    let mut sweeps = Sweeps { woken: Vec::new(), usual: Vec::new() };
    let mut worker = None;
    let pid = lab.machines()[0].process().pid;
    let own = Overhead::measure(pid, &[RAM]).map_err(std::io::Error::other)?.own;
    let mut done = next_sweep(&lab, 0)?.0;
    for _ in 0..rounds {
        // A pager leaves blocks alone that came back, and a new one knows of none.
        drop(worker.take());
        if way == ReturnArm::Ours {
            let wanted = Wanted { resident: Some(RAM), own: Some(own), ..Wanted::default() };
            let fresh = worker.insert(WorkerProcess::start("cold")?);
            fresh.order(&lab, wanted)?;
        }
        // A sweep that finds all in memory, and then one that does not.
        let (count, took) = next_sweep(&lab, done)?;
        sweeps.usual.push(took);
        let before = Counters::of(pid).map_err(std::io::Error::other)?;
        match (way, &mut worker, &group) {
            (ReturnArm::Ours, Some(worker), _) => {
                let resident = before.anonymous.minus(own).minus(Bytes::mib(MIB));
                let wanted = Wanted { own: Some(own), ..Wanted::default() };
                worker.order(&lab, Wanted { resident: Some(resident), ..wanted })?;
                lab.wait_for("the memory to be paged out", OUT_LIMIT, |_| is_out(pid, before))?;
                worker.order(&lab, Wanted { resident: Some(RAM), ..wanted })?;
            }
            (ReturnArm::Kernel, _, Some(group)) => {
                let left = group.usage()?.minus(Bytes::mib(MIB));
                // The kernel reclaims for a while, then gives up; the next request goes on.
                lab.wait_for("the kernel to reclaim so much", OUT_LIMIT, |_| {
                    group.reclaim_to(left)?;
                    is_out(pid, before)
                })?;
            }
            _ => {
                let machine = &lab.machines()[0];
                let mut left = RAM.minus(Bytes::mib(MIB));
                lab.wait_for("the guest to have its memory in swap", SWEEP_LIMIT, |_| {
                    machine.set_balloon(left)?;
                    left = left.minus(STEP).max(LEAST);
                    Ok(machine.reported("swap_kb") >= NEARLY.0 as f64 / 1024.0)
                })?;
                machine.set_balloon(RAM)?;
            }
        }
        let (count, took) = next_sweep(&lab, count)?;
        sweeps.woken.push(took);
        done = count;
    }
    lab.stop()?;
    Ok(sweeps)
}

/// Waits until more than `done` sweeps are over; returns their number, and the time of the last
/// one.
fn next_sweep(lab: &Lab, done: u64) -> Result<(u64, f64), LabError> {
    let machine = &lab.machines()[0];
    let sweeps = || {
        let sample = machine.last_metric()?;
        let took_us = sample.value["step_us"].as_f64()?;
        Some((sample.value["ops"].as_u64()? / (MIB << 8), took_us / 1e6))
    };
    let began = Instant::now();
    loop {
        if let Some((count, took)) = sweeps()
            && count > done
        {
            return Ok((count, took));
        }
        if began.elapsed() > SWEEP_LIMIT {
            let what = "the guest to sweep over its memory".to_owned();
            return Err(LabError::Timeout { what, limit: SWEEP_LIMIT });
        }
        interrupt::sleep(Duration::from_millis(100))?;
    }
}

/// Whether the host has paged out the memory.
fn is_out(pid: u32, before: Counters) -> Result<bool, LabError> {
    let now = Counters::of(pid).map_err(std::io::Error::other)?;
    Ok(now.swapped.minus(before.swapped) >= NEARLY)
}
