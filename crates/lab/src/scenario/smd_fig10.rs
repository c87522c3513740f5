//! `smd-fig10`, `smd-fig11`: whether a web server answers, and a compiler compiles, as fast next
//! to seven other VMs as alone, where memory is short and identical pages are kept once (SMD
//! §4.3, Figs. 10 and 11).
//!
//! **Rounds.** Each round runs all four arms: no merging, a table, scanning without a table, and
//! KSM. Every second round runs them backwards. The paper's figure, the increase from one VM to
//! all, says little by itself: where eight VMs are little slower than one without any merging, all
//! arms meet its limit. So the increase with the table is also set against that without merging in
//! the same round, and it must be less. [`ROUNDS`] rounds have an interval: one that reaches zero
//! does not tell the two apart, and misses.
//!
//! All guests run one Debian. The timed guest is a web server with a steady load far below its
//! capacity, or a compiler that compiles all the time. Up to seven others do little but go
//! through their programs every 15 seconds. The timed guest has a CPU of its own. The others have
//! another one, together with the worker or `ksmd`, which both scan 10 pages in a millisecond. So
//! only memory can change the timed guest's time. A response or a compilation is timed within the
//! guest. Two figures count: the median over the seconds of a window of each second's mean, and
//! the mean over the whole window. The latter includes the few operations that wait for swap.
//!
//! **The clock** is the same guest once more, on the same CPU, with memory of its own that is
//! neither merged nor swapped. Other users of the machine's caches slow both guests down: by up
//! to a half, for minutes, on a shared machine. So the timed guest's time is given in multiples
//! of the clock's.
//!
//! **Memory.** All QEMUs and the worker are in one memory cgroup. The pool's pages count there,
//! too, because the worker writes them first. First all guests have as much memory as they want.
//! *Small* is the memory that they took then with the table, plus a quarter of the table's
//! saving, plus [`BESIDE`]. Merged, the guests fit; without merging they swap. KSM's pages are
//! charged to the QEMU that had them, its lists to no cgroup. Swap is a file on the host's disk,
//! which all of them together read as fast as a disk of [`READS_PER_S`].
//!
//! **Left out**: other operating systems in each VM, as in the paper's Fig. 6; CMD, which needs
//! hardware.

use model::{PagesPerMs, TrackingBudget};

use super::dedup_vs_ksm::anonymous_mib;
use super::prelude::*;
use crate::arms::ROUNDS;
use crate::ksm::{self, Ksm};
use crate::meb::progress::Lines;
use crate::pinning::{self, Pinned};
use crate::slow_disk::SlowDisk;
use crate::smd::{Guest, Programs};
use crate::swap_file::SwapFile;
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-fig10",
    summary: "a web server beside 1 to 8 VMs, memory short: merged, known before, and not",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::TABLES,
        measured::ARMS,
    ],
    claims: claims! {
        "response_slope" <= 0.03 => "ratio",
            "A web server answers as fast with seven other VMs as alone where memory is short \
             and known code is shared",
            "almost the same";
        "mean_slope" <= 0.03 => "ratio", "The mean over all requests stays the same, too";
        "response_slope_to_none" < 0.0 => "ratio",
            "Seven other VMs slow the web server less where known code is shared than without \
             merging, in the same rounds";
        "mean_slope_to_none" < 0.0 => "ratio",
            "They slow the mean over all requests less than without merging, too";
        "static_vs_none_large" => "ratio",
            "Where memory is large, the web server's time with a table is this part of that \
             without (one course each)";
    },
    run: |context| compare(context, &WEB),
};

pub(super) const FIG_11: Scenario = Scenario {
    name: "smd-fig11",
    summary: "a compiler beside 1 to 8 VMs, memory short: merged, known before, and not",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::TABLES,
        measured::ARMS,
    ],
    claims: claims! {
        "run_time_slope" <= 0.03 => "ratio",
            "A compiler compiles as fast with seven other VMs as alone", "almost the same";
        "run_time_slope_to_none" < 0.0 => "ratio",
            "Seven other VMs slow the compiler less where known code is shared than without \
             merging, in the same rounds";
    },
    run: |context| compare(context, &BUILD),
};

