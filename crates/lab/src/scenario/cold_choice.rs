//! `cold-choice`: four ways to choose the memory that a guest does without. The same guest with
//! the same work is held to the same size in each way. The scenario counts its misses and its
//! work.
//!
//! * **ours**: a group's worker pages out the memory that, by its tracking, is untouched for
//!   longest;
//! * **attached**: the worker does so from outside, for a guest without the shim;
//! * **kernel**: the kernel's own reclaim chooses. It is asked over and over for the excess of
//!   QEMU's memory cgroup, as in proactive reclaim (Weiner 2022, TMO);
//! * **balloon**: the guest chooses, for its balloon has the rest; it swaps to its own disk.
//!
//! Each way must keep the same size, or its misses say nothing: how far the mean size of a guest is
//! from what was wanted has a limit. The size is [`KEPT`] percent of the memory that the guest of
//! **ours** held once it had filled its memory. The measure is guest RAM in the host's memory:
//! resident pages by the kernel's page tables, and by QEMU's memory cgroup the pages that the
//! kernel has read ahead and keeps unmapped. The size that the kernel is asked for, and the
//! balloon, are adjusted all the time. QEMU's own memory, and memory that the guest's balloon
//! leaves untouched, are thus measured and not guessed. Guest RAM is in small pages, because the
//! kernel pages out huge ones as a whole.
//!
//! A **miss** is an access that waits for memory that is out. On the host, misses are the major
//! faults of QEMU's threads, without the shim's own, or the touches of pieces that Overbook had
//! paged out; the larger number counts. With a balloon, they are the guest's major faults, which
//! its kernel reports through the balloon. Misses are set against the guest's work in the same
//! time: a guest that stands still misses nothing.

use std::io;

use rustix::thread::disable_transparent_huge_pages;
use serde_json::json;
use worker::VmReport;

use super::prelude::*;
use crate::meb::modes::BUDGET;
use crate::meb::progress::Lines;
use crate::swap_file::Swapped;
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cold-choice",
    summary: "the same size by our choice, by the kernel's own reclaim, by balloon: misses, speed",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::SYS,
        measured::ARMS,
    ],
    claims: claims! {
        "vs_kernel" <= 0.8 => "ratio",
            "A guest misses less than with the kernel's own choice, the same memory left to it";
        "attached_vs_kernel" <= 1.0 => "ratio",
            "A guest with nothing loaded misses no more than with the kernel's own choice";
        "attached_vs_balloon" <= 0.67 => "ratio",
            "A guest with nothing loaded misses less than with a balloon's choice";
        "vs_balloon" <= 0.5 => "ratio", "A guest misses less than with a balloon's choice";
        "kept_apart" <= 0.05 => "ratio",
            "Every guest keeps the size that it is held to, in each way";
    },
    run,
};

/// Workloads of a guest. `zipf`, `phases` and `kv` have popular memory, in one place or scattered.
/// At full speed `zipf` and `kv` would touch all of theirs several times in a second, so they run
/// at the pace of a service.
const WORKLOADS: [(&str, &str); 4] = [
    ("zipf", "zipf --mb 140 --skew 1.0 --rate 4000"),
    ("phases", "phases --mb 140 --parts 4 --length 10"),
    ("graph", "graph --mb 120"),
    ("kv", "kv --mb 120 --rate 2000"),
];

const RAM: Bytes = Bytes::mib(256);
/// The share of its memory that a guest keeps, in percent.
const KEPT: u64 = 50;
/// A disk as fast as QEMU and the host's page cache are.
const GUEST_SWAP: Bytes = Bytes::mib(512);
const ZRAM: Bytes = Bytes::mib(1024);
/// Time with all its memory. The speed in the last two thirds of it is the base for comparison.
const BEFORE: Duration = Duration::from_secs(9);
/// Time to reach the size, in seconds.
const ADJUSTED: u32 = 18;
/// Measured time in seconds: one round of the phases. Tracking's cost covers the last thirty.
const MEASURED: u32 = 40;
const SECOND: Duration = Duration::from_secs(1);
/// QEMU's name of the guest's balloon.
const BALLOON: &str = "/machine/peripheral/balloon0";

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChoiceArm {
    Ours,
    Attached,
    Kernel,
    Balloon,
}

const WAYS: [(&str, ChoiceArm); 4] = [
    ("ours", ChoiceArm::Ours),
    ("attached", ChoiceArm::Attached),
    ("kernel", ChoiceArm::Kernel),
    ("balloon", ChoiceArm::Balloon),
];

