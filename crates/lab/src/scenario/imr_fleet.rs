//! `imr-fig7`, `imr-fig8`, `imr-fig9`: fifteen guests boot, then take much memory and free it,
//! one after the other.
//!
//! There are three courses. In `plain`, guests report nothing, as where the paper begins. In
//! `discard`, they report free memory, and QEMU discards it at once. In `lazy`, it is handed over
//! to the kernel (`MADV_FREE`), and taken when it is needed. All QEMU processes of a course
//! together have less memory (a cgroup's limit) than they would need if nothing came back; the
//! host has a swap file. For `lazy`, freed memory is taken at the two points of measurement,
//! after the boots and at the end. It is also taken when the next guest's turn would not fit, as
//! the policy does, which begins before a host is short. In between the guests keep it.
//!
//! A guest's memory is the resident part of its RAM, including memory that the kernel could drop.
//! QEMU's own memory (65 to 90 MiB each under emulation) is left out of that, but counts against
//! the limit. The three scenarios run the same course and differ in the figures that they show.

use std::time::{Duration, Instant};

use model::{Bytes, FreePages};
use sys::memory_of::Overhead;

use super::{Context, Scenario};
use crate::figures::{Figure, Figures, Target};
use crate::interrupt;
use crate::lab::{Lab, LabError, Machine};
use crate::machine::MachineSpec;
use crate::memory_group::MemoryGroup;
use crate::steps;
use crate::swap_file::{SwapFile, Swapped, swapped_mib};
use crate::worker_process::WorkerProcess;

pub(super) const FIG_7: Scenario = Scenario {
    name: "imr-fig7",
    summary: "fifteen guests boot, then take and free memory in turn: what they have after the boot, and get back",
    run: fig_7,
};

pub(super) const FIG_8: Scenario = Scenario {
    name: "imr-fig8",
    summary: "the same course: memory of all guests after each has taken and freed some",
    run: fig_8,
};

pub(super) const FIG_9: Scenario = Scenario {
    name: "imr-fig9",
    summary: "the same course: how much the host swaps where their memory is limited, and who survives",
    run: fig_9,
};

const GUESTS: usize = 15;
const MEMORY: Bytes = Bytes::mib(704);
/// Memory that each guest takes and frees. Some 20 MiB of it stay in the guest's kernel, free but
/// on a per-CPU list, which the kernel does not report.
const TAKEN_MB: u32 = 512;
/// Guests report blocks of 2^5 pages, 128 KiB: the blocks that they free when they boot are
/// rarely as large as the usual 2 MiB.
const ORDER: u32 = 5;
const REPORTED: &str = "128 KiB";
/// The limit of all QEMU processes together. They would need some 10,800 MiB if nothing came
/// back, and need 3,500 if all does.
const LIMIT: Bytes = Bytes::mib(8192);
const SWAP: Bytes = Bytes::mib(6144);
/// The longest time for a guest's turn, with swapping.
const TURN: Duration = Duration::from_secs(90);
/// The guest's kernel reports free memory every two seconds, a part at a time. All is reported
/// when nothing has come for this long.
const QUIET: Duration = Duration::from_secs(7);
const QUIET_LIMIT: Duration = Duration::from_secs(40);
const LITTLE_MIB: f64 = 2.0;
/// Room to leave in addition to a guest's turn.
const MARGIN: Bytes = Bytes::mib(256);
/// Time for taking to end, and for the worker to report.
const TAKE: Duration = Duration::from_secs(5);
/// A guest that is alive reports every second.
const SILENCE: Duration = Duration::from_secs(15);

#[derive(Clone, Copy, PartialEq, Eq)]
enum FleetArm {
    Plain,
    Discard,
    Lazy,
}

/// Memory of all guests.
#[derive(Clone, Copy, Debug, Default)]
struct FleetMemory {
    resident_mib: f64,
    swapped_mib: f64,
}

/// Measurements of one course.
#[derive(Debug, Default)]
struct FleetRun {
    /// After the boots.
    login: FleetMemory,
    /// After each guest's turn.
    turns: Vec<FleetMemory>,
    /// After freed memory has come back.
    end: FleetMemory,
    swapped: Swapped,
    dead: usize,
}

/// All three courses.
struct Courses {
    plain: FleetRun,
    discard: FleetRun,
    lazy: FleetRun,
}

