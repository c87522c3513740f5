//! `smd-saved`: the memory that merging saves of real guests with a table of known pages,
//! compared with the memory that kernel KSM saves of the same guests.
//!
//! Four guests run a web server, a database, a compiler and a shell of one Debian. The saving is
//! counted as in `dedup-vs-ksm`: the fall of the QEMUs' anonymous memory, less the pool.
//!
//! **Guests at work.** Their memory goes up and down as they compile and check. They therefore
//! work at a steady pace, far below their capacity. Merging begins when each guest has checked
//! its programs twice, so that its page cache is full. Memory is the mean of all samples in
//! [`WINDOW`], in which each guest runs through all its work. Each way is measured twice, each
//! time with fresh guests, ours first and last. A run without merging shows how far the guests'
//! memory drifts by itself.

use pages::dedup::KnownPages;

use super::dedup_vs_ksm::anonymous_mib;
use super::prelude::*;
use crate::ksm::{self, Ksm};
use crate::merger::{Merger, Merging};
use crate::smd::{Guest, Programs};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-saved",
    summary: "real guests merged with a table and by KSM: how much of their memory each saves",
    measures: &[
        &[file!()],
        measured::PAGES,
        measured::WORKER,
        measured::SHIM,
        measured::TABLES,
        measured::ARMS,
        measured::MERGER,
    ],
    claims: claims! {
        "saved_vs_ksm" >= 0.95 => "ratio",
            "With a table and by looking, Overbook saves what KSM does in all";
        "drift_mib" => "MiB", "Without merging the guests' memory drifts by this";
    },
    run,
};

const GUESTS: [Guest; 4] = [
    Guest { name: "web", mb: 192, workload: "nginx --mb 8 --rate 20 --check-s 10" },
    Guest { name: "database", mb: 192, workload: "redis --mb 8 --rate 20 --check-s 10" },
    Guest { name: "builder", mb: 320, workload: "gcc --rate 0.2 --check-s 10" },
    Guest { name: "calm", mb: 160, workload: "shell --rate 0.2 --check-s 10" },
];
const OURS: [&str; 2] = ["ours", "ours again"];
const KSM: [&str; 2] = ["ksm", "ksm again"];
const NONE: &str = "none";
/// Pages per millisecond that both ways scan.
const RATE: u32 = 50;
const WARM_LIMIT: Duration = Duration::from_secs(180);
const CHECKS: f64 = 2.0;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Longer than a guest takes for one round of all its work.
const WINDOW: Duration = Duration::from_secs(15);
/// Saving has ended when a window exceeds the best one before by no more than this.
const LITTLE_MIB: f64 = 2.0;
/// KSM scans every page once before it merges any.
const FEWEST_WINDOWS: usize = 4;
const MOST_WINDOWS: usize = 10;

/// The course of one way.
struct SavingRun {
    /// The guests' memory before merging, in MiB.
    before: f64,
    /// Per window: seconds since the start, and MiB saved.
    saved: Vec<(f64, f64)>,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let programs = Programs::provide(context)?;
    let arms = [OURS[0], KSM[0], NONE, KSM[1], OURS[1]].map(|name| (name, ()));
    let courses = Arms::once(context, &arms, |name, ()| {
        let course = course(context, &programs, name)?;
        context.say(&course.in_words());
        Ok(course)
    })?;
    let mut figures = figures(context, &courses);
    let line = |(name, course): (&str, &SavingRun)| Line::new(name, course.saved.clone());
    let chart = Chart::linear("MiB", "seconds", courses.iter().map(line));
    Page::of("Memory saved", chart).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn course(context: &Context, programs: &Programs, name: &str) -> Result<SavingRun, LabError> {
    let spec = |guest| MachineSpec { seed: context.seed, shim: true, ..programs.machine(guest) };
    let mut lab = context.start(GUESTS.iter().map(spec))?;
    lab.wait_for("every guest to have checked its programs", WARM_LIMIT, |lab| {
        Ok(lab.machines().iter().all(|machine| machine.reported("checks") >= CHECKS))
    })?;
    let pids = lab.pids();
    let before = mean_mib(&pids, None)?;
    let began = Instant::now();
    let at = if OURS.contains(&name) {
        let known = KnownPages::of(&programs.table()?);
        Some(Merging::Ours(Merger::start_knowing(&pids, Some(RATE), known)?))
    } else if KSM.contains(&name) {
        Some(Merging::Kernel(Ksm::start(ksm::FAST)?))
    } else {
        None
    };
    let mut saved = vec![(0.0, 0.0)];
    loop {
        let best = saved.iter().map(|(_, saved)| *saved).fold(f64::NEG_INFINITY, f64::max);
        let now = before - mean_mib(&pids, at.as_ref())?;
        saved.push((began.elapsed().as_secs_f64(), now));
        let is_over = saved.len() > FEWEST_WINDOWS && now <= best + LITTLE_MIB;
        if is_over || saved.len() > MOST_WINDOWS {
            break;
        }
    }
    drop(at);
    lab.stop()?;
    Ok(SavingRun { before, saved })
}

/// The memory of all guests, including the pool: the mean over a window.
fn mean_mib(pids: &[u32], at: Option<&Merging>) -> Result<f64, LabError> {
    let (end, mut sum, mut looks) = (Instant::now() + WINDOW, 0.0, 0.0);
    while Instant::now() < end {
        sum += anonymous_mib(pids)? + at.map_or(0.0, Merging::pool_mib);
        looks += 1.0;
        interrupt::sleep(LOOK_EVERY)?;
    }
    Ok(sum / looks)
}

impl SavingRun {
    fn in_the_end(&self) -> f64 {
        self.saved.last().map_or(f64::NAN, |(_, saved)| *saved)
    }

    fn in_words(&self) -> String {
        let windows: Vec<String> =
            self.saved.iter().skip(1).map(|(_, saved)| format!("{saved:.0}")).collect();
        format!(
            "  of {:.0} MiB saved by windows of {} s: {}",
            self.before,
            WINDOW.as_secs(),
            windows.join(", ")
        )
    }
}

fn figures(context: &Context, courses: &Arms<SavingRun>) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 2);
    let of = |name: &str| courses.number(name, SavingRun::in_the_end);
    let (ours, ksm) = (OURS.map(of), KSM.map(of));
    let sum = |values: &[f64]| values.iter().sum::<f64>();
    let note = format!("both times, {ours:.0?} MiB, to KSM's {ksm:.0?}");
    figures.tell("saved_vs_ksm", sum(&ours) / sum(&ksm), "ratio", note);
    for (name, values) in [("saved_mib_ours", ours), ("saved_mib_ksm", ksm)] {
        figures.tell(name, mean(values), "MiB", "what all QEMUs have less, the pool subtracted");
    }
    let note = "what they have less without any merging, by themselves";
    figures.tell("drift_mib", of(NONE), "MiB", note);
    figures
}
