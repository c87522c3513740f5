//! What the daemon's log says, of the real daemon.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod daemon_fixture;

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::PermissionsExt,
};

use daemon_fixture::Daemon;

#[test]
fn whoever_has_something_changed_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "0123456789abcdef\n").unwrap();
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600)).unwrap();
    // An address of this process alone: no port has to be guessed.
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let tcp = format!("127.{}.{middle}.{low}:7780", 64 + high);
    let more = format!("tcp = \"{tcp}\"\ntoken_file = \"{}\"\n", token.display());
    let daemon = Daemon::start(dir, &more);
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