impl ChoiceArm {
    /// Whether a worker holds the guest to its size.
    const fn has_worker(self) -> bool {
        matches!(self, Self::Ours | Self::Attached)
    }
}

/// Counters of one guest.
#[derive(Clone, Copy, Debug, Default)]
struct MissCounts {
    misses: f64,
    read_mib: f64,
}

/// Results of one guest.
#[derive(Clone, Copy, Debug)]
struct ChoiceRun {
    /// Its target size; below, its mean size in MiB.
    wanted: Bytes,
    kept_mib: f64,
    /// Misses, MiB read back, and operations, in a second.
    misses: f64,
    read_mib: f64,
    speed: f64,
    /// Operations in a second with all its memory.
    speed_before: f64,
    /// Tracking's share of a vCPU.
    cost: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let zram = Zram::new(ZRAM)?;
    // Processes that are started from here on inherit this.
    disable_transparent_huge_pages(true).map_err(io::Error::from)?;
    let mut rows = Arms::default();
    for (name, command) in WORKLOADS {
        context.say(&format!("{name} ..."));
        let mut wanted = None;
        rows.turn(ArmOrder::Listed, &WAYS, |name, way| {
            let course = KeptMemory::start(context, command, *way)?.measure(wanted)?;
            context.say(&format!("  {name}: {}", course.words()));
            wanted = Some(course.wanted);
            Ok(course)
        })?;
    }
    disable_transparent_huge_pages(false).map_err(io::Error::from)?;
    drop(zram);
    let mut figures = context.figures(SCENARIO.name, 1);
    add_figures(&mut figures, &rows);
    Ok(figures)
}

/// A guest, and the worker that holds it to its size, if there is one.
struct KeptMemory {
    way: ChoiceArm,
    worker: Option<WorkerProcess>,
    lab: Lab,
    /// The last field, so it is dropped last: its processes must have ended.
    group: MemoryGroup,
}

impl KeptMemory {
    fn start(context: &Context, command: &str, way: ChoiceArm) -> Result<Self, LabError> {
        let group = MemoryGroup::new("choice")?;
        let guest = MachineSpec {
            // All ways move single pages; huge pages would have to be split first.
            kernel_options: "transparent_hugepage=never".to_owned(),
            ..context
                .guest("guest", "choice", RAM, command)
                .with_shim(way == ChoiceArm::Ours)
                .in_cgroup(group.dir())
        };
        let guest = match way {
            ChoiceArm::Balloon => guest.with_swap(GUEST_SWAP, None),
            ChoiceArm::Ours | ChoiceArm::Attached | ChoiceArm::Kernel => guest,
        };
        let lab = context.start([guest])?;
        let worker = way.has_worker().then(|| WorkerProcess::start("choice")).transpose()?;
        Ok(Self { way, worker, lab, group })
    }

    fn measure(mut self, wanted: Option<Bytes>) -> Result<ChoiceRun, LabError> {
        if self.way == ChoiceArm::Balloon {
            let stats = json!({
                "path": BALLOON, "property": "guest-stats-polling-interval", "value": 1
            });
            self.machine().qmp("qom-set", stats)?;
        }
        self.hold(RAM)?;
        progress::wait_until_working(&self.lab)?;
        let mut lines = Lines::of(&self.lab);
        interrupt::sleep(BEFORE / 3)?;
        lines.look_for(&self.lab, BEFORE * 2 / 3)?;
        let speed_before = lines.rate(0);
        let wanted = match wanted {
            Some(wanted) => wanted,
            None => self.memory()?.0.percent(KEPT),
        };
        self.keep(wanted, ADJUSTED, &mut lines)?;
        lines.clear();
        let before = self.counts()?;
        let kept_mib = self.keep(wanted, MEASURED, &mut lines)?;
        let after = self.counts()?;
        let per_s = |after: f64, before: f64| (after - before) / f64::from(MEASURED);
        let course = ChoiceRun {
            wanted,
            kept_mib,
            misses: per_s(after.misses, before.misses),
            read_mib: per_s(after.read_mib, before.read_mib),
            speed: lines.rate(0),
            speed_before,
            cost: self.cost(),
        };
        if let Some(worker) = self.worker.take() {
            worker.end()?;
        }
        self.lab.stop()?;
        Ok(course)
    }

    fn machine(&self) -> &Machine {
        &self.lab.machines()[0]
    }

    /// Resident memory of the guest, and QEMU's own. Pages that the kernel has read ahead, and
    /// that no process has mapped yet, count as the guest's.
    fn memory(&self) -> Result<(Bytes, Bytes), LabError> {
        let measured = self.machine().overhead()?;
        Ok((measured.guest.plus(self.group.unmapped()?), measured.own))
    }

