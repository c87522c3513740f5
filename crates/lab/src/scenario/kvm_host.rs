//! `kvm-host`: guests under KVM, on several kernels, keep every byte.
//!
//! Each kernel is booted in virtual hosts ([`crate::virtual_host`]), one for each experiment, so
//! that the death of one does not affect the others. The first checks the kernel: whether KVM
//! with nested page tables, cgroups, zram, MGLRU and (where it was built in) DAMON work. The
//! others run `reclaimed`, `shim-stress`, `dedup-soak` and `free-soak` unchanged.
//!
//! An experiment without a result has no figure, and so misses its target.

use serde_json::Value;

use super::prelude::*;
use crate::virtual_host::{HostError, NEWEST, VirtualHost};

pub(super) const SCENARIO: Scenario = Scenario {
    name: "kvm-host",
    summary: "guests under KVM on Linux 6.1, 6.12 and the newest (emulated) keep every byte",
    measures: &[&[file!()], measured::SHIM, measured::SYS, measured::WORKER],
    claims: &[],
    run,
};

const KERNELS: [&str; 3] = ["6.1", "6.12", NEWEST];
const USUAL_MINUTES: u32 = 1;
const EXPERIMENTS: [&str; 4] = ["reclaimed", "shim-stress", "dedup-soak", "free-soak"];
/// A boot, guests' boots and two rounds of verification, all at a thirtieth of the speed.
const OVERHEAD: Duration = Duration::from_secs(600);

/// One line for each feature that a host of guests must have; `no` before a missing one.
const CHECKS: &str = r#"
check() { name=$1; shift; if "$@" > /dev/null 2>&1; then echo "yes $name"; else echo "no $name"; fi; }
check kvm test -c /dev/kvm
check kvm_amd test -d /sys/module/kvm_amd
check nested_pages grep -qE '[1Y]' /sys/module/kvm_amd/parameters/npt
# Since Linux 6.3 there is no such parameter to look at on some builds.
[ -e /sys/module/kvm/parameters/tdp_mmu ] && check tdp_mmu grep -q Y /sys/module/kvm/parameters/tdp_mmu
mkdir /sys/fs/cgroup/check
check memory_reclaim test -w /sys/fs/cgroup/check/memory.reclaim
check cpu_weight test -w /sys/fs/cgroup/check/cpu.weight
check io_max test -w /sys/fs/cgroup/check/io.max
check pids_max test -w /sys/fs/cgroup/check/pids.max
check mglru test -r /sys/kernel/mm/lru_gen/enabled
check ksm test -w /sys/kernel/mm/ksm/run
check pressure test -r /proc/pressure/memory
uname -r | grep -q '^6\.1\.' || check damon test -w /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds
check zram_size sh -c 'echo 64M > /sys/block/zram0/disksize'
check zram_swap sh -c 'mkswap /dev/zram0 && swapon /dev/zram0'
"#;

fn run(context: &Context) -> Result<Figures, LabError> {
    let mut figures = context.figures(SCENARIO.name, 1);
    let all = || KERNELS.map(str::to_owned).to_vec();
    let kernels = if context.kernels.is_empty() { all() } else { context.kernels.clone() };
    let minutes = context.minutes.unwrap_or(USUAL_MINUTES);
    for kernel in &kernels {
        context.say(&format!("Linux {kernel}: what it has ..."));
        add_checks(&mut figures, kernel)?;
        for experiment in EXPERIMENTS {
            context.say(&format!("Linux {kernel}: {experiment} ..."));
            let seed = context.seed;
            let options = match experiment {
                "reclaimed" => String::new(),
                _ => format!(" --minutes {minutes}"),
            };
            let script =
                format!("overbook-lab run {experiment} --accel kvm --seed {seed}{options} --json");
            let limit = OVERHEAD + Duration::from_secs(60) * minutes;
            let said = ask(kernel, &script, limit)?;
            add_experiment(&mut figures, kernel, experiment, &said);
        }
    }
    Ok(figures)
}

/// Runs a script; returns its output, followed by the error of a host that died or timed out.
/// A faulty request and an interruption are errors.
fn ask(kernel: &str, script: &str, limit: Duration) -> Result<String, LabError> {
    let mut output = Vec::new();
    let result = VirtualHost::new(kernel).run(script.as_bytes(), limit, &mut output);
    let mut said = String::from_utf8_lossy(&output).into_owned();
    match result {
        Ok(_) => {}
        Err(LabError::Host(error @ (HostError::Died { .. } | HostError::TimedOut { .. }))) => {
            said += &format!("\n{error}")
        }
        Err(error) => return Err(error),
    }
    Ok(said)
}

