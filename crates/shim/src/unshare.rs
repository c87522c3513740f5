//! Puts copies in the place of a pool's pages: when the guest writes to one, and when all is to be
//! as it was before merging.
//!
//! **Problem.** Left alone, the kernel copies a merged page that is written to, but the copy lies
//! in the mapping of the pool's file for as long as that stands, and cannot be moved. Mapping other
//! memory over it takes the page away from a disk that may just be reading into it.
//!
//! **Idea.** A page that *nobody has written yet* holds what the pool holds, and to pin a page for
//! writing is to write to it. So merged pages are protected (userfaultfd) as soon as they are
//! mapped, and before that once the guest has written to one: who writes waits. What the page
//! tables show as protected and the file's can be replaced without asking who uses it: whoever has
//! pinned it only reads, and what he reads does not change. The content is copied aside, memory
//! that nobody has touched and that traps is mapped over the place in one step, and the copy is
//! moved there. Who touches it meanwhile waits, and never sees zeros. Then the page is plain: the
//! guest's own, in the mapping of its neighbours, to be merged again.
//!
//! **Seams.** The kernel joins no two mappings whose pages were touched before they met. A page
//! that is replaced between shared ones is such a mapping, and would be for ever. So where what is
//! replaced closes a gap the smaller neighbour is put aside, mapped anew, and put back
//! ([`Replacement::rejoin`]): it is one with the other then.
//!
//! **Invariants.** Everything here runs under the engine's lock. A copy is aside before its place
//! is taken, so afterwards no memory is needed that the host may not have. Where anything is in
//! doubt writes are let through ([`let_write`]), and the page stays in its mapping, which costs no
//! more than that.
//!
//! **Cost**, of a CPU: some 14 µs per run and 2 µs per page, half a millisecond in a turn of the
//! worst layout; for each seam the same calls once more.
//!
//! **Leaves out.** Kernels that cannot protect pages of a file (`CONFIG_PTE_MARKER_UFFD_WP`), and
//! hosts that promise no more memory than they have (`vm.overcommit_memory=2`: the kernel might
//! refuse when the place is already unmapped): there the kernel makes the copies ([`copy`]), and
//! the mappings stay. Kernels that do not tell of one mapping (`PROCMAP_QUERY`, Linux 6.11): there
//! seams stay; as they do on Linux 6.15 to 6.17, where what `mremap` leaves behind loses its part
//! in the memory that the kernel has promised. A place on the host's nodes (`mbind`): what is
//! replaced has none.

use std::sync::OnceLock;

use protocol::layout::PageState;
use rustix::io::Errno;
use sys::mappings::{Mappings, is_mapped};
use sys::memory_map::{Advice, Over, PAGE_BYTES, PAGE_LEN, Range, Untouched, advise};
use sys::userfaultfd::Userfaultfd;

use crate::channel::Channel;
use crate::descriptors::kept;
use crate::ram::{Block, end};
use crate::transitions::{self, Fresh, HasKernel, Host, Kernel as _, Run};
use crate::{merge, tracker, watchdog};

/// Why QEMU is ended: where its memory was nothing is mapped, and nothing can be.
pub(crate) const LOST_PLACE: &str = "guest memory has lost its place";

/// The smaller one of two mappings of no file that meet at `seam`, if there are two. Does not
/// allocate.
///
/// # Errors
/// A kernel that does not tell.
pub(crate) fn smaller_at(seam: u64) -> Result<Option<Range>, Errno> {
    let mappings = mappings().ok_or(Errno::NOENT)?;
    let (left, right) = (mappings.at(seam - 1)?, mappings.at(seam)?);
    let is_seam = end(left.range) == seam && right.range.start == seam;
    let smaller = if left.range.len < right.range.len { left.range } else { right.range };
    Ok((is_seam && left.is_anonymous && right.is_anonymous).then_some(smaller))
}

/// This process's mappings; opened once.
pub(crate) fn mappings() -> Option<&'static Mappings> {
    static MAPPINGS: OnceLock<Option<Mappings>> = OnceLock::new();
    MAPPINGS.get_or_init(|| kept(Mappings::open())).as_ref()
}

