//! Ends the view when its terminal has gone or a signal says so, whatever the view is doing.
//!
//! The library that reads keys never returns from reading a terminal that has gone, and a terminal
//! that takes no output holds up whoever paints. So a thread of its own waits for the end. It asks
//! first; who has not obeyed after [`GRACE`] is ended, and the terminal is put back as far as it
//! can be.

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

use ratatui::crossterm::terminal::disable_raw_mode;
use rustix::event::{PollFd, PollFlags, poll};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    low_level::pipe,
};

/// How long the view may take to end by itself; several times its own patience.
const GRACE: Duration = Duration::from_secs(1);

/// Knows when the view is to end.
pub(super) struct Ending {
    is_due: Arc<AtomicBool>,
}

impl Ending {
    /// Watches the terminal and the signals from now on, for as long as the process lives.
    ///
    /// # Errors
    /// When a signal cannot be handled, or there can be no further thread.
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
            // When the view ends in time, the process ends, and this thread with it.
            thread::sleep(GRACE);
            insist();
        })?;
        Ok(Self { is_due })
    }

    /// Whether it is time to end.
    pub(super) fn is_due(&self) -> bool {
        self.is_due.load(Ordering::Relaxed)
    }
}

/// Returns when a signal has come, or a terminal that we have as standard input or output has gone.
fn wait_for_end(signals: &UnixStream) {
    let (stdin, stdout) = (io::stdin(), io::stdout());
    let terminals = [stdin.as_fd(), stdout.as_fd()].into_iter().filter(IsTerminal::is_terminal);
    // Hang-ups are told without being asked for.
    let mut fds: Vec<PollFd<'_>> =
        terminals.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::empty())).collect();
    fds.push(PollFd::new(signals, PollFlags::IN));
    while poll(&mut fds, None) == Err(rustix::io::Errno::INTR) {}
}

/// Puts the terminal back and ends the process, while the view waits for something that may never
/// come.
fn insist() -> ! {
    // Either may wait for a lock that the view holds, the second one for room in the terminal, too.
    let restored = thread::Builder::new().spawn(|| {
        let _ = disable_raw_mode();
        ratatui::restore();
    });
    drop(restored);
    thread::sleep(GRACE);
    // Handlers of the exit would wait for the view as well.
    signal_hook::low_level::exit(1)
}
