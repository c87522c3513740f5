//! `dedup-vs-ksm`: the same guests with the same content, merged by Overbook and by the kernel.
//!
//! Four guests hold memory of which a part is the same in all, a part is their own and a part is
//! zero. Their kernels have some content in common, too. Each way begins with fresh guests. The
//! saving is the fall of the anonymous memory of all four QEMU processes (`RssAnon`, less the
//! saving that KSM reports), less the pool. CPU time is that of `ksmd`, or of the engine and the
//! shims' threads.
//!
//! Each figure sets two ways at the same setting against each other: both at 50 pages in a
//! millisecond, or both flat out. CPU time for merging is told apart from that of ten minutes at
//! rest afterwards; a resting time flat out would say nothing, for no service scans so. One way
//! more is KSM as kernels since 6.8 can run it: its advisor finds the rate by the time that a scan
//! takes, and smart scan skips pages that found no match.

use super::prelude::*;
use crate::ksm::{self, Ksm};
use crate::merger::{COPIES, COPIES_MB, Merger, Merging};
use crate::threads;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "dedup-vs-ksm",
    summary: "identical pages of four guests, merged by Overbook and by KSM: amount, time, cost",
    measures: &[&[file!()], measured::PAGES, measured::SHIM, measured::MERGER],
    claims: claims! {
        "saved_vs_ksm" >= 0.95 => "ratio",
            "Overbook saves what kernel KSM does (four guests, 140 of 256 MB known to be the \
             same, unique or zero)";
        "sooner_than_ksm_50" >= 15.0 => "ratio",
            "Overbook has merged all sooner than KSM, both at 50 pages/ms";
        "sooner_than_ksm_max" >= 2.0 => "ratio",
            "Overbook has merged all sooner than KSM, both flat out";
        "cpu_vs_ksm" <= 0.25 => "ratio",
            "Overbook takes a part of KSM's CPU time, both at 50 pages/ms, to merge all and to rest \
             for ten minutes";
        "cpu_merging_vs_ksm_50" <= 0.25 => "ratio",
            "It takes a part of KSM's CPU time until all is merged, both at 50 pages/ms";
        "cpu_resting_vs_ksm_50" <= 0.25 => "ratio",
            "It takes a part of KSM's CPU time in ten minutes at rest, both at 50 pages/ms";
        "cpu_merging_vs_ksm_max" => "ratio",
            "Until all is merged, it takes this part of KSM's CPU time, both flat out";
        "sooner_than_ksm_advised" => "ratio",
            "Overbook at 50 pages/ms has merged all sooner, by this factor, than KSM with its \
             advisor and smart scan";
        "cpu_merging_vs_ksm_advised" => "ratio",
            "It takes this part of that KSM's CPU time until all is merged";
        "cpu_resting_vs_ksm_advised" => "ratio",
            "It takes this part of that KSM's CPU time in ten minutes at rest";
    },
    run,
};

const GUESTS: usize = 4;
const MEMORY: Bytes = Bytes::mib(256);
/// Time for the guests to come to rest after they have booted and filled their memory.
const SETTLE: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// Merging has ended when this time passes with no more than [`LITTLE`] saved.
const QUIET: Duration = Duration::from_secs(12);
const LITTLE: f64 = 2.0;
/// KSM scans every page once before it merges any.
const SLOW_START: Duration = Duration::from_secs(150);
/// The same two for KSM with its advisor, which lets a scan take 200 s.
const ADVISED_QUIET: Duration = Duration::from_secs(240);
const ADVISED_START: Duration = Duration::from_secs(480);
const USUAL_REST_MINUTES: u32 = 10;
/// Pages per millisecond that both ways scan.
const RATE: u32 = 50;

#[derive(Clone, Copy, PartialEq, Eq)]
enum MergeArm {
    Ours(Option<u32>),
    Kernel(ksm::Rate),
    Advised,
}