    /// Holds the guest to `wanted` for `seconds`; returns its mean size in MiB.
    fn keep(&mut self, wanted: Bytes, seconds: u32, lines: &mut Lines) -> Result<f64, LabError> {
        // A balloon follows within a second.
        let period = if self.way == ChoiceArm::Kernel { SECOND / 10 } else { SECOND };
        let (begun, mut looks, mut sum) = (Instant::now(), 0.0, 0.0);
        while begun.elapsed() < SECOND * seconds {
            self.hold(wanted)?;
            lines.look_for(&self.lab, period)?;
            sum += self.memory()?.0.as_mib();
            looks += 1.0;
        }
        Ok(sum / looks)
    }

    /// Brings the guest's resident memory to `wanted`, or nearer to it.
    fn hold(&mut self, wanted: Bytes) -> Result<(), LabError> {
        let (guest, own) = self.memory()?;
        let adjusted = |whole: Bytes| whole.plus(wanted).minus(guest);
        match (&mut self.worker, self.way) {
            (Some(worker), _) => {
                let order = Wanted { resident: Some(wanted), own: Some(own), ..Wanted::default() };
                worker.order(&self.lab, order)
            }
            (None, ChoiceArm::Kernel) => self.group.reclaim_to(adjusted(self.group.usage()?)),
            (None, ChoiceArm::Balloon) => {
                let machine = self.machine();
                machine.set_balloon(adjusted(machine.balloon()?).min(RAM))
            }
            (None, ChoiceArm::Ours | ChoiceArm::Attached) => Ok(()),
        }
    }

    fn counts(&self) -> Result<MissCounts, LabError> {
        if self.way == ChoiceArm::Balloon {
            let stats = json!({ "path": BALLOON, "property": "guest-stats" });
            let stats = self.machine().qmp("qom-get", stats)?;
            let number = |name: &str| stats["stats"][name].as_f64().unwrap_or(f64::NAN);
            let read_mib = number("stat-swap-in") / Bytes::mib(1).0 as f64;
            return Ok(MissCounts { misses: number("stat-major-faults"), read_mib });
        }
        let faults = threads::major_faults_of_guest(self.machine().process().pid)?;
        let misses = [faults, self.pieces()].into_iter().largest();
        Ok(MissCounts { misses, read_mib: Swapped::read()?.in_mib })
    }

    /// The worker's report on the guest.
    fn report(&self) -> Option<VmReport> {
        let report = self.worker.as_ref()?.report()?;
        report.vms.into_values().next()
    }

    /// Number of pieces of memory that the worker had paged out and that came back; NaN when it
    /// has not reported.
    fn pieces(&self) -> f64 {
        let pieces = |vm: VmReport| {
            let granule = vm.tracking?.value.granule.0.max(1);
            Some((vm.cold?.value.returned.0 / granule) as f64)
        };
        if self.worker.is_none() {
            return 0.0;
        }
        self.report().and_then(pieces).unwrap_or(f64::NAN)
    }

    /// Tracking's share of a vCPU.
    fn cost(&self) -> f64 {
        let tracking = self.report().and_then(|vm| vm.tracking);
        tracking.map_or(f64::NAN, |tracking| tracking.value.cost.vcpu_share)
    }
}

impl ChoiceRun {
    /// Misses for each million of operations.
    fn misses_per_million(&self) -> f64 {
        self.misses / self.speed * 1e6
    }

    /// How far its mean size is from the wanted one, as a share of that.
    fn apart(&self) -> f64 {
        (self.kept_mib / self.wanted.as_mib() - 1.0).abs()
    }

    fn words(&self) -> String {
        let Self { kept_mib, misses, read_mib, speed, speed_before, .. } = self;
        format!(
            "{misses:.1} misses and {read_mib:.1} MiB read back a second, {kept_mib:.1} of {:.1} \
             MiB kept, {:.3} of its speed",
            self.wanted.as_mib(),
            speed / speed_before
        )
    }
}

