//! `smd-fig2`: the cost and the saving of the kernel's KSM, by the size of its batches and its
//! sleep between them (SMD §2.2, Figs. 2 to 4).
//!
//! A web server answers one request after the other on a CPU of its own, where `ksmd` runs as
//! well; a database has the other CPU. At each of the paper's settings KSM works half a minute in
//! all, with pauses; then all is unmerged. The time of an answer while KSM works is compared with
//! that in the pauses before and after. The shared pages are the kernel's count for the guests at
//! the end, relative to the most of all settings. Every step of both sweeps counts, to a larger
//! batch and to a shorter sleep, and no fall is too small.
//!
//! A model of KSM's trees over the guests' memory gives the share of futile comparisons. It
//! depends on the passes, and not on their distribution over time. The kernel itself counts the
//! scanned pages that were not merged.

use super::prelude::*;
use crate::alike;
use crate::cache::Cache;
use crate::debian::Debian;
use crate::ksm::{Ksm, Rate};
use crate::ksm_trees;
use crate::pinning::Pinned;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "smd-fig2",
    summary: "KSM's own trade-off: a web server's response time and what is shared, by pace",
    measures: &[&[file!()], measured::PAGES, measured::TABLES],
    claims: claims! {
        "out_of_order" == 0.0 => "count",
            "With each step to a larger batch or a shorter sleep KSM takes no less CPU and shares \
             no less";
        "futile_2" => "ratio",
            "Nearly all of KSM's comparisons are of unequal pages in two passes", "0.8";
        "futile_8" => "ratio", "Nearly all of them are so in eight passes", "0.8";
    },
    run,
};

const GUESTS: [(&str, &str); 2] =
    [("web", "nginx --mb 8 --check-s 0"), ("database", "redis --mb 8 --check-s 0 --rate 200")];
const MEMORY: Bytes = Bytes::mib(128);
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
    let guest = |(number, (name, work)): (usize, &(&str, &str))| {
        MachineSpec::new(name, "ksm", MEMORY, MEMORY, work)
            .on_cpus(vec![number])
            .with_debian(&debian)
    };
    let specs: Vec<MachineSpec> = GUESTS.iter().enumerate().map(guest).collect();
    // Pinned before KSM starts, so that its affinity is restored last.
    let _ksmd = Pinned::to(CPU, Ksm::thread()?)?;
    let mut lab = context.start(specs)?;
    progress::wait_until_working(&lab)?;
    let pids = lab.pids();
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
        let futile = counted.futile as f64 / counted.all as f64;
        figures.tell(&format!("futile_{passes}"), futile, "ratio", note);
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
        let (cpu, note) = (number(&|course| course.cpu), "of a CPU that ksmd takes");
        figures.tell(&format!("cpu_{name}"), cpu, "ratio", note);
        let note = "of ksmd's looks at a page, merged nothing";
        let fruitless = Figure::new(number(&|course| course.fruitless), "ratio", note);
        figures.add(&format!("fruitless_{name}"), fruitless.paper("about 0.8"));
    }
    add_out_of_order(&mut figures, courses);
    figures
}

/// Counts the steps in the wrong direction, of both sweeps.
fn add_out_of_order(figures: &mut Figures, courses: &[SweepRun]) {
    let by_batch = BATCHES.map(|pages| Rate { pages, sleep_ms: USUAL_SLEEP_MS });
    let by_sleep = SLEEPS_MS.map(|sleep_ms| Rate { pages: USUAL_BATCH, sleep_ms });
    let measures: [fn(&SweepRun) -> f64; 2] = [|course| course.cpu, |course| course.shared as f64];
    let sweeps = [by_batch, by_sleep];
    let steps = sweeps.iter().flat_map(|sweep| measures.map(|of| (sweep, of)));
    let counts = steps.map(|(sweep, of)| {
        let at = |rate: &Rate| courses.iter().find(|course| course.rate == *rate);
        falls(sweep.iter().map(|rate| at(rate).map_or(f64::NAN, of)))
    });
    let note = "steps to a larger batch or a shorter sleep after which ksmd takes less CPU, or \
                less is shared";
    figures.tell("out_of_order", counts.sum(), "count", note);
}

/// How often a value is less than the one before it; NaN when one of them is no number.
fn falls(values: impl Iterator<Item = f64>) -> f64 {
    let values: Vec<f64> = values.collect();
    let is_known = values.iter().all(|value| value.is_finite());
    let count = values.windows(2).filter(|pair| pair[1] < pair[0]).count() as f64;
    if is_known { count } else { f64::NAN }
}

fn most_shared(courses: &[SweepRun]) -> f64 {
    courses.iter().map(|course| course.shared as f64).largest()
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
            Line::new(name, points)
        };
        let lines = vec![
            line("response", &|course| (1.0 + course.slowdown.value) * 100.0),
            line("shared", &|course| 100.0 * course.shared as f64 / most),
            line("ksmd's CPU", &|course| course.cpu * 100.0),
            line("fruitless", &|course| course.fruitless * 100.0),
        ];
        Chart::linear("%", across, lines)
    };
    let mut page = Page::default();
    page.add("By the size of a batch, 30 ms of sleep", chart("pages", true));
    page.add("By the sleep between batches of 400 pages", chart("ms", false));
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A course in which all grows with the rate.
    fn ordered() -> Vec<SweepRun> {
        let course = |rate: Rate| {
            let pages_per_ms = f64::from(rate.pages) / f64::from(rate.sleep_ms);
            let slowdown = Median::of(vec![0.1]);
            let shared = u64::from(rate.pages * 1000 / rate.sleep_ms);
            let cpu = pages_per_ms / 100.0;
            SweepRun { rate, slowdown, worked: Duration::ZERO, shared, cpu, fruitless: 0.9 }
        };
        rates().into_iter().map(course).collect()
    }

    fn out_of_order(courses: &[SweepRun]) -> Figure {
        let mut figures = Figures::new(SCENARIO.name, "m".into(), 1, 1);
        add_out_of_order(&mut figures, courses);
        figures.get("out_of_order").unwrap().clone()
    }

    #[test]
    fn a_fall_in_either_sweep_misses_however_small() {
        assert!(out_of_order(&ordered()).met());
        for rate in [Rate { pages: 1600, sleep_ms: 30 }, Rate { pages: 400, sleep_ms: 10 }] {
            let mut courses = ordered();
            let at = courses.iter_mut().find(|course| course.rate == rate).unwrap();
            at.cpu = 0.0;
            at.shared = 0;
            assert!((out_of_order(&courses).value - 2.0).abs() < 1e-9);
        }
        let mut courses = ordered();
        courses[4].shared = courses[3].shared - 1;
        assert!(!out_of_order(&courses).met());
    }

    #[test]
    fn a_setting_that_is_missing_or_was_not_read_misses() {
        let mut missing = ordered();
        missing.pop();
        let mut unread = ordered();
        unread[1].cpu = f64::NAN;
        for courses in [missing, unread, Vec::new()] {
            assert!(out_of_order(&courses).value.is_nan());
        }
    }
}
