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
use crate::retries;
use crate::time::{Nanos, now};

/// How long a page may fail to move back, over many steps, before QEMU is ended.
const PATIENCE: Duration = Duration::from_secs(10);
/// A late page that no step has tried for this long makes way for one that is tried: all steps may
/// wait for that one.
const UNTRIED: Duration = Duration::from_secs(1);

/// The pauses between two tries: the first ones take no time, the others grow from this.
const SHORTEST_NAP: Duration = Duration::from_micros(10);
/// The longest pause takes 160 µs, a sixth of [`HOLD`](crate::retries::HOLD).
const MOST_DOUBLINGS: u32 = 4;

/// The kernel that this process runs on.
#[derive(Clone, Copy)]
pub(crate) struct HostKernel {
    pub(crate) uffd: &'static Userfaultfd,
    pub(crate) pagemap: &'static Pagemap,
}

static LATE: LatePage = LatePage::new();

/// The address in guest RAM of a page that could not be moved back in time.
pub(crate) fn late() -> Option<u64> {
    LATE.known().map(|(at, _)| at)
}

/// Clears the late page: QEMU has discarded it, or has mapped something else there.
pub(crate) fn forget_late() {
    LATE.forget();
}

/// The page that has been late for longest, of those that steps still try to move back. It changes
/// under the engine's lock.
struct LatePage {
    /// Its address.
    at: AtomicU64,
    /// Since when it is late; 0: no page is.
    since: AtomicU64,
    /// When it was last tried.
    tried: AtomicU64,
}

impl LatePage {
    const fn new() -> Self {
        Self { at: AtomicU64::new(0), since: AtomicU64::new(0), tried: AtomicU64::new(0) }
    }

    /// Its address, and since when it is late.
    fn known(&self) -> Option<(u64, Nanos)> {
        let since = self.since.load(Ordering::Acquire);
        (since != 0).then(|| (self.at.load(Ordering::Acquire), Nanos(since)))
    }

    fn forget(&self) {
        self.since.store(0, Ordering::Release);
    }

    /// Notes a try to move the pages of `home` back: those in `away` are late. Returns for how long
    /// the late page is, if this try was for it; 0: it is noted only now.
    fn tried(&self, home: Range, away: &PageSet, now: Nanos) -> Option<Duration> {
        let known = self.known();
        if let Some((at, since)) = known
            && (home.start..home.start + home.len).contains(&at)
        {
            self.tried.store(now.0, Ordering::Release);
            if away.has(pages_of(Range { start: home.start, len: at - home.start })) {
                return Some(now.since(since));
            }
            self.forget();
            return None;
        }
        let untried = now.since(Nanos(self.tried.load(Ordering::Acquire)));
        let page = away.first().filter(|_| known.is_none() || untried > UNTRIED)?;
        self.at.store(home.start + page as u64 * PAGE_BYTES, Ordering::Release);
        self.since.store(now.0, Ordering::Release);
        self.tried.store(now.0, Ordering::Release);
        Some(Duration::ZERO)
    }
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
        if away.is_empty() {
            retries::came_back();
        }
        match LATE.tried(home, away, now()) {
            // The watchdog may see nothing else to watch, and sleep.
            Some(Duration::ZERO) => crate::alerts::ring(),
            Some(late) if late > PATIENCE => self.end(STUCK, Errno::TIMEDOUT),
            _ => {}
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_all_steps_wait_for_is_not_hidden_by_one_that_none_tries() {
        let late = LatePage::new();
        let tried = |page: u64, ms: u64| {
            let home = Range { start: page * PAGE_BYTES, len: PAGE_BYTES };
            let mut away = PageSet::default();
            away.add(home, home);
            late.tried(home, &away, Nanos(1 + ms * 1_000_000))
        };
        assert_eq!(tried(176, 0), Some(Duration::ZERO));
        assert_eq!(tried(176, 900), Some(Duration::from_millis(900)));
        assert_eq!(tried(170, 1_900), None);
        assert_eq!(tried(170, 1_901), Some(Duration::ZERO));
        assert_eq!(tried(176, 12_000), Some(Duration::ZERO), "that one was not tried either");
        assert_eq!(tried(176, 12_800), Some(Duration::from_millis(800)));
    }
}
