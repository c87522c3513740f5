//! `imr-vs-ksm-swap`: the cost of regaining memory that a guest has used and no longer needs, in
//! three ways.
//!
//! * **Swap**: the guest reports nothing, and its QEMU's cgroup gets a lower limit. The
//!   measurement covers the kernel's work within the call that lowers the limit; writes to the
//!   disk continue meanwhile.
//! * **KSM**: the guest's memory is the same in every MB and still in use; the kernel merges it
//!   without a pause.
//! * **Ours**: the guest has freed the memory, its kernel has reported it, and the worker takes
//!   it.
//!
//! For each way: CPU time for each page regained; the wall time until all pages are regained (as
//! the paper measured it); and the extra time that the guest afterwards takes to write a word to
//! each page, compared with pages that were not regained.
//!
//! **Limits.** Swap and KSM preserve the guest's content; ours discards it, since the guest needs
//! none of it. The three are compared for memory that is free in the guest. The kernel chooses
//! the pages to swap out, and QEMU's own memory is among them.

use super::prelude::*;
use crate::ksm::{self, Ksm};
use crate::machine::USUAL_ORDER;
use crate::meb::watch::own_cpu;
use crate::steps;
use crate::swap_file::{SwapFile, swapped_mib};
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "imr-vs-ksm-swap",
    summary: "regaining a guest's memory by host swap, by kernel KSM, and by taking what it has freed",
    measures: &[&[file!()], measured::SHIM],
    claims: claims! {
        "swap_to_ours" >= 3.0 => "ratio",
            "Memory is regained by a take for less CPU time than by swap", "3,571 to 10,714";
        "ksm_to_ours" >= 3.0 => "ratio",
            "Memory is regained by a take for less CPU time than by KSM without a pause", "15,357";
    },
    run,
};

/// Little more than the guest's kernel and its workload need, so that the guest uses the same
/// memory each time.
const MEMORY: Bytes = Bytes::mib(384);
const USED_MB: u32 = 256;
/// Memory regained by swap: the memory that the guest has freed, less the part that may still be
/// in use.
const SWAPPED: Bytes = Bytes::mib(160);
const SWAP: Bytes = Bytes::mib(1024);
const ROUNDS: usize = 5;
/// The time that the guest's kernel takes to report free memory.
const REPORT: Duration = Duration::from_secs(8);
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Regaining has ended when this time passes with no more than [`LITTLE_MIB`] regained.
const QUIET: Duration = Duration::from_secs(3);
const LITTLE_MIB: f64 = 1.0;
const LIMIT: Duration = Duration::from_secs(90);

/// The costs of one round, in microseconds for each page of 4 KiB.
#[derive(Debug)]
struct Cost {
    cpu: f64,
    wall: f64,
    /// Extra time to write to a page again.
    reuse: f64,
    pages: f64,
}

#[derive(Debug, Default)]
struct Costs(Vec<Cost>);

