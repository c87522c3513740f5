//! A QMP socket that outlives the process that listens on it, as the kernel has it: the process has
//! called `listen()` and ended, and its number waits for another one.
//!
//! `SOCKET`: prints the number.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::process::{Command, Stdio};

use serde_json::json;

use super::{SUBCOMMAND, saw};
use crate::lab::LabError;

/// Its own name; with no argument it is the process that ends.
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
        // The client that comes has asked the kernel already which process is here.
        let _ = writeln!(stream, "{}", json!({"QMP": {"version": {}, "capabilities": []}}));
        saw("somebody has come");
    }
    Ok(())
}
