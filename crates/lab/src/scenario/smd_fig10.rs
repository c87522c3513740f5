//! `smd-fig10`, `smd-fig11`: whether a web server answers, and a compiler compiles, as fast beside
//! seven other VMs as alone, where memory is short and identical pages are kept once (SMD §4.3,
//! Figs. 10 and 11).
//!
//! All run one Debian: the guest that is timed (a web server with a steady load far from all that
//! it can, or a compiler that compiles all the time), and up to seven others that do little but go
//! through their programs every 15 seconds. The timed one has a CPU of its own; the others have
//! another one, with the worker or `ksmd`, which both look at 10 pages in a millisecond. So what
//! can move its time is memory. A response or a compilation is timed within the guest. Counted are
//! the median over the seconds of a window of each second's mean, and the mean over all of the
//! window, in which the few that wait for swap have their part.
//!
//! **The clock** is the same guest once more, on the same CPU, with memory for itself that nobody
//! merges or swaps. Other users of the machine's caches slow both down, by up to a half for minutes
//! on a shared machine. So the timed guest's time is told in times of the clock's.
//!
//! **Memory.** All QEMUs and the worker are in one memory cgroup, so the pool's pages count there,
//! too: who writes them first is the worker. First all have as much as they want. *Small* is what
//! they took then with the table, a quarter of what it saved, and [`BESIDE`]: merged, they fit, and
//! without merging they swap. KSM's pages count for whoever had them, its lists for nobody. Swap is
//! a file on the host's disk, which all of them together read as fast as a disk of [`READS_PER_S`].
//!
//! **Left out**: other operating systems in each VM, as in the paper's Fig. 6; CMD, which needs
//! hardware.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::{Bytes, PagesPerMs, TrackingBudget};

use super::dedup_vs_ksm::anonymous_mib;
use super::{Context, Scenario};
use crate::chart::{Chart, Line};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::ksm::{self, Ksm};
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::meb::page::Page;
use crate::meb::progress::{self, Lines};
use crate::memory_group::MemoryGroup;
use crate::pinning::{self, Pinned};
use crate::recording::median;
use crate::slow_disk::SlowDisk;
use crate::smd::{Guest, Programs};
use crate::swap_file::SwapFile;
use crate::threads;
use crate::worker_process::{Wanted, WorkerProcess};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-fig10",
    summary: "a web server beside 1 to 8 VMs, memory short: merged, known before, and not",
    run: |context| compare(context, &WEB),
};

pub(super) const FIG_11: Scenario = Scenario {
    name: "smd-fig11",
    summary: "a compiler beside 1 to 8 VMs, memory short: merged, known before, and not",
    run: |context| compare(context, &BUILD),
};

/// What is timed.
struct Timed {
    scenario: &'static str,
    guest: Guest,
    /// What the clock does: the same at another rate, lest one of the two always comes second.
    clock: &'static str,
    /// The figure of how much longer it takes in the mean with all VMs than alone.
    mean_slope: &'static str,
    /// The same by the median over seconds, where a second has many.
    median_slope: Option<&'static str>,
    /// What the plot shows.
    title: &'static str,
    /// With how many VMs it is timed.
    counts: &'static [usize],
    /// How long it is timed with one VM and with all.
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
/// Of the timed guest, and of all others.
const CPUS: [usize; 2] = [0, 1];
const ALL: usize = 1 + OTHERS.len();
/// The courses where memory is short; of a way that has several, the median counts.
const COURSES: [(&str, Way); 7] = [
    ("none", Way::Nothing),
    ("static", Way::Static),
    ("dynamic", Way::Dynamic),
    ("ksm", Way::Kernel),
    ("static", Way::Static),
    ("none", Way::Nothing),
    ("static", Way::Static),
];
/// Pages in a millisecond.
const RATE: u32 = 10;
const SWAP: Bytes = Bytes::mib(2048);
/// What a disk of the cheaper kind answers.
const READS_PER_S: u32 = 1_000;
/// What the group takes beside what is compared: page tables and other objects of the kernel, and
/// files.
const BESIDE: f64 = 64.0;
const START_LIMIT: Duration = Duration::from_secs(120);
/// With all VMs: long enough for each to go through its programs once, if it has them in memory.
const FIRST_CHECK: Duration = Duration::from_secs(22);
const SETTLE: Duration = Duration::from_secs(2);
/// How long the guest is timed with some of the others.
const SHORT_WINDOW: Duration = Duration::from_secs(6);
const POLL: Duration = Duration::from_millis(10);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Nothing,
    Static,
    Dynamic,
    Kernel,
}

/// Merging under way.
enum At {
    Nothing,
    Ours(WorkerProcess),
    #[expect(dead_code, reason = "they work until they are dropped")]
    Kernel(Ksm, Pinned),
}