impl MergeArm {
    /// The time without a saving after which merging has ended: before the first one, and since.
    fn quiet(self, has_begun: bool) -> Duration {
        match (self, has_begun) {
            (Self::Advised, false) => ADVISED_START,
            (Self::Advised, true) => ADVISED_QUIET,
            (Self::Ours(_) | Self::Kernel(_), false) => SLOW_START,
            (Self::Ours(_) | Self::Kernel(_), true) => QUIET,
        }
    }
}

/// The course of one way.
struct MergeRun {
    name: &'static str,
    /// Seconds, and MiB saved by then.
    saved: Vec<(f64, f64)>,
    /// CPU time until the last page was saved.
    merging_cpu_s: f64,
    /// CPU time at rest afterwards; `None`: it was not left at rest.
    resting_cpu_s: Option<f64>,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    let ways = [
        ("ours_max", MergeArm::Ours(None), false),
        ("ksm_max", MergeArm::Kernel(ksm::FLAT_OUT), false),
        ("ours_50", MergeArm::Ours(Some(RATE)), true),
        ("ksm_50", MergeArm::Kernel(ksm::FAST), true),
        ("ksm_default", MergeArm::Kernel(ksm::DEFAULT), false),
        ("ksm_advised", MergeArm::Advised, true),
    ];
    let mut courses = Vec::new();
    for (name, way, rests) in ways {
        context.say(&format!("{name} ..."));
        let Some(course) = course(context, name, way, rests)? else {
            context.say("  this kernel's KSM has no advisor: this way has no figures");
            continue;
        };
        context.say(&course.in_words());
        courses.push(course);
    }
    let mut figures = context.figures(SCENARIO.name, 1);
    add_figures(&mut figures, &courses, rest(context));
    page(&courses).write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// `None`: this kernel cannot do it this way.
fn course(
    context: &Context,
    name: &'static str,
    way: MergeArm,
    rests: bool,
) -> Result<Option<MergeRun>, LabError> {
    let work = format!("{COPIES} --rest");
    let guest = |number: usize| {
        context
            .guest(&format!("copy-{number}"), "dedup", MEMORY, &work)
            .seeded(number as u64)
            .with_shim(true)
    };
    let mut lab = context.start((0..GUESTS).map(guest))?;
    fleet::wait_until_filled(&lab, COPIES_MB)?;
    interrupt::sleep(SETTLE)?;
    let pids = lab.pids();

    let before = anonymous_mib(&pids)?;
    let cpu_before = cpu_s(None, &pids)?;
    let began = Instant::now();
    let at = match way {
        MergeArm::Ours(rate) => Merging::Ours(Merger::start(&pids, rate, None)?),
        MergeArm::Kernel(rate) => Merging::Kernel(Ksm::start(rate)?),
        MergeArm::Advised => match Ksm::start_advised()? {
            Some(ksm) => Merging::Kernel(ksm),
            None => return Ok(None),
        },
    };
    let mut course =
        MergeRun { name, saved: vec![(0.0, 0.0)], merging_cpu_s: 0.0, resting_cpu_s: None };
    let (mut last_change, mut cpu_then) = ((Instant::now(), 0.0), 0.0);
    while last_change.0.elapsed() < way.quiet(last_change.1 > 0.0) {
        interrupt::sleep(LOOK_EVERY)?;
        let saved = before - anonymous_mib(&pids)? - at.pool_mib();
        course.saved.push((began.elapsed().as_secs_f64(), saved));
        if saved > last_change.1 + LITTLE {
            last_change = (Instant::now(), saved);
            cpu_then = cpu_s(Some(&at), &pids)?;
        }
    }
    course.merging_cpu_s = cpu_then - cpu_before;
    if rests {
        let at_rest = cpu_s(Some(&at), &pids)?;
        interrupt::sleep(rest(context))?;
        course.resting_cpu_s = Some(cpu_s(Some(&at), &pids)? - at_rest);
    }
    drop(at);
    lab.stop()?;
    Ok(Some(course))
}

/// The time for which scanning goes on at rest.
fn rest(context: &Context) -> Duration {
    Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_REST_MINUTES)
}

