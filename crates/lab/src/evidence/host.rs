//! The computer that measures, and its other work.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use sys::cpu_time::CpuTime;

use crate::background::Background;
use crate::interrupt::{self, Interrupted};
use crate::lab::Provisions;

/// Time between two looks at the load.
const LOOK: Duration = Duration::from_secs(5);
/// CPUs that are busier than this disturb a measurement.
const QUIET: f32 = 0.15;

/// The computer; nothing names it or its owner.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Computer {
    pub cores: usize,
    /// Memory, in MiB.
    pub ram_mib: u64,
    /// The CPU's model, as the kernel names it.
    pub cpu: String,
    /// The kernel's release.
    pub kernel: String,
    /// QEMU's version.
    pub qemu: String,
    /// The guests' accelerator.
    pub accelerator: String,
}

/// The load of the computer, in processes that want a CPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HostLoad {
    /// Over the minute before the run.
    pub before: f64,
    /// The mean while it ran, its own part included.
    pub mean: f64,
    /// The most while it ran.
    pub most: f64,
    /// QEMUs that ran before it began.
    pub other_qemus: usize,
}

impl Computer {
    pub fn this(provisions: &Provisions) -> Self {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let about = read("/proc/cpuinfo");
        let model = about.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        let memory = read("/proc/meminfo");
        let kib = memory.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
        Self {
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            ram_mib: kib.unwrap_or_default() >> 10,
            cpu: model.map_or("unknown", |(_, name)| name.trim()).to_owned(),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            qemu: provisions.qemu.version.to_string(),
            accelerator: provisions.accel.to_string(),
        }
    }
}

/// Reads the load until it is asked for the sum.
#[derive(Debug)]
pub struct LoadMeter {
    before: f64,
    other_qemus: usize,
    reader: Background<Vec<f64>>,
}

impl LoadMeter {
    pub fn start() -> std::io::Result<Self> {
        let (before, other_qemus) = (load()?, qemus());
        let reader = Background::start("load", |stop| {
            let mut seen = Vec::new();
            while !stop.is_given() {
                seen.extend(load());
                std::thread::park_timeout(LOOK);
            }
            seen
        })?;
        Ok(Self { before, other_qemus, reader })
    }

    pub fn stop(self) -> HostLoad {
        let seen = self.reader.stop().unwrap_or_default();
        let mean = seen.iter().sum::<f64>() / (seen.len().max(1)) as f64;
        let most = seen.into_iter().fold(self.before, f64::max);
        let cents = |value: f64| (value * 100.0).round() / 100.0;
        let (mean, most) = (cents(mean), cents(most));
        HostLoad { before: self.before, mean, most, other_qemus: self.other_qemus }
    }
}

/// Waits until nothing else keeps the CPUs busy and no QEMU runs; tells each new reason to wait.
pub fn wait_until_quiet(mut may_wait: impl FnMut() -> bool) -> Result<bool, Interrupted> {
    let mut told = None;
    loop {
        let before = CpuTime::read().ok();
        interrupt::sleep(LOOK)?;
        let busy = before.and_then(|before| CpuTime::read().ok()?.busy_since(before));
        let Some(reason) = disturbance(busy, qemus()) else { return Ok(true) };
        if told.as_ref() != Some(&reason) {
            eprintln!("waiting for a quiet machine: {reason}");
            told = Some(reason);
        }
        if !may_wait() {
            return Ok(false);
        }
    }
}

/// The disturbance of a measurement, by the share of the CPUs that is busy and the number of QEMUs.
fn disturbance(busy: Option<f32>, qemus: usize) -> Option<String> {
    match (busy, qemus) {
        (_, 1..) => Some(format!("QEMUs that run: {qemus}")),
        (None, _) => Some("the kernel does not tell how busy its CPUs are".to_owned()),
        // In steps, so that the same reason has the same words.
        (Some(busy), 0) if busy > QUIET => {
            Some(format!("its CPUs are more than {:.0} % busy", (busy * 10.0).floor() * 10.0))
        }
        _ => None,
    }
}

fn load() -> std::io::Result<f64> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    let first = text.split_whitespace().next().and_then(|word| word.parse().ok());
    first.ok_or_else(|| std::io::Error::other(format!("/proc/loadavg says {text:?}")))
}

/// The number of QEMU's processes on this computer.
fn qemus() -> usize {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| std::fs::read_to_string(entry.path().join("comm")).ok());
    names.filter(|name| name.starts_with("qemu-system") || name.trim_end() == "kvm").count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_cpus_and_qemus_disturb_and_so_does_not_knowing() {
        assert_eq!(disturbance(Some(0.1), 0), None);
        assert!(disturbance(Some(0.57), 0).unwrap().contains("50 %"));
        assert!(disturbance(Some(0.1), 2).unwrap().contains('2'));
        assert!(disturbance(None, 0).is_some());
    }

    #[test]
    fn a_meter_tells_the_load_that_it_saw() {
        let load = LoadMeter::start().unwrap().stop();
        assert!(load.most >= load.mean && load.most >= load.before && load.before >= 0.0);
    }
}