/// Looks up the pages of `merged`, and stops writes to it until they are served if that is
/// `wanted`, as far as the kernel does that ([`unwritten_around`] tells).
///
/// # Safety
/// Its pages are a pool's, and have just been mapped; the fault thread serves.
pub(crate) unsafe fn stop_writes(uffd: &Userfaultfd, merged: Range, wanted: bool) {
    // Before: what is protected and not yet there the kernel looks up page by page, and who writes
    // to it gets a copy.
    look_up(merged);
    if wanted {
        // SAFETY: as the caller promises.
        let _ = unsafe { protect(uffd, merged) };
    }
}

/// # Safety
/// As for [`stop_writes`], until something else is mapped there or writes are let through.
unsafe fn protect(uffd: &Userfaultfd, merged: Range) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    unsafe { uffd.register_writes(merged).and_then(|()| uffd.protect(merged)) }
}

/// The pages of `merged` around `address` that nobody has written, and nobody can until they are
/// replaced or writes are [let through](let_write). Does not allocate.
///
/// # Safety
/// As for [`stop_writes`].
pub(crate) unsafe fn unwritten_around(
    uffd: &Userfaultfd,
    merged: Range,
    address: u64,
) -> Option<Range> {
    // Again, for some of it may have been let through. What the kernel has copied since then is not
    // the file's any more. SAFETY: as the caller promises.
    unsafe { protect(uffd, merged) }.ok()?;
    tracker::pagemap()?.of_file_around(merged, address).ok()?
}

/// Lets writes to `merged` go on: the kernel makes the copies.
///
/// To be called under the engine's lock: who replaces pages relies on nothing being written.
pub(crate) fn let_write(uffd: &Userfaultfd, merged: Range) {
    // SAFETY: as said.
    if unsafe { uffd.unprotect(merged) }.is_err() {
        // A part is not registered, and the kernel stops there. What it refuses for another reason
        // traps no more.
        for start in (merged.start..end(merged)).step_by(PAGE_LEN) {
            let page = Range { start, len: PAGE_BYTES };
            // SAFETY: as said; every page is in its place.
            let _ = unsafe { uffd.unprotect(page).or_else(|_| uffd.unregister(page)) };
        }
        watchdog::wake(uffd, merged);
    }
}

/// Has the page tables know the pages of `range`: of one that they do not know nothing can be said.
pub(crate) fn look_up(range: Range) {
    // SAFETY: it discards nothing. What is not looked up is not replaced.
    let _ = unsafe { advise(range, Advice::LinuxPopulateRead) };
}

/// Writes to every page of `range` without changing it: what it shares with a pool becomes a copy
/// of its own, by the same way that a write of the guest's takes. Memory that is not there becomes
/// zeros, which it is.
pub(crate) fn copy(range: Range) -> Result<(), Errno> {
    // SAFETY: it discards nothing.
    unsafe { advise(range, Advice::LinuxPopulateWrite) }
}

/// What replaces pages of one block in a turn.
pub(crate) struct Replacement<'a> {
    host: Host,
    block: &'a Block,
    channel: &'a Channel,
    /// What of the block is being moved: it may not all be back when the turn ends.
    moving: &'a mut Option<Run>,
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
        host: Host,
        block: &'a Block,
        channel: &'a Channel,
        moving: &'a mut Option<Run>,
    ) -> Option<Self> {
        let buffer = merge::buffer(host.uffd)?;
        let untouched = Untouched::new(buffer.len, block.reserve).ok()?;
        advise_alike(block, untouched.range());
        // SAFETY: as the caller promises, wherever it is mapped.
        unsafe { host.uffd.register(untouched.range()) }.ok()?;
        Some(Self { host, block, channel, moving, buffer, untouched })
    }

    /// Replaces what nobody has written of `merged`: no more pages than a turn has.
    ///
    /// # Safety
    /// Its pages are merged, and another thread reads the userfaultfd.
    pub(crate) unsafe fn replace(&mut self, merged: Range) {
        let Host { uffd, pagemap } = self.host;
        // SAFETY: the fault thread serves what the end of this function has not let go on, and we
        // do not write there.
        let protected = unsafe { protect(uffd, merged) };
        let unwritten = protected.and_then(|()| pagemap.of_file(merged)).unwrap_or_default();
        for part in unwritten {
            // SAFETY: the file's page was there while nobody could write, and still nobody can.
            let _ = unsafe { self.replace_unwritten(part) };
        }
        for left in self.channel.merged(merged) {
            // SAFETY: every page is in its place. What was protected is so no more: of what has
            // been written it cannot be known who holds it.
            let _ = unsafe { uffd.unregister(left) };
        }
        watchdog::wake(uffd, merged);
    }

    /// Answers whether the place is the guest's own.
    ///
    /// # Safety
    /// The pages are the pool's and protected, no more than a turn has; another thread reads the
    /// userfaultfd.
    pub(crate) unsafe fn replace_unwritten(&mut self, guest: Range) -> bool {
        // SAFETY: as the caller promises; the buffer is ours and registered.
        self.moves(guest, |it, run| unsafe { transitions::replace(it, it.channel, run) })
    }

    /// Makes a mapping one with its neighbours, if none of its pages is held by I/O.
    ///
    /// # Safety
    /// It is of guest RAM, of no file, smaller than a huge page, and registered; another thread
    /// reads the userfaultfd.
    pub(crate) unsafe fn rejoin(&mut self, mapping: Range) {
        // SAFETY: as the caller promises; the buffer is ours and registered.
        self.moves(mapping, |it, run| unsafe { transitions::map_anew(it, it.channel, run) });
    }

    /// Does a step that moves these pages, unless some of the step before are not home yet.
    fn moves(&mut self, home: Range, step: impl FnOnce(&Self, Run) -> bool) -> bool {
        let Some(page) = self.channel.page_at(home.start) else { return false };
        if self.moving.is_some_and(|run| self.channel.has(run.home, PageState::Aside)) {
            return false;
        }
        let run = Run { home, away: self.buffer.start, page };
        *self.moving = Some(run);
        step(self, run)
    }
}

