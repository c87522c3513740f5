//! `lab status`: the running guests, their memory, and the last report of each workload.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::Serialize;
use serde_json::Value;

use crate::accel::Accel;
use crate::machine::Files;
use crate::metrics;
use crate::qmp::Qmp;
use crate::state;

/// Timeout for QEMU. A scenario may use the QMP socket of its guests; their memory is then
/// unknown.
const PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Serialize)]
pub struct LabStatus {
    /// Whether the process that holds the lab runs.
    pub running: bool,
    pub holder_pid: Option<u32>,
    pub age_s: Option<u64>,
    /// The accelerator that the guests run on.
    pub accel: Option<Accel>,
    pub machines: Vec<MachineStatus>,
    pub helpers: Vec<HelperStatus>,
}

#[derive(Debug, Serialize)]
pub struct MachineStatus {
    pub name: String,
    pub group: String,
    pub pid: u32,
    pub alive: bool,
    /// The guest's memory, by its balloon; `None` when QEMU does not answer.
    pub balloon_bytes: Option<u64>,
    pub last_metric: Option<Value>,
    pub last_metric_age_s: Option<f64>,
}

#[derive(Debug, Serialize)]
pub struct HelperStatus {
    pub name: String,
    pub pid: u32,
    pub alive: bool,
}

/// Reads the state of the lab in `dir`, without disturbing it.
pub fn read(dir: &Path) -> LabStatus {
    let Some(record) = state::read_record(dir) else {
        let (machines, helpers) = (Vec::new(), Vec::new());
        let (running, holder_pid, age_s, accel) = (false, None, None, None);
        return LabStatus { running, holder_pid, age_s, accel, machines, helpers };
    };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let (mut machines, mut helpers) = (Vec::new(), Vec::new());
    for child in &record.children {
        let (name, pid) = (child.name.clone(), child.process.pid);
        let alive = child.process.identity().is_alive();
        match &child.group {
            Some(group) => machines.push(machine(dir, name, group.clone(), pid, alive)),
            None => helpers.push(HelperStatus { name, pid, alive }),
        }
    }
    LabStatus {
        running: record.holder.identity().is_alive(),
        holder_pid: Some(record.holder.pid),
        age_s: Some(now.as_secs().saturating_sub(record.since)),
        accel: record.accel,
        machines,
        helpers,
    }
}

fn machine(dir: &Path, name: String, group: String, pid: u32, alive: bool) -> MachineStatus {
    let files = Files::new(dir, &name);
    let balloon = || Qmp::connect(&files.lab_socket, PATIENCE).ok()?.balloon().ok();
    let balloon_bytes = if alive { balloon() } else { None };
    let (last_metric, age) = metrics::last_in(&files.metrics).unzip();
    let last_metric_age_s = age.map(|age| age.as_secs_f64());
    MachineStatus { name, group, pid, alive, balloon_bytes, last_metric, last_metric_age_s }
}

impl LabStatus {
    pub fn to_table(&self) -> String {
        let Some(holder) = self.holder_pid else { return "no lab here\n".to_owned() };
        let mut text = String::new();
        let state =
            if self.running { "running" } else { "its holder died; `overbook lab down` sweeps" };
        let accel = self.accel.map_or_else(|| "?".to_owned(), |accel| accel.to_string());
        let age = self.age_s.unwrap_or_default();
        let _ =
            writeln!(text, "lab: {state} for {age} s, held by process {holder}, guests on {accel}");
        let _ = writeln!(
            text,
            "{:<12} {:<10} {:>8} {:>6} {:>9}  last report",
            "machine", "group", "pid", "alive", "memory"
        );
        for machine in &self.machines {
            let mib = |bytes: u64| format!("{} MiB", bytes >> 20);
            let memory = machine.balloon_bytes.map_or_else(|| "?".to_owned(), mib);
            let report = machine.last_metric.as_ref().map(Value::to_string);
            let report = report.unwrap_or_else(|| "none yet".to_owned());
            let alive = if machine.alive { "yes" } else { "no" };
            let _ = writeln!(
                text,
                "{:<12} {:<10} {:>8} {alive:>6} {memory:>9}  {report}",
                machine.name, machine.group, machine.pid
            );
        }
        for helper in &self.helpers {
            let alive = if helper.alive { "yes" } else { "no" };
            let _ = writeln!(
                text,
                "{:<12} {:<10} {:>8} {alive:>6}",
                helper.name, "(helper)", helper.pid
            );
        }
        text
    }
}