/// What was seen with so many VMs.
#[derive(Clone, Copy)]
struct Stage {
    vms: usize,
    /// How long a response or a compilation took: each second's mean, in means of the clock's same
    /// second; the median of these.
    in_clocks: f64,
    /// The mean over all, and the clock's.
    mean_us: f64,
    clock_us: f64,
    /// Of a hundred requests or compilations, so many times the timed guest's QEMU waited for swap.
    faults: f64,
    /// What all VMs have in memory, the pool among it.
    taken_mib: f64,
}

impl Stage {
    fn mean_in_clocks(&self) -> f64 {
        self.mean_us / self.clock_us
    }
}

fn compare(context: &Context, timed: &Timed) -> Result<Figures, LabError> {
    let programs = Programs::provide(context)?;
    context.make_dir()?;
    let _swap = SwapFile::new(&context.dir, SWAP)?;
    let course = |name: &str, way: Way, limit: Option<Bytes>, counts: &[usize]| {
        context.say(&format!("{name} ..."));
        course(context, timed, &programs, (way, limit), counts)
    };
    let none = last(&course("none, large", Way::Nothing, None, &[ALL])?);
    let merged = last(&course("static, large", Way::Static, None, &[ALL])?);
    let (wanted_mib, merged_mib) = (none.taken_mib, merged.taken_mib);
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "some MiB")]
    let small = Bytes::mib((merged_mib + (wanted_mib - merged_mib) / 4.0 + BESIDE) as u64);
    let mut courses: BTreeMap<&str, Vec<Vec<Stage>>> = BTreeMap::new();
    for (name, way) in COURSES {
        let stages = course(&format!("{name}, {small}"), way, Some(small), timed.counts)?;
        courses.entry(name).or_default().push(stages);
    }
    let mut figures = context.figures(timed.scenario, 1);
    let mean_slope =
        (timed.mean_slope, Stage::mean_in_clocks as fn(&Stage) -> f64, "mean over all");
    let median_slope = timed
        .median_slope
        .map(|name| (name, (|stage: &Stage| stage.in_clocks) as _, "median over seconds"));
    for (kind, time, how) in median_slope.into_iter().chain([mean_slope]) {
        for (name, courses) in &courses {
            let (name, target) = match *name {
                "static" => (kind.to_owned(), Some(Target::AtMost(0.03))),
                other => (format!("{kind}_{other}"), None),
            };
            let slope = |stages: &[Stage]| time(&last(stages)) / time(&stages[0]) - 1.0;
            let each = courses.iter();
            let each = each.map(|stages| format!("{:+.3}: {}", slope(stages), in_words(stages)));
            let each = each.collect::<Vec<_>>().join(" / ");
            let note = format!("longer with {ALL} VMs than with one, {how}; {each}");
            let slopes = courses.iter().map(|stages| slope(stages));
            let figure = Figure { target, ..Figure::new(median(slopes), "ratio", note) };
            figures.add(&name, figure.paper("SMD: almost the same; KSM: grows"));
        }
    }
    let note = format!(
        "{ALL} VMs with static to none, where memory is large; none {}; static {}",
        in_words(&[none]),
        in_words(&[merged])
    );
    let ratio = merged.mean_in_clocks() / none.mean_in_clocks();
    figures.add("static_vs_none_large", Figure::new(ratio, "ratio", note));
    let note = format!("what all may have; {ALL} VMs want {wanted_mib:.0}, merged {merged_mib:.0}");
    figures.add("small_mib", Figure::new(small.as_mib(), "MiB", note));
    page(timed, &courses).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn course(
    context: &Context,
    timed: &Timed,
    programs: &Programs,
    (way, limit): (Way, Option<Bytes>),
    counts: &[usize],
) -> Result<Vec<Stage>, LabError> {
    let group = MemoryGroup::new(timed.scenario)?;
    let disk = SlowDisk::new(timed.scenario, &context.dir, READS_PER_S)?;
    if let Some(limit) = limit {
        group.set_limit(limit)?;
    }
    let spec = |(place, guest): (usize, &Guest)| MachineSpec {
        seed: context.seed + place as u64,
        shim: matches!(way, Way::Static | Way::Dynamic),
        cgroup: Some(group.dir().to_owned()),
        cpus: vec![CPUS[usize::from(place > 0)]],
        ..programs.machine(guest)
    };
    let specs: Vec<MachineSpec> =
        std::iter::once(&timed.guest).chain(&OTHERS).enumerate().map(spec).collect();
    let like_it = Guest { name: "clock", workload: timed.clock, ..timed.guest };
    let cpus = vec![CPUS[0]];
    let for_itself = MachineSpec { ksm: false, cpus, ..programs.machine(&like_it) };
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs[..1])?;
    let mut clock = Lab::start(&context.dir.join("clock"), &context.provisions, &[for_itself])?;
    progress::wait_until_working(&clock, START_LIMIT)?;
    let mut at = At::begin(way, programs, &lab, &group)?;
    if let At::Ours(worker) = &at {
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
        progress::wait_until_working(&lab, START_LIMIT)?;
        interrupt::sleep(if count == ALL { FIRST_CHECK } else { SETTLE })?;
        let is_end = count == 1 || count == ALL;
        let stage = at.look(&lab, &clock, if is_end { timed.window } else { SHORT_WINDOW })?;
        context.say(&format!("  {}, {:.0} MiB", in_words(&[stage]), stage.taken_mib));
        stages.push(stage);
    }
    // Before the merging ends, which would give all their pages back.
    lab.stop()?;
    clock.stop()?;
    Ok(stages)
}