fn fig_7(context: &Context) -> Result<Figures, LabError> {
    let Courses { plain, discard, lazy } = Courses::run(context)?;
    let mut figures = context.figures(FIG_7.name, 1);
    let each = |course: &FleetRun| course.login.sum() / GUESTS as f64;
    let saving = |course: &FleetRun| 1.0 - each(course) / each(&plain);
    let note =
        format!("of what guests have after the boot without reports; reports from {REPORTED} on");
    let figure = Figure::new(saving(&lazy), "ratio", note).paper("0.25: 90 of 120 MB");
    figures.add("boot_saving", figure.target(Target::AtLeast(0.25)));
    let note = "the same where QEMU discards at once";
    figures.add("boot_saving_discard", Figure::new(saving(&discard), "ratio", note));
    for (name, course) in [("boot_mb_plain", &plain), ("boot_mb_lazy", &lazy)] {
        let note = format!("of each of {GUESTS} guests of {} MiB", MEMORY.as_mib());
        let paper = if name == "boot_mb_plain" { "120 MB" } else { "90 MB" };
        figures.add(name, Figure::new(each(course), "MiB", note).paper(paper));
    }
    let taken_mib = f64::from(TAKEN_MB) * GUESTS as f64;
    let back = |course: &FleetRun| 1.0 - (course.end.sum() - course.login.sum()) / taken_mib;
    let note = format!(
        "of {taken_mib} MiB taken and freed in turn: what guests have more than after the boot is {:.0} MiB; discarded at once {:.3}",
        lazy.end.sum() - lazy.login.sum(),
        back(&discard)
    );
    let figure = Figure::new(back(&lazy), "ratio", note).paper("almost all");
    figures.add("freed_back", figure.target(Target::AtLeast(0.95)));
    swap_figures(&mut figures, "lazy", &lazy, true);
    Ok(figures)
}

fn fig_8(context: &Context) -> Result<Figures, LabError> {
    let courses = Courses::run(context)?;
    let mut figures = context.figures(FIG_8.name, 1);
    for (name, course) in courses.named() {
        let after = |turn: usize| course.turns.get(turn - 1).map_or(f64::NAN, |m| m.resident_mib);
        let note = format!(
            "resident; {:.0} after the boot, {:.0} after five turns, {:.0} after ten, {:.0} after fifteen, beside {:.0} in swap",
            course.login.resident_mib,
            after(5),
            after(10),
            after(GUESTS),
            course.end.swapped_mib
        );
        let figure = Figure::new(course.end.resident_mib, "MiB", note);
        figures.add(&format!("resident_mib_{name}"), figure);
    }
    let Courses { plain, lazy, .. } = &courses;
    let grown = |course: &FleetRun| course.end.sum() - course.login.sum();
    let note = "how much more guests have at the end than after the boot, to that without reports";
    let figure = Figure::new(grown(lazy) / grown(plain), "ratio", note);
    figures.add("growth_lazy_to_plain", figure.target(Target::AtMost(0.05)));
    Ok(figures)
}

fn fig_9(context: &Context) -> Result<Figures, LabError> {
    let courses = Courses::run(context)?;
    let mut figures = context.figures(FIG_9.name, 1);
    for (name, course) in courses.named() {
        swap_figures(&mut figures, name, course, name == "lazy");
    }
    Ok(figures)
}

fn swap_figures(figures: &mut Figures, name: &str, course: &FleetRun, is_ours: bool) {
    let paper = |ours: &str, theirs: &str| if is_ours { ours } else { theirs }.to_owned();
    let none = is_ours.then_some(Target::AtMost(0.0));
    let mut add = |what: &str, value, unit, target, note: &str, paper: Option<String>| {
        let figure = Figure { paper, target, ..Figure::new(value, unit, note) };
        figures.add(&format!("{what}_{name}"), figure);
    };
    let note = format!(
        "in use at the end, of all QEMUs within {:.0} MiB; most after a turn: {:.0}",
        LIMIT.as_mib(),
        course.turns.iter().map(|memory| memory.swapped_mib).fold(0.0, f64::max)
    );
    let (swap, dead) = (paper("0", "487 MB"), paper("0", "2 of 15"));
    add("host_swap_mb", course.end.swapped_mib, "MiB", none, &note, Some(swap));
    let (out, back) = (course.swapped.out_mib, course.swapped.in_mib);
    let note = "written to swap in the course, by all of the host: what a guest takes back in the moment of a take is, but stays";
    add("swapped_out_mb", out, "MiB", None, note, None);
    add("swapped_in_mb", back, "MiB", none, "read back from swap in the course", None);
    let note = "ended, or silent at the end";
    add("dead_guests", course.dead as f64, "count", none, note, Some(dead));
}

impl FleetMemory {
    fn of(lab: &Lab) -> Self {
        let mut all = Self::default();
        for machine in lab.machines().iter().filter(|machine| machine.alive()) {
            let pid = machine.process().pid;
            let of_ram = Overhead::measure(pid, &[MEMORY]);
            all.resident_mib += of_ram.map_or(0.0, |measured| measured.guest.as_mib());
            all.swapped_mib += swapped_mib(pid);
        }
        all
    }

    fn sum(&self) -> f64 {
        self.resident_mib + self.swapped_mib
    }
}

impl Courses {
    fn run(context: &Context) -> Result<Self, LabError> {
        let _swap = SwapFile::new(&context.dir, SWAP)?;
        let run = |name: &str, way| {
            context.say(&format!("{name} ..."));
            course(context, way)
        };
        Ok(Self {
            plain: run("plain", FleetArm::Plain)?,
            discard: run("discard", FleetArm::Discard)?,
            lazy: run("lazy", FleetArm::Lazy)?,
        })
    }

