//! The watchdog's reasons to act, and the eventfd that wakes it. Any thread may report one: a
//! report takes no lock and allocates nothing.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use sys::faults::{self, Call, NOWHERE};

use crate::descriptors::Guarded;
use crate::time::{Nanos, now};

static FUSE_BLOWN: AtomicBool = AtomicBool::new(false);
static GAVE_UP: AtomicBool = AtomicBool::new(false);
/// When the worker last sent something; 0: there is no worker.
static LAST_WORD: AtomicU64 = AtomicU64::new(0);
/// A thread may still wait that should have been woken.
static NOT_WOKEN: AtomicBool = AtomicBool::new(false);
static BELL: OnceLock<OwnedFd> = OnceLock::new();

/// Makes the eventfd; called before the watchdog starts.
///
/// # Errors
/// The kernel's.
pub(crate) fn prepare() -> std::io::Result<()> {
    if BELL.get().is_none() {
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = faults::call(Call::Eventfd, NOWHERE, make)?;
        std::mem::forget(Guarded::new(bell.as_raw_fd()));
        BELL.get_or_init(|| bell);
    }
    Ok(())
}

/// Wakes the watchdog: there is something to watch, or to do.
pub(crate) fn ring() {
    if let Some(bell) = BELL.get() {
        // The write fails only when the eventfd is already signalled.
        let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
    }
}

/// Sleeps until the watchdog is woken, at most for `timeout`. `false`: there is no eventfd.
pub(crate) fn wait(timeout: Option<Duration>) -> bool {
    let Some(bell) = BELL.get() else { return false };
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut fds = [PollFd::new(bell, PollFlags::IN)];
    // Interrupted or not: the caller checks.
    let _ = poll(&mut fds, timeout.as_ref());
    let _ = rustix::io::read(bell, &mut [0; 8]);
    true
}

/// The worker sent something.
pub(crate) fn worker_spoke() {
    LAST_WORD.store(now().0, Ordering::Release);
}

/// The worker has left.
pub(crate) fn worker_left() {
    LAST_WORD.store(0, Ordering::Release);
}

/// When the worker last sent something; `None`: there is no worker.
pub(crate) fn last_word() -> Option<Nanos> {
    let last_word = LAST_WORD.load(Ordering::Acquire);
    (last_word != 0).then_some(Nanos(last_word))
}

/// There were more traps than allowed.
pub(crate) fn blow_fuse() {
    if !FUSE_BLOWN.swap(true, Ordering::AcqRel) {
        ring();
    }
}

/// Whether there were more traps than allowed since tracking began.
pub(crate) fn is_fuse_blown() -> bool {
    FUSE_BLOWN.load(Ordering::Acquire)
}

/// Serving a fault failed in a way that should be impossible.
pub(crate) fn give_up() {
    GAVE_UP.store(true, Ordering::Release);
    ring();
}

/// Whether serving a fault has failed since tracking began.
pub(crate) fn has_given_up() -> bool {
    GAVE_UP.load(Ordering::Acquire)
}

/// Tracking begins: earlier events do not count.
pub(crate) fn tracking_begins() {
    FUSE_BLOWN.store(false, Ordering::Release);
    GAVE_UP.store(false, Ordering::Release);
}

/// A thread may still wait for a page: the watchdog wakes all waiting threads.
pub(crate) fn not_woken() {
    NOT_WOKEN.store(true, Ordering::Release);
    ring();
}

/// Whether a thread may still wait that should have been woken.
pub(crate) fn is_one_not_woken() -> bool {
    NOT_WOKEN.load(Ordering::Acquire)
}

/// The same, and clears the report.
pub(crate) fn take_not_woken() -> bool {
    NOT_WOKEN.swap(false, Ordering::AcqRel)
}

/// Restores a report that was taken, if it was one.
pub(crate) fn restore_not_woken(not_woken: bool) {
    NOT_WOKEN.fetch_or(not_woken, Ordering::AcqRel);
}
