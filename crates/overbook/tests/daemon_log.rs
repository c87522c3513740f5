//! The log of the real daemon.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod daemon_fixture;

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
};

use daemon_fixture::TestDaemon;

#[test]
fn whoever_has_something_changed_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    // An address of this process alone, so that the port is free.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let tcp = format!("127.{}.{middle}.{low}:7780", 64 + high);
    let more = format!("tcp = \"{tcp}\"\ntoken_file = \"{}\"\n", token.display());
    let daemon = TestDaemon::start(dir, &more);
    let user = rustix::process::getuid().as_raw();
    daemon.client().post("/v1/pause").unwrap();
    daemon.client().post("/v1/release").unwrap();
    let me = format!("by uid {user} (process {})", std::process::id());
    for what in ["pause", "release"] {
        let line = format!("{what}: asked for {me}");
        assert!(daemon.log().contains(&line), "no `{line}` in\n{}", daemon.log());
    }

    let mut stream = TcpStream::connect(tcp).unwrap();
    let port = stream.local_addr().unwrap();
    let request = "POST /v1/resume HTTP/1.1\r\nHost: x\r\nConnection: close\r\n";
    let with_token = "Authorization: Bearer 0123456789abcdef\r\n\r\n";
    stream.write_all(format!("{request}{with_token}").as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let line = format!("resume: asked for by {port} with the token");
    assert!(daemon.log().contains(&line), "no `{line}` in\n{}", daemon.log());
}

#[test]
fn a_reload_tells_what_has_changed_and_what_waits() {
    let mut daemon = TestDaemon::start(tempfile::tempdir().unwrap(), "");
    let said = |daemon: &mut TestDaemon, text: &str| {
        daemon.until(&format!("the log says: {text}"), |daemon| daemon.log().contains(text));
    };
    let host = |daemon: &TestDaemon| daemon.get::<serde_json::Value>("/v1/host");
    let pool =
        "[pool]\nname = \"p\"\nhost = \"h\"\netcd = [\"http://127.0.0.1:1\"]\ninsecure = true\n";
    let more = format!("[mode]\nballoon = \"enforce\"\n[group.web]\nvms = [\"web-*\"]\n{pool}");
    daemon.reconfigure(&more);
    said(
        &mut daemon,
        "changed: [mode] balloon is \"enforce\" (it was \"observe\"), [pool], [group.web] (new)\n",
    );
    said(&mut daemon, "nothing is taken from any VM for 60 s");
    let waits = "the change of [pool] takes effect at a restart; all else is in force";
    daemon.until("the host shows what waits", |daemon| host(daemon)["waits_for_restart"] == waits);
    let host = host(&daemon);
    assert_eq!((&host["mode"], host["config_error"].is_null()), (&"enforce".into(), true));

    daemon.reconfigure(&(more + "[nonsense]\n"));
    said(&mut daemon, "the last good configuration stays in force:");
    daemon.client().post("/v1/pause").unwrap();
    daemon.reconfigure("");
    said(&mut daemon, "[group.web] (gone)");
}

#[test]
fn lines_in_a_file_begin_with_the_time_and_have_no_level() {
    let mut daemon = TestDaemon::start(tempfile::tempdir().unwrap(), "");
    // An ordinary line, and a warning.
    daemon.client().post("/v1/pause").unwrap();
    daemon.reconfigure("[nonsense]\n");
    for said in ["pause: asked for by ", "the last good configuration stays in force"] {
        daemon.until(&format!("the log says: {said}"), |daemon| daemon.log().contains(said));
    }
    daemon.end();
    for line in daemon.log().lines() {
        let (time, _) = line.split_once(" overbook: ").unwrap_or_else(|| panic!("{line}"));
        let shape = time.replace(|letter: char| letter.is_ascii_digit(), "0");
        assert_eq!(shape, "0000-00-00T00:00:00Z", "{line}");
    }
}