    fn named(&self) -> [(&'static str, &FleetRun); 3] {
        [("plain", &self.plain), ("discard", &self.discard), ("lazy", &self.lazy)]
    }
}

fn course(context: &Context, way: FleetArm) -> Result<FleetRun, LabError> {
    let group = MemoryGroup::new("fleet")?;
    group.set_limit(LIMIT)?;
    let guest = |number: usize| MachineSpec {
        seed: context.seed + number as u64,
        shim: way == FleetArm::Lazy,
        reporting_order: (way != FleetArm::Plain).then_some(ORDER),
        cgroup: Some(group.dir().to_owned()),
        ..steps::guest(&format!("guest-{number}"), "fleet", MEMORY, TAKEN_MB)
    };
    let specs: Vec<_> = (0..GUESTS).map(guest).collect();
    let before = Swapped::read()?;
    let mut worker = (way == FleetArm::Lazy).then(|| WorkerProcess::start("fleet")).transpose()?;
    let met = |lab: &Lab| take(&mut worker, lab, None);
    let mut lab = Lab::start_in_turn(&context.dir, &context.provisions, &specs, met)?;
    let mut course = FleetRun { login: rest(context, &lab, &mut worker)?, ..FleetRun::default() };
    for machine in lab.machines() {
        make_room(&group, &lab, &mut worker)?;
        // A guest that dies or hangs is counted at the end.
        match steps::order(machine, "write+free", TURN) {
            Ok(_) => {}
            Err(error @ LabError::Interrupted(_)) => return Err(error),
            Err(error) => context.say(&format!("  {error}")),
        }
        course.turns.push(FleetMemory::of(&lab));
    }
    context.say(&format!(
        "  cgroup {:.0} MiB, {}",
        group.usage()?.as_mib(),
        in_words(course.turns.last().copied().unwrap_or_default())
    ));
    course.end = rest(context, &lab, &mut worker)?;
    course.swapped = Swapped::read()?.since(before);
    course.dead = lab.machines().iter().filter(|machine| is_dead(machine)).count();
    if let Some(worker) = worker {
        worker.end()?;
    }
    lab.stop()?;
    Ok(course)
}

/// Takes freed memory if the next turn would reach the limit.
fn make_room(
    group: &MemoryGroup,
    lab: &Lab,
    worker: &mut Option<WorkerProcess>,
) -> Result<(), LabError> {
    let room = LIMIT.minus(group.usage()?);
    if worker.is_some() && room < Bytes::mib(u64::from(TAKEN_MB)).plus(MARGIN) {
        take(worker, lab, Some(Bytes::ZERO))?;
        interrupt::sleep(TAKE)?;
        take(worker, lab, None)?;
    }
    Ok(())
}

fn is_dead(machine: &Machine) -> bool {
    let heard = machine.last_metric().map(|sample| sample.arrived.elapsed());
    !machine.alive() || heard.is_none_or(|ago| ago > SILENCE)
}

/// Waits until everything has been reported and taken; returns the guests' memory then.
fn rest(
    context: &Context,
    lab: &Lab,
    worker: &mut Option<WorkerProcess>,
) -> Result<FleetMemory, LabError> {
    let began = Instant::now();
    let look = |worker: &Option<WorkerProcess>| {
        (FleetMemory::of(lab).sum(), known(worker).handed_over.as_mib())
    };
    let (mut last, mut changed) = (look(worker), began);
    while changed.elapsed() < QUIET && began.elapsed() < QUIET_LIMIT {
        interrupt::sleep(Duration::from_secs(1))?;
        let now = look(worker);
        if (now.0 - last.0).abs() > LITTLE_MIB || (now.1 - last.1).abs() > LITTLE_MIB {
            (last, changed) = (now, Instant::now());
        }
    }
    if worker.is_some() {
        let before = FleetMemory::of(lab);
        take(worker, lab, Some(Bytes::ZERO))?;
        interrupt::sleep(TAKE)?;
        let known = known(worker);
        context.say(&format!(
            "  before the take: {}; freed {:.0} MiB, lazy {:.0}, handed over {:.0}, taken {:.0}, dropped {:.0}, in use again {:.0}",
            in_words(before),
            known.freed.as_mib(),
            known.lazy.as_mib(),
            known.handed_over.as_mib(),
            known.taken.as_mib(),
            known.dropped.as_mib(),
            known.taken_back.as_mib()
        ));
    }
    let memory = FleetMemory::of(lab);
    if worker.is_some() {
        take(worker, lab, None)?;
    }
    context.say(&format!("  {}, {:.0} s waited", in_words(memory), began.elapsed().as_secs_f64()));
    Ok(memory)
}

fn in_words(memory: FleetMemory) -> String {
    format!("{:.0} MiB resident, {:.0} in swap", memory.resident_mib, memory.swapped_mib)
}

/// Leaves `keep` of its freed memory to each guest, and takes the rest; `None`: takes nothing.
fn take(
    worker: &mut Option<WorkerProcess>,
    lab: &Lab,
    keep: Option<Bytes>,
) -> Result<(), LabError> {
    worker.as_mut().map_or(Ok(()), |worker| worker.take(lab, keep))
}

fn known(worker: &Option<WorkerProcess>) -> FreePages {
    worker.as_ref().map(WorkerProcess::freed).unwrap_or_default()
}
