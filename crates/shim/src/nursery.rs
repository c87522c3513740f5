//! Huge pages of zeros, ready to be moved to a hole that the guest touches.
//!
//! Where QEMU wants huge pages, the kernel handles the first touch of an empty block of 2 MiB by
//! mapping a huge page. A registered range traps instead. The zero page in its place would cost a
//! trap or a copy-on-write per 4 KiB, and the block would never get a huge page. So the kernel is
//! made to put a huge page into the shim's own memory, which is then moved: one trap per 2 MiB.
//!
//! When the kernel has no huge page to give, nothing is moved: the guest would not have got one
//! either.

use rustix::io::Errno;
use sys::memory_map::{Advice, HUGE_PAGE_BYTES, PAGE_BYTES, Pagemap, Range, Reserved};

use crate::transitions::{HostKernel, Kernel as _};

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

    /// Moves a huge page of zeros to `block`, which is registered, empty and 2 MiB large.
    pub(crate) fn put(&mut self, host: &HostKernel, block: Range) -> bool {
        if !self.ready && !self.prepare(host.pagemap) {
            return false;
        }
        let from = self.place.range();
        // SAFETY: the page holds zeros, and so does the empty block.
        let progress = unsafe { host.move_pages(block.start, from.start, from.len) };
        self.ready = false;
        if progress.stopped.is_some() {
            self.empty();
        }
        progress.bytes > 0
    }

    fn prepare(&mut self, pagemap: &Pagemap) -> bool {
        let first = std::ptr::with_exposed_provenance_mut::<u8>(address(self.place.range()));
        // SAFETY: the shim's own memory, not registered; the write makes the kernel put a page
        // there.
        unsafe { first.write_volatile(0) };
        self.ready = pagemap.huge(self.place.range()) == Ok(HUGE_PAGE_BYTES / PAGE_BYTES);
        if !self.ready {
            self.empty();
        }
        self.ready
    }

    fn empty(&self) {
        // SAFETY: the range holds nothing but zeros. If this fails, it costs one page.
        let _ = unsafe { self.place.advise(Advice::LinuxDontNeed) };
    }
}

/// An address of this process fits a `usize`.
fn address(range: Range) -> usize {
    usize::try_from(range.start).unwrap_or(0)
}
