//! Puts copies in the place of a pool's pages: when the guest writes to one, and when all is to be as it was before merging.
//!
//! **Problem.** Left alone, the kernel copies a merged page that is written to, but the copy lies in the mapping of the
//! pool's file for as long as that stands, and cannot be moved. Mapping other memory over it takes the page away from a
//! disk that may just be reading into it.
//!
//! **Idea.** A page that *nobody has written yet* holds what the pool holds, and to pin a page for writing is
//! to write to it. So merged pages are protected (userfaultfd) from the first moment: who writes to one waits. What the
//! page tables show as protected and the file's can be replaced without asking who uses it: whoever has pinned it only
//! reads, and what he reads does not change. The content is copied aside, memory that nobody has touched and that traps is
//! mapped over the place in one step, and the copy is moved there. Who touches it meanwhile waits, and never
//! sees zeros. Then the page is plain: the guest's own, in the mapping of its neighbours, to be merged again.
//!
//! **Seams.** The kernel joins no two mappings whose pages were touched before they met. A page that is replaced between
//! shared ones is such a mapping, and would be for ever. So where what is replaced closes a gap the smaller
//! neighbour is put aside, mapped anew, and put back ([`Replacement::rejoin`]): it is one with the other then.
//!
//! **A page at a time**, so that all others stay shared; but each one cuts a mapping in two. So around writes that come one
//! after the other more and more is replaced ([`Reach`]), and when so many runs are merged that there is no room for
//! more mappings ([`most_runs`]) the kernel makes the copy.
//!
//! **Invariants.** Everything here runs under the engine's lock. A copy is aside before its place is taken, so
//! afterwards no memory is needed that the host may not have. Where anything is in doubt writes are let through
//! ([`let_write`]), and the page stays in its mapping, which costs no more than that.
//!
//! **Cost**, of a CPU: some 14 µs per run and 2 µs per page; half a millisecond in a turn of the worst layout.
//!
//! **Leaves out.** Kernels that cannot protect pages of a file (`CONFIG_PTE_MARKER_UFFD_WP`), and hosts that promise no more memory than they have
//! (`vm.overcommit_memory=2`: the kernel might refuse when the place is already unmapped): there the kernel
//! makes the copies ([`copy`]), and the mappings stay. Kernels that do not tell of one mapping (`PROCMAP_QUERY`, Linux 6.11):
//! there seams stay.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::OnceLock;
use std::time::Duration;

use protocol::layout::PageState;
use rustix::io::Errno;
use sys::memory_map::{
    Advice, HUGE_PAGE_BYTES, Mappings, Over, PAGE_BYTES, Pagemap, Range, Untouched, advise,
};
use sys::userfaultfd::Userfaultfd;

use crate::channel::Channel;
use crate::descriptors::Guarded;
use crate::ram::{Block, end};
use crate::time::Nanos;
use crate::{merge, moves};

/// Writes that are so near to each other, in time and place, are one story: memory that is used anew.
const NEAR: Duration = Duration::from_millis(100);
const NEAR_BYTES: u64 = merge::AT_ONCE as u64 * PAGE_BYTES;
/// What a kernel allows that does not say (`vm.max_map_count`).
const USUAL_MAPPINGS: u32 = 65_530;

/// Whether pages can be replaced on this host.
pub(crate) fn is_possible(uffd: &Userfaultfd) -> bool {
    // Asked here first, for the fault thread allocates nothing.
    let _ = (most_runs(), mappings());
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    uffd.can_replace() && ["0", "1"].contains(&overcommit.trim())
}

/// How many runs may be merged for another one to be cut in two: each has two mappings. The worker leaves half of what the
/// kernel allows; this takes half of that half.
pub(crate) fn most_runs() -> u32 {
    static MOST: OnceLock<u32> = OnceLock::new();
    *MOST.get_or_init(|| {
        let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        allowed.trim().parse().unwrap_or(USUAL_MAPPINGS) / 8
    })
}

/// The smaller one of two mappings of no file that meet at `seam`, if it is worth it: smaller than a huge page.
pub(crate) fn smaller_at(seam: u64) -> Option<Range> {
    let mapped = |at| Some(mappings()?.at(at).ok()?).filter(|mapping| mapping.is_anonymous);
    let (left, right) = (mapped(seam - 1)?.range, mapped(seam)?.range);
    let is_seam = end(left) == seam && right.start == seam;
    let smaller = if left.len < right.len { left } else { right };
    (is_seam && smaller.len < HUGE_PAGE_BYTES).then_some(smaller)
}

/// This process's mappings; opened once.
fn mappings() -> Option<&'static Mappings> {
    static MAPPINGS: OnceLock<Option<Mappings>> = OnceLock::new();
    let guarded = || {
        let mappings = Mappings::open().ok()?;
        std::mem::forget(Guarded::new(mappings.as_fd().as_raw_fd())?);
        Some(mappings)
    };
    MAPPINGS.get_or_init(guarded).as_ref()
}

