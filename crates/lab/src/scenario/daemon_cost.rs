//! `daemon-cost`: the CPU time and memory that the daemon takes from the host, without anything
//! that needs a worker, and with everything on.
//!
//! There are three setups, of a minute each: the six busy guests of `quickstart` under a daemon
//! that moves balloons only; the same six with everything on; forty small guests with
//! everything on. *Everything* is tracking, merging, taking of freed memory, paging, lending, and a
//! disk with a cache. The daemon and the process that answers its API count together. The groups'
//! workers have budgets of their own, and are told apart.
//!
//! A part that is not at work costs nothing. So each setup counts the parts that the daemon's own
//! readings show at work.

use std::collections::BTreeSet;

use model::HostView;
use sys::process::{Identity, Usage, children_of};

use super::prelude::*;
use crate::fleet::HARD_DISK_IOPS;
use crate::remote_swap::{Disk, GROUP, RemoteSwap};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "daemon-cost",
    summary: "CPU time and memory of the daemon, bare and with everything on, six guests and forty",
    measures: &[&[file!()], measured::POLICY, measured::DAEMON, measured::API],
    claims: claims! {
        "cpu_percent" < 1.0 => "%",
            "The daemon takes next to no CPU where it moves balloons only (six guests, 60 s)",
            "1 % at the same period (Kim 2014 §6.1)";
        "rss_mb" < 50.0 => "MB",
            "The daemon and the process that answers the API are small there";
        "cpu_percent_6" < 1.0 => "%",
            "They take next to no CPU with everything on (six guests, 60 s)", "1 %";
        "rss_mb_6" < 50.0 => "MB", "They are small with everything on";
        "on_6" == PARTS => "count", "All parts are at work meanwhile";
        "cpu_percent_40" < 1.0 => "%",
            "They take next to no CPU with everything on (forty guests, 60 s)", "1 %";
        "rss_mb_40" < 50.0 => "MB", "They are small with everything on and forty guests";
        "on_40" == PARTS => "count", "All parts are at work meanwhile";
        "workers_cpu_percent_6" => "%", "The workers of six guests take this part of a CPU";
        "workers_cpu_percent_40" => "%", "The workers of forty guests take this part of a CPU";
    },
    run,
};

/// Time for the daemon to start, find its guests and fill its buffers.
const WARM_UP: Duration = Duration::from_secs(5);
const MINUTE: u32 = 60;
/// Timeout for all parts to begin to work.
const ON_LIMIT: Duration = Duration::from_secs(180);
/// Parts that a daemon's readings can show at work: see [`parts_on`].
const PARTS: f64 = 5.0;

const DATA: Bytes = Bytes::mib(64);
const ZRAM: Bytes = Bytes::mib(2048);

/// The costs in one setup.
struct DaemonCost {
    /// The end of its figures' names.
    end: &'static str,
    /// CPU time of the daemon and the process that answers its API, and of all workers.
    cpu: Duration,
    workers_cpu: Duration,
    /// Memory of the daemon and that process, second by second, in MB.
    resident_mb: Vec<f64>,
    /// The number of parts at work in the end.
    on: usize,
}

fn run(context: &Context) -> Result<Figures, LabError> {
    context.say("Six guests, balloons only ...");
    let bare = measure(context, "", fleet::quickstart(context.seed), None)?;
    context.say("Six guests, everything on ...");
    let six = everything(context, "_6", fleet::managed(fleet::quickstart(context.seed), GROUP))?;
    context.say("Forty guests, everything on ...");
    let forty = everything(context, "_40", fleet::many(context.seed, GROUP))?;
    let mut figures = context.figures(SCENARIO.name, 1);
    add_figures(&mut figures, &[bare, six, forty]);
    Ok(figures)
}

