//! The running kernel, as the steps use it, and the time for which a page may be late.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::clock_nanosleep_relative;
use rustix::time::{ClockId, Timespec};
use sys::memory_map::{Advice, PAGE_BYTES, PageSet, Pagemap, Range, advise};
use sys::userfaultfd::{Progress, Userfaultfd};

use super::{Kernel, STUCK, TRIES, pages_of};
use crate::process::{pagemap, userfaultfd};
use crate::time::{Nanos, now};

/// How long a page may fail to move back, over many steps, before QEMU is ended.
const PATIENCE: Duration = Duration::from_secs(10);

/// The pauses between two tries: the first ones take no time, the others grow from this.
const SHORTEST_NAP: Duration = Duration::from_micros(10);
/// The longest pause takes 160 µs, a sixth of [`HOLD`](super::HOLD).
const MOST_DOUBLINGS: u32 = 4;

/// The kernel that this process runs on.
#[derive(Clone, Copy)]
pub(crate) struct HostKernel {
    pub(crate) uffd: &'static Userfaultfd,
    pub(crate) pagemap: &'static Pagemap,
}

/// The page that has been late for longest: its address, and since when. Both 0: no page is late.
static LATE: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];

/// The address in guest RAM of a page that could not be moved back in time.
pub(crate) fn late() -> Option<u64> {
    let [at, since] = &LATE;
    (since.load(Ordering::Acquire) != 0).then(|| at.load(Ordering::Acquire))
}

/// Clears the late page: QEMU has discarded it, or has mapped something else there.
pub(crate) fn forget_late() {
    LATE[1].store(0, Ordering::Release);
}

impl HostKernel {
    /// `None` when this process has no userfaultfd or no page tables.
    pub(crate) fn get() -> Option<Self> {
        Some(Self { uffd: userfaultfd().ok()?, pagemap: pagemap()? })
    }
}

impl Kernel for HostKernel {
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

    fn now(&self) -> Nanos {
        now()
    }

    /// A page is busy because another CPU changes its mapping or has it locked, for reclaim or
    /// compaction. The kernel tells no thread when that is over, so there is nothing to wait on.
    /// Most often it is over at once; afterwards the pauses become longer.
    fn pause(&self, before: u32) {
        let Some(doublings) = before.checked_sub(TRIES) else { return };
        let nap = SHORTEST_NAP.saturating_mul(1 << doublings.min(MOST_DOUBLINGS));
        // An interrupted nap is long enough. The time is valid, so nothing else can fail.
        let nap = Timespec { tv_sec: 0, tv_nsec: nap.subsec_nanos().into() };
        let _ = clock_nanosleep_relative(ClockId::Monotonic, &nap);
    }

    fn tried(&self, home: Range, away: &PageSet) {
        let [at, since] = &LATE;
        let (late, began) = (at.load(Ordering::Acquire), since.load(Ordering::Acquire));
        if began == 0 {
            if let Some(page) = away.first() {
                at.store(home.start + page as u64 * PAGE_BYTES, Ordering::Release);
                since.store(now().0, Ordering::Release);
                // The watchdog may see nothing else to watch, and sleep.
                crate::alerts::ring();
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

/// Maps zeros at `page` if it is a hole; this uses no memory until the guest writes. Returns
/// whether it was a hole.
///
/// # Safety
/// Any content of the page is in place already, and it is not mapped from a pool.
pub(crate) unsafe fn fill_hole(uffd: &Userfaultfd, page: Range) -> bool {
    // SAFETY: as the caller promises.
    unsafe { uffd.zero_pages(page) }.stopped != Some(Errno::EXIST)
}

/// Maps zeros in all holes of `range`.
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
            // A thread that waits for a page that is still missing traps again.
            Some(_) => break,
        }
    }
}
