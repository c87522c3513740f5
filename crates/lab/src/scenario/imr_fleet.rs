//! `imr-fig7`, `imr-fig8`, `imr-fig9`: fifteen guests boot, then take much memory and free it,
//! one after the other.
//!
//! There are four courses. In `plain`, guests report nothing, as where the paper begins. In
//! `discard`, they report free memory, and QEMU discards it at once. In `lazy`, it is handed over
//! to the kernel (`MADV_FREE`), and taken when it is needed. The guests of both report blocks of
//! 2 MiB and more, as they come. In `lazy_128k`, a parameter of their kernel has them report
//! blocks from 128 KiB on. All QEMU processes of a course
//! together have less memory (a cgroup's limit) than they would need if nothing came back; the
//! host has a swap file. For `lazy`, freed memory is taken at the two points of measurement,
//! after the boots and at the end. It is also taken when the next guest's turn would not fit, as
//! the policy does, which begins before a host is short. In between the guests keep it.
//!
//! A guest's memory is the resident part of its RAM, including memory that the kernel could drop.
//! QEMU's own memory (65 to 90 MiB each under emulation) is left out of that, but counts against
//! the limit. A guest that has ended has no memory that could be told: the sum is no number then.
//! The three scenarios run the same courses and differ in the figures that they show.

use model::FreePages;

use super::prelude::*;
use crate::machine::USUAL_ORDER;
use crate::steps;
use crate::swap_file::{SwapFile, Swapped, swapped_mib};

pub(super) const FIG_7: Scenario = Scenario {
    name: "imr-fig7",
    summary: "fifteen guests boot, then take and free memory in turn: what they have after the boot, and get back",
    measures: &[&[file!()], measured::SHIM, measured::WORKER, measured::ARMS],
    claims: claims! {
        "boot_saving" >= 0.25 => "ratio",
            "Fifteen guests that report the memory that they free need less of the host when \
             they have booted",
            "0.25: 90 of 120 MB";
        "freed_back" >= 0.95 => "ratio",
            "When each in turn has taken and freed 512 MB, the memory is back", "almost all";
        "host_swap_mb_lazy" <= 0.0 => "MiB", "Nothing of it lies in swap", "0";
        "swapped_in_mb_lazy" <= 0.0 => "MiB", "Nothing of it was read from swap", "0";
        "dead_guests_lazy" <= 0.0 => "count", "No guest ends or falls silent", "0";
        "boot_saving_128k" >= 0.25 => "ratio",
            "They need less, too, where their kernel is told to report blocks of 128 KiB and more",
            "0.25: 90 of 120 MB";
        "freed_back_128k" >= 0.95 => "ratio", "All of it is back there, too", "almost all";
        "host_swap_mb_lazy_128k" <= 0.0 => "MiB", "Nothing of it lies in swap there", "0";
        "swapped_in_mb_lazy_128k" <= 0.0 => "MiB", "Nothing of it was read from swap there", "0";
        "dead_guests_lazy_128k" <= 0.0 => "count", "No guest ends or falls silent there", "0";
    },
    run: fig_7,
};

pub(super) const FIG_8: Scenario = Scenario {
    name: "imr-fig8",
    summary: "the same course: memory of all guests after each has taken and freed some",
    measures: &[&[file!()], measured::SHIM, measured::WORKER, measured::ARMS],
    claims: claims! {
        "growth_lazy_to_plain" <= 0.05 => "ratio",
            "Guests grow by a small part of the growth without reports";
        "growth_lazy_128k_to_plain" <= 0.05 => "ratio",
            "They do so, too, where they report blocks of 128 KiB and more";
    },
    run: fig_8,
};

pub(super) const FIG_9: Scenario = Scenario {
    name: "imr-fig9",
    summary: "the same course: how much the host swaps where their memory is limited, and who survives",
    measures: &[&[file!()], measured::SHIM, measured::WORKER, measured::ARMS],
    claims: claims! {
        "host_swap_mb_lazy" <= 0.0 => "MiB",
            "The host does not swap while each guest takes and frees 512 MB in turn", "0";
        "swapped_in_mb_lazy" <= 0.0 => "MiB", "The host reads nothing from swap meanwhile", "0";
    },
    run: fig_9,
};

