//! `release` restores what Overbook changed, and only that: with a daemon, without one, with one
//! that cannot be asked, with a faulty configuration.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::time::Duration;

use model::{Bytes, Mode};
use overbook_tests::{BASE, Stage, hungry, idle, text};
use sys::process::Signal;

/// Memory to which the idle guest is reduced.
const LESS: Bytes = Bytes::mib(112);
const GUESTS: [&str; 2] = ["hungry", "idle"];

/// The hungry guest has a grant, the idle one is below its original memory, and both are polled.
fn touched() -> Option<Stage> {
    let stage = Stage::start(Mode::Enforce, &[hungry(), idle("idle")])?;
    let drop_in = stage.config().with_extension("d");
    std::fs::create_dir(&drop_in).unwrap();
    let less = "[vm.idle]\nbase = \"112MiB\"\nmax = \"112MiB\"\n";
    std::fs::write(drop_in.join("less.toml"), less).unwrap();
    stage.hang_up();
    until_touched(&stage);
    Some(stage)
}

fn until_touched(stage: &Stage) {
    stage.until("hungry has more and idle has less", |stage| {
        stage.balloon("hungry") > BASE && stage.balloon("idle") <= LESS
    });
    stage.until("both are polled", |stage| GUESTS.map(|guest| stage.polling_s(guest)) == [1, 1]);
    assert_eq!(stage.undo().len(), 2);
}

fn until_put_back(stage: &Stage) {
    assert_eq!(stage.undo(), Vec::<serde_json::Value>::new());
    assert_eq!(GUESTS.map(|guest| stage.polling_s(guest)), [0, 0]);
    stage.until("both guests have what they had", |stage| {
        GUESTS.iter().all(|guest| stage.balloon(guest) == BASE)
    });
}

fn break_configuration(stage: &Stage) {
    let good = std::fs::read_to_string(stage.config()).unwrap();
    std::fs::write(stage.config(), good + "\n[group\nnonsense = = 1\n").unwrap();
}

#[test]
fn the_daemon_puts_everything_back_and_stays_paused_until_resume_even_if_restarted() {
    let Some(mut stage) = touched() else { return };
    let said = stage.says(&["release"]);
    for guest in GUESTS {
        let line = said.lines().find(|line| line.starts_with(guest)).unwrap();
        assert!(
            line.contains("statistics every 0 s") && line.contains("back to 128 MiB"),
            "{said}"
        );
    }
    until_put_back(&stage);

    stage.daemon.kill(&mut stage.lab).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
    stage.until("both are seen", |stage| stage.host()["unreachable_vms"] == 0);
    let is_paused = |stage: &Stage| stage.host()["paused"] == true && stage.undo().is_empty();
    stage.throughout(Duration::from_secs(3), "a paused daemon touches nothing", is_paused);
    until_put_back(&stage);

    assert_eq!(stage.says(&["resume"]), "resumed\n");
    until_touched(&stage);
}

