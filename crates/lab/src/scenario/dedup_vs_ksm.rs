//! `dedup-vs-ksm`: the same guests with the same content, merged by Overbook and by the kernel.
//!
//! Four guests hold memory of which a part is the same in all, a part is their own and a part is
//! zero. Their kernels have some content in common, too. Each way begins with fresh guests. The
//! saving is the fall of the anonymous memory of all four QEMU processes (`RssAnon`, less the
//! saving that KSM reports), less the pool. CPU time is that of `ksmd`, or of the engine and the
//! shims' threads; for two ways ten minutes more of scanning at rest are included.

use std::time::{Duration, Instant};

use model::Bytes;
use sys::memory_of::Counters;

use super::{Context, Scenario};
use crate::chart::{Chart, Line};
use crate::figures::{Figure, Figures, Target};
use crate::fleet;
use crate::interrupt;
use crate::ksm::{self, Ksm};
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::meb::page::Page;
use crate::merger::Merger;
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-vs-ksm",
    summary: "identical pages of four guests merged by Overbook and by kernel KSM: how much, how soon, at what cost",
    run,
};

const GUESTS: usize = 4;
const MEMORY: Bytes = Bytes::mib(256);
const SAME_MB: u32 = 60;
const OWN_MB: u32 = 60;
const ZERO_MB: u32 = 20;
/// Time for the guests to come to rest after they have booted and filled their memory.
const SETTLE: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Merging has ended when this time passes with no more than [`LITTLE`] saved.
const QUIET: Duration = Duration::from_secs(12);
const LITTLE: f64 = 2.0;
/// KSM scans every page once before it merges any.
const SLOW_START: Duration = Duration::from_secs(150);
const USUAL_REST_MINUTES: u32 = 10;
/// Pages per millisecond that both ways scan.
const RATE: u32 = 50;

#[derive(Clone, Copy, PartialEq, Eq)]
enum MergeArm {
    Ours(Option<u32>),
    Kernel(ksm::Rate),
}

/// The course of one way.
struct MergeRun {
    name: &'static str,
    /// Seconds, and MiB saved by then.
    saved: Vec<(f64, f64)>,
    /// CPU time until nothing more was saved.
    merging_cpu_s: f64,
    /// CPU time at rest afterwards.
    resting_cpu_s: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let ways = [
        ("ours_max", MergeArm::Ours(None), false),
        ("ksm_max", MergeArm::Kernel(ksm::FLAT_OUT), false),
        ("ours_50", MergeArm::Ours(Some(RATE)), true),
        ("ksm_50", MergeArm::Kernel(ksm::FAST), true),
        ("ksm_default", MergeArm::Kernel(ksm::DEFAULT), false),
    ];
    let mut courses = Vec::new();
    for (name, way, rests) in ways {
        context.say(&format!("{name} ..."));
        let course = course(context, name, way, rests)?;
        context.say(&course.in_words());
        courses.push(course);
    }
    let mut figures = figures(context, &courses);
    page(&courses).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// Merging in progress.
enum MergePhase {
    Ours(Merger),
    Kernel(#[expect(dead_code, reason = "it works until it is dropped")] Ksm),
}

fn course(
    context: &Context,
    name: &'static str,
    way: MergeArm,
    rests: bool,
) -> Result<MergeRun, LabError> {
    let work = format!("copies --same-mb {SAME_MB} --own-mb {OWN_MB} --zero-mb {ZERO_MB} --rest");
    let guest = |number: usize| MachineSpec {
        seed: context.seed + number as u64,
        shim: true,
        ..MachineSpec::new(&format!("copy-{number}"), "dedup", MEMORY, MEMORY, &work)
    };
    let specs: Vec<_> = (0..GUESTS).map(guest).collect();
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    fleet::wait_until_filled(&lab, SAME_MB + OWN_MB + ZERO_MB)?;
    interrupt::sleep(SETTLE)?;
    let pids: Vec<u32> = lab.machines().iter().map(|machine| machine.process().pid).collect();

    let before = anonymous_mib(&pids)?;
    let cpu_before = cpu_s(None, &pids)?;
    let began = Instant::now();
    let at = match way {
        MergeArm::Ours(rate) => MergePhase::Ours(Merger::start(&pids, rate, None)?),
        MergeArm::Kernel(rate) => MergePhase::Kernel(Ksm::start(rate)?),
    };
    let mut course =
        MergeRun { name, saved: vec![(0.0, 0.0)], merging_cpu_s: 0.0, resting_cpu_s: 0.0 };
    let mut last_change = (Instant::now(), 0.0);
    while last_change.0.elapsed() < if last_change.1 > 0.0 { QUIET } else { SLOW_START } {
        interrupt::sleep(LOOK_EVERY)?;
        let saved = before - anonymous_mib(&pids)? - at.pool_mib();
        course.saved.push((began.elapsed().as_secs_f64(), saved));
        if saved > last_change.1 + LITTLE {
            last_change = (Instant::now(), saved);
        }
    }
    course.merging_cpu_s = cpu_s(Some(&at), &pids)? - cpu_before;
    if rests {
        interrupt::sleep(rest(context))?;
        course.resting_cpu_s = cpu_s(Some(&at), &pids)? - cpu_before - course.merging_cpu_s;
    }
    drop(at);
    lab.stop()?;
    Ok(course)
}

/// The time for which scanning goes on at rest.
fn rest(context: &Context) -> Duration {
    Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_REST_MINUTES)
}

impl MergePhase {
    fn pool_mib(&self) -> f64 {
        match self {
            Self::Ours(merger) => merger.pool_bytes() as f64 / (1 << 20) as f64,
            Self::Kernel(_) => 0.0,
        }
    }
}

/// CPU time of all threads that merge.
fn cpu_s(at: Option<&MergePhase>, pids: &[u32]) -> Result<f64, LabError> {
    let engine = match at {
        Some(MergePhase::Ours(merger)) => merger.cpu_s(),
        _ => 0.0,
    };
    Ok(engine + threads::shims_cpu_s(pids) + Ksm::cpu_s()?)
}

/// Anonymous memory of these processes, with merged pages of KSM counted once. The counters are
/// cheap: walking page tables twenty times a second would delay the merging.
pub(super) fn anonymous_mib(pids: &[u32]) -> Result<f64, LabError> {
    let of = |pid: &u32| Counters::of(*pid).map(|counters| counters.anonymous);
    let all: Bytes = pids.iter().map(of).sum::<Result<_, _>>().map_err(std::io::Error::other)?;
    Ok(all.as_mib() - Ksm::saved_mib()?)
}

impl MergeRun {
    fn all_saved(&self) -> f64 {
        self.saved.last().map_or(f64::NAN, |(_, saved)| *saved)
    }

