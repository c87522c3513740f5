//! The thread that reads the userfaultfd while a registered mapping is moved.
//!
//! **Problem.** The kernel reports such a move on the userfaultfd, and the move does not return
//! until the report has been read. The fault thread cannot read it: that thread may be waiting
//! for the lock that the mover holds.
//!
//! **Idea.** While mappings are moved, this thread reads. It does not serve the faults that it
//! reads: it wakes the waiting threads afterwards, they trap again, and the fault thread serves
//! them. This thread never takes the engine's lock and touches no guest RAM.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::Timespec;
use sys::memory_map::{PAGE_BYTES, Range};
use sys::userfaultfd::{MAX_FAULTS, PageFault};

use crate::process::userfaultfd;
use crate::waiters::{self, Reader};

/// How long the thread waits before it checks whether the turn is over.
const LOOK: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000 };

/// Counts beginnings and ends of turns: odd while mappings are moved.
static TURNS: Mutex<u32> = Mutex::new(0);
static BEGUN: Condvar = Condvar::new();

/// While an instance exists, registered mappings may be moved: the thread reads.
pub(crate) struct RemapReadGuard(());

impl RemapReadGuard {
    pub(crate) fn begin() -> Self {
        count();
        BEGUN.notify_one();
        Self(())
    }
}

impl Drop for RemapReadGuard {
    fn drop(&mut self) {
        count();
    }
}

/// The thread's body.
pub(crate) fn run() {
    let Ok(uffd) = userfaultfd() else { return };
    loop {
        let mut turns = turns();
        while turns.is_multiple_of(2) {
            turns = BEGUN.wait(turns).unwrap_or_else(PoisonError::into_inner);
        }
        let turn = *turns;
        drop(turns);
        let (mut first, mut last, mut faults) = (u64::MAX, 0, [PageFault::default(); MAX_FAULTS]);
        while *self::turns() == turn {
            let read = if uffd.wait(Some(&LOOK)) { uffd.read_faults(&mut faults) } else { Ok(0) };
            let read = read.unwrap_or(0);
            if read > 0 {
                waiters::has_read(Reader::Remapper, read);
            }
            for fault in &faults[..read] {
                (first, last) = (first.min(fault.address), last.max(fault.address));
            }
        }
        if first <= last {
            let start = first / PAGE_BYTES * PAGE_BYTES;
            // All threads in between, too: one that is woken too early traps again.
            let len = last / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES - start;
            waiters::wake(uffd, Range { start, len });
            waiters::has_none(Reader::Remapper);
        }
    }
}

fn count() {
    let mut turns = turns();
    *turns = turns.wrapping_add(1);
}

fn turns() -> MutexGuard<'static, u32> {
    TURNS.lock().unwrap_or_else(PoisonError::into_inner)
}
