//! `cold-density`: the number of guests of a mix that one host's memory carries: without help,
//! with balloons and KSM, with the kernel's zswap, with all of these, and under Overbook.
//!
//! The guests are typical of small hosts: a cache (redis), a web server (nginx), a database
//! (PostgreSQL), and one that idles, in turn. Each has read a part of its system's files once, as
//! a nightly job does; they stay in its page cache. Each gets a steady rate of requests, which is
//! low: memory must run out before the CPU does. **Loss** of a guest is the share of the requests
//! due in a window that it has not answered. Its client sends one after the other, and drops
//! requests that were due 200 ms ago. A dead guest loses all. The guest that loses most counts:
//! a host that starves one guest does not carry it.
//!
//! Guests are added one after the other, and the host has [`SETTLE`] to settle. A number is
//! *carried* when that loss is at most [`LOSS`] in the middle one of [`WINDOWS`] consecutive
//! windows. The first number that is not carried ends the course, as does a guest that is killed
//! or does not boot.
//!
//! **Memory.** [`SmallHost`]: all QEMUs, and Overbook's processes with the pool, are in one
//! memory cgroup. Its limit is lowered by the memory that zswap holds, and leaves room for the
//! cost of emulation. The guests' disk image lies in the page cache outside. *Plain* is the
//! number carried without swap: memory that guests have not touched is not charged. All other
//! ways have the same swap file. Overbook has zswap in front of it, as `zswap` has. Each guest has
//! a swap disk of its own of [`READS_PER_S`], and with each guest the host's disk gets as many, so
//! that neither way of swapping has the faster disk.
//!
//! **CPU.** A control has one guest more than the best course carried, and unlimited memory.

use model::{ColdSpec, DedupSpec, FreePagesSpec, PagesPerMs};
use sys::cpu_time::CpuTime;
use sys::meminfo::MemInfo;
use sys::process::children_of;

use super::prelude::*;
use crate::autoballoon;
use crate::cache::Cache;
use crate::chart::Line as Curve;
use crate::debian::Debian;
use crate::ksm::{self, Ksm};
use crate::meb::progress::Line;
use crate::slow_disk::SlowDisk;
use crate::small_host::{Look, SmallHost};
use crate::smd::Programs;
use crate::swap_file::SwapFile;
use crate::zswap::Zswap;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "cold-density",
    summary: "how many guests of a mix a host carries: plain, balloon and KSM, zswap, Overbook",
    measures: &[&[file!()], measured::MANAGED, measured::ARMS],
    claims: claims! {
        "density" >= 2.0 => "ratio",
            "A host of 1 GiB carries more guests of a mix, none of which loses more than 5 % of \
             its requests, than without help";
        "more_than_others" >= 1.0 => "count",
            "It carries more than with zswap, with balloons and KSM, or with all three";
        "bad_bytes" == 0.0 => "B", "No answer of these guests is wrong";
        "carried_overbook" => "count", "Overbook carries this many guests";
        "carried_plain" => "count", "The host carries this many without help";
        "carried_zswap" => "count", "The kernel's zswap carries this many";
        "carried_balloon_ksm" => "count", "Balloons and KSM carry this many";
        "carried_all_peers" => "count", "Zswap, balloons and KSM together carry this many";
    },
    run,
};

/// A guest's workload, and its requests per second.
struct GuestKind {
    name: &'static str,
    work: &'static str,
    rate: f64,
}

const MIX: [GuestKind; 4] = [
    GuestKind {
        name: "cache",
        work: "redis --mb 64 --parts 2 --read-mb 96 --check-s 0",
        rate: 60.0,
    },
    GuestKind { name: "web", work: "nginx --mb 48 --read-mb 112 --check-s 0", rate: 40.0 },
    GuestKind {
        name: "database",
        work: "postgres --mb 24 --parts 2 --read-mb 96 --check-s 0",
        rate: 20.0,
    },
    GuestKind { name: "idle", work: "idle --read-mb 160", rate: 10.0 },
];
const GROUP: &str = "tenant";
const RAM: Bytes = Bytes::mib(256);
/// The host's memory for the guests.
const HOST: Bytes = Bytes::mib(1024);
const LOSS: f64 = 0.05;
const WINDOWS: usize = 3;
/// The number of guests at the beginning, which fit in any case.
const FIRST: usize = MIX.len();
/// More guests would test the CPU.
const MOST: usize = 20;

