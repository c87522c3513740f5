//! Huge pages of zeros, ready to be moved to where the guest touches a hole.
//!
//! Where QEMU wants huge pages, the kernel answers the first touch of an empty block of 2 MiB with
//! one. A registered range traps instead, and the page of zeros in its place would cost a trap or a
//! copy-on-write per 4 KiB, and the huge page for good. So the kernel is made to put a huge page
//! into memory of our own, which is then moved: one trap per 2 MiB.
//!
//! When the kernel has no huge page to give, nothing is put: it would not have had one for the
//! guest.

use rustix::io::Errno;
use sys::memory_map::{Advice, HUGE_PAGE_BYTES, PAGE_BYTES, Pagemap, Range, Reserved};

use crate::transitions::{Host, Kernel as _};

/// Room for one huge page.
pub(crate) struct Nursery {
    place: Reserved,
    ready: bool,
}

impl Nursery {
    pub(crate) fn new() -> Result<Self, Errno> {
        let place = Reserved::new(HUGE_PAGE_BYTES)?;
        for advice in [Advice::LinuxHugepage, Advice::LinuxDontFork] {
            // SAFETY: fresh memory.
            unsafe { place.advise(advice) }?;
        }
        Ok(Self { place, ready: false })
    }

    /// Puts a huge page of zeros at `block`, which is registered, empty and 2 MiB.
    pub(crate) fn put(&mut self, host: &Host, block: Range) -> bool {
        if !self.ready && !self.prepare(host.pagemap) {
            return false;
        }
        let from = self.place.range();
        // SAFETY: the page holds zeros, as the block does that it is moved to.
        let progress = unsafe { host.move_pages(block.start, from.start, from.len) };
        self.ready = false;
        if progress.stopped.is_some() {
            self.empty();
        }
        progress.bytes > 0
    }

    fn prepare(&mut self, pagemap: &Pagemap) -> bool {
        let first = std::ptr::with_exposed_provenance_mut::<u8>(address(self.place.range()));
        // SAFETY: memory of ours, not registered; the write makes the kernel put a page there.
        unsafe { first.write_volatile(0) };
        self.ready = pagemap.huge(self.place.range()) == Ok(HUGE_PAGE_BYTES / PAGE_BYTES);
        if !self.ready {
            self.empty();
        }
        self.ready
    }

    fn empty(&self) {
        // SAFETY: nothing but zeros is there. What stays costs one page.
        let _ = unsafe { self.place.advise(Advice::LinuxDontNeed) };
    }
}

/// An address of this process fits its words.
fn address(range: Range) -> usize {
    usize::try_from(range.start).unwrap_or(0)
}