    /// Seconds until `mib` were saved.
    fn until(&self, mib: f64) -> f64 {
        self.saved.iter().find(|(_, saved)| *saved >= mib).map_or(f64::NAN, |(at, _)| *at)
    }

    fn in_words(&self) -> String {
        format!(
            "  {:.0} MiB saved, 95 % of it in {:.2} s, {:.2} CPU seconds, {:.2} at rest",
            self.all_saved(),
            self.until(self.all_saved() * 0.95),
            self.merging_cpu_s,
            self.resting_cpu_s
        )
    }
}

fn figures(context: &Context, courses: &[MergeRun]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let of = |name: &str| courses.iter().find(|course| course.name == name);
    let number = |name: &str, what: fn(&MergeRun) -> f64| of(name).map_or(f64::NAN, what);
    let ksm_saved = courses
        .iter()
        .filter(|course| course.name.starts_with("ksm"))
        .map(MergeRun::all_saved)
        .fold(f64::NAN, f64::max);
    let ours = ["ours_max", "ours_50"].map(|name| number(name, MergeRun::all_saved));
    let note = format!(
        "the less of both our rates, {:.0} and {:.0} MiB, to the most of KSM's, {ksm_saved:.0} MiB",
        ours[0], ours[1]
    );
    let saved = ours[0].min(ours[1]) / ksm_saved;
    figures.add("saved_vs_ksm", Figure::new(saved, "ratio", note).target(Target::AtLeast(0.95)));
    let own_95 = |course: &MergeRun| course.until(course.all_saved() * 0.95);
    let sooner = |name: &str| number(name, own_95) / number("ours_max", own_95);
    for (name, against, target) in
        [("sooner_than_ksm_50", "ksm_50", 15.0), ("sooner_than_ksm_max", "ksm_max", 2.0)]
    {
        let note = format!(
            "seconds to 95 % of what each saves: {:.2} to {:.2}",
            number(against, own_95),
            number("ours_max", own_95)
        );
        figures
            .add(name, Figure::new(sooner(against), "ratio", note).target(Target::AtLeast(target)));
    }
    let cpu = |course: &MergeRun| course.merging_cpu_s + course.resting_cpu_s;
    let note = format!(
        "CPU seconds at {RATE} pages/ms with {} minutes at rest: {:.2} to {:.2}",
        rest(context).as_secs() / 60,
        number("ours_50", cpu),
        number("ksm_50", cpu)
    );
    let ratio = number("ours_50", cpu) / number("ksm_50", cpu);
    figures.add("cpu_vs_ksm", Figure::new(ratio, "ratio", note).target(Target::AtMost(0.25)));
    for course in courses {
        let saved = course.all_saved();
        figures.add(
            &format!("saved_mib_{}", course.name),
            Figure::new(saved, "MiB", course.in_words().trim()),
        );
    }
    figures
}

fn page(courses: &[MergeRun]) -> Page {
    let line =
        |course: &MergeRun| Line { name: course.name.to_owned(), points: course.saved.clone() };
    let lines = courses.iter().map(line).collect();
    let mut page = Page::default();
    let chart = Chart { unit: "MiB", across: "seconds", is_log: false, lines, marks: Vec::new() };
    page.add("Memory saved", chart);
    page
}
