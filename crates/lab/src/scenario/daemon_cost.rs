//! `daemon-cost`: the CPU time and memory that the daemon and its processes take from the host
//! while the daemon manages six busy guests.

use std::time::Duration;

use model::{Bytes, Mode};
use sys::process::{Identity, Usage, children_of};

use super::{Context, Scenario};
use crate::daemon::Daemon;
use crate::figures::{Figure, Figures, Target};
use crate::lab::{Lab, LabError};
use crate::recording::median;
use crate::{fleet, interrupt};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "daemon-cost",
    summary: "CPU time and memory of the daemon and its processes, with six busy guests, over a minute",
    run,
};

/// Time for the daemon to start, find its guests and fill its buffers.
const WARM_UP: Duration = Duration::from_secs(5);
const MINUTE: u32 = 60;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut lab = Lab::start(&context.dir, &context.provisions, &fleet::quickstart(context.seed))?;
    let daemon = Daemon::start(&mut lab, Mode::Enforce)?;
    interrupt::sleep(WARM_UP)?;
    let before = usage(&daemon)?.cpu;
    let mut resident = Vec::new();
    for _ in 0..MINUTE {
        interrupt::sleep(Duration::from_secs(1))?;
        resident.push(megabytes(usage(&daemon)?.resident));
    }
    let spent = usage(&daemon)?.cpu.saturating_sub(before);
    let most = resident.iter().copied().fold(0.0, f64::max);
    if let Some(dead) = lab.machines().iter().find(|machine| !machine.alive()) {
        return Err(dead.death());
    }
    lab.stop()?;

    let mut figures = context.figures(SCENARIO.name, 1);
    let percent = spent.as_secs_f64() / f64::from(MINUTE) * 100.0;
    figures.add(
        "cpu_percent",
        Figure::new(percent, "%", "user and system time of one CPU, over 60 s, enforcing")
            .target(Target::Below(1.0))
            .paper("1 % at the same period (Kim 2014 §6.1)"),
    );
    figures.add(
        "rss_mb",
        Figure::new(most, "MB", format!("most resident; median {:.1}", median(resident)))
            .target(Target::Below(50.0)),
    );
    Ok(figures)
}

/// The usage of the daemon and its child processes, of which the API server always exists.
fn usage(daemon: &Daemon) -> Result<Usage, LabError> {
    // A zombie, which its parent has not reaped, has a usage too: no memory.
    daemon.ensure_alive()?;
    let gone = || LabError::Daemon("nothing; it is gone".to_owned());
    let own = daemon.process().usage().ok_or_else(gone)?;
    let children = children_of(daemon.process().pid)?;
    if children.is_empty() {
        return Err(LabError::Daemon("no process that answers the API".to_owned()));
    }
    let all = children.iter().filter_map(Identity::usage).fold(own, |sum, of| Usage {
        cpu: sum.cpu + of.cpu,
        resident: sum.resident.plus(of.resident),
    });
    Ok(all)
}

fn megabytes(size: Bytes) -> f64 {
    size.as_mib() * f64::from(1 << 20) / 1e6
}