/// Of each guest's swap disk, and of the host's for each guest.
const READS_PER_S: u32 = 1_000;
const GUEST_SWAP: Bytes = Bytes::mib(256);
const HOST_SWAP: Bytes = Bytes::mib(4096);
/// The rate at which KSM and Overbook scan for identical pages.
const SCAN: PagesPerMs = PagesPerMs(50);
/// Memory that balloons leave to a guest.
const LEAST: Bytes = Bytes::mib(128);
/// Memory that Overbook guarantees each guest.
const GUARANTEED: Bytes = Bytes::mib(40);
/// The group's budget: the host's memory less a reserve for Overbook's own processes and sudden
/// needs.
const BUDGET: Bytes = Bytes::mib(960);

/// The longest time from a guest's start until it works.
const WORK_LIMIT: Duration = Duration::from_secs(60);
const SETTLE: Duration = Duration::from_secs(8);
const WINDOW: Duration = Duration::from_secs(6);
/// Period in which balloons are moved and QEMUs measured.
const TEND: Duration = Duration::from_secs(2);
/// Period of the checks whether guests work.
const LOOK: Duration = Duration::from_secs(1);
/// A guest that has not reported for this long is silent.
const SILENT: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, PartialEq, Eq)]
enum DensityArm {
    Plain,
    Balloon,
    Zswap,
    /// Zswap, balloons and KSM.
    AllPeers,
    Overbook,
}

impl DensityArm {
    /// Whether balloons move, and KSM merges.
    const fn has_balloons(self) -> bool {
        matches!(self, Self::Balloon | Self::AllPeers)
    }

    const fn has_zswap(self) -> bool {
        matches!(self, Self::Zswap | Self::AllPeers | Self::Overbook)
    }
}

const WAYS: [(&str, DensityArm); 5] = [
    ("plain", DensityArm::Plain),
    ("overbook", DensityArm::Overbook),
    ("zswap", DensityArm::Zswap),
    ("balloon_ksm", DensityArm::Balloon),
    ("all_peers", DensityArm::AllPeers),
];

/// Measurements with a given number of guests.
#[derive(Clone)]
struct Stage {
    guests: usize,
    /// The loss of the guest that loses most, the mean over all guests, and over each kind.
    worst: f64,
    loss: f64,
    of_kinds: [f64; MIX.len()],
    cpu_busy: f64,
    look: Look,
}

