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

use super::prelude::*;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cold-return",
    summary: "a VM wakes, 256 MiB of it out: paged by the host, by its own swap, by balloon",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::SYS,
        measured::ARMS,
    ],
    claims: claims! {
        "return_s" <= 0.5 => "s", "A VM of which 256 MiB are out is as fast as before in a moment";
        "return_vs_guest" <= 0.02 => "ratio",
            "It is so long before one that reads its own swap from a disk of 3,000 operations a \
             second";
        "return_vs_guest_fast" => "ratio", "It is so before one whose swap is as fast as QEMU";
        "return_vs_kernel" => "ratio",
            "It takes this part of the time of one that the kernel pages out by itself";
    },
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

const ARMS: [(&str, ReturnArm); 4] = [
    ("paged", ReturnArm::Ours),
    ("kernel", ReturnArm::Kernel),
    ("guest", ReturnArm::Guest(Some(DISK_IOPS))),
    ("guest_fast", ReturnArm::Guest(None)),
];
/// How often the memory goes and comes back, in each arm.
const ROUNDS: usize = 3;

/// Times of sweeps in seconds: after the memory was out, and otherwise.
struct Sweeps {
    woken: Vec<f64>,
    usual: Vec<f64>,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let zram = Zram::new(ZRAM)?;
    let arms = Arms::once(context, &ARMS, |_, arm| {
        let sweeps = measure(context, *arm)?;
        let Sweeps { woken, usual } = &sweeps;
        context.say(&format!("  {woken:.3?} s, else {usual:.3?} s"));
        Ok(sweeps)
    })?;
    drop(zram);
    let mut figures = context.figures(SCENARIO.name, 1);
    add_figures(&mut figures, &arms);
    Ok(figures)
}

fn add_figures(figures: &mut Figures, arms: &Arms<Sweeps>) {
    for (name, Sweeps { woken, usual }) in arms.iter() {
        let usual = median(usual.iter().copied());
        let note = format!("until all {MIB} MiB were touched once; when none is out {usual:.3}");
        let name = if name == "paged" { String::new() } else { format!("_{name}") };
        figures.tell_rounds(&format!("return_s{name}"), woken.clone(), "s", note);
    }
    let of = |arm: &str| arms.number(arm, |sweeps| median(sweeps.woken.iter().copied()));
    for (other, note) in [
        ("guest", "to the guest's own swap on a disk of 3,000 operations per second"),
        ("guest_fast", "to its own swap on a disk as fast as QEMU is"),
        ("kernel", "to the kernel's own paging to the same device"),
    ] {
        let figure = Figure::new(of("paged") / of(other), "ratio", format!("{note}, medians"));
        figures.add(&format!("return_vs_{other}"), figure);
    }
}

fn measure(context: &Context, way: ReturnArm) -> Result<Sweeps, LabError> {
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
    let mut lab = context.start([guest])?;
    let mut sweeps = Sweeps { woken: Vec::new(), usual: Vec::new() };
    let mut worker = None;
    let pid = lab.machines()[0].process().pid;
    let own = lab.machines()[0].overhead()?.own;
    let mut done = next_sweep(&lab, 0)?.0;
    for _ in 0..ROUNDS {
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
        let before = Counters::of(pid)?;
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
    let mut latest = (0, f64::NAN);
    lab.wait_for("the guest to sweep over its memory", SWEEP_LIMIT, |_| {
        latest = sweeps().unwrap_or(latest);
        Ok(latest.0 > done)
    })?;
    Ok(latest)
}

/// Whether the host has paged out the memory.
fn is_out(pid: u32, before: Counters) -> Result<bool, LabError> {
    let now = Counters::of(pid)?;
    Ok(now.swapped.minus(before.swapped) >= NEARLY)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arms() -> Vec<(&'static str, Sweeps)> {
        let of = |seconds: f64| Sweeps { woken: vec![seconds; ROUNDS], usual: vec![0.1; ROUNDS] };
        let seconds = [0.4, 0.3, 40.0, 8.0];
        ARMS.iter().zip(seconds).map(|((name, _), seconds)| (*name, of(seconds))).collect()
    }

    fn figures(arms: Vec<(&'static str, Sweeps)>) -> Figures {
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, &Arms(vec![arms])))
    }

    #[test]
    fn a_return_is_set_against_each_other_arm() {
        let figures = figures(arms());
        let expected = [
            ("return_s", 0.4),
            ("return_s_kernel", 0.3),
            ("return_vs_guest", 0.01),
            ("return_vs_guest_fast", 0.05),
            ("return_vs_kernel", 0.4 / 0.3),
        ];
        figures.assert_near(&expected);
        assert!(figures.passed(), "{}", figures.to_table());
    }

    #[test]
    fn arms_that_are_swapped_or_missing_and_sweeps_that_were_not_timed_miss() {
        let mut swapped = arms();
        (swapped[0].0, swapped[2].0) = ("guest", "paged");
        let swapped = figures(swapped);
        assert!(!swapped.met("return_s") && !swapped.met("return_vs_guest"));
        let mut missing = arms();
        missing.remove(2);
        let mut unread = arms();
        unread[0].1.woken[1] = f64::NAN;
        for arms in [missing, unread, Vec::new()] {
            assert!(figures(arms).value("return_vs_guest").is_nan());
        }
    }
}
