//! Measures the cost of a trap for the thread that touches a page. The granule is the shim's own
//! and takes the same fault thread and the same moves as a guest's.
//!
//! The handler's own time is counted trap by trap. That time leaves out the way there and back:
//! the kernel puts the thread to sleep and wakes another, often on an idle CPU. Here a thread of
//! the shim touches a revoked granule and reads the clock before and after.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use protocol::MAX_GRANULE_PAGES;
use rustix::io::Errno;
use sys::memory_map::{Advice, PAGE_BYTES, Range, Reserved};

use crate::time::now;
use crate::transitions::{self, HostKernel, Kernel as _};
use crate::waiters::wake;

const LARGEST: u64 = MAX_GRANULE_PAGES as u64 * PAGE_BYTES;

/// Room for the largest granule and, next to it, its staging. The memory is never freed, because
/// a thread may be touching it.
pub(crate) struct Bench {
    place: Reserved,
    /// Bytes that were moved away and not yet moved back.
    away: AtomicU64,
}

impl Bench {
    /// The process's only instance; `None` when there is no memory for it.
    pub(crate) fn get() -> Option<&'static Self> {
        static BENCH: OnceLock<Option<Bench>> = OnceLock::new();
        BENCH.get_or_init(|| Self::new().ok()).as_ref()
    }

    fn new() -> Result<Self, Errno> {
        let place = Reserved::new(2 * LARGEST)?;
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork] {
            // SAFETY: fresh memory. A kernel without huge pages refuses that advice, and needs
            // none.
            let _ = unsafe { place.advise(advice) };
        }
        // The pages are touched while they are registered nowhere: a thread that waited for the
        // fault thread here would hold the lock.
        for page in 0..LARGEST / PAGE_BYTES {
            // SAFETY: the shim's own fresh memory.
            unsafe { pointer(place.range().start + page * PAGE_BYTES).write_volatile(1) };
        }
        Ok(Self { place, away: AtomicU64::new(0) })
    }

    /// The range to register.
    pub(crate) fn range(&self) -> Range {
        self.place.range()
    }

    /// Revokes a granule and returns the address to touch. Its content is not needed, so the page
    /// tables are not asked afterwards.
    pub(crate) fn arm(&self, host: &HostKernel, granule_pages: u32) -> Option<u64> {
        let guest = self.guest(u64::from(granule_pages) * PAGE_BYTES);
        self.away.store(guest.len, Ordering::Relaxed);
        // SAFETY: both halves are registered, and the fault thread serves.
        let taken = unsafe { host.move_pages(self.staging(), guest.start, guest.len) };
        (taken.bytes > 0).then_some(guest.start)
    }

    /// Moves the pages back; fills those that cannot be moved with zeros.
    pub(crate) fn serve(&self, host: &HostKernel) {
        let guest = self.guest(self.away.swap(0, Ordering::Relaxed));
        if guest.len > 0 {
            // SAFETY: `arm` moved the content there.
            let given = unsafe { host.move_pages(guest.start, self.staging(), guest.len) };
            if given.stopped.is_some() {
                // SAFETY: the content is not needed.
                unsafe { transitions::fill_holes(host.uffd, guest) };
            }
        }
        wake(host.uffd, self.guest(LARGEST));
    }

    /// Whether an address lies in the first half, which is the one touched.
    pub(crate) fn contains(&self, address: u64) -> bool {
        let guest = self.guest(LARGEST);
        (guest.start..guest.start + guest.len).contains(&address)
    }

    fn guest(&self, len: u64) -> Range {
        Range { start: self.place.range().start, len }
    }

    fn staging(&self) -> u64 {
        self.place.range().start + LARGEST
    }
}

/// Touches the granule that [`Bench::arm`] revoked, without the lock, and returns how long that
/// took.
///
/// # Safety
/// `address` is the one that [`Bench::arm`] returned.
pub(crate) unsafe fn touch(address: u64) -> Duration {
    let before = now();
    // SAFETY: as the caller promises; the page is there when the read ends.
    unsafe { pointer(address).read_volatile() };
    now().since(before)
}

fn pointer(address: u64) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(address).unwrap_or(0))
}
