//! Puts copies in place of a pool's pages: when the guest writes to one, and when all are to be
//! as before merging.
//!
//! **Problem.** Left alone, the kernel copies a merged page that is written to. But the copy
//! belongs to the mapping of the pool's file for as long as that exists, and cannot be moved.
//! Mapping other memory over the page takes it away from a disk that may be reading into it.
//!
//! **Idea.** A page that *has not been written yet* holds the pool's content, and to pin a page
//! for writing is to write to it. So merged pages are write-protected (userfaultfd) as soon as
//! they are mapped; once the guest has written to one, even before that. A write to them waits. A
//! page that the page tables show as protected and as the file's can be replaced without regard
//! to its users: I/O that has it pinned only reads, and its data does not change. The content is
//! copied to the buffer. Untouched memory that traps is mapped over the place in one step, and
//! the copy is moved there. A thread that touches the page meanwhile waits, and never sees zeros.
//! Then the page is plain: the guest's own, in the same mapping as its neighbours, and can be
//! merged again.
//!
//! **Seams.** The kernel does not join two mappings whose pages were touched before they became
//! adjacent. A page replaced between shared ones is such a mapping, and would stay one. So when a
//! replaced range closes a gap, the smaller neighbour is moved to the buffer, mapped afresh, and
//! moved back ([`Replacement::rejoin`]). The kernel then joins it with the other one.
//!
//! **Invariants.** Everything here runs under the engine's lock. A copy is in the buffer before
//! its place is mapped over, so no memory is needed afterwards that the host may not have. In any
//! doubt writes are let through ([`let_write`]), and the page stays in its mapping. That costs
//! only the mapping.
//!
//! **Cost**, of a CPU: some 14 µs per run and 2 µs per page, half a millisecond in a turn of the
//! worst layout; for each seam the same calls once more.
//!
//! **Leaves out.** Kernels that cannot protect pages of a file (`CONFIG_PTE_MARKER_UFFD_WP`), and
//! hosts that promise no more memory than they have (`vm.overcommit_memory=2`: the kernel might
//! refuse after the place has been unmapped). There the kernel makes the copies ([`copy`]), and
//! the mappings stay. Kernels that do not report a single mapping (`PROCMAP_QUERY`, Linux 6.11):
//! there seams stay. Seams also stay on Linux 6.15 to 6.17, where the mapping that `mremap`
//! leaves behind loses its accounting of promised memory. NUMA policies (`mbind`): replaced pages
//! have none.

use std::sync::OnceLock;

use protocol::layout::PageState;
use rustix::io::Errno;
use sys::mappings::{Mappings, is_mapped};
use sys::memory_map::{Advice, Over, PAGE_BYTES, PAGE_LEN, Range, Untouched, advise};
use sys::userfaultfd::Userfaultfd;

use crate::buffer::buffer;
use crate::channel::Channel;
use crate::descriptors::kept;
use crate::process::pagemap;
use crate::ram::{Block, end};
use crate::threads::end_process;
use crate::transitions::{self, Fresh, HasKernel, HostKernel, Kernel as _, PageRun};
use crate::waiters::wake;

/// Why QEMU is ended: its memory has lost its mapping, and no new one can be made.
pub(crate) const LOST_PLACE: &str = "guest memory has lost its place";

/// The smaller of two anonymous mappings that meet at `seam`, if there are two. Does not
/// allocate.
///
/// # Errors
/// A kernel that does not report mappings.
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