fn everything(
    context: &Context,
    end: &'static str,
    mut guests: Vec<MachineSpec>,
) -> Result<DaemonCost, LabError> {
    // Declared first, dropped last: memory must not lie in it then.
    let _zram = Zram::new(ZRAM)?;
    let read_delay_us = 1_000_000 / HARD_DISK_IOPS;
    let disk = Disk { size: DATA, read_delay_us, lent: Bytes::ZERO, cache: true };
    let dir = context.dir.with_extension("data");
    let served = RemoteSwap::start(&dir, &guests[0].name, disk)?;
    guests[0] = served.given_as_data(guests[0].clone());
    let cost = measure(context, end, guests, Some(&served))?;
    served.end()?;
    Ok(cost)
}

/// `disk`: the first guest's; with it, everything is on.
fn measure(
    context: &Context,
    end: &'static str,
    guests: Vec<MachineSpec>,
    disk: Option<&RemoteSwap>,
) -> Result<DaemonCost, LabError> {
    // Forty that boot at once would not be up in time.
    let mut lab = Lab::start_in_turn(&context.dir, &context.provisions, &guests, |_| Ok(()))?;
    let settings = match disk {
        None => DaemonSettings::from(Mode::Enforce),
        Some(disk) => {
            disk.make_known(&lab)?;
            DaemonSettings::everything()
        }
    };
    let daemon = Daemon::start(&mut lab, settings)?;
    interrupt::sleep(WARM_UP)?;
    if disk.is_some() {
        wait_until_all_on(context, &lab, &daemon)?;
    }
    let mut workers = BTreeSet::new();
    let (before, workers_before) = (usage(&daemon, &mut workers)?.cpu, workers_cpu(&daemon)?);
    let mut resident_mb = Vec::new();
    for _ in 0..MINUTE {
        interrupt::sleep(Duration::from_secs(1))?;
        resident_mb.push(megabytes(usage(&daemon, &mut workers)?.resident));
    }
    let cpu = usage(&daemon, &mut workers)?.cpu.saturating_sub(before);
    let workers_cpu = workers_cpu(&daemon)?.saturating_sub(workers_before);
    lab.ensure_alive()?;
    let on = parts_on(&daemon.case()?.view);
    lab.stop()?;
    Ok(DaemonCost { end, cpu, workers_cpu, resident_mb, on })
}

/// Waits for all parts, for as long as [`ON_LIMIT`]: a part that never works is a missed target,
/// and no error.
fn wait_until_all_on(context: &Context, lab: &Lab, daemon: &Daemon) -> Result<(), LabError> {
    let all_on = |_: &Lab| {
        let case = daemon.latest()?;
        Ok(case.is_some_and(|case| parts_on(&case.view) as f64 >= PARTS))
    };
    match lab.wait_for("all parts to be at work", ON_LIMIT, all_on) {
        Err(error @ LabError::Timeout { .. }) => {
            context.say(&format!("  {error}"));
            Ok(())
        }
        result => result,
    }
}

/// The number of parts that these readings show at work: a worker for each group of VMs, a pool
/// with pages, tracking, paging, and a disk's cache.
fn parts_on(view: &HostView) -> usize {
    let workers = || view.workers.values().map(|worker| &worker.value);
    let any_vm = |has: fn(&model::VmView) -> bool| view.vms.values().any(has);
    let parts = [
        !view.workers.is_empty() && workers().all(|worker| worker.pid.is_some()),
        workers().any(|worker| !worker.pool.is_zero()),
        any_vm(|vm| vm.tracking.as_ref().is_some_and(|it| it.value.working_set.is_some())),
        any_vm(|vm| vm.cold.is_some()),
        !view.caches.is_empty(),
    ];
    parts.into_iter().filter(|is_on| *is_on).count()
}

