//! The kernel that this process runs on, as the steps ask it; and how long a page may be late.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use sys::memory_map::{Advice, PAGE_BYTES, PageSet, Pagemap, Range, advise};
use sys::userfaultfd::{Progress, Userfaultfd};

use super::{Kernel, STUCK, TRIES, pages_of};
use crate::time::{Nanos, now};

/// How long a page may fail to come home, over many steps, before QEMU is ended.
const PATIENCE: Duration = Duration::from_secs(10);

/// The kernel that this process runs on.
#[derive(Clone, Copy)]
pub(crate) struct Host {
    pub(crate) uffd: &'static Userfaultfd,
    pub(crate) pagemap: &'static Pagemap,
}

/// The page that has not come home for the longest time, and since when: 0 and 0 if all have.
static LATE: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// A page that has not come home when it should have: its address there.
pub(crate) fn late() -> Option<u64> {
    let [at, since] = &LATE;
    (since.load(Ordering::Acquire) != 0).then(|| at.load(Ordering::Acquire))
}

/// It is nowhere any more: QEMU has discarded it, or has mapped something else there.
pub(crate) fn forget_late() {
    LATE[1].store(0, Ordering::Release);
}

impl Kernel for Host {
    unsafe fn move_pages(&self, dst: u64, src: u64, len: u64) -> Progress {
        // SAFETY: as the caller promises.
        unsafe { self.uffd.move_pages(dst, src, len) }
    }

    unsafe fn copy_pages(&self, dst: u64, src: u64, len: u64) -> Progress {
        // SAFETY: as the caller promises.
        unsafe { self.uffd.copy_pages(dst, src, len) }
    }

    unsafe fn discard(&self, ours: Range) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        unsafe { advise(ours, Advice::LinuxDontNeed) }
    }

    fn populated(&self, range: Range) -> Result<PageSet, Errno> {
        self.pagemap.populated_set(range)
    }

    fn swapped(&self, range: Range) -> Result<PageSet, Errno> {
        self.pagemap.swapped_set(range)
    }

    fn now(&self) -> Nanos {
        now()
    }

    fn pause(&self) {
        rustix::thread::sched_yield();
    }

    fn tried(&self, home: Range, away: &PageSet) {
        let [at, since] = &LATE;
        let (late, began) = (at.load(Ordering::Acquire), since.load(Ordering::Acquire));
        if began == 0 {
            if let Some(page) = away.first() {
                at.store(home.start + page as u64 * PAGE_BYTES, Ordering::Release);
                since.store(now().0, Ordering::Release);
                // It may see nothing else to watch, and sleep.
                crate::watchdog::ring();
            }
        } else if (home.start..home.start + home.len).contains(&late) {
            if !away.has(pages_of(Range { start: home.start, len: late - home.start })) {
                since.store(0, Ordering::Release);
            } else if now().since(Nanos(began)) > PATIENCE {
                self.end(STUCK, Errno::TIMEDOUT);
            }
        }
    }

    fn end(&self, what: &str, errno: Errno) -> ! {
        crate::threads::end_process(what, errno)
    }
}

/// Maps zeros at `page`, if it is a hole: no memory is used until the guest writes. Answers whether
/// it was.
///
/// # Safety
/// Whatever belongs there is there already, and it is not mapped from a pool.
pub(crate) unsafe fn fill_hole(uffd: &Userfaultfd, page: Range) -> bool {
    // SAFETY: as the caller promises.
    unsafe { uffd.zero_pages(page) }.stopped != Some(Errno::EXIST)
}

/// Maps zeros wherever `range` has a hole.
///
/// # Safety
/// As for [`fill_hole`].
pub(crate) unsafe fn fill_holes(uffd: &Userfaultfd, range: Range) {
    let (mut at, mut tries) = (0, 0);
    while at < range.len {
        let rest = Range { start: range.start + at, len: range.len - at };
        // SAFETY: as the caller promises.
        let progress = unsafe { uffd.zero_pages(rest) };
        at += progress.bytes;
        match progress.stopped {
            None => break,
            Some(Errno::EXIST) => at += PAGE_BYTES,
            Some(Errno::AGAIN) if tries < TRIES => tries += 1,
            // Whoever waits for a page that is still missing traps again.
            Some(_) => break,
        }
    }
}