/// How many pages are replaced at a write.
#[derive(Debug)]
pub(crate) struct Reach {
    pages: u32,
    /// Where the last write was, and when.
    last: (u64, Nanos),
}

impl Reach {
    pub(crate) const fn new() -> Self {
        Self { pages: 1, last: (0, Nanos(0)) }
    }

    /// Of a write now at this address: a power of two, [`merge::AT_ONCE`] at most.
    pub(crate) fn of_write(&mut self, address: u64, at: Nanos) -> u32 {
        let (last, then) = std::mem::replace(&mut self.last, (address, at));
        let is_near = address.abs_diff(last) <= NEAR_BYTES && at.since(then) < NEAR;
        self.pages = if is_near { (2 * self.pages).min(merge::AT_ONCE) } else { 1 };
        self.pages
    }
}

/// Stops writes to `merged` until they are served, as far as the kernel does that ([`Pagemap::unwritten_around`] tells).
///
/// # Safety
/// Its pages are a pool's; the fault thread serves.
pub(crate) unsafe fn stop_writes(uffd: &Userfaultfd, merged: Range) {
    // SAFETY: as the caller promises, until something else is mapped there or writes are let through.
    if unsafe { uffd.register_writes(merged).and_then(|()| uffd.protect(merged)) }.is_ok() {
        look_up(merged);
    }
}

/// Lets writes to `merged` go on: the kernel makes the copies.
///
/// To be called under the engine's lock: who replaces pages relies on nothing being written.
pub(crate) fn let_write(uffd: &Userfaultfd, merged: Range) {
    // SAFETY: as said.
    if unsafe { uffd.unprotect(merged) }.is_err() {
        // A part is not registered. It fails only for what is no longer mapped, where nobody waits.
        let _ = uffd.wake(merged);
    }
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
        // SAFETY: the fault thread serves what the end of this function has not let go on, and we do not write there.
        let protected =
            unsafe { self.uffd.register_writes(merged).and_then(|()| self.uffd.protect(merged)) };
        let unwritten = protected.and_then(|()| self.pagemap.of_file(merged)).unwrap_or_default();
        for part in unwritten {
            // SAFETY: the file's page was there while nobody could write, and still nobody can.
            let _ = unsafe { self.replace_unwritten(part) };
        }
        for left in self.channel.merged(merged) {
            // SAFETY: every page is in its place. What was protected is so no more: of what has been written it cannot be
            // known who holds it.
            let _ = unsafe { self.uffd.unregister(left) };
        }
        let _ = self.uffd.wake(merged);
    }

    /// Answers whether they are replaced.
    ///
    /// # Safety
    /// The pages are the pool's and protected, no more than a turn has; another thread reads the userfaultfd.
    pub(crate) unsafe fn replace_unwritten(&self, guest: Range) -> bool {
        let aside = Range { start: self.buffer.start, len: guest.len };
        // SAFETY: the buffer is empty, registered and ours; the guest's pages can be read.
        let copied = unsafe { self.uffd.copy_pages(aside.start, guest.start, guest.len) };
        // SAFETY: a copy of it is aside.
        if copied.stopped.is_none() && unsafe { self.map_over(guest) } {
            // SAFETY: both are registered, and that is what belongs there.
            unsafe { moves::give(self.uffd, self.pagemap, guest, aside.start) };
            self.channel.set(guest, PageState::Plain);
            true
        } else {
            // SAFETY: it is a copy of what is still in its place.
            unsafe { merge::clear(aside) };
            false
        }
    }

    /// Makes a mapping one with its neighbours, if none of its pages is held by I/O.
    ///
    /// # Safety
    /// It is of guest RAM, of no file, smaller than a huge page, and registered; another thread reads the userfaultfd.
    pub(crate) unsafe fn rejoin(&self, mapping: Range) {
        // SAFETY: both are registered, and the fault thread serves when the turn is over.
        unsafe { moves::take(self.uffd, mapping, self.buffer.start) };
        if self.pagemap.populated(mapping) == Ok(0) {
            // SAFETY: all that it holds is aside. Should this fail, it stays as it was.
            let _ = unsafe { self.map_over(mapping) };
        }
        // SAFETY: it was taken from there.
        unsafe { moves::give(self.uffd, self.pagemap, mapping, self.buffer.start) };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn around_writes_that_come_one_after_the_other_more_and_more_is_replaced() {
        let mut reach = Reach::new();
        let write = |reach: &mut Reach, page: u64, ms: u64| {
            reach.of_write(page * PAGE_BYTES, Nanos(10_000_000_000 + ms * 1_000_000))
        };
        assert_eq!(write(&mut reach, 1000, 0), 1);
        let more = [1001, 1002, 990, 1006, 1020, 1040, 1090].map(|page| write(&mut reach, page, 1));
        assert_eq!(more, [2, 4, 8, 16, 32, 64, 64]);
        assert_eq!(write(&mut reach, 1091, 200), 1, "much later");
        assert_eq!(write(&mut reach, 2000, 201), 1, "elsewhere");
        assert_eq!(write(&mut reach, 2000, 202), 2);
    }
}
