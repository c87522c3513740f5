//! `boot`: two guests of two tenants boot at their base memory, report, and leave nothing behind.
//!
//! The smallest experiment: it shows that the lab itself works on this machine.

use super::prelude::*;

pub(super) const SCENARIO: Scenario = Scenario {
    name: "boot",
    summary: "two guests in two groups boot, report, and leave nothing behind",
    measures: &[&[file!()], measured::DAEMON],
    claims: claims! {
        "above_base_mib" == 0.0 => "MiB",
            "A guest boots with the memory that it pays for and no more";
        "left_behind" == 0.0 => "count", "The lab leaves no process and no socket behind";
    },
    run,
};

/// A guest reports each second; the limit leaves room for a busy machine.
const REPORT_LIMIT: Duration = Duration::from_secs(120);

fn run(context: &Context) -> Result<Figures, LabError> {
    let spec =
        |name, group| context.guest(name, group, Bytes::mib(128), "idle").up_to(Bytes::mib(256));
    let mut lab = context.start([spec("a", "left"), spec("b", "right")])?;
    lab.wait_for("a report of both guests", REPORT_LIMIT, |lab| {
        Ok(lab.machines().iter().all(|machine| machine.last_metric().is_some()))
    })?;
    let slowest = lab.machines().iter().map(|m| m.boot_time().as_secs_f64()).largest();
    let mut above_base = 0.0;
    for machine in lab.machines() {
        above_base += machine.balloon()?.minus(machine.spec().memory_base).as_mib();
    }
    let processes: Vec<_> = lab.machines().iter().map(|machine| machine.process()).collect();
    let sockets: Vec<_> = lab.machines().iter().map(|m| m.files().daemon_socket.clone()).collect();
    lab.stop()?;
    let left_processes = processes.iter().filter(|process| process.is_alive()).count();
    let left_sockets = sockets.iter().filter(|socket| socket.exists()).count();
    let left = u32::try_from(left_processes + left_sockets).unwrap_or(u32::MAX);

    let mut figures = context.figures(SCENARIO.name, 1);
    let note = "start of QEMU to workload at base memory, slower of two";
    figures.tell("boot_s_max", slowest, "s", note);
    figures.tell("above_base_mib", above_base, "MiB", "memory beyond base when the workload runs");
    figures.tell("left_behind", f64::from(left), "count", "processes and sockets after the end");
    Ok(figures)
}
