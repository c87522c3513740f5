//! Child processes of the daemon that run this program. They exchange lines with the daemon.
//!
//! A child ends when its `Helper` is dropped, and when the daemon ends, for any reason.

use std::io;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use signal_hook::consts::{SIGINT, SIGTERM};
use sys::process::{Child, Signal, Spawn};
use tokio::io::BufReader;
use tokio::net::unix::pipe;
use tokio::time::{Instant, sleep};

/// Interval at which a child's end is checked.
const LOOK: Duration = Duration::from_millis(10);
/// How long a killed child may take to end.
const GRACE: Duration = Duration::from_secs(1);

/// A running child.
pub(crate) struct Helper(Child);

impl Helper {
    /// This very program, even after an upgrade has replaced its file.
    pub(crate) fn program() -> Spawn {
        Spawn::new("/proc/self/exe")
    }

    /// Starts a child. The first pipe carries lines to it, the second one lines from it.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub(crate) fn start(
        spawn: Spawn,
    ) -> io::Result<(Self, pipe::Sender, BufReader<pipe::Receiver>)> {
        let (stdin, down) = io::pipe()?;
        let (up, stdout) = io::pipe()?;
        let helper = Self(spawn.stdin(stdin).stdout(stdout).die_with_parent().spawn()?);
        let down = pipe::Sender::from_owned_fd(down.into())?;
        let up = BufReader::new(pipe::Receiver::from_owned_fd(up.into())?);
        Ok((helper, down, up))
    }

    /// Ends the child, and returns its exit status in brackets, or nothing if it has not ended.
    pub(crate) async fn end(mut self) -> String {
        let _ = self.0.signal(Signal::KILL);
        let status = ended(&mut self.0, GRACE).await;
        status.map_or_else(String::new, |status| format!(" ({status})"))
    }
}

/// For a child itself: makes it ignore a service manager's signals to all processes of the
/// service, so that it does not end before the daemon.
///
/// # Errors
/// Errors of the kernel.
pub(crate) fn outlive_signals() -> io::Result<()> {
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, Arc::clone(&ignored))?;
    }
    Ok(())
}

impl Drop for Helper {
    fn drop(&mut self) {
        // The child has nothing to clean up, and is reaped at the latest when the daemon ends.
        let _ = self.0.signal(Signal::KILL);
        let _ = self.0.try_wait();
    }
}

/// The exit status of a child, if it ends within `limit`. Never blocks: the daemon has one
/// thread.
pub(crate) async fn ended(child: &mut Child, limit: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + limit;
    loop {
        if let Ok(Some(status)) = child.try_wait() {
            return Some(status);
        }
        if Instant::now() >= deadline {
            return None;
        }
        sleep(LOOK).await;
    }
}
