//! `smd-fig2`: the cost and the saving of the kernel's KSM, by the size of its batches and its
//! sleep between them (SMD §2.2, Figs. 2 to 4).
//!
//! A web server answers one request after the other on a CPU of its own, where `ksmd` runs as
//! well; a database has the other CPU. At each of the paper's settings KSM works half a minute in
//! all, with pauses; then all is unmerged. The time of an answer while KSM works is compared with
//! that in the pauses before and after. The shared pages are the kernel's count for the guests at
//! the end, relative to the most of all settings.
//!
//! A model of KSM's trees over the guests' memory gives the share of futile comparisons. It
//! depends on the passes, and not on their distribution over time. The kernel itself counts the
//! scanned pages that were not merged.

use std::time::{Duration, Instant};

use model::Bytes;

use super::{Context, Scenario};
use crate::alike;
use crate::cache::Cache;
use crate::chart::{Chart, Line};
use crate::debian::Debian;
use crate::figures::{Figure, Figures, Target};
use crate::ksm::{Ksm, Rate};
use crate::ksm_trees;
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::meb::page::Page;
use crate::meb::pairs::{Median, Pairs};
use crate::meb::progress;
use crate::pinning::Pinned;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-fig2",
    summary: "KSM's own trade-off: a web server's response time and what is shared, by pace",
    run,
};

const GUESTS: [(&str, &str); 2] =
    [("web", "nginx --mb 8 --check-s 0"), ("database", "redis --mb 8 --check-s 0 --rate 200")];
const MEMORY: Bytes = Bytes::mib(128);
const START_LIMIT: Duration = Duration::from_secs(180);
/// The CPU of the web server and of `ksmd`.
const CPU: usize = 0;
const WEB: usize = 0;
/// Table 1, from the smallest batch on; its sleep is 30 ms. Then Table 2, from the longest sleep
/// on; its batch is of 400 pages. One setting is in both.
const BATCHES: [u32; 5] = [100, 200, 400, 800, 1600];
const USUAL_SLEEP_MS: u32 = 30;
const SLEEPS_MS: [u32; 5] = [50, 40, 30, 20, 10];
const USUAL_BATCH: u32 = 400;
/// The number of times that KSM works at each setting; it pauses before and after each.
const ROUNDS: usize = 6;
/// The web server's reports, one a second: reports to skip at the beginning of each window, and
/// reports that count.
const BEGINNING: usize = 1;
const WITH: usize = 4;
const WITHOUT: usize = 2;
/// A value down to one percent less counts as equal.
const SAME: f64 = 0.99;
/// Passes of the model: KSM merges from the second one on.
const PASSES: [u32; 2] = [2, 8];

/// The course of one setting.
struct SweepRun {
    rate: Rate,
    /// Extra time of an answer while KSM works.
    slowdown: Median,
    /// The time that KSM worked in all.
    worked: Duration,
    /// Pages that have been merged with others.
    shared: u64,
    /// Share of a CPU.
    cpu: f64,
    /// The share of scanned pages that were not merged.
    fruitless: f64,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let debian = Debian::provide(&Cache::open()?)?;
    let guest = |(number, (name, work)): (usize, &(&str, &str))| MachineSpec {
        cpus: vec![number],
        ..MachineSpec::new(name, "ksm", MEMORY, MEMORY, work).with_debian(&debian)
    };
    let specs: Vec<MachineSpec> = GUESTS.iter().enumerate().map(guest).collect();
    // Pinned before KSM starts, so that its affinity is restored last.
    let _ksmd = Pinned::to(CPU, Ksm::thread()?)?;
    let mut lab = Lab::start(&context.dir, &context.provisions, &specs)?;
    progress::wait_until_working(&lab, START_LIMIT)?;
    let pids: Vec<u32> = lab.machines().iter().map(|machine| machine.process().pid).collect();
    let mut courses = Vec::new();
    for rate in rates() {
        let course = course(&lab, &pids, rate)?;
        context.say(&course.in_words());
        courses.push(course);
    }
    let seen = alike::pages(&pids)?;
    lab.stop()?;
    let mut figures = figures(context, &courses);
    let contents: Vec<&[u8]> = seen.iter().map(|page| &page.content[..]).collect();
    for passes in PASSES {
        let (counted, ..) = ksm_trees::scan(&contents, passes);
        let note = format!("of KSM's comparisons in {passes} passes over {} pages", contents.len());
        let futile = Figure::new(counted.futile as f64 / counted.all as f64, "ratio", note);
        figures.add(&format!("futile_{passes}"), futile.paper("steady at about 0.8"));
    }
    page(&courses).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// Each setting once.
fn rates() -> Vec<Rate> {
    let by_batch = BATCHES.map(|pages| Rate { pages, sleep_ms: USUAL_SLEEP_MS });
    let by_sleep = SLEEPS_MS.map(|sleep_ms| Rate { pages: USUAL_BATCH, sleep_ms });
    let mut all = by_batch.to_vec();
    all.extend(by_sleep.into_iter().filter(|rate| !by_batch.contains(rate)));
    all
}

/// Measures KSM at this setting.
fn course(lab: &Lab, pids: &[u32], rate: Rate) -> Result<SweepRun, LabError> {
    let (scanned, cpu) = (Ksm::scanned()?, Ksm::cpu_s()?);
    let mut worked = Duration::ZERO;
    let mut pairs = Pairs::default();
    pairs.add_without(speed(lab, WITHOUT)?);
    let ksm = Ksm::start(rate)?;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        ksm.go_on()?;
        pairs.add_with(speed(lab, WITH)?);
        ksm.stop()?;
        worked += begun.elapsed();
        pairs.add_without(speed(lab, WITHOUT)?);
    }
    let shared = Ksm::merged_of(pids)?;
    let fruitless = 1.0 - shared as f64 / (Ksm::scanned()? - scanned) as f64;
    let cpu = (Ksm::cpu_s()? - cpu) / worked.as_secs_f64();
    drop(ksm);
    Ok(SweepRun { rate, slowdown: pairs.overhead(), worked, shared, cpu, fruitless })
}

