//! The daemon and its operator: one daemon per state directory, which survives a faulty file.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use model::Mode;
use overbook_tests::{Stage, idle, text};

#[test]
fn a_second_daemon_is_refused_with_the_pid_of_the_first_which_is_unharmed() {
    let Some(stage) = Stage::start(Mode::Enforce, &[idle("one")]) else { return };
    let pid = stage.daemon.process().pid;
    let second = stage.overbook(&["daemon"]);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second).contains(&format!("another overbook daemon (pid {pid})")), "{second:?}");

    assert!(stage.daemon.process().is_alive());
    let seen = stage.host()["wall_ms"].as_u64().unwrap();
    stage.until("the first goes on", |stage| stage.host()["wall_ms"].as_u64().unwrap() > seen);
    stage.until("and still talks to its guest", |stage| stage.vm("one")["link_up"] == true);
}

#[test]
fn after_a_faulty_file_the_last_good_configuration_stays_and_the_fault_shows_until_mended() {
    let Some(stage) = Stage::start(Mode::Observe, &[idle("one")]) else { return };
    let good = std::fs::read_to_string(stage.config()).unwrap();
    let faulty = good.replace("observe", "enforcement");
    let line = 1 + faulty.lines().position(|line| line.contains("enforcement")).unwrap();
    std::fs::write(stage.config(), &faulty).unwrap();
    stage.hang_up();
    stage.until("the fault shows", |stage| !stage.host()["config_error"].is_null());
    let host = stage.host();
    let place = format!("{}:{line}", stage.config().display());
    assert!(host["config_error"].as_str().unwrap().contains(&place), "{host}");
    assert_eq!(host["mode"], "observe");
    assert!(stage.says(&["status"]).contains(&place));

    std::fs::write(stage.config(), good.replace("observe", "recommend")).unwrap();
    stage.hang_up();
    stage.until("the mended file is in force", |stage| stage.host()["mode"] == "recommend");
    assert!(stage.host()["config_error"].is_null());
}