/// Looks up the pages of `merged`. If `wanted`, also stops writes to it until they are served,
/// where the kernel can do that ([`unwritten_around`] tells where).
///
/// # Safety
/// Its pages are a pool's, and have just been mapped; the fault thread serves.
pub(crate) unsafe fn stop_writes(uffd: &Userfaultfd, merged: Range, wanted: bool) {
    // Looked up first: the kernel handles protected pages that are not mapped yet one by one, and
    // a write to such a page gets a copy.
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

/// The pages of `merged` around `address` that have not been written, and cannot be until they
/// are replaced or writes are [let through](let_write). Does not allocate.
///
/// # Safety
/// As for [`stop_writes`].
pub(crate) unsafe fn unwritten_around(
    uffd: &Userfaultfd,
    merged: Range,
    address: u64,
) -> Option<Range> {
    // Protected again, for some of it may have been let through. Pages that the kernel has copied
    // since then are not the file's any more. SAFETY: as the caller promises.
    unsafe { protect(uffd, merged) }.ok()?;
    pagemap()?.of_file_around(merged, address).ok()?
}

/// Lets writes to `merged` go on: the kernel makes the copies.
///
/// To be called under the engine's lock: replacing pages relies on nothing being written.
pub(crate) fn let_write(uffd: &Userfaultfd, merged: Range) {
    // SAFETY: as stated above.
    if unsafe { uffd.unprotect(merged) }.is_err() {
        // A part is not registered, and the kernel stops there. A page that it refuses for
        // another reason is unregistered, and traps no more.
        for start in (merged.start..end(merged)).step_by(PAGE_LEN) {
            let page = Range { start, len: PAGE_BYTES };
            // SAFETY: as stated above; every page is in its place.
            let _ = unsafe { uffd.unprotect(page).or_else(|_| uffd.unregister(page)) };
        }
        wake(uffd, merged);
    }
}

/// Makes the page tables map the pages of `range`: they show nothing about an unmapped page.
pub(crate) fn look_up(range: Range) {
    // SAFETY: this discards nothing. A page that is not looked up is not replaced.
    let _ = unsafe { advise(range, Advice::LinuxPopulateRead) };
}

/// Writes to every page of `range` without changing it. A page shared with a pool becomes a
/// private copy, in the same way as by a write of the guest. A missing page becomes zeros, which
/// is its content.
pub(crate) fn copy(range: Range) -> Result<(), Errno> {
    // SAFETY: this discards nothing.
    unsafe { advise(range, Advice::LinuxPopulateWrite) }
}

/// Replaces pages of one block in a turn.
pub(crate) struct Replacement<'a> {
    host: HostKernel,
    block: &'a Block,
    channel: &'a Channel,
    /// The part of the block that is being moved: some of it may not be back when the turn ends.
    moving: &'a mut Option<PageRun>,
    /// The buffer for copies.
    buffer: Range,
    untouched: Untouched,
}

impl<'a> Replacement<'a> {
    /// `None` when the kernel refuses what is needed.
    ///
    /// # Safety
    /// The fault thread serves when the turn is over.
    pub(crate) unsafe fn new(
        host: HostKernel,
        block: &'a Block,
        channel: &'a Channel,
        moving: &'a mut Option<PageRun>,
    ) -> Option<Self> {
        let buffer = buffer(host.uffd)?;
        let untouched = Untouched::new(buffer.len, block.reserve).ok()?;
        advise_alike(block, untouched.range());
        // SAFETY: as the caller promises, wherever it is mapped.
        unsafe { host.uffd.register(untouched.range()) }.ok()?;
        Some(Self { host, block, channel, moving, buffer, untouched })
    }

    /// Replaces the unwritten pages of `merged`, which has no more pages than a turn.
    ///
    /// # Safety
    /// The pages are merged, and another thread reads the userfaultfd.
    pub(crate) unsafe fn replace(&mut self, merged: Range) {
        let HostKernel { uffd, pagemap } = self.host;
        // SAFETY: the fault thread serves writes that the end of this function has not let
        // through, and this thread does not write there.
        let protected = unsafe { protect(uffd, merged) };
        let unwritten = protected.and_then(|()| pagemap.of_file(merged)).unwrap_or_default();
        for part in unwritten {
            // SAFETY: the file's page was there while nothing could write to it, and still
            // nothing can.
            let _ = unsafe { self.replace_unwritten(part) };
        }
        for left in self.channel.merged(merged) {
            // SAFETY: every page is in its place. The remaining pages lose their protection: for
            // a written page it cannot be known which I/O holds it.
            let _ = unsafe { uffd.unregister(left) };
        }
        wake(uffd, merged);
    }