/// The usage of the daemon and its child processes without the workers; the process that answers
/// the API always exists. `workers` are all that were seen: in a second in which the daemon does
/// not answer, they are known from before.
fn usage(daemon: &Daemon, workers: &mut BTreeSet<u32>) -> Result<Usage, LabError> {
    // A zombie, which its parent has not reaped, has a usage too: no memory.
    daemon.ensure_alive()?;
    let gone = || LabError::Daemon("nothing; it is gone".to_owned());
    let own = daemon.process().usage().ok_or_else(gone)?;
    if let Some(case) = daemon.latest()? {
        workers.extend(case.view.workers.values().filter_map(|worker| worker.value.pid));
    }
    let mut children = children_of(daemon.process().pid)?;
    children.retain(|child| !workers.contains(&child.pid));
    if children.is_empty() {
        return Err(LabError::Daemon("no process that answers the API".to_owned()));
    }
    let all = children.iter().filter_map(Identity::usage).fold(own, |sum, of| Usage {
        cpu: sum.cpu + of.cpu,
        resident: sum.resident.plus(of.resident),
    });
    Ok(all)
}

/// CPU time of all workers since the daemon started.
fn workers_cpu(daemon: &Daemon) -> Result<Duration, LabError> {
    let view = daemon.case()?.view;
    Ok(Duration::from_micros(view.workers.values().map(|worker| worker.value.cpu_us).sum()))
}

fn add_figures(figures: &mut Figures, costs: &[DaemonCost]) {
    let percent = |cpu: Duration| cpu.as_secs_f64() / f64::from(MINUTE) * 100.0;
    for DaemonCost { end, cpu, workers_cpu, resident_mb, on } in costs {
        let note = "user and system time of one CPU, over 60 s, enforcing";
        figures.tell(&format!("cpu_percent{end}"), percent(*cpu), "%", note);
        let most = resident_mb.iter().copied().largest();
        let note = format!("most resident; median {:.1}", median(resident_mb.iter().copied()));
        figures.tell(&format!("rss_mb{end}"), most, "MB", note);
        if end.is_empty() {
            continue;
        }
        let note = "of one CPU, over the same 60 s, by the daemon's readings";
        let name = format!("workers_cpu_percent{end}");
        figures.tell(&name, percent(*workers_cpu), "%", note);
        let note = "workers for all groups, pools, tracking, paging, a disk's cache";
        figures.tell(&format!("on{end}"), *on as f64, "count", note);
    }
}

fn megabytes(size: Bytes) -> f64 {
    size.as_mib() * f64::from(1 << 20) / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(end: &'static str) -> DaemonCost {
        let (cpu, workers_cpu) = (Duration::from_millis(300), Duration::from_secs(6));
        DaemonCost { end, cpu, workers_cpu, resident_mb: vec![30.0, 32.0, 31.0], on: 5 }
    }

    fn figures(change: impl Fn(&mut DaemonCost)) -> Figures {
        let mut costs = ["", "_6", "_40"].map(cost);
        change(&mut costs[2]);
        Figures::invented(SCENARIO.name, |figures| add_figures(figures, &costs))
    }

    #[test]
    fn costs_are_those_of_a_minute_and_workers_are_told_apart() {
        let figures = figures(|_| ());
        figures.assert_near(&[
            ("cpu_percent_40", 0.5),
            ("workers_cpu_percent_40", 10.0),
            ("rss_mb_6", 32.0),
        ]);
        assert!(figures.passed(), "{}", figures.to_table());
    }

    #[test]
    fn a_part_that_is_off_and_memory_that_was_not_read_miss() {
        assert!(!figures(|cost| cost.on = 4).met("on_40"));
        assert!(!figures(|cost| cost.resident_mb.clear()).met("rss_mb_40"));
        assert!(!figures(|cost| cost.resident_mb.push(f64::NAN)).passed());
        let costly = figures(|cost| cost.cpu = Duration::from_secs(1));
        assert!(!costly.met("cpu_percent_40"));
    }

    #[test]
    fn an_empty_view_shows_no_part_at_work() {
        assert_eq!(parts_on(&HostView::default()), 0);
    }
}
