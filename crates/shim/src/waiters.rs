//! Threads that wait for a page: how they are woken, and which of their faults have been read but
//! not served yet.

use std::sync::atomic::{AtomicU64, Ordering};

use sys::memory_map::Range;
use sys::userfaultfd::Userfaultfd;

use crate::alerts;
use crate::time::{Nanos, now};

/// Wakes threads that wait for a page of `range`; each continues, or traps again. The kernel
/// refuses this only for wrong addresses. If it refuses, the watchdog wakes all waiting threads.
pub(crate) fn wake(uffd: &Userfaultfd, range: Range) {
    if uffd.wake(range).is_err() {
        alerts::not_woken();
    }
}

/// The thread that reads faults.
#[derive(Clone, Copy)]
pub(crate) enum Reader {
    /// The fault thread.
    Server,
    /// The thread that reads while mappings are moved.
    Remapper,
    /// The watchdog, in place of the fault thread.
    Watchdog,
}

/// When each reader read the faults that it has in hand; 0: none.
static SINCE: [AtomicU64; 3] = [const { AtomicU64::new(0) }; 3];
/// Number of faults read so far.
static READ: AtomicU64 = AtomicU64::new(0);

/// Records that a reader has `count` more faults in hand.
pub(crate) fn has_read(reader: Reader, count: usize) {
    let _ =
        SINCE[reader as usize].compare_exchange(0, now().0, Ordering::AcqRel, Ordering::Relaxed);
    READ.fetch_add(count as u64, Ordering::Relaxed);
}

/// Records that all faults of a reader have been served, or trap again.
pub(crate) fn has_none(reader: Reader) {
    SINCE[reader as usize].store(0, Ordering::Release);
}

/// When the oldest fault that a reader has in hand was read.
pub(crate) fn waiting_since() -> Option<Nanos> {
    let since = SINCE.iter().map(|since| since.load(Ordering::Acquire));
    since.filter(|&since| since != 0).min().map(Nanos)
}

/// Number of faults read so far.
pub(crate) fn faults_read() -> u64 {
    READ.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_that_read_at_once_do_not_clear_each_others_mark() {
        assert_eq!(waiting_since(), None);
        has_read(Reader::Remapper, 1);
        let first = waiting_since();
        assert!(first.is_some());
        has_read(Reader::Server, 2);
        has_none(Reader::Server);
        assert_eq!(waiting_since(), first, "what the other one has read still waits");
        has_read(Reader::Remapper, 1);
        assert_eq!(waiting_since(), first, "the oldest counts");
        has_none(Reader::Remapper);
        assert_eq!(waiting_since(), None);
    }
}
