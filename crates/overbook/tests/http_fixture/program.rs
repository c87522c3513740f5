//! The program as the operator runs it.

#![allow(dead_code, reason = "not every test file uses every part")]

use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::server::TestServer;

/// Runs the program with a pipe for its output.
pub(crate) fn overbook(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overbook"));
    // Without a terminal and without this variable, lines have any length.
    command.args(arguments).env_remove("COLUMNS").stdin(Stdio::null()).output().unwrap()
}

/// Standard output of a command that succeeds.
pub(crate) fn says(server: &TestServer, arguments: &[&str]) -> String {
    let socket = server.socket.to_str().unwrap();
    let output = overbook(&[arguments, &["--socket", socket]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).unwrap()
}

/// The JSON on standard output of a command that succeeds.
pub(crate) fn json(server: &TestServer, arguments: &[&str]) -> Value {
    serde_json::from_str(&says(server, &[arguments, &["--json"]].concat())).unwrap()
}

/// Standard error of a command.
pub(crate) fn error(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
