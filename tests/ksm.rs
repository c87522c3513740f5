//! VMs without the shim are merged by the kernel's KSM, end to end: real guests of one group, the daemon, a
//! crash of it, and a release.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use lab::MachineSpec;
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage};
use sys::ksm::{Knob, Ksm, Settings};

/// Of 40 MiB that are the same in both guests.
const ENOUGH: Bytes = Bytes::mib(12);

/// Puts the kernel's settings back, whatever has become of the test.
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

#[test]
fn ksm_merges_a_group_survives_the_daemon_and_gets_back_what_it_had() {
    let ksm = Ksm::of_host();
    let before = ksm.settings().unwrap_or_default();
    let is_idle = before.get(&Knob::Run).is_some_and(|run| run == "0");
    if !is_idle || ksm.check_writable(&before).is_err() {
        return eprintln!("SKIPPED: needs root, and a KSM that nobody uses");
    }
    let _guard = Kernels(before.clone());
    let guest = |name| MachineSpec::new(name, "shop", MAX, MAX, "verify --mb 40");
    let Some(mut stage) = Stage::start(Mode::Observe, &[guest("a1"), guest("a2")]) else { return };
    let config = std::fs::read_to_string(stage.config()).unwrap();
    let config = config.replace("dedup = \"off\"", "dedup = 200");
    std::fs::write(stage.config(), config).unwrap();
    stage.hang_up();
    until_merged(&stage);
    assert_eq!(stage.vm("a1")["unsupported"]["dedup"], serde_json::Value::Null);
    assert!(stage.says(&["group", "shop"]).contains("kernel KSM merges them and saves"));

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