/// One way, from few guests to too many.
#[derive(Default)]
struct DensityRun {
    stages: Vec<Stage>,
    /// The reason why it ended.
    end: String,
    bad_bytes: f64,
    /// The most by which the host exceeded its memory.
    above: Bytes,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let programs = Programs::of(context, Debian::with_database(&Cache::open()?)?)?;
    context.make_dir()?;
    // All guests read the image. Reading it here first charges its page cache to none of their
    // cgroups.
    std::io::copy(&mut std::fs::File::open(&programs.debian().image)?, &mut std::io::sink())?;
    let courses = Arms::once(context, &WAYS, |_, way| {
        let course = course(context, &programs, *way)?;
        context.say(&format!("  {} carried; {}", course.carried(), course.end));
        Ok(course)
    })?;
    let best = courses.iter().map(|(_, course)| course.carried()).max().unwrap_or(0);
    context.say("control ...");
    let control = control(context, &programs, (best + 1).min(MOST))?;
    let mut figures = figures(context.figures(SCENARIO.name, 1), &courses, &control);
    page(&courses).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn guest(
    context: &Context,
    programs: &Programs,
    number: usize,
    way: DensityArm,
    host: Option<&SmallHost>,
) -> MachineSpec {
    let kind = &MIX[number % MIX.len()];
    let name = format!("{}-{}", kind.name, number / MIX.len() + 1);
    let work = format!("{} --rate {}", kind.work, kind.rate);
    MachineSpec {
        cgroup: host.map(|host| host.dir().to_owned()),
        ..context
            .guest(&name, GROUP, RAM, &work)
            .seeded(number as u64)
            .with_shim(way == DensityArm::Overbook)
            .with_debian(programs.debian())
            .with_swap(GUEST_SWAP, Some(READS_PER_S))
    }
}

fn course(context: &Context, programs: &Programs, way: DensityArm) -> Result<DensityRun, LabError> {
    // Values declared first are dropped last.
    let swaps = way != DensityArm::Plain;
    let on_disk = context.dir.join("host");
    let _swap = swaps.then(|| SwapFile::new(&on_disk, HOST_SWAP)).transpose()?;
    let _zswap = way.has_zswap().then(|| Zswap::start(usual_pool()?)).transpose()?;
    let ksm = || Ksm::start(ksm::pages_per_ms(SCAN.0));
    let _ksm = way.has_balloons().then(ksm).transpose()?;
    let disk = swaps.then(|| SlowDisk::new("density", &context.dir, READS_PER_S)).transpose()?;
    let host = SmallHost::new("density", HOST)?;
    let spec = |number| guest(context, programs, number, way, Some(&host));
    let mut lab = context.start((0..FIRST).map(spec))?;
    let at = DensityStep { way, host: &host, disk: disk.as_ref() };
    let daemon =
        (way == DensityArm::Overbook).then(|| at.manage(programs, &mut lab)).transpose()?;
    let mut course = DensityRun::default();
    course.end = loop {
        if let Some(daemon) = &daemon {
            daemon.ensure_alive()?;
            daemon.meet(&lab)?;
        }
        at.take_in(&lab)?;
        if !at.wait_until_working(&lab)? {
            break format!("guest {} does not get to work", lab.machines().len());
        }
        at.wait(&lab, SETTLE)?;
        let stage = at.stage(&lab)?;
        context.say(&stage.in_words());
        course.stages.push(stage.clone());
        if !stage.is_carried() {
            break format!("one of {} loses {:.0} %", stage.guests, stage.worst * 100.0);
        }
        if stage.guests == MOST {
            break "no more were tried".to_owned();
        }
        host.measure(&lab, 1);
        match lab.add(&context.provisions, &[spec(stage.guests)]) {
            Ok(()) => {}
            Err(error) if is_for_want_of_memory(&error) => break first_words(&error),
            Err(error) => return Err(error),
        }
    };
    course.bad_bytes = lab.machines().iter().map(|machine| machine.reported("bad_bytes")).sum();
    course.above = host.most_above();
    lab.stop()?;
    Ok(course)
}

/// Whether a guest was killed or does not boot, or another one does not answer.
fn is_for_want_of_memory(error: &LabError) -> bool {
    use LabError::{Died, NotUp, Qmp, Timeout};
    matches!(error, Died { .. } | NotUp { .. } | Timeout { .. } | Qmp(_))
}

fn first_words(error: &LabError) -> String {
    error.to_string().split([';', '\n']).next().unwrap_or_default().to_owned()
}

/// Measures `count` guests with all the memory that they want.
fn control(context: &Context, programs: &Programs, count: usize) -> Result<Stage, LabError> {
    let host = SmallHost::new("density", RAM.share(MOST as u64 * 2, 1))?;
    let spec = |number| guest(context, programs, number, DensityArm::Plain, Some(&host));
    let mut lab = context.start((0..count).map(spec))?;
    let at = DensityStep { way: DensityArm::Plain, host: &host, disk: None };
    if !at.wait_until_working(&lab)? {
        let what = "the control's guests to work".to_owned();
        return Err(LabError::Timeout { what, limit: WORK_LIMIT });
    }
    at.wait(&lab, SETTLE)?;
    let stage = at.stage(&lab)?;
    context.say(&stage.in_words());
    lab.stop()?;
    Ok(stage)
}

/// The usual size of zswap's pool, a fifth of the host's memory, as a percentage of the machine's
/// memory; at least one.
fn usual_pool() -> Result<u64, LabError> {
    let total = MemInfo::read()?.total;
    Ok((HOST.share(20, total.0).0).max(1))
}

/// A way in progress.
struct DensityStep<'a> {
    way: DensityArm,
    host: &'a SmallHost,
    disk: Option<&'a SlowDisk>,
}