fn run(context: &Context) -> Result<Figures, LabError> {
    let told = |name: &str, way: fn(&Context) -> Result<Costs, LabError>| {
        context.say(&format!("{name} ..."));
        way(context)
    };
    let swap = told("swap", by_swap)?;
    let ksm = told("ksm", by_ksm)?;
    let ours = told("ours", by_taking)?;
    let mut figures = context.figures(SCENARIO.name, u32::try_from(ROUNDS).unwrap_or(u32::MAX));
    let ways = [
        ("swap", &swap, "the call that lowers the limit", "6 or 2 ms to read one back"),
        ("ksm", &ksm, "ksmd without a pause, all that it looks at", "8.6 ms at its default rate"),
        ("ours", &ours, "the shim's and the worker's threads", "0.56 us"),
    ];
    for (name, costs, what, paper) in ways {
        let note = format!(
            "CPU time to regain a page, {what}; wall {:.2} us; {:.0} MiB",
            costs.median(|it| it.wall),
            costs.median(|it| it.pages) / 256.0
        );
        let figure = Figure::new(costs.median(|it| it.cpu), "us", note).paper(paper);
        figures.add(&format!("{name}_us_per_page"), figure);
        let note = "longer for the guest to write to a page again that was regained";
        figures.tell(&format!("{name}_reuse_us_per_page"), costs.median(|it| it.reuse), "us", note);
    }
    let ratio = |costs: &Costs, of: fn(&Cost) -> f64| costs.median(of) / ours.median(of);
    for (name, costs) in [("swap_to_ours", &swap), ("ksm_to_ours", &ksm)] {
        let note = format!("CPU time to regain a page; wall {:.1}", ratio(costs, |it| it.wall));
        figures.tell(name, ratio(costs, |it| it.cpu), "ratio", note);
    }
    let there_and_back = |costs: &Costs| costs.median(|it| it.wall) + costs.median(|it| it.reuse);
    for (name, costs) in [("swap_to_ours_in_all", &swap), ("ksm_to_ours_in_all", &ksm)] {
        let note = "wall time to regain a page, and what the guest waits for it afterwards";
        figures.tell(name, there_and_back(costs) / there_and_back(&ours), "ratio", note);
    }
    Ok(figures)
}

/// Memory regained, and the cost.
#[derive(Debug, Clone, Copy, Default)]
struct Regained {
    mib: f64,
    cpu_s: f64,
    wall_s: f64,
}

/// The part that the guest has used again, and the time for that with and without regaining.
#[derive(Debug, Clone, Copy)]
struct Reused {
    mib: f64,
    kept_s: f64,
    again_s: f64,
}

impl Costs {
    fn add(&mut self, context: &Context, regained: Regained, reused: Reused) {
        let Regained { mib, cpu_s, wall_s } = regained;
        context.say(&format!(
            "  {mib:.0} MiB regained in {wall_s:.3} s, {cpu_s:.3} of CPU; {:.0} used again in {:.3} s instead of {:.3}",
            reused.mib, reused.again_s, reused.kept_s
        ));
        let us = |seconds: f64, mib: f64| seconds * 1e6 / (mib * 256.0);
        self.0.push(Cost {
            cpu: us(cpu_s, mib),
            wall: us(wall_s, mib),
            reuse: us(reused.again_s - reused.kept_s, reused.mib),
            pages: mib * 256.0,
        });
    }

    fn median(&self, of: impl Fn(&Cost) -> f64) -> f64 {
        median(self.0.iter().map(of))
    }
}

fn spec(context: &Context, reporting_order: Option<u32>) -> MachineSpec {
    let guest = steps::guest("guest", "imr", MEMORY, USED_MB);
    MachineSpec { seed: context.seed, reporting_order, ..guest }
}

fn by_swap(context: &Context) -> Result<Costs, LabError> {
    let _swap = SwapFile::new(&context.dir, SWAP)?;
    let group = MemoryGroup::new("imr")?;
    let spec = MachineSpec { cgroup: Some(group.dir().to_owned()), ..spec(context, None) };
    let mut lab = context.start([spec])?;
    let machine = &lab.machines()[0];
    let pid = machine.process().pid;
    steps::order(machine, "write+free", LIMIT)?;
    let mut costs = Costs::default();
    for _ in 0..ROUNDS {
        let kept_s = steps::order(machine, "touch+free", LIMIT)?;
        let (cpu, began, before) = (own_cpu(), Instant::now(), swapped_mib(pid));
        shrink(&group)?;
        let (cpu, wall) = (own_cpu().saturating_sub(cpu), began.elapsed());
        let swapped = swapped_mib(pid);
        let (cpu_s, wall_s) = (cpu.as_secs_f64(), wall.as_secs_f64());
        group.set_unlimited()?;
        let again_s = steps::order(machine, "touch+free", LIMIT)?;
        let reused = Reused { mib: swapped - swapped_mib(pid), kept_s, again_s };
        costs.add(context, Regained { mib: swapped - before, cpu_s, wall_s }, reused);
        // All of it is resident again.
        steps::order(machine, "write+free", LIMIT)?;
    }
    lab.stop()?;
    Ok(costs)
}