/// `rows`: the courses of each workload, by the ways' names.
fn add_figures(figures: &mut Figures, rows: &Arms<ChoiceRun>) {
    for (name, one, other) in [
        ("vs_kernel", "ours", "kernel"),
        ("vs_balloon", "ours", "balloon"),
        ("attached_vs_kernel", "attached", "kernel"),
        ("attached_vs_balloon", "attached", "balloon"),
    ] {
        let misses = mean(rows.ratios(one, other, ChoiceRun::misses_per_million));
        figures.tell(name, misses, "ratio", "misses to that one's, mean of four workloads");
        let speed = mean(rows.ratios(one, other, |course| course.speed));
        let note = "speed to that one's, mean of four workloads";
        figures.tell(&format!("speed_{name}"), speed, "ratio", note);
    }
    let apart = WAYS.iter().flat_map(|(name, _)| rows.each(name, ChoiceRun::apart)).largest();
    let note = "of what was wanted: how far the mean size was from it, the worst guest of all ways";
    figures.tell("kept_apart", apart, "ratio", note);
    let with_worker = || WAYS.iter().filter(|(_, way)| way.has_worker()).map(|(name, _)| *name);
    let costs = with_worker().flat_map(|name| rows.each(name, |course| course.cost));
    let note = "of a vCPU's time, the dearest workload";
    figures.check("tracking_cost_max", costs.largest(), "ratio", note, Target::AtMost(BUDGET));
    for ((name, _), courses) in WORKLOADS.iter().zip(&rows.0) {
        for (way, course) in courses {
            let misses = course.misses_per_million();
            figures.tell(&format!("misses_{name}_{way}"), misses, "misses/Mop", course.words());
        }
        for (way, course) in courses {
            let note = format!("{:.0} with all its memory", course.speed_before);
            figures.tell(&format!("speed_{name}_{way}"), course.speed, "ops/s", note);
        }
        for (way, course) in courses.iter().filter(|(way, _)| with_worker().any(|it| it == *way)) {
            let note = "what tracking took of a vCPU's time";
            figures.tell(&format!("tracking_cost_{name}_{way}"), course.cost, "ratio", note);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn course(misses: f64) -> ChoiceRun {
        let (wanted, kept_mib, cost) = (Bytes::mib(100), 102.0, 0.004);
        let (speed, speed_before, read_mib) = (1_000.0, 1_100.0, 5.0);
        ChoiceRun { wanted, kept_mib, misses, read_mib, speed, speed_before, cost }
    }

    /// By [`WAYS`], for each workload.
    fn rows() -> Arms<ChoiceRun> {
        let courses = [40.0, 50.0, 100.0, 200.0].map(course);
        let round = || WAYS.iter().map(|(name, _)| *name).zip(courses).collect();
        Arms(WORKLOADS.iter().map(|_| round()).collect())
    }

    fn figures(rows: &Arms<ChoiceRun>) -> Figures {
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, rows))
    }

    /// The rows with another course of one way, in the second workload.
    fn with(way: usize, change: impl Fn(&mut ChoiceRun)) -> Figures {
        let mut rows = rows();
        change(&mut rows.0[1][way].1);
        figures(&rows)
    }

    #[test]
    fn each_choice_is_set_against_the_kernels_and_a_balloons() {
        let figures = figures(&rows());
        let expected = [
            ("vs_kernel", 0.4),
            ("vs_balloon", 0.2),
            ("attached_vs_kernel", 0.5),
            ("attached_vs_balloon", 0.25),
            ("kept_apart", 0.02),
        ];
        figures.assert_near(&expected);
        assert!(figures.passed(), "{}", figures.to_table());
    }

    #[test]
    fn a_guest_that_keeps_another_size_misses_in_any_way() {
        for way in 0..WAYS.len() {
            for kept_mib in [90.0, 110.0, f64::NAN] {
                let figures = with(way, |course| course.kept_mib = kept_mib);
                assert!(!figures.met("kept_apart"), "{kept_mib}");
            }
        }
    }

    #[test]
    fn choices_that_are_swapped_miss() {
        let mut swapped = rows();
        swapped.0.iter_mut().for_each(|all| (all[0].0, all[2].0) = ("kernel", "ours"));
        assert!(!figures(&swapped).met("vs_kernel"));
    }

    #[test]
    fn a_way_that_is_missing_and_counts_that_were_not_read_are_no_numbers() {
        let unread = with(0, |course| course.misses = f64::NAN);
        let stopped = with(2, |course| course.speed = f64::NAN);
        let mut rows = rows();
        rows.0[2].pop();
        let missing = figures(&rows);
        assert!(unread.value("vs_kernel").is_nan());
        assert!(stopped.value("attached_vs_kernel").is_nan());
        assert!(missing.value("vs_balloon").is_nan());
        assert!(missing.value("kept_apart").is_nan());
        let costly = with(1, |course| course.cost = f64::NAN);
        assert!(!costly.met("tracking_cost_max"));
        assert!(figures(&Arms::default()).value("kept_apart").is_nan());
    }
}