impl DensityStep<'_> {
    /// Has Overbook manage the guests, within the host's memory.
    fn manage(&self, programs: &Programs, lab: &mut Lab) -> Result<Daemon, LabError> {
        let settings = DaemonSettings {
            cold: ColdSpec::WhenNeeded,
            dedup: DedupSpec::Fixed(SCAN),
            free_pages: FreePagesSpec::Lazy,
            guaranteed: Some(GUARANTEED),
            ..Mode::Enforce.into()
        };
        let tables = vec![programs.write_table(lab)?];
        let overbooked = Overbooked { budget: BUDGET, tables };
        let daemon = Daemon::start_overbooked(lab, settings, overbooked)?;
        let pid = daemon.process().pid;
        self.host.take_in(pid)?;
        for worker in children_of(pid)? {
            self.host.take_in(worker.pid)?;
        }
        Ok(daemon)
    }

    fn take_in(&self, lab: &Lab) -> Result<(), LabError> {
        let Some(disk) = self.disk else { return Ok(()) };
        let guests = u32::try_from(lab.machines().len()).unwrap_or(u32::MAX);
        disk.set_rate(READS_PER_S.saturating_mul(guests))?;
        lab.pids().into_iter().try_for_each(|pid| disk.take_in(pid))
    }

    /// Whether all guests work within [`WORK_LIMIT`].
    fn wait_until_working(&self, lab: &Lab) -> Result<bool, LabError> {
        let begun = Instant::now();
        let works = |machine: &Machine| machine.alive() && machine.reported("ops") > 0.0;
        while !lab.machines().iter().all(works) {
            if begun.elapsed() > WORK_LIMIT || !lab.machines().iter().all(Machine::alive) {
                return Ok(false);
            }
            self.wait(lab, LOOK)?;
        }
        Ok(true)
    }

    /// Waits, and meanwhile does the periodic work.
    fn wait(&self, lab: &Lab, length: Duration) -> Result<(), LabError> {
        let end = Instant::now() + length;
        loop {
            self.host.measure(lab, 0);
            if self.way.has_balloons() {
                // A QEMU that itself waits for memory is asked again.
                let _ = autoballoon::step(lab, self.host.latest().used, HOST, LEAST);
            }
            let left = end.saturating_duration_since(Instant::now());
            interrupt::sleep(left.min(TEND))?;
            if left <= TEND {
                return Ok(());
            }
        }
    }

    /// The middle one of [`WINDOWS`] windows, or the last one where a guest has died.
    fn stage(&self, lab: &Lab) -> Result<Stage, LabError> {
        let mut windows = Vec::new();
        while windows.len() < WINDOWS {
            let window = self.window(lab)?;
            if !lab.machines().iter().all(Machine::alive) {
                return Ok(window);
            }
            windows.push(window);
        }
        Ok(middle(windows))
    }

    fn window(&self, lab: &Lab) -> Result<Stage, LabError> {
        let machines = lab.machines();
        let cpu = CpuTime::read()?;
        let before: Vec<Option<Line>> = machines.iter().map(Line::newest).collect();
        self.wait(lab, WINDOW)?;
        let losses: Vec<f64> = machines
            .iter()
            .zip(&before)
            .enumerate()
            .map(|(number, (machine, before))| {
                loss(machine, before.as_ref(), MIX[number % MIX.len()].rate)
            })
            .collect();
        let of_kind = |kind: usize| mean(losses.iter().copied().skip(kind).step_by(MIX.len()));
        let now = CpuTime::read()?;
        Ok(Stage {
            guests: machines.len(),
            worst: losses.iter().copied().largest(),
            loss: mean(losses.iter().copied()),
            of_kinds: std::array::from_fn(of_kind),
            cpu_busy: now.busy_since(cpu).map_or(f64::NAN, f64::from),
            look: self.host.latest(),
        })
    }
}