/// CPU time of all threads that merge.
fn cpu_s(at: Option<&Merging>, pids: &[u32]) -> Result<f64, LabError> {
    let engine = match at {
        Some(Merging::Ours(merger)) => merger.cpu_s(),
        _ => 0.0,
    };
    Ok(engine + threads::shims_cpu_s(pids) + Ksm::cpu_s()?)
}

/// Anonymous memory of these processes, with merged pages of KSM counted once. The counters are
/// cheap: walking page tables twenty times a second would delay the merging.
pub(super) fn anonymous_mib(pids: &[u32]) -> Result<f64, LabError> {
    let of = |pid: &u32| Counters::of(*pid).map(|counters| counters.anonymous);
    let all: Bytes = pids.iter().map(of).sum::<Result<_, _>>()?;
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

    /// Seconds until 95 % of all that it saves were saved.
    fn nearly_all_s(&self) -> f64 {
        self.until(self.all_saved() * 0.95)
    }

    /// CPU time at rest; NaN where it was not left at rest.
    fn resting(&self) -> f64 {
        self.resting_cpu_s.unwrap_or(f64::NAN)
    }

    fn in_words(&self) -> String {
        let rest =
            self.resting_cpu_s.map_or(String::new(), |cpu_s| format!(", {cpu_s:.2} at rest"));
        format!(
            "  {:.0} MiB saved, 95 % of it in {:.2} s, {:.2} CPU seconds{rest}",
            self.all_saved(),
            self.nearly_all_s(),
            self.merging_cpu_s,
        )
    }
}

fn add_figures(figures: &mut Figures, courses: &[MergeRun], rest: Duration) {
    let of = |name: &str| courses.iter().find(|course| course.name == name);
    let number = |name: &str, what: fn(&MergeRun) -> f64| of(name).map_or(f64::NAN, what);
    let saved = |name: &str| number(name, MergeRun::all_saved);
    // KSM has the same pages at each rate, and the kernel's advisor is not everywhere.
    let ksm_saved = ["ksm_max", "ksm_50", "ksm_default"].map(saved).into_iter().largest();
    let ours = ["ours_max", "ours_50"].map(saved).into_iter().smallest();
    let note = format!(
        "the less of both our rates, {ours:.0} MiB, to the most of KSM's, {ksm_saved:.0} MiB"
    );
    figures.tell("saved_vs_ksm", ours / ksm_saved, "ratio", note);
    let minutes = rest.as_secs() / 60;
    let cpu = |course: &MergeRun| course.merging_cpu_s + course.resting();
    let seconds = "seconds to 95 % of what each saves";
    let merging = "CPU seconds until the last page is merged";
    let resting = format!("CPU seconds in {minutes} minutes at rest");
    let both = format!("CPU seconds to merge, and in {minutes} minutes at rest");
    let mut compare = |figure: &str, one: &str, other: &str, what: fn(&MergeRun) -> f64, note| {
        let (one_s, other_s) = (number(one, what), number(other, what));
        let note = format!("{note}: {one} {one_s:.2}, {other} {other_s:.2}");
        figures.tell(figure, one_s / other_s, "ratio", note);
    };
    for (name, theirs, ours) in [
        ("sooner_than_ksm_50", "ksm_50", "ours_50"),
        ("sooner_than_ksm_max", "ksm_max", "ours_max"),
        ("sooner_than_ksm_advised", "ksm_advised", "ours_50"),
    ] {
        compare(name, theirs, ours, MergeRun::nearly_all_s, seconds);
    }
    compare("cpu_vs_ksm", "ours_50", "ksm_50", cpu, &both);
    for (name, ours, theirs) in [
        ("cpu_merging_vs_ksm_50", "ours_50", "ksm_50"),
        ("cpu_merging_vs_ksm_max", "ours_max", "ksm_max"),
        ("cpu_merging_vs_ksm_advised", "ours_50", "ksm_advised"),
    ] {
        compare(name, ours, theirs, |course| course.merging_cpu_s, merging);
    }
    for (name, theirs) in
        [("cpu_resting_vs_ksm_50", "ksm_50"), ("cpu_resting_vs_ksm_advised", "ksm_advised")]
    {
        compare(name, "ours_50", theirs, MergeRun::resting, &resting);
    }
    for course in courses {
        let saved = course.all_saved();
        figures.tell(&format!("saved_mib_{}", course.name), saved, "MiB", course.in_words().trim());
    }
}