const GUESTS: usize = 15;
const MEMORY: Bytes = Bytes::mib(704);
/// Memory that each guest takes and frees. Some 20 MiB of it stay in the guest's kernel, free but
/// on a per-CPU list, which the kernel does not report.
const TAKEN_MB: u32 = 512;
/// 2^5 pages, 128 KiB: the blocks that guests free when they boot are rarely as large as the usual
/// 2 MiB.
const SMALL_ORDER: u32 = 5;
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
    LazySmall,
}

impl FleetArm {
    /// The least block that guests report.
    fn reporting_order(self) -> Option<u32> {
        match self {
            Self::Plain => None,
            Self::Discard | Self::Lazy => Some(USUAL_ORDER),
            Self::LazySmall => Some(SMALL_ORDER),
        }
    }

    /// Whether a worker takes freed memory.
    fn is_lazy(self) -> bool {
        matches!(self, Self::Lazy | Self::LazySmall)
    }
}

const ARMS: [(&str, FleetArm); 4] = [
    ("plain", FleetArm::Plain),
    ("discard", FleetArm::Discard),
    ("lazy", FleetArm::Lazy),
    ("lazy_128k", FleetArm::LazySmall),
];

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

fn fig_7(context: &Context) -> Result<Figures, LabError> {
    let courses = courses(context)?;
    let mut figures = context.figures(FIG_7.name, 1);
    add_boots(&mut figures, &courses);
    for (name, course) in courses.iter().filter(|(name, _)| name.starts_with("lazy")) {
        swap_figures(&mut figures, name, course, true);
    }
    Ok(figures)
}

/// The ends of figures' names, and the arms whose guests report.
const REPORTING: [(&str, &str); 3] =
    [("", "lazy"), ("_discard", "discard"), ("_128k", "lazy_128k")];

fn add_boots(figures: &mut Figures, courses: &Arms<FleetRun>) {
    let each = |arm: &str| courses.number(arm, |course| course.login.sum() / GUESTS as f64);
    let note = "of what guests have after the boot without reports";
    for (end, arm) in REPORTING {
        let saving = 1.0 - each(arm) / each("plain");
        figures.tell(&format!("boot_saving{end}"), saving, "ratio", note);
    }
    for (arm, paper) in [("plain", "120 MB"), ("lazy", "90 MB")] {
        let note = format!("of each of {GUESTS} guests of {} MiB", MEMORY.as_mib());
        let figure = Figure::new(each(arm), "MiB", note).paper(paper);
        figures.add(&format!("boot_mb_{arm}"), figure);
    }
    let taken_mib = f64::from(TAKEN_MB) * GUESTS as f64;
    for (end, arm) in REPORTING {
        let grown = courses.number(arm, FleetRun::grown);
        let note = format!(
            "of {taken_mib} MiB taken and freed in turn: what guests have more than after the \
             boot is {grown:.0} MiB"
        );
        figures.tell(&format!("freed_back{end}"), 1.0 - grown / taken_mib, "ratio", note);
    }
}

fn fig_8(context: &Context) -> Result<Figures, LabError> {
    let courses = courses(context)?;
    let mut figures = context.figures(FIG_8.name, 1);
    for (name, course) in courses.iter() {
        let after = |turn: usize| course.turns.get(turn - 1).map_or(f64::NAN, |m| m.resident_mib);
        let note = format!(
            "resident; {:.0} after the boot, {:.0} after five turns, {:.0} after ten, {:.0} after fifteen, beside {:.0} in swap",
            course.login.resident_mib,
            after(5),
            after(10),
            after(GUESTS),
            course.end.swapped_mib
        );
        figures.tell(&format!("resident_mib_{name}"), course.end.resident_mib, "MiB", note);
    }
    add_growth(&mut figures, &courses);
    Ok(figures)
}

