//! The fault thread. It serves every touch of a revoked page and every first write to a merged
//! page; the guest's thread waits meanwhile.
//!
//! The thread reads faults, takes the lock and has the faults served. It allocates nothing, logs
//! nothing, touches no guest RAM and makes no call that could wait for QEMU. It never ends. The
//! watchdog sees from [`waiting_since`] for how long a fault has been in hand, and serves faults
//! itself ([`serve_pending`]) if this thread has stopped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};

use sys::userfaultfd::{MAX_FAULTS, PageFault, Userfaultfd};

use crate::engine::{self, ENGINE};
use crate::time::{Nanos, now};
use crate::tracker::{Served, page_of};
use crate::watchdog;

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

/// The thread's body.
pub(crate) fn run() {
    let Ok(uffd) = engine::userfaultfd() else { return };
    loop {
        if !serve_pending(uffd, Reader::Server) {
            uffd.wait(None);
        }
    }
}

/// Serves the faults that have arrived; returns whether there were any. A panic costs the fault's
/// log entry; the guest's thread continues, or traps again.
pub(crate) fn serve_pending(uffd: &'static Userfaultfd, reader: Reader) -> bool {
    let mut faults = [PageFault::default(); MAX_FAULTS];
    let Ok(count) = uffd.read_faults(&mut faults) else { return false };
    if count == 0 {
        return false;
    }
    let received = now();
    has_read(reader, count);
    for &fault in &faults[..count] {
        let served =
            catch_unwind(AssertUnwindSafe(|| ENGINE.lock_for_fault().serve(uffd, fault, received)));
        match served {
            Ok(Served::Yes) => {}
            Ok(Served::FuseBlown) => watchdog::blow_fuse(),
            Err(_) => {
                ENGINE.lock_for_fault().let_go_on(uffd, page_of(fault.address));
                watchdog::give_up();
            }
        }
    }
    has_none(reader);
    ENGINE.make_way();
    true
}

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
