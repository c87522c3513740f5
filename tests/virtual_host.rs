//! A virtual host is like a real one: its kernel has KVM and all mechanisms that reclaim memory,
//! and the lab's guests run under KVM in it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::PathBuf;
use std::time::Duration;

use lab::LabError;
use lab::virtual_host::{HostError, ScriptResult, VirtualHost};
use overbook_tests::{Requirement, provisions, requires, take_turn};
use serde_json::Value;

const KERNEL: &str = "6.12";
/// Long enough for a busy machine: the longest script takes two minutes on an idle one.
const LIMIT: Duration = Duration::from_secs(600);
/// Hosts that are started for one script.
const ATTEMPTS: u32 = 3;

/// Runs a script. `None`, with a message: the kernel is not available.
fn run(host: &VirtualHost, script: &str) -> Option<(ScriptResult, String)> {
    let mut output = Vec::new();
    match host.run(script.as_bytes(), LIMIT, &mut output) {
        Ok(outcome) => Some((outcome, String::from_utf8(output).unwrap())),
        Err(LabError::Host(HostError::Package(error))) => {
            requires(Requirement::Packages, Err(error))
        }
        Err(error) => panic!("{error}\n{}", String::from_utf8_lossy(&output)),
    }
}

/// Runs a scenario in a virtual host, after a script. `None`, with a message: no kernel.
///
/// The emulator at times runs not one instruction of a guest below KVM: its console stays empty
/// until the lab gives up. Overbook has not touched the guest by then, so a fresh host is tried.
fn scenario(name: &str, before: &str) -> Option<(ScriptResult, String, Value)> {
    let script = format!("{before}\nexec overbook-lab run {name} --json");
    let mut attempt = 0;
    loop {
        attempt += 1;
        let (outcome, output) = run(&VirtualHost::new(KERNEL), &script)?;
        if let Some(line) = output.lines().find(|line| line.starts_with('{')) {
            let result = serde_json::from_str(line).unwrap();
            return Some((outcome, output, result));
        }
        let never_ran = output.contains("its init has not spoken");
        assert!(never_ran && attempt < ATTEMPTS, "attempt {attempt}: {output}");
    }
}

#[test]
fn its_kernel_is_real_and_its_guests_run_under_kvm() {
    let (Some(_turn), Some(_)) = (take_turn(), provisions()) else { return };
    let before = r"
        set -e
        test -c /dev/kvm
        test $(cat /sys/module/kvm_amd/parameters/npt) != 0
        [ ! -e /sys/module/kvm/parameters/tdp_mmu ] || grep -q Y /sys/module/kvm/parameters/tdp_mmu
        grep -q Y /sys/module/kvm_amd/parameters/npt || grep -q 1 /sys/module/kvm_amd/parameters/npt
        for controller in memory cpu io pids; do
            grep -q $controller /sys/fs/cgroup/cgroup.subtree_control
        done
        mkdir /sys/fs/cgroup/one
        test -w /sys/fs/cgroup/one/memory.reclaim
        grep -q 0x /sys/kernel/mm/lru_gen/enabled
        test -w /sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds
        echo 64M > /sys/block/zram0/disksize
        mkswap /dev/zram0 > /dev/null
        swapon /dev/zram0
        grep -q zram0 /proc/swaps
        swapoff /dev/zram0
    ";
    let Some((outcome, output, result)) = scenario("reclaimed", before) else { return };
    let figure = |name: &str| result["figures"][name]["value"].as_f64();
    assert_eq!(figure("kvm"), Some(1.0), "the probe finds KVM good: {output}");
    for prefix in ["", "managed_"] {
        assert_eq!(figure(&format!("{prefix}bad_bytes")), Some(0.0), "{output}");
        let out = figure(&format!("{prefix}paged_out_mib")).unwrap();
        assert!(out >= 32.0, "{prefix}: {out} MiB of some 64 are paged out");
    }
    assert_eq!(outcome.code, 0, "{output}");
    let is_wrong = |line: &&str| line.contains("BUG:") || line.contains("WARNING:");
    let wrong: Vec<&str> = outcome.console.lines().filter(is_wrong).collect();
    assert!(wrong.is_empty(), "its kernel complains: {wrong:?}");
}

#[test]
fn a_guest_under_kvm_is_paged_from_outside_and_keeps_its_huge_pages() {
    let (Some(_turn), Some(_)) = (take_turn(), provisions()) else { return };
    let Some((_, output, result)) = scenario("attached-kvm", "") else { return };
    let figure = |name: &str| result["figures"][name]["value"].as_f64().unwrap();
    assert!((figure("kvm") - 1.0).abs() < 1e-9, "the probe finds KVM good: {output}");
    for prefix in ["", "huge_"] {
        let of = |name: &str| figure(&format!("{prefix}{name}"));
        assert!(of("bad_bytes").abs() < 1e-9, "{output}");
        assert!(of("paged_out_mib") >= 24.0, "{output}");
        assert!(of("left_out_mib") <= 4.0, "{output}");
    }
    assert!(figure("huge_kept") >= 0.9, "{output}");
}

#[test]
fn what_a_script_writes_and_its_exit_code_come_back_and_nothing_else() {
    let (Some(_turn), Some(_)) = (take_turn(), provisions()) else { return };
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "a file\n").unwrap();
    let name = file.path().file_name().unwrap().to_str().unwrap().to_owned();
    let host = VirtualHost { files: vec![PathBuf::from(file.path())], ..VirtualHost::new(KERNEL) };
    // A background program that holds the output open is not waited for.
    let script =
        format!("cat {name}; echo error >&2; echo again > /dev/stderr; sleep 1000 & exit 7");
    let Some((outcome, output)) = run(&host, &script) else { return };
    assert_eq!((output.as_str(), outcome.code), ("a file\nerror\nagain\n", 7));
}

#[test]
fn a_host_that_panics_or_takes_too_long_is_told_with_its_console() {
    let (Some(_turn), Some(_)) = (take_turn(), provisions()) else { return };
    let error_of = |script: &str, seconds: u64| {
        let limit = Duration::from_secs(seconds);
        let result = VirtualHost::new(KERNEL).run(script.as_bytes(), limit, &mut std::io::sink());
        result.unwrap_err()
    };
    match error_of("echo c > /proc/sysrq-trigger; sleep 1000", 170) {
        LabError::Host(HostError::Died { console, .. }) => {
            assert!(console.contains("sysrq triggered crash"), "{console}");
        }
        LabError::Host(HostError::Package(error)) => {
            return requires(Requirement::Packages, Err(error)).unwrap_or_default();
        }
        other => panic!("{other}"),
    }
    match error_of("sleep 1000", 60) {
        LabError::Host(HostError::TimedOut { console, .. }) => {
            assert!(console.contains("virtual host: up"), "{console}");
        }
        other => panic!("{other}"),
    }
}