/// The window that is the middle one by its worst guest; one that is no number comes last.
fn middle(mut windows: Vec<Stage>) -> Stage {
    windows.sort_by(|one, other| one.worst.total_cmp(&other.worst));
    windows.swap_remove(windows.len() / 2)
}

/// The share of the requests due since `before` that a guest has not answered.
fn loss(machine: &Machine, before: Option<&Line>, rate: f64) -> f64 {
    let (Some(before), Some(now)) = (before, Line::newest(machine)) else { return 1.0 };
    if !machine.alive() || now.has_ended() {
        return 1.0;
    }
    let silent = now.arrived.elapsed();
    let unreported = if silent > SILENT { silent.as_secs_f64() } else { 0.0 };
    lost(now.ops - before.ops, now.t_s - before.t_s + unreported, rate)
}

fn lost(done: f64, seconds: f64, rate: f64) -> f64 {
    if seconds > 0.0 { (1.0 - done / (rate * seconds)).clamp(0.0, 1.0) } else { 1.0 }
}

impl Stage {
    /// Whether no guest loses too much. A loss that is no number is too much.
    fn is_carried(&self) -> bool {
        self.worst <= LOSS
    }

    fn in_words(&self) -> String {
        let Look { used, compressed } = self.look;
        let kinds = MIX.iter().zip(self.of_kinds).take(self.guests);
        let kinds: Vec<String> =
            kinds.map(|(kind, loss)| format!("{} {:.1}", kind.name, loss * 100.0)).collect();
        format!(
            "  {} guests: the worst loses {:.1} %, all {:.1} % ({}), {:.0} MiB and {:.0} \
             compressed, CPU {:.0} %",
            self.guests,
            self.worst * 100.0,
            self.loss * 100.0,
            kinds.join(", "),
            used.as_mib(),
            compressed.as_mib(),
            self.cpu_busy * 100.0
        )
    }
}

impl DensityRun {
    /// The largest number of guests that it carried.
    fn carried(&self) -> usize {
        let carried = self.stages.iter().filter(|stage| stage.is_carried());
        carried.map(|stage| stage.guests).max().unwrap_or(0)
    }

    fn note(&self) -> String {
        let last = self.stages.iter().rfind(|stage| stage.is_carried());
        let last = last.map_or(String::new(), |stage| stage.in_words().trim().to_owned() + "; ");
        format!("{last}{}; the host was {:.0} MiB above at most", self.end, self.above.as_mib())
    }
}

fn figures(mut figures: Figures, courses: &Arms<DensityRun>, control: &Stage) -> Figures {
    let carried = |name: &str| courses.number(name, |course| course.carried() as f64);
    // Without one of the others nothing is known of the best of them.
    let others = WAYS.iter().map(|(name, _)| *name).filter(|name| *name != "overbook");
    let best = others.map(carried).largest();
    let note = format!("guests that {HOST} carry under Overbook, to plain; the worst loses <= 5 %");
    figures.tell("density", carried("overbook") / carried("plain"), "ratio", note);
    let note = "guests that it carries more than the best of the others";
    figures.tell("more_than_others", carried("overbook") - best, "count", note);
    for (name, course) in courses.iter() {
        figures.tell(&format!("carried_{name}"), carried(name), "count", course.note());
    }
    let note = format!("unlimited memory: {}", control.in_words().trim());
    figures.tell("loss_control", control.worst, "ratio", note);
    let bad: f64 = courses.iter().map(|(_, course)| course.bad_bytes).sum();
    figures.tell("bad_bytes", bad, "B", "wrong bytes in all answers");
    figures
}

fn page(courses: &Arms<DensityRun>) -> Page {
    let lines = courses.iter().map(|(name, course)| {
        Curve::new(name, course.stages.iter().map(|s| (s.guests as f64, s.worst * 100.0)))
    });
    let chart = Chart::linear("% lost", "guests", lines);
    Page::of("Requests that the worst guest loses, by the number of guests", chart)
}

#[cfg(test)]
mod tests;