/// Lowers the limit by [`SWAPPED`]. Cgroup v1 reports `EBUSY` when the kernel reclaimed less.
fn shrink(group: &MemoryGroup) -> Result<(), LabError> {
    match group.set_limit(group.usage()?.minus(SWAPPED)) {
        Err(LabError::Io(error)) if error.kind() == std::io::ErrorKind::ResourceBusy => Ok(()),
        result => result,
    }
}

fn by_ksm(context: &Context) -> Result<Costs, LabError> {
    let mut lab = context.start([spec(context, None)])?;
    let machine = &lab.machines()[0];
    steps::order(machine, "same", LIMIT)?;
    let mut costs = Costs::default();
    for _ in 0..ROUNDS {
        let kept_s = steps::order(machine, "touch", LIMIT)?;
        let ksm = Ksm::start(ksm::FLAT_OUT)?;
        let regained = watch(Ksm::saved_mib, Ksm::cpu_s)?;
        // KSM would update its counter of merged pages only in its next pass.
        ksm.stop()?;
        let again_s = steps::order(machine, "touch", LIMIT)?;
        let reused = Reused { mib: f64::from(USED_MB), kept_s, again_s };
        costs.add(context, regained, reused);
    }
    lab.stop()?;
    Ok(costs)
}

fn by_taking(context: &Context) -> Result<Costs, LabError> {
    let spec = MachineSpec { shim: true, ..spec(context, Some(USUAL_ORDER)) };
    let mut lab = context.start([spec])?;
    let machine = &lab.machines()[0];
    let pid = machine.process().pid;
    let mut worker = WorkerProcess::start("imr")?;
    worker.take(&lab, None)?;
    steps::order(machine, "write+free", LIMIT)?;
    let mut costs = Costs::default();
    for _ in 0..ROUNDS {
        interrupt::sleep(REPORT)?;
        let kept_s = steps::order(machine, "touch+free", LIMIT)?;
        interrupt::sleep(REPORT)?;
        let before = anonymous_mib(pid)?;
        let worker_pid = worker.identity().pid;
        let cpu_s = || Ok(threads::shims_cpu_s(&[pid]) + threads::cpu_s(&[worker_pid], ""));
        worker.take(&lab, Some(Bytes::ZERO))?;
        let regained = watch(|| Ok(before - anonymous_mib(pid)?), cpu_s)?;
        worker.take(&lab, None)?;
        let taken = anonymous_mib(pid)?;
        let again_s = steps::order(machine, "touch+free", LIMIT)?;
        let reused = Reused { mib: anonymous_mib(pid)? - taken, kept_s, again_s };
        costs.add(context, regained, reused);
    }
    worker.end()?;
    lab.stop()?;
    Ok(costs)
}

/// Watches until nothing more is regained; returns the amount, and the cost up to then.
fn watch(
    mib: impl Fn() -> Result<f64, LabError>,
    cpu_s: impl Fn() -> Result<f64, LabError>,
) -> Result<Regained, LabError> {
    let (began, cpu_before) = (Instant::now(), cpu_s()?);
    let (mut regained, mut changed) = (Regained::default(), began);
    while changed.elapsed() < QUIET {
        interrupt::sleep(LOOK_EVERY)?;
        let mib = mib()?;
        if mib > regained.mib + LITTLE_MIB {
            changed = Instant::now();
            let wall_s = (changed - began).as_secs_f64();
            regained = Regained { mib, cpu_s: cpu_s()? - cpu_before, wall_s };
        }
    }
    Ok(regained)
}

fn anonymous_mib(pid: u32) -> Result<f64, LabError> {
    Ok(Counters::of(pid)?.anonymous.as_mib())
}