    /// Replaces pages that have not been written. Returns whether the place is the guest's own.
    ///
    /// # Safety
    /// The pages are the pool's and protected, and no more than a turn has. Another thread reads
    /// the userfaultfd.
    pub(crate) unsafe fn replace_unwritten(&mut self, guest: Range) -> bool {
        // SAFETY: as the caller promises; the buffer is the shim's own and registered.
        self.moves(guest, |it, run| unsafe { transitions::replace(it, it.channel, run) })
    }

    /// Joins a mapping with its neighbours, if no I/O holds any of its pages.
    ///
    /// # Safety
    /// The mapping is anonymous guest RAM, smaller than a huge page, and registered. Another
    /// thread reads the userfaultfd.
    pub(crate) unsafe fn rejoin(&mut self, mapping: Range) {
        // SAFETY: as the caller promises; the buffer is the shim's own and registered.
        self.moves(mapping, |it, run| unsafe { transitions::map_anew(it, it.channel, run) });
    }

    /// Takes a step that moves these pages, unless some pages of the step before are not back
    /// yet.
    fn moves(&mut self, home: Range, step: impl FnOnce(&Self, PageRun) -> bool) -> bool {
        let Some(page) = self.channel.page_at(home.start) else { return false };
        if self.moving.is_some_and(|run| self.channel.has(run.home, PageState::Aside)) {
            return false;
        }
        let run = PageRun { home, away: self.buffer.start, page };
        *self.moving = Some(run);
        step(self, run)
    }
}

impl HasKernel for Replacement<'_> {
    type Kernel = HostKernel;

    fn kernel(&self) -> &HostKernel {
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

/// To be called when mapping over `range` has failed. Usually nothing has changed then. But the
/// kernel may have unmapped the old memory, as before Linux 6.12; then fresh memory is mapped.
/// Returns whether that was so. A failure of this too ends QEMU.
///
/// # Safety
/// The old content is not needed.
pub(crate) unsafe fn refill(block: &Block, range: Range) -> bool {
    if is_mapped(range) {
        return false;
    }
    if let Err(errno) = (Over { range, reserve: block.reserve }).map_fresh_into_hole() {
        end_process(LOST_PLACE, errno);
    }
    advise_alike(block, range);
    true
}

/// The same in guest RAM, where the fresh memory traps.
///
/// # Safety
/// The content of `range` is in the buffer; the fault thread serves when the turn is over.
pub(crate) unsafe fn mend(host: &HostKernel, block: &Block, range: Range) -> bool {
    // SAFETY: as the caller promises.
    if !unsafe { refill(block, range) } {
        return false;
    }
    // SAFETY: as the caller promises.
    if let Err(errno) = unsafe { host.uffd.register(range) } {
        host.end("guest memory cannot be registered", errno);
    }
    // A thread that touched the range before it was registered has seen zeros.
    if host.pagemap.populated(range) != Ok(0) {
        host.end("guest memory was touched while it was missing", Errno::EXIST);
    }
    true
}

/// Maps fresh memory over pages of a pool whose content is no longer needed. Returns whether no
/// page of the pool is left there.
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
    let of_file = || pagemap().map(|pagemap| pagemap.of_file(range));
    is_fresh && of_file().is_some_and(|found| found.is_ok_and(|pages| pages.is_empty()))
}

/// Gives fresh memory the same advice as the rest of its block.
fn advise_alike(block: &Block, range: Range) {
    for advice in block.own_advice() {
        // SAFETY: this advice discards nothing, and the memory is fresh.
        let _ = unsafe { advise(range, advice) };
    }
}
