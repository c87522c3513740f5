//! The kernel's KSM merges VMs without the shim, end to end: real guests of one group, a QEMU
//! that Overbook does not know, the daemon, its crash, and a release.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::MachineSpec;
use model::{Bytes, Mode};
use overbook_tests::{MAX, Requirement, Stage, ensure, requires};
use sys::ksm::{Knob, Ksm, Settings};
use sys::mergeable;
use sys::process::Identity;

/// Part of the 40 MiB that are identical in both guests.
const ENOUGH: Bytes = Bytes::mib(12);

/// Restores the kernel's settings, also after a failure.
struct Kernels(Settings);

impl Drop for Kernels {
    fn drop(&mut self) {
        for (knob, value) in self.0.iter().rev() {
            let _ = Ksm::of_host().set(*knob, value);
        }
    }
}

fn host_saved(stage: &Stage) -> Bytes {
    Bytes(stage.host()["ksm_saved_bytes"].as_u64().unwrap_or(0))
}

fn until_merged(stage: &Stage) {
    stage.until("KSM merges them", |stage| {
        stage.host()["ksm_is_driven"] == true && host_saved(stage) > ENOUGH
    });
}

/// Writes the group's rate into the configuration, and whether KSM may be driven.
fn configure(stage: &Stage, may_drive: bool) {
    let config = std::fs::read_to_string(stage.config()).unwrap();
    let mut config = config.replace("dedup = \"off\"", "dedup = 200");
    if may_drive {
        config = config.replace("[host]\n", "[host]\nksm = \"drive\"\n");
    }
    std::fs::write(stage.config(), config).unwrap();
    stage.hang_up();
}

fn until_refused(stage: &Stage, why: &str) {
    stage.until(&format!("it is said that {why}"), |stage| {
        let said = &stage.vm("a1")["unsupported"]["dedup"];
        said.as_str().is_some_and(|said| said.contains(why))
    });
}

/// A QEMU that is in no configuration of Overbook.
fn stranger(stage: &mut Stage) -> Identity {
    let qemu = stage.provisions.qemu.command();
    let machine =
        ["-machine", "q35,accel=tcg", "-m", "64", "-S", "-nodefaults", "-display", "none"];
    stage.lab.spawn("stranger", qemu.args(machine)).unwrap()
}

#[test]
fn ksm_merges_one_group_alone_and_only_if_told_to_and_gets_back_what_it_had() {
    let ksm = Ksm::of_host();
    let before = ksm.settings().unwrap_or_default();
    let is_idle = ensure(before.get(&Knob::Run).is_some_and(|run| run == "0"), "it is at work");
    let is_idle = is_idle.and_then(|()| ksm.check_writable(&before).map_err(|it| it.to_string()));
    let Some(()) = requires(Requirement::IdleKsm, is_idle) else { return };
    let others: Vec<_> = mergeable::processes().unwrap().iter().map(|other| other.pid).collect();
    let _guard = Kernels(before.clone());
    let guest = |name| MachineSpec::new(name, "shop", MAX, MAX, "verify --mb 40");
    let Some(mut stage) = Stage::start(Mode::Observe, &[guest("a1"), guest("a2")]) else { return };
    configure(&stage, false);
    until_refused(&stage, "kernel KSM is not driven (`ksm = \"off\"` in [host])");
    assert_eq!(ksm.settings().unwrap(), before);

    configure(&stage, true);
    if !others.is_empty() {
        until_refused(&stage, "has mergeable memory and is no VM that Overbook knows");
        assert_eq!(ksm.settings().unwrap(), before);
    }
    let is_alone = ensure(others.is_empty(), format!("processes {others:?} have some"));
    let Some(()) = requires(Requirement::NothingMergeable, is_alone) else { return };
    until_merged(&stage);
    assert_eq!(stage.vm("a1")["unsupported"]["dedup"], serde_json::Value::Null);
    assert!(stage.says(&["group", "shop"]).contains("kernel KSM merges them and saves"));

    let other = stranger(&mut stage);
    until_refused(
        &stage,
        &format!("process {} (\"qemu-system-x86_64\") has mergeable memory", other.pid),
    );
    stage.until("KSM has stopped", |_| ksm.settings().unwrap()[&Knob::Run] == "0");
    stage.lab.end_helper("stranger", true).unwrap();
    until_merged(&stage);

    stage.daemon.kill(&mut stage.lab).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
    until_merged(&stage);

    let said = stage.says(&["release"]);
    assert!(
        said.contains("KSM: its settings are what they were") && said.contains("unmerged"),
        "{said}"
    );
    assert_eq!(ksm.settings().unwrap(), before);
    assert_eq!(ksm.counters().unwrap().saved, Bytes::ZERO);
}
