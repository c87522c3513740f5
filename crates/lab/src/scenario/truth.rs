//! `truth`: the tracer's accuracy as ground truth, and its cost.
//!
//! A guest works at random over an array of known size. Its exact working set, from the pages
//! that the tracer saw it touch, must be that array plus the little that kernel and program need.
//! Then three workloads run with and without the tracer.

use super::prelude::*;
use crate::meb::progress::Lines;
use crate::truth::{Definition, Truth};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "truth",
    summary: "the tracer against arrays of known size, and its cost on three workloads",
    measures: &[&[file!()], measured::TRACER, measured::MEB],
    claims: &[],
    run,
};

const MEMORY: Bytes = Bytes::mib(400);
const ARRAYS_MIB: [u32; 3] = [40, 100, 200];
const WORKLOADS: [&str; 3] = ["random-array --mb 100", "sort --mb 100", "web --mb 100"];
/// Long enough that the filling of the array no longer counts.
const SETTLE: Duration = Duration::from_secs(30);
const MEASURE: Duration = Duration::from_secs(10);

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    for mib in ARRAYS_MIB {
        context.say(&format!("A traced guest works on {mib} MiB ..."));
        let (found, trace_bytes) = known_array(context, mib)?;
        let most = Target::AtMost(f64::from(mib) * 1.05 + 12.0);
        let note = format!("exact working set of random-array --mb {mib}");
        figures.check(&format!("wss_mib_{mib}"), found, "MiB", note, most);
        let (name, note) = (format!("trace_mib_per_min_{mib}"), "growth of the trace file");
        figures.tell(&name, trace_bytes, "MiB/min", note);
    }
    for workload in WORKLOADS {
        context.say(&format!("{workload}, without the tracer and with it ..."));
        let plain = rate(context, workload, false)?;
        let traced = rate(context, workload, true)?;
        let name = workload.split(' ').next().unwrap_or_default().replace('-', "_");
        let note = format!("{plain:.0} ops/s become {traced:.0}");
        figures.tell(&format!("slowdown_{name}"), plain / traced, "x", note);
    }
    Ok(figures)
}

fn guest(context: &Context, workload: &str, traced: bool) -> MachineSpec {
    let spec = MachineSpec::new("vm", "g", MEMORY, MEMORY, workload);
    MachineSpec { seed: context.seed, traced, ..spec }
}

fn start(context: &Context, spec: MachineSpec) -> Result<Lab, LabError> {
    let lab = context.start([spec])?;
    progress::wait_until_working(&lab)?;
    Ok(lab)
}

/// The exact working set in MiB, and the growth of the trace in MiB per minute.
fn known_array(context: &Context, mib: u32) -> Result<(f64, f64), LabError> {
    let spec = guest(context, &format!("random-array --mb {mib}"), true);
    let mut lab = start(context, spec)?;
    let trace = lab.machine("vm")?.files().trace.clone();
    let before = std::fs::metadata(&trace)?.len();
    interrupt::sleep(SETTLE)?;
    let growth = Bytes(std::fs::metadata(&trace)?.len() - before);
    let mut truth = Truth::open(&trace, Definition::default())?;
    truth.advance_to(u64::MAX)?;
    lab.stop()?;
    let found = truth.exact().working_set_size().as_mib();
    Ok((found, growth.as_mib() / SETTLE.as_secs_f64() * 60.0))
}

/// Operations per second, by the guest's own count.
fn rate(context: &Context, workload: &str, traced: bool) -> Result<f64, LabError> {
    let mut lab = start(context, guest(context, workload, traced))?;
    let mut lines = Lines::of(&lab);
    lines.look_for(&lab, MEASURE)?;
    lab.stop()?;
    Ok(lines.rate(0))
}
