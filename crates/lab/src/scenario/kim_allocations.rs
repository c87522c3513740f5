//! `kim-fig9`, `kim-fig10`: the memory that each policy gives to each guest (Kim 2014 §6.2.2,
//! Figs. 9 and 10).
//!
//! A job of three guests runs next to two guests that use up the CPUs. The job has a master that
//! needs little, and two guests that sort more text than fits into their memory. `kim-fig9`
//! compares the memory of the job and of the others under each policy; `kim-fig10` shows the
//! job's guests under `demand`.

use super::prelude::*;
use crate::fleet::BASE;
use crate::kim::course::{self, SharingRun};
use crate::kim::jobs::{self, CG, MASTER, SORT};
use crate::kim::setting::{POLICIES, Setting};
use crate::kim::trial::GROUP;

pub(super) const SETS: Scenario = Scenario {
    name: "kim-fig9",
    summary: "memory of a sorting job and of guests short of CPU time, under three reprovisioning policies",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: claims! {
        "demand_more_than_fair" >= 0.0 => "MiB",
            "The sorting job gets at least as much under `demand` as under `fair`";
        "demand_more_than_entitlement" >= 0.0 => "MiB",
            "The sorting job gets at least as much under `demand` as under `entitlement`";
    },
    run: run_sets,
};

pub(super) const WITHIN: Scenario = Scenario {
    name: "kim-fig10",
    summary: "memory of each guest of a sorting job whose master needs little",
    measures: &[&[file!()], measured::MANAGED, measured::KIM],
    claims: claims! {
        "master_more_than_slaves" < 0.0 => "MiB",
            "The master of a job gets less than those that sort", "less";
    },
    run: run_within,
};

const WINDOW: Duration = Duration::from_secs(60);
/// From this second on, merging has found all that it can.
const SETTLED_S: f64 = 45.0;
const DEMAND: &str = "demand";

/// The mix, and the names of the job's guests and of the others.
fn mix(context: &Context) -> (Vec<MachineSpec>, Vec<String>, Vec<String>) {
    let guests = jobs::group(GROUP, &[MASTER, SORT, SORT, CG, CG], context.seed);
    let names = guests.iter().map(|guest| guest.name.clone());
    let (others, job) = names.partition(|name| name.starts_with(CG.name));
    (guests, job, others)
}

fn course(
    context: &Context,
    guests: &[MachineSpec],
    setting: &Setting,
) -> Result<SharingRun, LabError> {
    context.say(&format!("a sorting job under {} ...", setting.name));
    course::run(context, guests, setting, Duration::ZERO, WINDOW)
}

fn run_sets(context: &Context) -> Result<Figures, LabError> {
    let (guests, job, others) = mix(context);
    let mut figures = context.figures(SETS.name, 1);
    let mut charts = [("The sorting job", job, Vec::new()), ("The others", others, Vec::new())];
    for setting in &POLICIES {
        let course = course(context, &guests, setting)?;
        for (what, guests, lines) in &mut charts {
            let set = if *what == "The others" { "others" } else { "job" };
            let note = format!("mean beyond base after {SETTLED_S:.0} s, all its guests");
            let granted = settled(&course, guests) - BASE.as_mib() * guests.len() as f64;
            let name = format!("granted_{set}_{}", setting.name);
            figures.tell(&name, granted, "MiB", note);
            lines.push(line(setting.name, &course, guests));
        }
    }
    let granted = |figures: &Figures, name: &str| figures.get(name).map_or(f64::NAN, |f| f.value);
    for other in ["fair", "entitlement"] {
        let more = granted(&figures, "granted_job_demand")
            - granted(&figures, &format!("granted_job_{other}"));
        let note = format!("what the job is granted under demand, less that under {other}");
        let figure = Figure::new(more, "MiB", note);
        figures.add(&format!("demand_more_than_{other}"), figure.paper("all of it goes to SORT"));
    }
    let mut page = Page::default();
    for (what, _, lines) in charts {
        page.add(what, Chart::linear("MiB", "seconds", lines));
    }
    page.write(&context.dir, &mut figures)?;
    Ok(figures)
}

fn run_within(context: &Context) -> Result<Figures, LabError> {
    let (guests, job, _) = mix(context);
    let mut figures = context.figures(WITHIN.name, 1);
    let Some(setting) = POLICIES.iter().find(|setting| setting.name == DEMAND) else {
        return Ok(figures);
    };
    let course = course(context, &guests, setting)?;
    let mut lines = Vec::new();
    let (mut master, mut slaves) = (f64::NAN, Vec::new());
    for name in &job {
        let guest = std::slice::from_ref(name);
        let granted = settled(&course, guest) - BASE.as_mib();
        let note = format!("mean beyond base after {SETTLED_S:.0} s");
        figures.tell(&format!("granted_{name}"), granted, "MiB", note);
        if name.starts_with(MASTER.name) {
            master = granted;
        } else {
            slaves.push(granted);
        }
        lines.push(line(name, &course, guest));
    }
    let note = "what the master is granted, less what the slave is that is granted least";
    let more = master - slaves.into_iter().smallest();
    figures.tell("master_more_than_slaves", more, "MiB", note);
    Page::of("Each guest of the sorting job", Chart::linear("MiB", "seconds", lines))
        .write(&context.dir, &mut figures)?;
    Ok(figures)
}

/// The mean memory of these guests together after [`SETTLED_S`].
fn settled(course: &SharingRun, guests: &[String]) -> f64 {
    let late = course.ticks.iter().filter(|tick| tick.at_s >= SETTLED_S);
    mean(late.filter_map(|tick| tick.allocated_to_all_mib(guests)))
}

fn line(name: &str, course: &SharingRun, guests: &[String]) -> Line {
    course.line(name, |tick| tick.allocated_to_all_mib(guests))
}
