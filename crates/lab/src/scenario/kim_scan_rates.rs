//! `kim-fig7`: how the adaptive controllers change the scan rate while guests run (Kim 2014 §6.2.1,
//! Fig. 7).
//!
//! Two guests sort more text than fits into their memory, next to two that use up the CPUs. Each
//! controller has a plot of its rate, its saving, and the guests' swapping, second by second.

use super::prelude::*;
use crate::kim::course::{self, SharingRun, Tick};
use crate::kim::jobs::{self, CG, SORT};
use crate::kim::setting::CONTROLLERS;
use crate::kim::trial::GROUP;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kim-fig7",
    summary: "the scan rate second by second, under the three adaptive controllers",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: claims! {
        "c_vs_others_early" < 1.0 => "ratio",
            "Adaptive-C scans slower than the two others at first, for it sees busy CPUs only",
            "about 0.1";
        "csd_vs_cs_late" < 1.0 => "ratio",
            "Adaptive-CSD scans slower than Adaptive-CS once nothing more is found", "about 0.1";
    },
    run,
};

const WINDOW: Duration = Duration::from_secs(90);
/// The first three seconds do not count: the controllers have three periods to react.
const EARLY_S: std::ops::Range<f64> = 3.0..30.0;
const LATE_S: std::ops::Range<f64> = 45.0..90.0;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mix = jobs::group(GROUP, &[SORT, SORT, CG, CG], context.seed);
    let [_, _, c, cs, csd] = CONTROLLERS;
    let courses = Arms::once(context, &[c, cs, csd].map(|it| (it.name, it)), |_, setting| {
        course::run(context, &mix, setting, Duration::ZERO, WINDOW)
    })?;
    let mut figures = context.figures(SCENARIO.name, 1);
    add_figures(&mut figures, &courses);
    page(&mix, &courses).write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn add_figures(figures: &mut Figures, courses: &Arms<SharingRun>) {
    for (when, seconds) in [("early", EARLY_S), ("late", LATE_S)] {
        let rate = |name: &str| courses.number(name, |course| mean_rate(course, &seconds));
        for (name, _) in courses.iter() {
            let note = format!("mean from {:.0} to {:.0} s", seconds.start, seconds.end);
            figures.tell(&format!("rate_{name}_{when}"), rate(name), "pages/ms", note);
        }
        let (name, ratio, note) = if when == "early" {
            let least = [rate("cs"), rate("csd")].into_iter().smallest();
            let note = "rate of Adaptive-C to the slower of the two others, early";
            ("c_vs_others_early", rate("c") / least, note)
        } else {
            let note = "rate of Adaptive-CSD to that of Adaptive-CS, late";
            ("csd_vs_cs_late", rate("csd") / rate("cs"), note)
        };
        figures.tell(name, ratio, "ratio", note);
    }
}

/// The mean over the seconds in which the daemon answered.
fn mean_rate(course: &SharingRun, seconds: &std::ops::Range<f64>) -> f64 {
    let ticks = course.ticks.iter().filter(|tick| seconds.contains(&tick.at_s));
    mean(ticks.map(|tick| tick.scan_rate(GROUP)))
}

fn page(mix: &[MachineSpec], courses: &Arms<SharingRun>) -> Page {
    let total = |of: fn(&Tick, &str) -> Option<f64>| {
        move |tick: &Tick| mix.iter().filter_map(|guest| of(tick, &guest.name)).sum::<f64>()
    };
    let merged = total(|tick, vm| Some(tick.merged_mib(vm)));
    let swapped = total(Tick::swapped_mib);
    let mut page = Page::default();
    for (name, course) in courses.iter() {
        let over_time = |of: &dyn Fn(&Tick) -> f64| -> Vec<(f64, f64)> {
            course.ticks.iter().map(|tick| (tick.at_s, of(tick))).collect()
        };
        let per_second = |of: &dyn Fn(&Tick) -> f64| -> Vec<(f64, f64)> {
            let pairs = course.ticks.windows(2);
            pairs.map(|pair| (pair[1].at_s, of(&pair[1]) - of(&pair[0]))).collect()
        };
        let lines = [
            ("scan rate, pages/ms", over_time(&|tick| tick.scan_rate(GROUP))),
            ("merged less broken, MiB/s", per_second(&merged)),
            ("swapped, MiB/s", per_second(&swapped)),
        ];
        let line = |(name, points): (&str, _)| Line::new(name, points);
        let chart = Chart::linear("per ms, per s", "seconds", lines.into_iter().map(line));
        page.add(&format!("Adaptive-{}", name.to_uppercase()), chart);
    }
    page
}
