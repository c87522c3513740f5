//! Ends the view when its terminal has gone or on a signal, even while the view blocks.
//!
//! The library that reads keys never returns from reading a terminal that has gone, and a
//! terminal that takes no output blocks the painting thread. So a separate thread waits for the
//! end. It first asks the view to end. After [`GRACE`] it ends the process, and restores the
//! terminal if possible.

use std::{
    io::{self, IsTerminal},
    os::{fd::AsFd, unix::net::UnixStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    low_level::pipe,
};

/// Time that the view has to end by itself; several times the delay of a key.
const GRACE: Duration = Duration::from_secs(1);

/// Knows when the view has to end.
pub(super) struct Ending {
    is_due: Arc<AtomicBool>,
}

impl Ending {
    /// Watches the terminal and the signals from now on, until the process ends.
    ///
    /// # Errors
    /// A signal cannot be handled, or the thread cannot be started.
    pub(super) fn watch() -> io::Result<Self> {
        let (signals, signalled) = UnixStream::pair()?;
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            pipe::register(signal, signalled.try_clone()?)?;
        }
        let is_due = Arc::<AtomicBool>::default();
        let told = Arc::clone(&is_due);
        thread::Builder::new().name("ending".to_owned()).spawn(move || {
            wait_for_end(&signals);
            told.store(true, Ordering::Relaxed);
            // When the view ends in time, the process and this thread end with it.
            thread::sleep(GRACE);
            insist();
        })?;
        Ok(Self { is_due })
    }

    /// Whether the view has to end.
    pub(super) fn is_due(&self) -> bool {
        self.is_due.load(Ordering::Relaxed)
    }
}

/// Returns after a signal, or when a terminal on standard input or output has gone.
fn wait_for_end(signals: &UnixStream) {
    let (stdin, stdout) = (io::stdin(), io::stdout());
    let terminals = [stdin.as_fd(), stdout.as_fd()].into_iter().filter(IsTerminal::is_terminal);
    // `poll` reports hang-ups without being asked.
    let mut fds: Vec<PollFd<'_>> =
        terminals.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::empty())).collect();
    fds.push(PollFd::new(signals, PollFlags::IN));
    while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}

/// Restores the terminal and ends the process, because the view may block for ever.
fn insist() -> ! {
    // The call may wait for a lock that the view holds, and for the terminal.
    drop(thread::Builder::new().spawn(ratatui::try_restore));
    thread::sleep(GRACE);
    // Exit handlers would also wait for the view.
    signal_hook::low_level::exit(1)
}
