//! `daemon-cost`: what the daemon itself takes from the host while it manages six busy guests.

use std::time::Duration;

use model::Mode;
use sys::process::{Identity, Usage};

use super::{Context, Scenario};
use crate::daemon::Daemon;
use crate::figures::{Figure, Figures, Target};
use crate::lab::{Lab, LabError};
use crate::recording::median;
use crate::{fleet, interrupt};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "daemon-cost",
    summary: "the daemon's own CPU time and memory with six busy guests, over a minute",
    run,
};

/// The daemon starts, finds its guests and fills its buffers.
const WARM_UP: Duration = Duration::from_secs(5);
const MINUTE: u32 = 60;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut lab = Lab::start(&context.dir, &context.provisions, &fleet::quickstart(context.seed))?;
    let daemon = Daemon::start(&mut lab, Mode::Enforce)?;
    interrupt::sleep(WARM_UP)?;
    let process = daemon.process();
    let before = usage(process)?.cpu;
    let mut resident = Vec::new();
    for _ in 0..MINUTE {
        interrupt::sleep(Duration::from_secs(1))?;
        resident.push(usage(process)?.resident.as_mib());
    }
    let spent = usage(process)?.cpu.saturating_sub(before);
    let most = resident.iter().copied().fold(0.0, f64::max);
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

fn usage(process: Identity) -> Result<Usage, LabError> {
    process.usage().ok_or_else(|| LabError::Daemon("nothing; it is gone".to_owned()))
}
