//! Tracking end to end: a real guest with the shim, the daemon and its group's worker.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use lab::MachineSpec;
use model::{Bytes, Mode};
use overbook_tests::{MAX, Stage, idle};
use serde_json::Value;
use sys::process::{Identity, Signal};

/// The guest's working memory, without its kernel.
const SET_MIB: f64 = 60.0;
/// Maximum memory that a guest's kernel and other programs touch.
const KERNEL_MIB: f64 = 20.0;

/// The time over which the daemon takes the cost of tracking.
const WINDOW: Duration = Duration::from_secs(30);
/// The budget of 1 % of a vCPU, a tenth of it for a few probes, and a tenth for late charges.
const MOST_COST: f64 = 0.012;

/// A guest with the shim that touches 60 MiB in random order.
fn managed() -> MachineSpec {
    let workload = "random-array --mb 60";
    let spec = MachineSpec::new("managed", "shop", MAX, MAX, workload);
    MachineSpec { shim: true, ..spec }
}

fn working_set_mib(stage: &Stage) -> Option<f64> {
    let bytes = stage.vm("managed")["tracking"]["working_set_bytes"].as_u64()?;
    Some(Bytes(bytes).as_mib())
}

fn until_known(stage: &Stage) {
    let near = SET_MIB * 0.85..SET_MIB + KERNEL_MIB;
    stage.until("the working set is near what the guest works on", |stage| {
        working_set_mib(stage).is_some_and(|set| near.contains(&set))
    });
}

/// Cost of tracking in the last [`WINDOW`], as a share of a vCPU.
fn cost(stage: &Stage) -> f64 {
    stage.vm("managed")["tracking"]["cost_ratio"].as_f64().unwrap()
}

/// The group's worker, as the daemon shows it.
fn worker(stage: &Stage) -> Value {
    stage.json(&["group", "shop"])["worker"].clone()
}

fn why_not(stage: &Stage, vm: &str) -> String {
    stage.vm(vm)["unsupported"]["tracking"].as_str().unwrap_or_default().to_owned()
}

fn process_of(worker: &Value) -> Option<Identity> {
    Identity::of(u32::try_from(worker["pid"].as_u64()?).unwrap())
}

#[test]
fn a_guest_with_the_shim_shows_its_working_set_within_the_budget_and_the_others_say_why_not() {
    let Some(stage) = Stage::start(Mode::Observe, &[managed(), idle("plain")]) else { return };
    until_known(&stage);
    // This host has no swap, so the other VM cannot be tracked.
    assert!(why_not(&stage, "plain").contains("swap"), "{}", why_not(&stage, "plain"));
    let curve = stage.json(&["vm", "managed", "--mrc"]);
    assert!(curve["points"].as_array().unwrap().len() > 10, "{curve}");
    assert!(stage.says(&["vm", "managed", "--mrc"]).contains("working set: "));
    // Two windows, one after the other: what the first takes too much, the second pays back.
    let first = cost(&stage);
    std::thread::sleep(WINDOW);
    let second = cost(&stage);
    assert!(first > 0.001 && second > 0.001, "it measures its cost: {first} {second}");
    assert!((first + second) / 2.0 < MOST_COST, "{first} {second}");
    let worker = worker(&stage);
    assert!(worker["resident_bytes"].as_u64().unwrap() < 64 << 20, "{worker}");
}

#[test]
fn a_killed_worker_is_started_again_and_finds_the_working_set_again() {
    let Some(stage) = Stage::start(Mode::Observe, &[managed()]) else { return };
    until_known(&stage);
    let first = process_of(&worker(&stage)).unwrap();
    first.signal(Signal::KILL).unwrap();
    stage.until("another worker runs", |stage| {
        process_of(&worker(stage)).is_some_and(|second| second != first)
    });
    let second = worker(&stage);
    assert_eq!(second["restarts"], 1);
    assert!(second["last_error"].as_str().unwrap().contains("signal: 9"), "{second}");
    until_known(&stage);
}

#[test]
fn a_pause_ends_tracking_and_a_resume_takes_it_up_again() {
    let Some(stage) = Stage::start(Mode::Observe, &[managed()]) else { return };
    until_known(&stage);
    let process = process_of(&worker(&stage)).unwrap();
    let _ = stage.says(&["pause"]);
    stage.until("the worker has ended", |_| !process.is_alive());
    stage.until("the VM says why", |stage| why_not(stage, "managed").contains("paused"));
    let _ = stage.says(&["resume"]);
    until_known(&stage);
}

#[test]
fn a_new_daemon_tracks_the_vms_of_one_that_was_killed() {
    let Some(mut stage) = Stage::start(Mode::Observe, &[managed()]) else { return };
    until_known(&stage);
    let process = process_of(&worker(&stage)).unwrap();
    let daemon = stage.daemon.process();
    daemon.signal(Signal::KILL).unwrap();
    assert!(process.wait_for(Duration::from_secs(60)).unwrap(), "a worker outlived its daemon");
    // The daemon holds its state's lock until it has ended.
    assert!(daemon.wait_for(Duration::from_secs(60)).unwrap(), "a killed daemon lives on");
    stage.daemon = lab::daemon::Daemon::start(&mut stage.lab, Mode::Observe).unwrap();
    until_known(&stage);
}