/// One scenario: a timed guest and its figures.
struct Timed {
    scenario: &'static str,
    guest: Guest,
    /// The clock's workload: the same at another rate, so that neither of the two is always
    /// second.
    clock: &'static str,
    /// The figure of the increase of the mean time from one VM to all.
    mean_slope: &'static str,
    /// The same by the median over seconds, for a workload with many operations in a second.
    median_slope: Option<&'static str>,
    /// The plot's title.
    title: &'static str,
    /// The numbers of VMs with which it is timed.
    counts: &'static [usize],
    /// The time for which it is timed with one VM and with all.
    window: Duration,
}

const WEB: Timed = Timed {
    scenario: SCENARIO.name,
    guest: Guest { name: "web", mb: 192, workload: "nginx --mb 32 --rate 50 --check-s 0" },
    clock: "nginx --mb 32 --rate 47 --check-s 0",
    mean_slope: "mean_slope",
    median_slope: Some("response_slope"),
    title: "Mean response time of the web server where memory is short",
    counts: &[1, 2, 4, ALL],
    window: Duration::from_secs(25),
};
const BUILD: Timed = Timed {
    scenario: FIG_11.name,
    guest: Guest { name: "build", mb: 320, workload: "gcc --check-s 0" },
    clock: "gcc --check-s 0",
    mean_slope: "run_time_slope",
    median_slope: None,
    title: "Mean time to compile a file where memory is short",
    counts: &[1, ALL],
    window: Duration::from_secs(30),
};
const OTHERS: [Guest; 7] = [
    Guest { name: "other-1", mb: 320, workload: "gcc --rate 0.05 --check-s 15" },
    Guest { name: "other-2", mb: 192, workload: "nginx --mb 8 --rate 2 --check-s 15" },
    Guest { name: "other-3", mb: 192, workload: "redis --mb 8 --rate 2 --check-s 15" },
    Guest { name: "other-4", mb: 320, workload: "gcc --rate 0.05 --check-s 15" },
    Guest { name: "other-5", mb: 160, workload: "shell --rate 0.1 --check-s 15" },
    Guest { name: "other-6", mb: 320, workload: "gcc --rate 0.05 --check-s 15" },
    Guest { name: "other-7", mb: 192, workload: "nginx --mb 8 --rate 2 --check-s 15" },
];
/// The CPU of the timed guest, and of all others.
const CPUS: [usize; 2] = [0, 1];
const ALL: usize = 1 + OTHERS.len();
/// The arms of a round with short memory.
const ARMS: [(&str, TableArm); 4] = [
    (NONE, TableArm::Nothing),
    (STATIC, TableArm::Static),
    ("dynamic", TableArm::Dynamic),
    ("ksm", TableArm::Kernel),
];
const NONE: &str = "none";
const STATIC: &str = "static";
/// Pages in a millisecond.
const RATE: u32 = 10;
const SWAP: Bytes = Bytes::mib(2048);
/// The read rate of a cheap disk.
const READS_PER_S: u32 = 1_000;
/// Memory of the group that is not in the comparison, in MiB: page tables, other kernel objects,
/// and files.
const BESIDE: f64 = 64.0;
/// With all VMs: long enough for each guest to go through its programs once, if they are
/// resident.
const FIRST_CHECK: Duration = Duration::from_secs(22);
const SETTLE: Duration = Duration::from_secs(2);
/// The time for which the guest is timed with some of the others.
const SHORT_WINDOW: Duration = Duration::from_secs(6);
const POLL: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, PartialEq, Eq)]
enum TableArm {
    Nothing,
    Static,
    Dynamic,
    Kernel,
}