#[test]
fn one_vm_is_released_alone_and_the_other_one_goes_on() {
    let Some(mut stage) = touched() else { return };
    let would = stage.says(&["release", "--dry-run"]);
    let of_idle = would.lines().find(|line| line.starts_with("idle: would get ")).unwrap();
    assert!(of_idle.contains("back to 128 MiB"), "{would}");
    assert!(would.contains("in this order; the host has "), "{would}");
    until_touched(&stage);

    let said = stage.says(&["release", "idle"]);
    assert!(said.starts_with("idle: ") && said.contains("back to 128 MiB"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    stage.until("the idle one has what it had", |stage| stage.balloon("idle") == BASE);
    assert_eq!((stage.polling_s("idle"), stage.polling_s("hungry")), (0, 1));
    assert_eq!(stage.undo().len(), 1);
    assert_eq!(stage.vm("idle")["paused"], true);

    stage.daemon.kill(&mut stage.lab).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
    stage.until("both are seen", |stage| stage.host()["unreachable_vms"] == 0);
    stage.throughout(Duration::from_secs(3), "the idle one is left alone", |stage| {
        stage.balloon("idle") == BASE && stage.polling_s("idle") == 0
    });
    assert!(stage.balloon("hungry") > BASE);
    assert_eq!(stage.says(&["resume", "idle"]), "idle resumed\n");
    until_touched(&stage);
}

#[test]
fn without_a_daemon_the_journal_is_enough_and_a_second_release_has_nothing_to_do() {
    let Some(mut stage) = touched() else { return };
    let other = stage.lab.dir().join("etc/other.toml");
    let (state, socket) =
        (stage.lab.dir().join("run/other"), stage.lab.dir().join("run/other.sock"));
    let text_of_other = format!("host.state = {state:?}\napi.socket = {socket:?}\n");
    std::fs::write(&other, text_of_other).unwrap();
    let elsewhere = stage.overbook_with(&other, &["release"]);
    assert_eq!(text(&elsewhere), "nothing to release\n");
    until_touched(&stage);

    stage.daemon.kill(&mut stage.lab).unwrap();
    let said = stage.says(&["release"]);
    assert_eq!(said.lines().count(), 2, "{said}");
    until_put_back(&stage);
    assert_eq!(stage.says(&["release"]), "nothing to release\n");
}

#[test]
fn a_faulty_configuration_does_not_stop_a_release_with_a_daemon_or_without() {
    let Some(mut stage) = touched() else { return };
    break_configuration(&stage);
    let said = stage.says(&["release"]);
    assert_eq!(said.lines().count(), 2, "{said}");
    until_put_back(&stage);

    assert_eq!(stage.says(&["resume"]), "resumed\n");
    until_touched(&stage);
    stage.daemon.kill(&mut stage.lab).unwrap();
    let said = stage.says(&["release"]);
    assert_eq!(said.lines().count(), 2, "{said}");
    until_put_back(&stage);
}

/// Restarts the daemon after it was ended, and waits until it is paused.
fn until_paused_anew(stage: &mut Stage) {
    assert!(!stage.daemon.process().is_alive());
    stage.lab.end_helper("daemon", true).unwrap();
    stage.daemon.restart(&mut stage.lab).unwrap();
    stage.until("both are seen", |stage| stage.host()["unreachable_vms"] == 0);
    assert_eq!(stage.host()["paused"], true);
    until_put_back(stage);
}

#[test]
fn a_daemon_whose_socket_was_deleted_makes_it_again_and_releases_by_itself() {
    let Some(stage) = touched() else { return };
    std::fs::remove_file(stage.socket()).unwrap();
    let said = stage.says(&["release"]);
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(stage.daemon.process().is_alive());
    until_put_back(&stage);
}

#[test]
fn a_daemon_that_nobody_can_reach_is_ended_first_and_the_next_one_is_paused() {
    let Some(mut stage) = touched() else { return };
    // The daemon cannot make its socket again, because the path is never free.
    let aside = stage.socket().with_extension("aside");
    std::fs::write(&aside, "").unwrap();
    std::fs::rename(&aside, stage.socket()).unwrap();
    let pid = stage.daemon.process().pid;
    let said = stage.says(&["release"]);
    let first = format!("the daemon (pid {pid}) did not answer and was told to end; ");
    assert!(said.starts_with(&first), "{said}");
    assert_eq!(said.lines().count(), 3, "{said}");
    until_put_back(&stage);
    std::fs::remove_file(stage.socket()).unwrap();
    until_paused_anew(&mut stage);
}

#[test]
fn a_daemon_that_was_stopped_is_ended_first_also_where_the_configuration_is_faulty() {
    let Some(mut stage) = touched() else { return };
    let good = std::fs::read_to_string(stage.config()).unwrap();
    break_configuration(&stage);
    stage.daemon.process().signal(Signal::STOP).unwrap();
    let said = stage.says(&["release"]);
    assert!(said.contains("did not answer and was "), "{said}");
    until_put_back(&stage);
    std::fs::write(stage.config(), good).unwrap();
    until_paused_anew(&mut stage);
}
