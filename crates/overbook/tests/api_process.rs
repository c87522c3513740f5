//! The process that answers the API: its rights, and its clients when it ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod daemon_fixture;

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    thread::sleep,
    time::{Duration, Instant},
};

use api::wire::{HostStatus, StatusPage};
use daemon_fixture::TestDaemon;
use sys::process::{Identity, Signal, children_of};

fn start() -> TestDaemon {
    TestDaemon::start(tempfile::tempdir().unwrap(), "")
}

/// The process that answers; the daemon has no other child here.
fn answering(daemon: &TestDaemon) -> Option<Identity> {
    let children = children_of(daemon.pid()).unwrap();
    children.into_iter().find(Identity::is_alive)
}

fn status(process: Identity) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{}/status", process.pid)).unwrap();
    let pair = |line: &str| line.split_once(':').map(|(k, v)| (k.to_owned(), v.trim().to_owned()));
    text.lines().filter_map(pair).collect()
}

#[test]
fn it_has_no_capability_and_none_but_the_files_that_it_needs() {
    let daemon = start();
    let process = answering(&daemon).unwrap();
    let status = status(process);
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!((status["Seccomp"].as_str(), status["NoNewPrivs"].as_str()), ("2", "1"));
    assert_eq!(status["Threads"], "1", "a thread of its own would not be confined");
    let open = fs::read_dir(format!("/proc/{}/fd", process.pid)).unwrap();
    let open = open.map(|fd| fs::read_link(fd.unwrap().path()).unwrap().display().to_string());
    let files: Vec<String> = open.filter(|path| path.starts_with('/')).collect();
    let log = daemon.dir().join("log").display().to_string();
    assert!(files.iter().all(|path| *path == log || path == "/dev/null"), "{files:?}");
}

#[test]
fn a_client_whose_process_was_killed_is_answered_by_the_next_one_and_the_daemon_goes_on() {
    let mut daemon = start();
    let before = daemon.get::<HostStatus>("/v1/host");
    let mut killed = None;
    for _ in 0..3 {
        daemon.until("another one answers", |daemon| {
            answering(daemon).is_some_and(|process| Some(process) != killed)
        });
        let process = answering(&daemon).unwrap();
        assert!(process.signal(Signal::KILL).unwrap());
        killed = Some(process);
        // The client waits in the backlog and is never refused.
        let mut waiting = UnixStream::connect(daemon_fixture::socket(daemon.dir())).unwrap();
        waiting.write_all(b"GET /healthz HTTP/1.0\r\n\r\n").unwrap();
        let mut answer = String::new();
        // If the killed process had accepted the connection, the kernel closes it.
        if waiting.read_to_string(&mut answer).is_ok() && !answer.is_empty() {
            assert!(answer.starts_with("HTTP/1.0 200"), "{answer}");
        }
    }
    let after = daemon.get::<HostStatus>("/v1/host");
    assert!(after.wall_ms >= before.wall_ms);
    assert!(
        daemon.log().contains("the process that answers the API has ended"),
        "{}",
        daemon.log()
    );
}

#[test]
fn one_that_is_stopped_for_a_while_shows_the_newest_tick_when_it_goes_on() {
    let mut daemon = start();
    let process = answering(&daemon).unwrap();
    let at = |daemon: &TestDaemon| daemon.get::<HostStatus>("/v1/host").wall_ms;
    let before = at(&daemon);
    assert!(process.signal(Signal::STOP).unwrap());
    let state = |_: &TestDaemon| status(process)["State"].starts_with('T');
    daemon.until("it is stopped", state);
    assert!(process.signal(Signal::CONT).unwrap());
    daemon.until("a newer tick is shown", |daemon| at(daemon) > before);
    assert_eq!(answering(&daemon), Some(process));
}

#[test]
fn it_ends_with_the_daemon() {
    let mut daemon = start();
    let process = answering(&daemon).unwrap();
    daemon.end();
    // The daemon kills it, and does not wait for its end.
    let deadline = Instant::now() + Duration::from_secs(10);
    while process.is_alive() {
        assert!(Instant::now() < deadline, "it goes on without its daemon");
        sleep(Duration::from_millis(5));
    }
}

/// So the alert `OverbookHangs` and the verdict can tell that it hangs.
#[test]
fn it_tells_the_age_of_the_last_tick_while_the_daemon_stands_still() {
    let mut daemon = start();
    let age = |daemon: &TestDaemon| {
        let page = daemon.client().get_text("/metrics").unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix("overbook_tick_age_seconds "));
        line.unwrap().parse::<f64>().unwrap()
    };
    assert!(age(&daemon) < 10.0, "it runs");
    daemon.signal("STOP");
    daemon.until("the last tick is old", |daemon| age(daemon) > 10.0);
    let text = daemon.get::<StatusPage>("/v1/status").verdict.text;
    daemon.signal("CONT");
    assert!(text.starts_with("CRITICAL: the daemon stands still: its last tick was"), "{text}");
    daemon.until("it runs again", |daemon| age(daemon) < 10.0);
}