impl At {
    fn begin(
        way: Way,
        programs: &Programs,
        lab: &Lab,
        group: &MemoryGroup,
    ) -> Result<Self, LabError> {
        let cpu = CPUS[1];
        Ok(match way {
            Way::Nothing => Self::Nothing,
            Way::Kernel => {
                let pinned = Pinned::to(cpu, Ksm::thread()?)?;
                Self::Kernel(Ksm::start(ksm::pages_per_ms(RATE))?, pinned)
            }
            Way::Static | Way::Dynamic => {
                let worker = pinning::on_cpu(cpu, || WorkerProcess::start("code"))?;
                group.take_in(worker.identity().pid)?;
                Self::Ours(match way {
                    Way::Static => worker.knowing(&programs.write_table(lab)?),
                    _ => worker,
                })
            }
        })
    }

    /// More guests have come.
    fn meet(&mut self, lab: &Lab) -> Result<(), LabError> {
        let Self::Ours(worker) = self else { return Ok(()) };
        let (tracking, scan_rate) = (TrackingBudget::Off, Some(PagesPerMs(RATE)));
        worker.order(lab, Wanted { tracking, scan_rate, ..Wanted::default() })
    }

    fn look(&self, lab: &Lab, clock: &Lab, window: Duration) -> Result<Stage, LabError> {
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
            Self::Ours(worker) => worker.report().unwrap_or_default().pool.as_mib(),
            Self::Kernel(..) | Self::Nothing => 0.0,
        };
        Ok(Stage {
            vms: lab.machines().len(),
            in_clocks: in_clocks(timed.guest(0), beside.guest(0)),
            mean_us: mean_us(timed.guest(0)),
            clock_us: mean_us(beside.guest(0)),
            faults: 100.0 * faults / done(timed.guest(0)),
            taken_mib: anonymous_mib(&lab.pids())? + pool,
        })
    }
}

/// The median of the timed guest's means over a second, each in means of the clock's same second.
fn in_clocks(timed: &[progress::Line], clock: &[progress::Line]) -> f64 {
    // The first line is from before.
    let seconds = timed.get(1..).unwrap_or_default().iter().filter_map(|line| {
        let apart = |other: &&progress::Line| {
            other.arrived.max(line.arrived) - other.arrived.min(line.arrived)
        };
        let same = clock.get(1..)?.iter().min_by_key(apart)?;
        Some(line.number("mean_us")? / same.number("mean_us")?)
    });
    median(seconds)
}

/// How long one of all these took, in the mean.
fn mean_us(lines: &[progress::Line]) -> f64 {
    let taken = lines.windows(2).filter_map(|pair| {
        let [before, line] = pair else { return None };
        Some((line.ops - before.ops) * line.number("mean_us")?)
    });
    taken.sum::<f64>() / done(lines)
}

/// How many these are.
fn done(lines: &[progress::Line]) -> f64 {
    match lines {
        [first, .., last] => last.ops - first.ops,
        _ => f64::NAN,
    }
}

fn last(stages: &[Stage]) -> Stage {
    stages[stages.len() - 1]
}

fn in_words(stages: &[Stage]) -> String {
    let word = |stage: &Stage| {
        let Stage { vms, in_clocks, mean_us, faults, .. } = stage;
        let (ms, mean) = (mean_us / 1000.0, stage.mean_in_clocks());
        format!(
            "{vms}: {in_clocks:.3} of the clock's, mean {ms:.2} ms, {mean:.3}, {faults:.1} faults"
        )
    };
    stages.iter().map(word).collect::<Vec<_>>().join("; ")
}

fn page(timed: &Timed, courses: &BTreeMap<&str, Vec<Vec<Stage>>>) -> Page {
    let points = |stages: &[Stage]| {
        stages.iter().map(|stage| (stage.vms as f64, stage.mean_in_clocks())).collect()
    };
    let line = |(name, courses): (&&str, &Vec<Vec<Stage>>)| Line {
        name: (*name).to_owned(),
        points: points(&courses[0]),
    };
    let lines = courses.iter().map(line).collect();
    let chart =
        Chart { unit: "of the clock's", across: "VMs", is_log: false, lines, marks: Vec::new() };
    let mut page = Page::default();
    page.add(timed.title, chart);
    page
}
