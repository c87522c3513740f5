//! Puts copies in the place of a pool's pages, so that memory and mappings are as they were before merging.
//!
//! **Problem.** A write has the kernel copy a merged page, but the copy lies in the mapping of the pool's file
//! for as long as that stands, and cannot be moved. Mapping other memory over it takes the page away from a
//! disk that may just be reading into it.
//!
//! **Idea.** A page that *nobody has written yet* holds what the pool holds, and to pin a page for writing is
//! to write to it. So writes are stopped (userfaultfd write protection); what the page tables then still show
//! as the file's page can be replaced without asking who uses it: whoever has pinned it only reads, and what
//! he reads does not change. The content is copied aside, memory that nobody has touched and that traps is
//! mapped over the place in one step, and the copy is moved there. Who touches it meanwhile waits, and never
//! sees zeros. What the guest had written before stays where it is.
//!
//! **Invariants.** Everything here runs under the engine's lock, and nothing is protected when a turn ends. A copy is
//! aside before its place is taken, so afterwards no memory is needed that the host may not have.
//!
//! **Cost**, of a CPU: some 14 µs per run and 2 µs per page; half a millisecond in a turn of the worst layout.
//!
//! **Leaves out.** Kernels that cannot protect pages of a file (`CONFIG_PTE_MARKER_UFFD_WP`), and hosts that promise no more memory than they have
//! (`vm.overcommit_memory=2`: the kernel might refuse when the place is already unmapped): there the kernel
//! makes the copies ([`copy`]), and the mappings stay.

use protocol::layout::PageState;
use rustix::io::Errno;
use sys::memory_map::{Advice, Over, Pagemap, Range, Untouched, advise};
use sys::userfaultfd::Userfaultfd;

use crate::channel::Channel;
use crate::ram::Block;
use crate::{merge, moves};

/// Whether pages can be replaced on this host.
pub(crate) fn is_possible(uffd: &Userfaultfd) -> bool {
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    uffd.can_replace() && ["0", "1"].contains(&overcommit.trim())
}

/// Has the page tables know the pages of `range`: of one that they do not know nothing can be said.
pub(crate) fn look_up(range: Range) {
    // SAFETY: it discards nothing. What is not looked up is not replaced.
    let _ = unsafe { advise(range, Advice::LinuxPopulateRead) };
}

/// Writes to every page of `range` without changing it: what it shares with a pool becomes a copy of its own,
/// by the same way that a write of the guest's takes. Memory that is not there becomes zeros, which it is.
pub(crate) fn copy(range: Range) -> Result<(), Errno> {
    // SAFETY: it discards nothing.
    unsafe { advise(range, Advice::LinuxPopulateWrite) }
}

/// What replaces pages of one block in a turn.
pub(crate) struct Replacement<'a> {
    uffd: &'static Userfaultfd,
    pagemap: &'static Pagemap,
    block: &'a Block,
    channel: &'a Channel,
    /// Where copies are put aside.
    buffer: Range,
    untouched: Untouched,
}

impl<'a> Replacement<'a> {
    /// `None` when the kernel refuses what is needed.
    ///
    /// # Safety
    /// The fault thread serves when the turn is over.
    pub(crate) unsafe fn new(
        uffd: &'static Userfaultfd,
        pagemap: &'static Pagemap,
        block: &'a Block,
        channel: &'a Channel,
    ) -> Option<Self> {
        let buffer = merge::buffer(uffd)?;
        let untouched = Untouched::new(buffer.len, block.reserve).ok()?;
        for advice in block.own_advice() {
            // SAFETY: this advice discards nothing, and the memory is fresh.
            let _ = unsafe { advise(untouched.range(), advice) };
        }
        // SAFETY: as the caller promises, wherever it is mapped.
        unsafe { uffd.register(untouched.range()) }.ok()?;
        Some(Self { uffd, pagemap, block, channel, buffer, untouched })
    }

    /// Replaces what nobody has written of `merged`: no more pages than a turn has.
    ///
    /// # Safety
    /// Its pages are merged, and another thread reads the userfaultfd.
    pub(crate) unsafe fn replace(&self, merged: Range) {
        // SAFETY: until the end of this function, and we do not write there.
        let protected =
            unsafe { self.uffd.register_writes(merged).and_then(|()| self.uffd.protect(merged)) };
        let unwritten = protected.and_then(|()| self.pagemap.of_file(merged)).unwrap_or_default();
        for part in unwritten {
            // SAFETY: the file's page was there while nobody could write, and still nobody can.
            unsafe { self.replace_unwritten(part) };
        }
        for left in self.channel.merged(merged) {
            // SAFETY: every page is in its place. What was protected is so no more.
            let _ = unsafe { self.uffd.unregister(left) };
        }
        let _ = self.uffd.wake(merged);
    }

    /// # Safety
    /// The pages are the pool's and protected; another thread reads the userfaultfd.
    unsafe fn replace_unwritten(&self, guest: Range) {
        let aside = Range { start: self.buffer.start, len: guest.len };
        // SAFETY: the buffer is empty, registered and ours; the guest's pages can be read.
        let copied = unsafe { self.uffd.copy_pages(aside.start, guest.start, guest.len) };
        // SAFETY: a copy of it is aside.
        if copied.stopped.is_none() && unsafe { self.map_over(guest) } {
            // SAFETY: both are registered, and that is what belongs there.
            unsafe { moves::give(self.uffd, self.pagemap, guest, aside.start) };
            self.channel.set(guest, PageState::Plain);
        } else {
            // SAFETY: it is a copy of what is still in its place.
            unsafe { merge::clear(aside) };
        }
    }

    /// # Safety
    /// What `range` holds is aside, and another thread reads the userfaultfd.
    unsafe fn map_over(&self, range: Range) -> bool {
        // SAFETY: as the caller promises.
        if unsafe { self.untouched.map_over(range) }.is_ok() {
            return true;
        }
        // Nothing has changed, as a rule; but the kernel first unmaps what it maps over.
        let over = Over { range, reserve: self.block.reserve };
        if over.map_fresh_into_hole().is_err() {
            return false;
        }
        for advice in self.block.own_advice() {
            // SAFETY: this advice discards nothing, and the memory is fresh.
            let _ = unsafe { advise(range, advice) };
        }
        // SAFETY: the fault thread serves when the turn is over.
        if let Err(errno) = unsafe { self.uffd.register(range) } {
            crate::threads::end_process("guest memory cannot be registered", errno);
        }
        // Who touched it before it was registered has seen zeros.
        if self.pagemap.populated(range) != Ok(0) {
            crate::threads::end_process(
                "guest memory was touched while it was missing",
                Errno::EXIST,
            );
        }
        true
    }
}