fn add_growth(figures: &mut Figures, courses: &Arms<FleetRun>) {
    let note = "how much more guests have at the end than after the boot, to that without reports";
    let grown = |arm: &str| courses.number(arm, FleetRun::grown);
    for name in ["lazy", "lazy_128k"] {
        let ratio = grown(name) / grown("plain");
        figures.tell(&format!("growth_{name}_to_plain"), ratio, "ratio", note);
    }
}

fn fig_9(context: &Context) -> Result<Figures, LabError> {
    let courses = courses(context)?;
    let mut figures = context.figures(FIG_9.name, 1);
    for (name, course) in courses.iter() {
        swap_figures(&mut figures, name, course, name.starts_with("lazy"));
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
        course.turns.iter().map(|memory| memory.swapped_mib).largest()
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
        for machine in lab.machines() {
            let pid = machine.process().pid;
            let of_ram = machine.overhead().ok().filter(|_| machine.alive());
            all.resident_mib += of_ram.map_or(f64::NAN, |measured| measured.guest.as_mib());
            all.swapped_mib += swapped_mib(pid);
        }
        all
    }

    fn sum(&self) -> f64 {
        self.resident_mib + self.swapped_mib
    }
}

impl FleetRun {
    /// How much more memory guests have at the end than after the boot, in MiB.
    fn grown(&self) -> f64 {
        self.end.sum() - self.login.sum()
    }
}

fn courses(context: &Context) -> Result<Arms<FleetRun>, LabError> {
    let _swap = SwapFile::new(&context.dir, SWAP)?;
    Arms::once(context, &ARMS, |_, arm| course(context, *arm))
}

fn course(context: &Context, way: FleetArm) -> Result<FleetRun, LabError> {
    let group = MemoryGroup::new("fleet")?;
    group.set_limit(LIMIT)?;
    let guest = |number: usize| MachineSpec {
        seed: context.seed + number as u64,
        shim: way.is_lazy(),
        reporting_order: way.reporting_order(),
        cgroup: Some(group.dir().to_owned()),
        ..steps::guest(&format!("guest-{number}"), "fleet", MEMORY, TAKEN_MB)
    };
    let specs: Vec<_> = (0..GUESTS).map(guest).collect();
    let before = Swapped::read()?;
    let mut worker = way.is_lazy().then(|| WorkerProcess::start("fleet")).transpose()?;
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

#[cfg(test)]
mod tests {
    use super::*;

    fn course(login_mib: f64, end_mib: f64) -> FleetRun {
        let memory = |resident_mib| FleetMemory { resident_mib, swapped_mib: 0.0 };
        let (login, end) = (memory(login_mib), memory(end_mib));
        FleetRun { login, end, ..FleetRun::default() }
    }

    /// Guests that report need 1,200 of 2,000 MiB after the boot, and grow by 76.8.
    fn courses() -> Vec<FleetRun> {
        let reporting = || course(1_200.0, 1_276.8);
        vec![course(2_000.0, 9_680.0), reporting(), reporting(), reporting()]
    }

    /// `courses`: by [`ARMS`].
    fn boots(courses: Vec<FleetRun>) -> Figures {
        let courses = Arms(vec![ARMS.iter().map(|arm| arm.0).zip(courses).collect()]);
        Figures::invented(FIG_7.name, |figures| {
            add_boots(figures, &courses);
            add_growth(figures, &courses);
        })
    }

    #[test]
    fn savings_are_to_guests_without_reports_and_what_comes_back_to_what_was_taken() {
        boots(courses()).assert_near(&[
            ("boot_saving", 0.4),
            ("freed_back", 0.99),
            ("growth_lazy_to_plain", 0.01),
        ]);
    }

    #[test]
    fn courses_that_are_swapped_and_memory_that_was_not_read_miss() {
        assert!(boots(courses()).met("boot_saving") && boots(courses()).met("freed_back"));
        let mut swapped = courses();
        swapped.swap(0, 2);
        assert!(!boots(swapped).met("boot_saving"));
        for lazy in [course(f64::NAN, 1_276.8), course(1_200.0, f64::NAN)] {
            let mut unread = courses();
            unread[2] = lazy;
            let figures = boots(unread);
            assert!(!figures.met("freed_back") && figures.value("growth_lazy_to_plain").is_nan());
        }
    }
}