/// The stages of each course.
type Courses = Arms<Vec<TableStage>>;

/// A time of a stage.
type TimeOf = fn(&TableStage) -> f64;

/// Merging in progress.
enum TablePhase {
    Nothing,
    Ours(WorkerProcess),
    #[expect(dead_code, reason = "they work until they are dropped")]
    Kernel(Ksm, Pinned),
}

/// Measurements with a given number of VMs.
#[derive(Clone, Copy)]
struct TableStage {
    vms: usize,
    /// The time of a response or a compilation: each second's mean, divided by the clock's mean
    /// of the same second; the median of these.
    in_clocks: f64,
    /// The mean over the whole window, and the clock's.
    mean_us: f64,
    clock_us: f64,
    /// Major faults of the timed guest's QEMU in a hundred requests or compilations.
    faults: f64,
    /// Memory of all VMs, including the pool.
    taken_mib: f64,
}

impl TableStage {
    fn mean_in_clocks(&self) -> f64 {
        self.mean_us / self.clock_us
    }
}

fn compare(context: &Context, timed: &Timed) -> Result<Figures, LabError> {
    let programs = Programs::provide(context)?;
    context.make_dir()?;
    let _swap = SwapFile::new(&context.dir, SWAP)?;
    let course = |name: &str, way: TableArm, limit: Option<Bytes>, counts: &[usize]| {
        context.say(&format!("{name} ..."));
        course(context, timed, &programs, (way, limit), counts)
    };
    let none = last(&course("none, large", TableArm::Nothing, None, &[ALL])?);
    let merged = last(&course("static, large", TableArm::Static, None, &[ALL])?);
    let (wanted_mib, merged_mib) = (none.taken_mib, merged.taken_mib);
    let small_mib = merged_mib + (wanted_mib - merged_mib) / 4.0 + BESIDE;
    if !small_mib.is_finite() {
        return Err(LabError::Daemon("the worker did not report its pool".to_owned()));
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some MiB")]
    let small = Bytes::mib(small_mib as u64);
    let mut courses = Courses::default();
    for number in 1..=ROUNDS {
        courses.turn(ArmOrder::Alternating, &ARMS, |name, way| {
            course(&format!("round {number}: {name}, {small}"), *way, Some(small), timed.counts)
        })?;
    }
    let mut figures = context.figures(timed.scenario, ROUNDS);
    add_slopes(&mut figures, timed, &courses);
    let note = format!(
        "{ALL} VMs with static to none, where memory is large; none {}; static {}",
        in_words(&[none]),
        in_words(&[merged])
    );
    let ratio = merged.mean_in_clocks() / none.mean_in_clocks();
    figures.tell("static_vs_none_large", ratio, "ratio", note);
    let note = format!("what all may have; {ALL} VMs want {wanted_mib:.0}, merged {merged_mib:.0}");
    figures.tell("small_mib", small.as_mib(), "MiB", note);
    page(timed, &courses).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// Adds the increase of the timed guest's time from one VM to all: of each arm, and of the table
/// less that of no merging in the same round.
fn add_slopes(figures: &mut Figures, timed: &Timed, courses: &Courses) {
    let mean: (_, TimeOf, _) = (timed.mean_slope, TableStage::mean_in_clocks, "mean over all");
    let median_slope = timed.median_slope.map(|name| {
        (name, (|stage: &TableStage| stage.in_clocks) as TimeOf, "median over seconds")
    });
    for (kind, time, how) in median_slope.into_iter().chain([mean]) {
        for (name, _) in ARMS {
            let each = courses.of(name).map(|stages| in_words(stages));
            let each = each.collect::<Vec<_>>().join(" / ");
            let note = format!("longer with {ALL} VMs than with one, {how}; {each}");
            let slopes = courses.each(name, |stages| slope(stages, time));
            let figure = Figure::of_rounds(slopes, "ratio", note);
            let name = if name == STATIC { kind.to_owned() } else { format!("{kind}_{name}") };
            figures.add(&name, figure.paper("SMD: almost the same; KSM: grows"));
        }
        let less = courses.both(STATIC, NONE, |table, none| slope(table, time) - slope(none, time));
        let note = "the increase with the table less that without merging, in the same round";
        figures.tell_rounds(&format!("{kind}_to_none"), less, "ratio", note);
    }
}

/// The increase of a time from one VM to all; NaN where one of both was not measured.
fn slope(stages: &[TableStage], time: TimeOf) -> f64 {
    let with = |vms| stages.iter().find(|stage| stage.vms == vms).map_or(f64::NAN, time);
    with(ALL) / with(1) - 1.0
}

fn course(
    context: &Context,
    timed: &Timed,
    programs: &Programs,
    (way, limit): (TableArm, Option<Bytes>),
    counts: &[usize],
) -> Result<Vec<TableStage>, LabError> {
    let group = MemoryGroup::new(timed.scenario)?;
    let disk = SlowDisk::new(timed.scenario, &context.dir, READS_PER_S)?;
    if let Some(limit) = limit {
        group.set_limit(limit)?;
    }
    let spec = |(place, guest): (usize, &Guest)| MachineSpec {
        seed: context.seed + place as u64,
        shim: matches!(way, TableArm::Static | TableArm::Dynamic),
        cgroup: Some(group.dir().to_owned()),
        cpus: vec![CPUS[usize::from(place > 0)]],
        ..programs.machine(guest)
    };
    let specs: Vec<MachineSpec> =
        std::iter::once(&timed.guest).chain(&OTHERS).enumerate().map(spec).collect();
    let like_it = Guest { name: "clock", workload: timed.clock, ..timed.guest };
    let cpus = vec![CPUS[0]];
    let for_itself = MachineSpec { ksm: false, cpus, ..programs.machine(&like_it) };
    let mut lab = context.start(specs[..1].to_vec())?;
    let mut clock = Lab::start(&context.dir.join("clock"), &context.provisions, &[for_itself])?;
    progress::wait_until_working(&clock)?;
    let mut at = TablePhase::begin(way, programs, &lab, &group)?;
    if let TablePhase::Ours(worker) = &at {
        disk.take_in(worker.identity().pid)?;
    }
    let mut stages = Vec::new();
    for &count in counts {
        let more = &specs[lab.machines().len()..count];
        lab.add(&context.provisions, more)?;
        at.meet(&lab)?;
        for pid in lab.pids() {
            disk.take_in(pid)?;
        }
        progress::wait_until_working(&lab)?;
        interrupt::sleep(if count == ALL { FIRST_CHECK } else { SETTLE })?;
        let is_end = count == 1 || count == ALL;
        let stage = at.look(&lab, &clock, if is_end { timed.window } else { SHORT_WINDOW })?;
        context.say(&format!("  {}, {:.0} MiB", in_words(&[stage]), stage.taken_mib));
        stages.push(stage);
    }
    // Merging must not end before the guests: it would give all their pages back.
    lab.stop()?;
    clock.stop()?;
    Ok(stages)
}

impl TablePhase {
    fn begin(
        way: TableArm,
        programs: &Programs,
        lab: &Lab,
        group: &MemoryGroup,
    ) -> Result<Self, LabError> {
        let cpu = CPUS[1];
        Ok(match way {
            TableArm::Nothing => Self::Nothing,
            TableArm::Kernel => {
                let pinned = Pinned::to(cpu, Ksm::thread()?)?;
                Self::Kernel(Ksm::start(ksm::pages_per_ms(RATE))?, pinned)
            }
            TableArm::Static | TableArm::Dynamic => {
                let worker = pinning::on_cpu(cpu, || WorkerProcess::start("code"))?;
                group.take_in(worker.identity().pid)?;
                Self::Ours(match way {
                    TableArm::Static => worker.knowing(&programs.write_table(lab)?),
                    _ => worker,
                })
            }
        })
    }

    /// Tells the worker of guests that were added.
    fn meet(&mut self, lab: &Lab) -> Result<(), LabError> {
        let Self::Ours(worker) = self else { return Ok(()) };
        let (tracking, scan_rate) = (TrackingBudget::Off, Some(PagesPerMs(RATE)));
        worker.order(lab, Wanted { tracking, scan_rate, ..Wanted::default() })
    }

    fn look(&self, lab: &Lab, clock: &Lab, window: Duration) -> Result<TableStage, LabError> {
        // The timed guest is the first.
        let pid = lab.pids()[0];
        let before = threads::major_faults(pid)?;
        let [mut timed, mut beside] = [lab, clock].map(Lines::of);
        let end = Instant::now() + window;
        while Instant::now() < end {
            timed.look(lab)?;
            beside.look(clock)?;
            interrupt::sleep(POLL)?;
        }
        let faults = threads::major_faults(pid)? - before;
        let pool = match self {
            Self::Ours(worker) => worker.report().map_or(f64::NAN, |report| report.pool.as_mib()),
            Self::Kernel(..) | Self::Nothing => 0.0,
        };
        Ok(TableStage {
            vms: lab.machines().len(),
            in_clocks: in_clocks(timed.guest(0), beside.guest(0)),
            mean_us: mean_us(timed.guest(0)),
            clock_us: mean_us(beside.guest(0)),
            faults: 100.0 * faults / done(timed.guest(0)),
            taken_mib: anonymous_mib(&lab.pids())? + pool,
        })
    }
}

/// The median of the timed guest's means over a second, each divided by the clock's mean of the
/// same second.
fn in_clocks(timed: &[progress::Line], clock: &[progress::Line]) -> f64 {
    // The first line is from before the window.
    let seconds = timed.get(1..).unwrap_or_default().iter().filter_map(|line| {
        let apart = |other: &&progress::Line| {
            other.arrived.max(line.arrived) - other.arrived.min(line.arrived)
        };
        let same = clock.get(1..)?.iter().min_by_key(apart)?;
        Some(line.number("mean_us")? / same.number("mean_us")?)
    });
    median(seconds)
}

/// The mean time of one operation over all these lines.
fn mean_us(lines: &[progress::Line]) -> f64 {
    let taken = lines.windows(2).filter_map(|pair| {
        let [before, line] = pair else { return None };
        Some((line.ops - before.ops) * line.number("mean_us")?)
    });
    taken.sum::<f64>() / done(lines)
}

/// The number of operations in these lines.
fn done(lines: &[progress::Line]) -> f64 {
    match lines {
        [first, .., last] => last.ops - first.ops,
        _ => f64::NAN,
    }
}

fn last(stages: &[TableStage]) -> TableStage {
    stages[stages.len() - 1]
}

fn in_words(stages: &[TableStage]) -> String {
    let word = |stage: &TableStage| {
        let TableStage { vms, in_clocks, mean_us, faults, .. } = stage;
        let (ms, mean) = (mean_us / 1000.0, stage.mean_in_clocks());
        format!(
            "{vms}: {in_clocks:.3} of the clock's, mean {ms:.2} ms, {mean:.3}, {faults:.1} faults"
        )
    };
    stages.iter().map(word).collect::<Vec<_>>().join("; ")
}

fn page(timed: &Timed, courses: &Courses) -> Page {
    let point = |stage: &TableStage| (stage.vms as f64, stage.mean_in_clocks());
    // In the first round the arms ran as they are listed.
    let lines = courses.0.iter().take(1).flatten();
    let lines = lines.map(|(name, stages)| Line::new(name, stages.iter().map(point)));
    let chart = Chart::linear("of the clock's", "VMs", lines);
    Page::of(timed.title, chart)
}

#[cfg(test)]
mod tests;
