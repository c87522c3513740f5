//! `daemon-kill`: the daemon is killed twenty times at random moments, under the load of
//! `quickstart`.
//!
//! No guest may notice: every guest lives on with its data intact. Each new daemon finds its
//! guests and brings every balloon back to the group's targets within seconds. A guest that dies
//! meanwhile fails the run, with its last output.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::{Bytes, Mode, VmName};

use super::{Context, Scenario};
use crate::daemon::Daemon;
use crate::figures::{Figure, Figures, Target};
use crate::lab::{Lab, LabError};
use crate::random::Random;
use crate::{fleet, interrupt};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "daemon-kill",
    summary: "the daemon is killed 20 times at random moments and no guest is harmed",
    run,
};

const KILLS: u32 = 20;
/// Lifetimes of a daemon: from its first tick to well into its work.
const LIFE_MS: (u64, u64) = (200, 4_000);
/// When to stop waiting for a daemon to converge; the figure's target is lower.
const CONVERGE_LIMIT: Duration = Duration::from_secs(60);
/// A target may differ by this much from the one before the kill: one unit of reprovisioning.
const TOLERANCE: Bytes = policy::tuning::UNIT;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut random = Random::new(context.seed);
    let fleet = fleet::quickstart(context.seed);
    let mut lab = Lab::start(&context.dir, &context.provisions, &fleet)?;
    let mut daemon = Daemon::start(&mut lab, Mode::Enforce)?;
    fleet::wait_until_working(&lab)?;

    let mut slowest = Duration::ZERO;
    for _ in 0..KILLS {
        interrupt::sleep(Duration::from_millis(random.between(LIFE_MS.0, LIFE_MS.1)))?;
        let before = balloons(&lab)?;
        daemon.kill(&mut lab)?;
        // The time without a daemon is random, too.
        interrupt::sleep(Duration::from_millis(random.between(0, 1_000)))?;
        let restarted = Instant::now();
        daemon.restart(&mut lab)?;
        lab.wait_for("the targets to converge", CONVERGE_LIMIT, |lab| {
            has_converged(lab, &daemon, &before)
        })?;
        slowest = slowest.max(restarted.elapsed());
    }
    let bad_bytes = fleet::bad_bytes(&lab)?;
    let dead = lab.machines().iter().filter(|machine| !machine.alive()).count();
    lab.stop()?;

    let mut figures = context.figures(SCENARIO.name, KILLS);
    #[expect(clippy::cast_precision_loss, reason = "a figure is a float, and zero is exact")]
    let (bad, dead) = (bad_bytes as f64, dead as f64);
    let none = Target::Equals(0.0);
    figures.add("bad_bytes", Figure::new(bad, "B", "wrong bytes found by `verify`").target(none));
    figures
        .add("dead_guests", Figure::new(dead, "count", "guests not alive at the end").target(none));
    figures.add(
        "converge_s_max",
        Figure::new(
            slowest.as_secs_f64(),
            "s",
            format!("start of the daemon to all balloons on target, worst of {KILLS}"),
        )
        .target(Target::AtMost(10.0)),
    );
    Ok(figures)
}

/// The balloons' sizes, as QEMU itself reports them.
fn balloons(lab: &Lab) -> Result<BTreeMap<VmName, Bytes>, LabError> {
    let of = |machine: &crate::lab::Machine| {
        Ok((VmName::from(machine.spec().name.as_str()), machine.balloon()?))
    };
    lab.machines().iter().map(of).collect()
}

/// Whether every guest is managed with fresh statistics, every balloon is on its target, and no
/// guest has lost memory that it had before the kill.
fn has_converged(
    lab: &Lab,
    daemon: &Daemon,
    before: &BTreeMap<VmName, Bytes>,
) -> Result<bool, LabError> {
    let Ok(case) = daemon.case() else { return Ok(false) };
    let plan = case.decide();
    let now = balloons(lab)?;
    let is_settled = |vm: &VmName, held: &Bytes| {
        let view = case.view.vms.get(vm)?;
        let target = plan.vms.get(vm)?.target?;
        let stats = view.stats.filter(|s| s.age(case.now) <= policy::tuning::STALE_AFTER)?;
        stats.value.total?;
        let actual = *now.get(vm)?;
        let is_on_target = actual.0.abs_diff(target.0) <= TOLERANCE.0;
        Some(is_on_target && actual.plus(TOLERANCE) >= *held)
    };
    Ok(before.iter().all(|(vm, held)| is_settled(vm, held) == Some(true)))
}