fn page(courses: &[MergeRun]) -> Page {
    let line = |course: &MergeRun| Line::new(course.name, course.saved.clone());
    let chart = Chart::linear("MiB", "seconds", courses.iter().map(line));
    Page::of("Memory saved", chart)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn course(name: &'static str, seconds: f64, merging: f64, resting: Option<f64>) -> MergeRun {
        let saved = vec![(0.0, 0.0), (seconds, 240.0)];
        MergeRun { name, saved, merging_cpu_s: merging, resting_cpu_s: resting }
    }

    fn courses() -> Vec<MergeRun> {
        vec![
            course("ours_max", 0.5, 1.0, None),
            course("ksm_max", 2.0, 2.0, None),
            course("ours_50", 1.0, 1.0, Some(2.0)),
            course("ksm_50", 16.0, 5.0, Some(20.0)),
            course("ksm_default", 60.0, 4.0, None),
            course("ksm_advised", 200.0, 2.0, Some(1.0)),
        ]
    }

    fn figures(courses: &[MergeRun]) -> Figures {
        Figures::invented(SCENARIO.name, |figures| {
            add_figures(figures, courses, Duration::from_secs(600))
        })
    }

    fn value(courses: &[MergeRun], name: &str) -> f64 {
        figures(courses).value(name)
    }

    #[test]
    fn each_figure_sets_the_same_setting_of_both_against_each_other() {
        let expected = [
            ("saved_vs_ksm", 1.0),
            ("sooner_than_ksm_50", 16.0),
            ("sooner_than_ksm_max", 4.0),
            ("sooner_than_ksm_advised", 200.0),
            ("cpu_vs_ksm", 3.0 / 25.0),
            ("cpu_merging_vs_ksm_50", 0.2),
            ("cpu_merging_vs_ksm_max", 0.5),
            ("cpu_merging_vs_ksm_advised", 0.5),
            ("cpu_resting_vs_ksm_50", 0.1),
            ("cpu_resting_vs_ksm_advised", 2.0),
        ];
        for (name, wanted) in expected {
            let value = value(&courses(), name);
            assert!((value - wanted).abs() < 1e-9, "{name} is {value}");
        }
        assert!(figures(&courses()).passed(), "{}", figures(&courses()).to_table());
    }

    #[test]
    fn ways_that_are_swapped_miss() {
        let mut swapped = courses();
        for course in &mut swapped {
            course.name = match course.name {
                "ours_50" => "ksm_50",
                "ksm_50" => "ours_50",
                name => name,
            };
        }
        for name in ["sooner_than_ksm_50", "cpu_vs_ksm", "cpu_merging_vs_ksm_50"] {
            assert!(!figures(&swapped).met(name), "{name}");
        }
    }

    #[test]
    fn a_way_that_is_missing_or_has_saved_nothing_known_is_no_number() {
        let mut without_ours = courses();
        without_ours.retain(|course| course.name != "ours_50");
        assert!(value(&without_ours, "saved_vs_ksm").is_nan());
        assert!(value(&without_ours, "sooner_than_ksm_50").is_nan());
        let mut unread = courses();
        unread[3].saved = vec![(0.0, 0.0), (5.0, f64::NAN)];
        assert!(value(&unread, "saved_vs_ksm").is_nan());
        assert!(value(&unread, "sooner_than_ksm_50").is_nan());
        let mut no_rest = courses();
        no_rest[2].resting_cpu_s = None;
        assert!(value(&no_rest, "cpu_vs_ksm").is_nan());
        let mut older = courses();
        older.retain(|course| course.name != "ksm_advised");
        assert!(value(&older, "cpu_resting_vs_ksm_advised").is_nan() && figures(&older).passed());
    }
}
