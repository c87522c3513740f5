//! `starve`: guests without swap allocate in bursts while their group is far over its budget, and
//! no program dies that would live without Overbook.
//!
//! Three guests of `shop` run one program after the other: each takes 40 to 170 MB at 10 to 300
//! MB/s, uses it for a moment and ends ([`BURSTS`]). Two are quiet. All have their whole RAM when
//! Overbook begins to enforce, more than twice the group's budget, so Overbook wants memory of
//! every one of them, all the time. Three guests outside of any group do the same work from the
//! same seeds; a kill there is the guest's own. The quiet guests show that Overbook does take
//! memory.

use super::prelude::*;
use crate::daemon::OUTSIDE;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "starve",
    summary: "guests without swap allocate in bursts in a group over its budget; no program dies",
    measures: &[&[file!()], measured::POLICY, measured::DAEMON, measured::WORKER],
    claims: claims! {
        "oom_kills" == 0.0 => "count",
            "No program of a guest without swap dies for its group's budget, however fast it \
             takes memory";
        "taken_idle" >= 20.0 => "MiB",
            "Quiet guests without swap give the memory that they leave unused";
        "taken_bursting" => "MiB", "Guests that take memory in bursts give little";
    },
    run,
};

const USUAL_MINUTES: u32 = 5;
const MEMORY: Bytes = Bytes::mib(256);
/// Guaranteed to each guest.
const BASE: Bytes = Bytes::mib(96);
const PAIRS: u64 = 3;
const QUIET: u64 = 2;
const BUDGET: Bytes = Bytes(BASE.0 * (PAIRS + QUIET));
/// The largest burst is 20 MB less than the memory that such a guest has for its programs.
const BURSTS: &str = "bursts --mb 170";
/// A workload that has not reported for this long is gone.
const SILENT: Duration = Duration::from_secs(30);

fn run(context: &Context) -> Result<Figures, LabError> {
    let length = Duration::from_secs(60) * context.minutes.unwrap_or(USUAL_MINUTES);
    let guest = |name: String, group: &str, workload: &str, number: u64| {
        context.guest(&name, group, MEMORY, workload).seeded(number)
    };
    let mut specs = Vec::new();
    for number in 0..PAIRS {
        specs.push(guest(format!("bursting-{number}"), "shop", BURSTS, number));
        specs.push(guest(format!("twin-{number}"), OUTSIDE, BURSTS, number));
    }
    specs.extend((0..QUIET).map(|n| guest(format!("quiet-{n}"), "shop", "idle", PAIRS + n)));
    let mut lab = context.start(specs.clone())?;
    let settings = DaemonSettings { guaranteed: Some(BASE), ..Mode::Enforce.into() };
    let overbooked = Overbooked { budget: BUDGET, tables: Vec::new() };
    let daemon = Daemon::start_overbooked(&mut lab, settings, overbooked)?;
    fleet::wait_until_working(&lab)?;
    context.say(&format!("{} min of bursts ...", length.as_secs() / 60));
    let mut least = vec![MEMORY; specs.len()];
    let end = Instant::now() + length;
    while Instant::now() < end {
        daemon.ensure_alive()?;
        for (machine, least) in lab.machines().iter().zip(&mut least) {
            machine.ensure_alive()?;
            *least = machine.balloon()?.min(*least);
        }
        interrupt::sleep(Duration::from_secs(1))?;
    }
    let figures = figures(context, &lab, &least)?;
    lab.stop()?;
    Ok(figures)
}

/// A number of a guest's newest report; NaN if it has not reported for long.
fn reported(machine: &Machine, name: &str) -> f64 {
    let fresh = machine.last_metric().filter(|report| report.arrived.elapsed() < SILENT);
    fresh.and_then(|report| report.value[name].as_f64()).unwrap_or(f64::NAN)
}

fn figures(context: &Context, lab: &Lab, least: &[Bytes]) -> Result<Figures, LabError> {
    let of_pairs = |name: &str, field: &str| -> Result<Vec<f64>, LabError> {
        let machine = |number| lab.machine(&format!("{name}-{number}"));
        (0..PAIRS).map(|number| Ok(reported(machine(number)?, field))).collect()
    };
    let kills = of_pairs("bursting", "oom_kills")?;
    let outside = of_pairs("twin", "oom_kills")?;
    // A guest that does not report makes the sum NaN.
    let more = kills.iter().zip(&outside).map(|(kills, other)| {
        if kills.is_nan() || other.is_nan() { f64::NAN } else { (kills - other).max(0.0) }
    });
    let bursts: f64 = of_pairs("bursting", "ops")?.iter().sum();
    let taken = |name: &str| {
        let machines = lab.machines().iter().zip(least);
        machines
            .filter(|(machine, _)| machine.spec().name.starts_with(name))
            .map(|(_, least)| MEMORY.minus(*least).as_mib())
            .collect::<Vec<_>>()
    };
    let smallest = |all: Vec<f64>| all.into_iter().smallest();
    let largest = |all: Vec<f64>| all.into_iter().largest();
    let mut figures = context.figures(SCENARIO.name, 1);
    let note = "programs killed in guests of the group beyond those killed in their twins outside";
    figures.tell("oom_kills", more.sum(), "count", note);
    let note = "the same in the twins, which Overbook does not touch";
    figures.tell("oom_kills_outside", outside.iter().sum(), "count", note);
    let note = "programs that took memory in the guests of the group and ended";
    figures.check("bursts", bursts, "count", note, Target::AtLeast(1.0));
    let note = "the least that was taken from a quiet guest, at the most";
    figures.tell("taken_idle", smallest(taken("quiet")), "MiB", note);
    let note = "the most that was taken from a bursting one";
    figures.tell("taken_bursting", largest(taken("bursting")), "MiB", note);
    Ok(figures)
}