fn add_checks(figures: &mut Figures, kernel: &str) -> Result<(), LabError> {
    let said = ask(kernel, CHECKS, OVERHEAD)?;
    let with = |prefix: &str| -> Vec<&str> {
        said.lines().filter_map(|line| line.strip_prefix(prefix)).collect()
    };
    let (has, lacks) = (with("yes "), with("no "));
    let note = match lacks.is_empty() {
        true => "things that a host of guests must have".to_owned(),
        false => format!("it lacks {}", lacks.join(", ")),
    };
    let name = |what: &str| format!("{kernel}_{what}");
    figures.tell(&name("has"), has.len() as f64, "count", has.join(", "));
    let lacking = if has.is_empty() { f64::NAN } else { lacks.len() as f64 };
    figures.check(&name("lacks"), lacking, "count", note, Target::Equals(0.0));
    Ok(())
}

fn add_experiment(figures: &mut Figures, kernel: &str, experiment: &str, said: &str) {
    let result = Inner::parse(said);
    if result.bad_bytes.is_none() || !result.missed.is_empty() {
        figures.preface += &format!("Linux {kernel}, {experiment}:\n{}\n\n", said.trim());
    }
    let name = |what: &str| format!("{kernel}_{}_{what}", experiment.replace('-', "_"));
    let bad_bytes = result.bad_bytes.unwrap_or(f64::NAN);
    let note = "wrong bytes that its guests found";
    figures.check(&name("bad_bytes"), bad_bytes, "B", note, Target::Equals(0.0));
    // Times in a virtual host mean nothing, and some targets are times.
    let note = match result.missed.is_empty() {
        true => "of its other targets".to_owned(),
        false => result.missed.join(", "),
    };
    figures.tell(&name("missed"), result.missed.len() as f64, "count", note);
}

/// The result of an experiment in a virtual host.
#[derive(Debug, Default, PartialEq)]
struct Inner {
    /// Wrong bytes of all its guests; `None`: it has no result.
    bad_bytes: Option<f64>,
    /// The figures that miss their targets, with their values.
    missed: Vec<String>,
}

impl Inner {
    fn parse(said: &str) -> Self {
        let mut inner = Self::default();
        let objects = said.lines().rev().filter(|line| line.starts_with('{'));
        let mut results = objects.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let Some(result) = results.next() else { return inner };
        for (name, figure) in result["figures"].as_object().into_iter().flatten() {
            let value = figure["value"].as_f64();
            if name.ends_with("bad_bytes") {
                inner.bad_bytes = value.map(|value| value + inner.bad_bytes.unwrap_or(0.0));
            } else if !is_met(figure["target"].as_str(), value) {
                inner.missed.push(format!("{name} {}", figure["value"]));
            }
        }
        inner
    }
}

/// Whether the value of a figure meets its target, given as [`Target`] displays it.
fn is_met(target: Option<&str>, value: Option<f64>) -> bool {
    let Some((sign, limit)) = target.and_then(|target| target.split_once(' ')) else { return true };
    let Ok(limit) = limit.parse() else { return false };
    let target = match sign {
        ">=" => Target::AtLeast(limit),
        "<=" => Target::AtMost(limit),
        "<" => Target::Below(limit),
        _ => Target::Equals(limit),
    };
    value.is_some_and(|value| target.is_met_by(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_bytes_of_all_guests_count_and_missed_targets_are_named() {
        let said = "progress\n{\"figures\":{\"bad_bytes\":{\"value\":0.0,\"target\":\"== 0\"},\
            \"guests_bad_bytes\":{\"value\":2.0,\"target\":\"== 0\"},\
            \"kills\":{\"value\":0.0,\"target\":\">= 1\"},\
            \"traps\":{\"value\":5.0,\"target\":\">= 1\"}}}\n";
        let inner = Inner::parse(said);
        assert_eq!(inner, Inner { bad_bytes: Some(2.0), missed: vec!["kills 0.0".to_owned()] });
    }

    #[test]
    fn what_came_to_no_result_has_no_count() {
        assert_eq!(Inner::parse("overbook lab: a machine died\n").bad_bytes, None);
    }
}
