//! A lab ends everything that it started, on every exit path. Real QEMU, real guests.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::{LabDir, signal, text};

/// The keeper and six guests.
const FLEET_PROCESSES: usize = 7;

#[test]
fn up_brings_guests_to_base_memory_and_down_leaves_nothing() {
    let lab = LabDir::new();
    let up = lab.lab(&["up"]);
    assert!(up.status.success(), "{}", text(&up.stderr));

    let status = lab.lab(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["running"], true);
    let machines = status["machines"].as_array().unwrap();
    assert_eq!(machines.len(), 6);
    for machine in machines {
        assert_eq!(machine["alive"], true, "{machine}");
        assert_eq!(machine["balloon_bytes"], 128 << 20, "{machine}");
    }

    let second = lab.lab(&["up"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains("a lab runs in"), "{}", text(&second.stderr));
    assert_eq!(lab.processes().len(), FLEET_PROCESSES, "the second up harmed the first");

    let down = lab.lab(&["down"]);
    assert_eq!(text(&down.stdout), "the lab is ended\n");
    assert_eq!(lab.remains(), Vec::<String>::new());

    let again = lab.lab(&["down"]);
    assert!(again.status.success());
    assert_eq!(text(&again.stdout), "no lab runs here, nothing to end\n");
}

#[test]
fn killing_the_keeper_ends_every_guest_and_down_sweeps() {
    let lab = LabDir::new();
    let up = lab.lab(&["up", "--json"]);
    assert!(up.status.success(), "{}", text(&up.stderr));
    let status: serde_json::Value = serde_json::from_slice(&up.stdout).unwrap();
    let keeper = u32::try_from(status["holder_pid"].as_u64().unwrap()).unwrap();

    signal(keeper, "-KILL");
    lab.wait_for_the_end();

    let down = lab.lab(&["down"]);
    assert!(text(&down.stdout).starts_with("no lab ran"), "{}", text(&down.stdout));
    assert_eq!(lab.remains(), Vec::<String>::new());
}

#[test]
fn ctrl_c_while_guests_boot_leaves_nothing() {
    interrupted_after(0);
}

#[test]
fn ctrl_c_while_a_scenario_runs_leaves_nothing() {
    interrupted_after(1500);
}

fn interrupted_after(millis: u64) {
    let lab = LabDir::new();
    let run = lab.start(&["run", "boot"]);
    lab.wait_for_a_guest();
    std::thread::sleep(std::time::Duration::from_millis(millis));
    signal(run.id(), "-INT");
    let output = run.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", text(&output.stderr));
    assert_eq!(lab.remains(), Vec::<String>::new());
}

#[test]
fn a_killed_scenario_takes_its_guests_along() {
    let lab = LabDir::new();
    let mut run = lab.start(&["run", "boot"]);
    lab.wait_for_a_guest();
    signal(run.id(), "-KILL");
    run.wait().unwrap();
    lab.wait_for_the_end();
}

#[test]
fn down_ends_a_scenario_that_runs_elsewhere() {
    let lab = LabDir::new();
    let run = lab.start(&["run", "boot"]);
    lab.wait_for_a_guest();
    assert_eq!(text(&lab.lab(&["down"]).stdout), "the lab is ended\n");
    assert_eq!(run.wait_with_output().unwrap().status.code(), Some(130));
    assert_eq!(lab.remains(), Vec::<String>::new());
}

#[test]
fn boot_passes_and_says_so_in_json() {
    let lab = LabDir::new();
    let run = lab.lab(&["run", "boot", "--json"]);
    assert!(run.status.success(), "{}", text(&run.stderr));
    let figures: serde_json::Value = serde_json::from_slice(&run.stdout).unwrap();
    assert_eq!((&figures["scenario"], &figures["passed"]), (&"boot".into(), &true.into()));
    assert_eq!(lab.remains(), Vec::<String>::new());
}

#[test]
fn a_directory_of_somebody_else_is_refused_and_left_alone() {
    let lab = LabDir::new();
    std::fs::create_dir(lab.path()).unwrap();
    std::fs::write(lab.path().join("precious"), "data").unwrap();
    let permissions = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(lab.path(), permissions).unwrap();
    let run = lab.lab(&["run", "boot"]);
    assert_eq!(run.status.code(), Some(1));
    assert!(text(&run.stderr).contains("no lab made it"), "{}", text(&run.stderr));
    assert_eq!(lab.remains(), ["precious"]);
}