impl HasKernel for Replacement<'_> {
    type Kernel = Host;

    fn kernel(&self) -> &Host {
        &self.host
    }
}

impl Fresh for Replacement<'_> {
    unsafe fn map_fresh(&self, home: Range) -> bool {
        // SAFETY: as the caller promises, and another thread reads the userfaultfd.
        let mapped = unsafe { self.untouched.map_over(home) }.is_ok();
        // SAFETY: the fault thread serves when the turn is over.
        mapped || unsafe { mend(&self.host, self.block, home) }
    }
}

/// Mapping something over `range` has failed. Nothing has changed then, as a rule; but the kernel
/// may have unmapped what was there, as it does before Linux 6.12, and then fresh memory is mapped.
/// Answers whether it was so. What cannot be mended ends QEMU.
///
/// # Safety
/// Nobody needs what was there.
pub(crate) unsafe fn refill(block: &Block, range: Range) -> bool {
    if is_mapped(range) {
        return false;
    }
    if let Err(errno) = (Over { range, reserve: block.reserve }).map_fresh_into_hole() {
        crate::threads::end_process(LOST_PLACE, errno);
    }
    advise_alike(block, range);
    true
}

/// The same in guest RAM, where the fresh memory traps.
///
/// # Safety
/// What `range` held is aside; the fault thread serves when the turn is over.
pub(crate) unsafe fn mend(host: &Host, block: &Block, range: Range) -> bool {
    // SAFETY: as the caller promises.
    if !unsafe { refill(block, range) } {
        return false;
    }
    // SAFETY: as the caller promises.
    if let Err(errno) = unsafe { host.uffd.register(range) } {
        host.end("guest memory cannot be registered", errno);
    }
    // Who touched it before it was registered has seen zeros.
    if host.pagemap.populated(range) != Ok(0) {
        host.end("guest memory was touched while it was missing", Errno::EXIST);
    }
    true
}

/// Maps fresh memory over what is mapped from a pool, whose content nobody needs any more. Answers
/// whether no page of the pool is there now.
///
/// # Safety
/// The pages of `range` are merged, and QEMU discards them.
pub(crate) unsafe fn replace_by_fresh(block: &Block, range: Range) -> bool {
    let over = Over { range, reserve: block.reserve };
    // SAFETY: as the caller promises.
    let is_fresh = match unsafe { over.map_fresh() } {
        Ok(()) => {
            advise_alike(block, range);
            true
        }
        // SAFETY: as the caller promises.
        Err(_) => unsafe { refill(block, range) },
    };
    let of_file = || tracker::pagemap().map(|pagemap| pagemap.of_file(range));
    is_fresh && of_file().is_some_and(|found| found.is_ok_and(|pages| pages.is_empty()))
}

/// Fresh memory is treated by the kernel as the rest of its block is.
fn advise_alike(block: &Block, range: Range) {
    for advice in block.own_advice() {
        // SAFETY: this advice discards nothing, and the memory is fresh.
        let _ = unsafe { advise(range, advice) };
    }
}
