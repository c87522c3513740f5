//! `daemon-kill`: the daemon is killed twenty times at random moments, under the load of
//! `quickstart`: where it moves balloons only, and where everything is on; then once more with
//! forty small guests and everything on.
//!
//! No guest may notice: every guest lives on with its data intact. Each new daemon finds its
//! guests and brings every balloon back to the group's targets within seconds. A guest that dies
//! meanwhile fails the run, with its last output. With everything on targets move all the time, so
//! a new daemon has taken over when each group has its worker again.

use std::collections::{BTreeMap, BTreeSet};

use model::VmName;

use super::prelude::*;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "daemon-kill",
    summary: "the daemon is killed at random moments, bare and with all on: no guest is harmed",
    measures: &[&[file!()], measured::POLICY, measured::DAEMON, measured::WORKER, measured::SHIM],
    claims: claims! {
        "bad_bytes" == 0.0 => "B",
            "The daemon may be killed at any moment, and no byte is lost (20 kills)";
        "dead_guests" == 0.0 => "count", "No guest dies with a killed daemon";
        "converge_s_max" <= 10.0 => "s", "A new daemon has all balloons on target soon";
        "bad_bytes_6" == 0.0 => "B",
            "It may be killed with everything on, and no byte is lost (six guests, 20 kills)";
        "dead_guests_6" == 0.0 => "count", "No guest dies with everything on";
        "bad_bytes_40" == 0.0 => "B", "No byte is lost of forty guests, either (20 kills)";
        "dead_guests_40" == 0.0 => "count", "None of the forty dies";
        "workers_s_max_6" => "s", "A new daemon has a worker for each group of the six after this";
        "workers_s_max_40" => "s", "It has one for each group of the forty after this";
    },
    run,
};

const KILLS: u32 = 20;
/// Lifetimes of a daemon: from its first tick to well into its work.
const LIFE_MS: (u64, u64) = (200, 4_000);
const ZRAM: Bytes = Bytes::mib(2048);
/// When to stop waiting for a daemon to converge; the figure's target is lower.
const CONVERGE_LIMIT: Duration = Duration::from_secs(60);
/// A target may differ by this much from the one before the kill: one unit of reprovisioning.
const TOLERANCE: Bytes = policy::tuning::UNIT;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, KILLS);
    balloons_only(context, &mut figures)?;
    let six = fleet::managed(fleet::quickstart(context.seed), "shop");
    for (end, guests) in [("6", six), ("40", fleet::many(context.seed, "shop"))] {
        context.say(&format!("{end} guests, everything on ..."));
        everything(context, end, &guests, &mut figures)?;
    }
    Ok(figures)
}

fn everything(
    context: &Context,
    end: &str,
    guests: &[MachineSpec],
    figures: &mut Figures,
) -> Result<(), LabError> {
    // Declared first, dropped last: memory must not lie in it then.
    let _zram = Zram::new(ZRAM)?;
    // Forty that boot at once would not be up in time.
    let mut lab = Lab::start_in_turn(&context.dir, &context.provisions, guests, |_| Ok(()))?;
    let groups: BTreeSet<&str> = guests.iter().map(|guest| guest.group.as_str()).collect();
    let daemon = Daemon::start(&mut lab, DaemonSettings::everything())?;
    fleet::wait_until_working(&lab)?;
    wait_for_workers(&lab, &daemon, groups.len())?;
    let have_workers = |lab: &Lab, daemon: &Daemon, ()| wait_for_workers(lab, daemon, groups.len());
    let [bad, dead, slowest] = kills(context, lab, daemon, |_| Ok(()), have_workers)?;
    let note = format!("wrong bytes found by `verify`, of {end} guests, everything on");
    figures.tell(&format!("bad_bytes_{end}"), bad, "B", note);
    let note = "guests not alive at the end, everything on";
    figures.tell(&format!("dead_guests_{end}"), dead, "count", note);
    let note = format!("start of the daemon to a worker for each group, worst of {KILLS}");
    figures.tell(&format!("workers_s_max_{end}"), slowest, "s", note);
    Ok(())
}

/// Waits until each group has a worker that runs.
fn wait_for_workers(lab: &Lab, daemon: &Daemon, groups: usize) -> Result<(), LabError> {
    lab.wait_for("every group to have a worker", CONVERGE_LIMIT, |_| {
        let Some(case) = daemon.latest()? else { return Ok(false) };
        let running = case.view.workers.values().filter(|worker| worker.value.pid.is_some());
        Ok(running.count() == groups)
    })
}

/// Kills and restarts the daemon; the wrong bytes, the dead guests and the slowest recovery.
fn kills<T>(
    context: &Context,
    mut lab: Lab,
    mut daemon: Daemon,
    before: impl Fn(&Lab) -> Result<T, LabError>,
    wait: impl Fn(&Lab, &Daemon, T) -> Result<(), LabError>,
) -> Result<[f64; 3], LabError> {
    let mut random = Random::new(context.seed);
    let mut slowest = Duration::ZERO;
    for _ in 0..KILLS {
        interrupt::sleep(random.millis(LIFE_MS))?;
        let before = before(&lab)?;
        daemon.kill(&mut lab)?;
        // The time without a daemon is random, too.
        interrupt::sleep(random.millis((0, 1_000)))?;
        let restarted = Instant::now();
        daemon.restart(&mut lab)?;
        wait(&lab, &daemon, before)?;
        slowest = slowest.max(restarted.elapsed());
    }
    let bad_bytes = fleet::bad_bytes(&lab)?;
    let dead = lab.machines().iter().filter(|machine| !machine.alive()).count();
    lab.stop()?;
    Ok([bad_bytes as f64, dead as f64, slowest.as_secs_f64()])
}

fn balloons_only(context: &Context, figures: &mut Figures) -> Result<(), LabError> {
    let mut lab = context.start(fleet::quickstart(context.seed))?;
    let daemon = Daemon::start(&mut lab, Mode::Enforce)?;
    fleet::wait_until_working(&lab)?;
    let converge = |lab: &Lab, daemon: &Daemon, before: BTreeMap<VmName, Bytes>| {
        lab.wait_for("the targets to converge", CONVERGE_LIMIT, |lab| {
            has_converged(lab, daemon, &before)
        })
    };
    let [bad, dead, slowest] = kills(context, lab, daemon, balloons, converge)?;
    figures.tell("bad_bytes", bad, "B", "wrong bytes found by `verify`");
    figures.tell("dead_guests", dead, "count", "guests not alive at the end");
    let note = format!("start of the daemon to all balloons on target, worst of {KILLS}");
    figures.tell("converge_s_max", slowest, "s", note);
    Ok(())
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
