//! The verdict on a host and its page, as monitoring, a pipe and a narrow terminal get them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

#[path = "../../api/tests/fixture/mod.rs"]
mod http_fixture;
#[path = "http_fixture/program.rs"]
mod program;
#[path = "http_fixture/server.rs"]
mod server;

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio},
};

use program::{json, overbook, says};
use serde_json::Value;
use server::TestServer;

#[test]
fn status_shows_host_groups_and_vms() {
    let text = says(&TestServer::start(), &["status"]);
    let (verdict, rest) = text.split_once('\n').unwrap();
    assert_eq!(verdict, "WARNING: db-1: no connection to its QEMU: no such socket (and 2 more)");
    assert!(rest.starts_with(
        "host    6 GiB of 16 GiB available, 1000 MiB of 1 GiB swap free; mode enforce"
    ));
    for words in ["3 VMs, 1 unreachable, 1 uncooperative", "HOST:USED", "GUEST:AVAIL", "demand"] {
        assert!(text.contains(words), "{words} is missing in\n{text}");
    }
    let row = text.lines().find(|line| line.starts_with("web-1")).unwrap();
    assert!(row.contains("target raised to 202 MiB: it is short of memory"), "{row}");
    assert!(text.lines().any(|line| line.starts_with("db-1") && line.contains("unreachable")));
}

#[test]
fn status_prints_json() {
    let page = json(&TestServer::start(), &["status"]);
    assert_eq!(page["host"]["mode"], "enforce");
    assert_eq!(page["groups"][0]["name"], "web");
    assert_eq!(page["vms"].as_array().unwrap().len(), 3);
    assert_eq!(page["verdict"]["level"], "warning");
    assert_eq!(page["verdict"]["troubles"].as_array().unwrap().len(), 3);
}

/// Exit code and first line of `overbook status --exit-code`.
fn verdict(socket: &str) -> (Option<i32>, String) {
    let output = overbook(&["status", "--exit-code", "--socket", socket]);
    let text = String::from_utf8(output.stdout).unwrap();
    (output.status.code(), text.lines().next().unwrap_or_default().to_owned())
}

#[test]
fn with_exit_code_status_is_a_monitoring_plugin() {
    let server = TestServer::start();
    let socket = server.socket.to_str().unwrap();
    let (code, line) = verdict(socket);
    assert_eq!(code, Some(1), "{line}");
    assert!(line.starts_with("WARNING: "), "{line}");

    let mut tick = http_fixture::published();
    tick.plan.host.push(model::Reason::HostShort {
        available: model::Bytes::mib(9),
        reserve: model::Bytes::mib(99),
    });
    server.publish(tick);
    let (code, line) = verdict(socket);
    assert_eq!(code, Some(2), "{line}");
    assert!(line.starts_with("CRITICAL: the host has 9 MiB left"), "{line}");

    let mut tick = http_fixture::published();
    tick.view.vms.retain(|name, _| name.as_str() == "web-1");
    tick.plan.vms.retain(|name, _| name.as_str() == "web-1");
    server.publish(tick);
    let (code, line) = verdict(socket);
    assert_eq!(code, Some(0), "{line}");
    assert_eq!(
        line,
        "OK: 1 VM (1 short of memory now), 1 group, 6 GiB of 16 GiB available, mode enforce"
    );

    let (code, line) = verdict("/nonexistent/s");
    assert_eq!(code, Some(2), "{line}");
    assert!(line.starts_with("CRITICAL: no daemon answers"), "{line}");
    let unknown = overbook(&["status", "--exit-code", "--json", "--config", "/nonexistent/x.toml"]);
    assert_eq!(unknown.status.code(), Some(3));
    let page: Value = serde_json::from_slice(&unknown.stdout).unwrap();
    assert_eq!(page["verdict"]["level"], "unknown");
}

/// Starts a command with a pipe for its output.
fn piped(server: &TestServer, arguments: &[&str]) -> std::process::Child {
    let socket = server.socket.to_str().unwrap();
    Command::new(env!("CARGO_BIN_EXE_overbook"))
        .args(arguments)
        .args(["--socket", socket])
        .env_remove("COLUMNS")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn watch_repeats_the_page_until_the_pipe_is_closed() {
    let server = TestServer::start();
    let mut child = piped(&server, &["status", "--watch", "1"]);
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..2 {
        let verdict = lines.find(|line| line.as_ref().unwrap().starts_with("WARNING: ")).unwrap();
        assert!(!verdict.unwrap().contains('\u{1b}'), "a pipe is no screen");
    }
    drop(lines);
    assert!(child.wait().unwrap().success());
}

#[test]
fn top_writes_pages_without_a_terminal() {
    let server = TestServer::start();
    let text = says(&server, &["top", "--batch", "-n", "2"]);
    assert_eq!(text.lines().filter(|line| line.starts_with("WARNING: ")).count(), 2, "{text}");
    assert_eq!(text.lines().filter(|line| line.starts_with("web-1 ")).count(), 2, "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
    let output = piped(&server, &["top"]).wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn output_is_as_wide_as_its_reader_says() {
    let server = TestServer::start();
    let socket = server.socket.to_str().unwrap();
    for arguments in [&["status"][..], &["vm"], &["group"], &["top", "-b", "-n1"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_overbook"))
            .args(arguments)
            .args(["--socket", socket])
            .env("COLUMNS", "60")
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let long = text.lines().find(|line| line.chars().count() > 60);
        assert_eq!(long, None, "{arguments:?}");
    }
}
