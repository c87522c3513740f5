//! Holes in guest RAM: pages that were never there, or that were discarded.
//!
//! A hole that was never revoked would trap once per 4 KiB where the kernel alone would have
//! mapped a huge page. So an empty block of 2 MiB gets a huge page in one move, prepared in the
//! shim's own memory ([`Nursery`]). Any other hole gets the zero page for its whole granule. That
//! costs no memory, and does not bring back neighbouring pages that a balloon took.

use protocol::layout::{PageState, Shared};
use sys::memory_map::{PAGE_BYTES, Range};
use sys::userfaultfd::Userfaultfd;

use crate::granules::Granule;
use crate::nursery::Nursery;
use crate::ram::page_of;
use crate::transitions::{self, HostKernel};
use crate::waiters::wake;

/// Fills holes with zeros. Everything here runs under the engine's lock.
pub(crate) struct Holes {
    host: HostKernel,
    nursery: Option<Nursery>,
}

impl Holes {
    pub(crate) fn new(host: HostKernel) -> Self {
        Self { host, nursery: Nursery::new().ok() }
    }

    /// Maps a huge page at `block`, whose numbers are `pages`, if all of it is empty and no part
    /// of it is revoked; returns the block.
    pub(crate) fn fill_block(
        &mut self,
        shared: Shared<'_>,
        block: Range,
        pages: std::ops::Range<u32>,
    ) -> Option<Range> {
        let is_home = |page| matches!(shared.state(page), PageState::Plain | PageState::Freed);
        if !pages.clone().all(is_home) || self.host.pagemap.populated(block) != Ok(0) {
            return None;
        }
        self.nursery.as_mut()?.put(&self.host, block).then(|| {
            // The guest uses the freed pages of the block again.
            pages.for_each(|page| shared.set_state(page, PageState::Plain));
            block
        })
    }

    /// Maps zeros at `page`, if it is a hole, and then in all other holes of its granule. A page
    /// that is there (the usual case) costs one call. Returns whether `page` was a hole.
    ///
    /// # Safety
    /// The granule's content is in place, and the page is not merged.
    pub(crate) unsafe fn fill_granule(
        &self,
        shared: Shared<'_>,
        granule: Granule,
        page: Range,
    ) -> bool {
        // SAFETY: as the caller promises.
        let was_hole = unsafe { transitions::fill_hole(self.host.uffd, page) };
        for part in granule.parts(shared, PageState::Plain).filter(|_| was_hole) {
            // SAFETY: as above.
            unsafe { transitions::fill_holes(self.host.uffd, part.guest) };
        }
        for part in granule.parts(shared, PageState::Freed).filter(|_| was_hole) {
            self.take_back(shared, part, page);
        }
        was_hole
    }

    /// Fills those of these freed pages that the kernel has dropped, and makes them plain. The
    /// page just `filled` becomes plain too.
    fn take_back(&self, shared: Shared<'_>, freed: Granule, filled: Range) {
        for (i, number) in (0..).zip(freed.numbers()) {
            let page = Range { start: freed.guest.start + i * PAGE_BYTES, len: PAGE_BYTES };
            // SAFETY: the guest has given up the old content, or it is still there.
            if page == filled || unsafe { transitions::fill_hole(self.host.uffd, page) } {
                shared.set_state(number, PageState::Plain);
            }
        }
    }
}

/// A fault outside of all granules, or after tracking has ended: a range whose registration could
/// not be ended. Everything that was taken is back, so a missing page is zero.
pub(crate) fn fill_stray(uffd: &Userfaultfd, address: u64) {
    let page = page_of(address);
    // SAFETY: as stated above.
    unsafe { transitions::fill_hole(uffd, page) };
    wake(uffd, page);
}
