//! A QMP socket that outlives its listener. The process that called `listen()` has ended. The
//! kernel still names its pid as the socket's owner, and another process may get that pid.
//!
//! `SOCKET`: prints the pid.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use serde_json::json;

use super::{SUBCOMMAND, saw};
use crate::lab::LabError;

/// The attack's name. Without an argument, the program is the process that calls `listen()` and
/// ends.
pub(super) const NAME: &str = "orphan";

pub(super) fn run(args: &[String]) -> Result<(), LabError> {
    let Some(socket) = args.first() else {
        rustix::net::listen(io::stdin().as_fd(), 8).map_err(io::Error::from)?;
        return Ok(());
    };
    let listener = UnixListener::bind(socket)?;
    let mut child = Command::new(std::env::current_exe()?)
        .args([SUBCOMMAND, NAME])
        .stdin(Stdio::from(OwnedFd::from(listener.try_clone()?)))
        .spawn()?;
    let pid = child.id();
    child.wait()?;
    saw(&format!("the process that listened was {pid}"));
    for stream in listener.incoming() {
        let mut stream = stream?;
        // The client has already asked the kernel for the process behind this socket.
        let _ = writeln!(stream, "{}", json!({"QMP": {"version": {}, "capabilities": []}}));
        saw("somebody has come");
    }
    Ok(())
}