/// The web server's speed in answers per second, over `lines` of its reports.
fn speed(lab: &Lab, lines: usize) -> Result<f64, LabError> {
    let rates = progress::rates(lab, BEGINNING, lines)?;
    Ok(rates.get(WEB).copied().unwrap_or(f64::NAN))
}

impl SweepRun {
    fn in_words(&self) -> String {
        let Self { rate: Rate { pages, sleep_ms }, slowdown, worked, shared, cpu, fruitless } =
            self;
        format!(
            "{pages} pages, {sleep_ms} ms: response {:.3} ({}), {shared} pages shared in {:.0} s, \
             {:.1} % CPU, {fruitless:.2} fruitless",
            1.0 + slowdown.value,
            slowdown.interval_percent(),
            worked.as_secs_f64(),
            cpu * 100.0
        )
    }
}

fn figures(context: &Context, courses: &[SweepRun]) -> Figures {
    let mut figures = context.figures(SCENARIO.name, 1);
    let most = most_shared(courses);
    let share = |course: &SweepRun| course.shared as f64 / most;
    let of = |pages: u32, sleep_ms: u32| {
        let rate = Rate { pages, sleep_ms };
        courses.iter().find(|course| course.rate == rate)
    };
    let ends = [
        ("batch_100", of(BATCHES[0], USUAL_SLEEP_MS)),
        ("batch_1600", of(BATCHES[BATCHES.len() - 1], USUAL_SLEEP_MS)),
        ("sleep_50", of(USUAL_BATCH, SLEEPS_MS[0])),
        ("sleep_10", of(USUAL_BATCH, SLEEPS_MS[SLEEPS_MS.len() - 1])),
    ];
    for (name, course) in ends {
        let number = |what: &dyn Fn(&SweepRun) -> f64| course.map_or(f64::NAN, what);
        let note = format!(
            "time of an answer of the web server while ksmd works on its CPU, to that while it \
             pauses; {} longer",
            course.map(|course| course.slowdown.interval_percent()).unwrap_or_default()
        );
        let response = Figure::new(1.0 + number(&|course| course.slowdown.value), "ratio", note);
        let paper = "grows with the batch and with less sleep (no number)";
        figures.add(&format!("response_{name}"), response.paper(paper));
        let worked = number(&|course| course.worked.as_secs_f64());
        let note = format!("shared after {worked:.0} s, to the most, {most} pages");
        let shared = Figure::new(number(&share), "ratio", note);
        figures.add(&format!("shared_{name}"), shared.paper(paper));
        let cpu = Figure::new(number(&|course| course.cpu), "ratio", "of a CPU that ksmd takes");
        figures.add(&format!("cpu_{name}"), cpu);
        let note = "of ksmd's looks at a page, merged nothing";
        let fruitless = Figure::new(number(&|course| course.fruitless), "ratio", note);
        figures.add(&format!("fruitless_{name}"), fruitless.paper("about 0.8"));
    }
    let count = |of: &dyn Fn(&SweepRun) -> f64| {
        let less = |pair: &&[SweepRun]| of(&pair[1]) < of(&pair[0]) * SAME;
        courses[..BATCHES.len()].windows(2).filter(less).count() as f64
    };
    let note = "steps to a larger batch after which ksmd takes less CPU, or less is shared";
    let steps = count(&|course| course.cpu) + count(&|course| course.shared as f64);
    figures.add("out_of_order", Figure::new(steps, "count", note).target(Target::Equals(0.0)));
    figures
}

fn most_shared(courses: &[SweepRun]) -> f64 {
    courses.iter().map(|course| course.shared as f64).fold(f64::NAN, f64::max)
}

fn page(courses: &[SweepRun]) -> Page {
    let most = most_shared(courses);
    let chart = |across: &'static str, is_by_batch: bool| {
        let usual = |rate: Rate| match is_by_batch {
            true => rate.sleep_ms == USUAL_SLEEP_MS,
            false => rate.pages == USUAL_BATCH,
        };
        let at = |rate: Rate| f64::from(if is_by_batch { rate.pages } else { rate.sleep_ms });
        let line = |name: &str, what: &dyn Fn(&SweepRun) -> f64| {
            let of = courses.iter().filter(|course| usual(course.rate));
            let mut points: Vec<_> = of.map(|course| (at(course.rate), what(course))).collect();
            points.sort_by(|one, other| one.0.total_cmp(&other.0));
            Line { name: name.to_owned(), points }
        };
        let lines = vec![
            line("response", &|course| (1.0 + course.slowdown.value) * 100.0),
            line("shared", &|course| 100.0 * course.shared as f64 / most),
            line("ksmd's CPU", &|course| course.cpu * 100.0),
            line("fruitless", &|course| course.fruitless * 100.0),
        ];
        Chart { unit: "%", across, is_log: false, lines, marks: Vec::new() }
    };
    let mut page = Page::default();
    page.add("By the size of a batch, 30 ms of sleep", chart("pages", true));
    page.add("By the sleep between batches of 400 pages", chart("ms", false));
    page
}
