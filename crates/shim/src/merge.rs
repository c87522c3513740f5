//! Puts a pool's pages in the place of equal ones, in a turn so short that no guest notices it.
//!
//! **Problem.** Two pages were found to hold the same. Whether they still do can only be said while nobody
//! can write to them: neither a vCPU, nor QEMU, nor a disk.
//!
//! **Idea.** A page is moved aside (`UFFDIO_MOVE`; one that I/O has pinned is refused, and where I/O does not pin nothing is
//! merged: [`disks`](crate::disks)), compared there, and if it is equal, the pool's page is mapped where it was,
//! copy-on-write. Whoever touches it meanwhile waits for the fault thread, which waits for our turn to end. A page of zeros
//! is simply dropped: its place is a hole, which reads as zeros.
//!
//! **Invariants.** Everything here runs under the engine's lock. What is aside when a turn ends, however it
//! ends, goes back ([`Aside`]). A page's state is "merged" exactly while its place is mapped from a pool; what is
//! there cannot be moved, so such a page is never taken again, nor ever filled with zeros (for `UFFDIO_ZEROPAGE` a
//! pool's page that is not mapped yet is a hole). A write to it traps, and has it replaced ([`unshare`]); where the kernel
//! cannot do that, it makes a copy in the same mapping.
//!
//! **Cost**: some 2 µs per page, 3 µs more per mapping and two calls to protect it; 20 µs per mapping once the guest has
//! written to a merged page ([`Place::prepared_at`]); the kernel keeps some 400 bytes per mapping.
//!
//! Source: Kim 2014 §4.1; Waldspurger 2002 §4.2 (hashes propose, a comparison decides).

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;

use protocol::layout::PageState;
use protocol::{Content, Merge, Merged, Refusal};
use sys::memory_map::{
    Advice, HUGE_PAGE_BYTES, Over, PAGE_BYTES, PAGE_LEN, Pagemap, Range, Reserved, Untouched,
    advise, is_zeros,
};
use sys::pool_file::PoolView;
use sys::userfaultfd::Userfaultfd;

use crate::channel::Channel;
use crate::descriptors::Guarded;
use crate::ram::Block;
use crate::{cuts, moves, unshare};

/// Most pages in a turn: well below a millisecond. Where slots are prepared aside it may end with fewer.
pub(crate) const AT_ONCE: u32 = 64;
const ROOM: usize = AT_ONCE as usize;
pub(crate) const TURN_BYTES: u64 = AT_ONCE as u64 * PAGE_BYTES;
/// Blocks begin at such a page number, so it cuts them where huge pages begin.
const HUGE_PAGE_PAGES: u32 = protocol::REGION_ALIGN_PAGES;

/// The pool that slots are of.
pub(crate) struct Pool {
    view: PoolView,
    /// What is written to its pages traps, and they are replaced.
    stops_writes: bool,
    /// Pages of it, to compare with: mapping it would keep page tables for it.
    pages: Box<[u8]>,
    _guarded: Option<Guarded>,
}

impl Pool {
    /// What came with [`protocol::Request::Pool`].
    pub(crate) fn open(fd: Option<OwnedFd>, slots: u32) -> Result<Self, Refusal> {
        let refused = |why: String| Refusal::NotMerging { why };
        let fd = fd.ok_or_else(|| refused("no pool came with the message".to_owned()))?;
        let view = PoolView::open(fd, slots).map_err(|error| refused(error.to_string()))?;
        let guarded = Guarded::new(view.as_fd().as_raw_fd());
        let pages = vec![0; ROOM * PAGE_LEN].into_boxed_slice();
        cuts::prepare();
        let stops_writes = crate::engine::userfaultfd().is_ok_and(cuts::is_possible);
        Ok(Self { view, stops_writes, pages, _guarded: guarded })
    }

    pub(crate) fn stops_writes(&self) -> bool {
        self.stops_writes
    }
}

/// Cuts runs into turns, in their order: each has [`AT_ONCE`] pages at most, which stand in one huge page's
/// worth of memory.
pub(crate) fn turns(runs: &[Merge]) -> Vec<Vec<Merge>> {
    let huge = |page: u32| page / HUGE_PAGE_PAGES;
    let mut turns: Vec<Vec<Merge>> = Vec::new();
    for run in runs {
        let mut rest = *run;
        while rest.pages > 0 {
            let same = |turn: &&mut Vec<Merge>| {
                page_sum(turn) < AT_ONCE
                    && turn.last().is_some_and(|last| huge(last.page) == huge(rest.page))
            };
            let room = turns.last_mut().filter(same);
            let free = AT_ONCE - room.as_deref().map_or(0, |turn| page_sum(turn));
            let to_border = HUGE_PAGE_PAGES - rest.page % HUGE_PAGE_PAGES;
            let part = Merge { pages: rest.pages.min(free).min(to_border), ..rest };
            match room {
                Some(turn) => turn.push(part),
                None => turns.push(vec![part]),
            }
            let page = rest.page + part.pages;
            rest = Merge { page, pages: rest.pages - part.pages, content: rest.content_at(page) };
        }
    }
    turns
}

/// The pages of all these runs.
pub(crate) fn page_sum(runs: &[Merge]) -> u32 {
    runs.iter().map(|run| run.pages).sum()
}

/// Where a run is merged: some pages of one block, all plain when the turn began.
pub(crate) struct Place<'a> {
    pub(crate) uffd: &'static Userfaultfd,
    pub(crate) pagemap: &'static Pagemap,
    pub(crate) block: &'a Block,
    pub(crate) channel: &'a Channel,
    pub(crate) guest: Range,
    /// Where slots are mapped and protected, to be moved to the guest then: it has room for a turn. Without it, who writes
    /// to what is mapped and not yet protected gets a copy that stays in its mapping.
    pub(crate) prepared_at: Option<&'a Untouched>,
}

impl Place<'_> {
    /// Merges what is equal; the rest is back when this returns.
    ///
    /// # Safety
    /// The guest's pages are registered, and the fault thread serves when the turn is over.
    pub(crate) unsafe fn merge(&self, content: Content, mut pool: Option<&mut Pool>) -> Merged {
        // SAFETY: as the caller promises.
        let Some(mut aside) = (unsafe { Aside::take(self) }) else {
            return Merged { kept: count(page_count(self.guest.len)), ..Merged::default() };
        };
        let mut merged = Merged::default();
        let verdicts = aside.judge(content, pool.as_deref_mut());
        for (part, verdict) in parts(&verdicts) {
            let at = match (verdict, content) {
                (Verdict::Absent, _) => &mut merged.kept,
                (Verdict::Different, _) => &mut merged.different,
                (Verdict::Same, Content::Zeros) => {
                    aside.drop_part(part);
                    &mut merged.dropped
                }
                (Verdict::Same, Content::Slot(slot)) => {
                    if self.share(pool.as_deref(), slot + count(part.first), part) {
                        aside.drop_part(part);
                        &mut merged.shared
                    } else {
                        &mut merged.no_room
                    }
                }
            };
            *at += count(part.pages);
        }
        merged
    }

    /// Maps slots where pages were taken from.
    fn share(&self, pool: Option<&Pool>, slot: u32, part: Part) -> bool {
        let range = part.of(self.guest);
        // SAFETY: the pages there have just been taken aside, and hold what the slots do.
        if !pool.is_some_and(|pool| unsafe { self.map(pool, slot, range) }) {
            // SAFETY: the pages are aside, and go back when the turn ends.
            unsafe { unshare::mend(self.uffd, self.pagemap, self.block, range) };
            return false;
        }
        self.channel.set(range, PageState::Merged);
        for advice in self.block.shared_advice() {
            // SAFETY: this advice discards nothing. Without it a forked child has a few pages too many.
            let _ = unsafe { advise(range, advice) };
        }
        true
    }

    /// Maps slots over `range`, and has writes to it trap if the pool does that; answers whether they are mapped.
    ///
    /// # Safety
    /// Nobody needs what is there.
    unsafe fn map(&self, pool: &Pool, slot: u32, range: Range) -> bool {
        let reserve = self.block.reserve;
        let first = self.prepared_at.map_or(range, |at| Range { len: range.len, ..at.range() });
        // SAFETY: as the caller promises; the other place is ours.
        if unsafe { pool.view.map_over(slot, Over { range: first, reserve }) }.is_err() {
            return false;
        }
        if pool.stops_writes {
            // SAFETY: mapped from the pool, and the fault thread serves.
            unsafe { unshare::stop_writes(self.uffd, first) };
        }
        // SAFETY: as the caller promises, and another thread reads while mappings are moved.
        self.prepared_at.is_none_or(|at| unsafe { at.map_over(range) }.is_ok())
    }
}

/// Some pages of a run.
#[derive(Clone, Copy)]
struct Part {
    first: usize,
    pages: usize,
}

impl Part {
    fn of(self, whole: Range) -> Range {
        let bytes = |pages| pages as u64 * PAGE_BYTES;
        Range { start: whole.start + bytes(self.first), len: bytes(self.pages) }
    }
}

/// The parts of a run of which the same is to be said.
fn parts<T: Copy + PartialEq>(pages: &[T]) -> impl Iterator<Item = (Part, T)> {
    let mut next = 0;
    pages.chunk_by(|one, other| one == other).map(move |equal| {
        let part = Part { first: next, pages: equal.len() };
        next += equal.len();
        (part, equal[0])
    })
}

/// What was found of one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It was not there, or could not be taken.
    Absent,
    Different,
    Same,
}

/// Pages that were taken from the guest. They go back unless they were dropped.
struct Aside<'a> {
    place: &'a Place<'a>,
    buffer: Range,
    dropped: [bool; ROOM],
}

impl<'a> Aside<'a> {
    /// # Safety
    /// As for [`Place::merge`].
    unsafe fn take(place: &'a Place<'a>) -> Option<Self> {
        let buffer = Range { start: buffer(place.uffd)?.start, len: place.guest.len };
        // SAFETY: both are registered, as the caller promises and `buffer` does.
        unsafe { moves::take(place.uffd, place.guest, buffer.start) };
        Some(Self { place, buffer, dropped: [false; ROOM] })
    }

    fn judge(&self, content: Content, pool: Option<&mut Pool>) -> Vec<Verdict> {
        let mut verdicts = vec![Verdict::Absent; page_count(self.buffer.len)];
        let expected = match (content, pool) {
            (Content::Slot(slot), Some(Pool { view, pages, .. })) => {
                let pages = &mut pages[..verdicts.len() * PAGE_LEN];
                view.read(slot, pages).is_ok().then_some(&*pages)
            }
            _ => None,
        };
        // Reading a page that is not there would be a fault that waits for us.
        let there = self.place.pagemap.readable(self.buffer).unwrap_or_default();
        for range in there.iter().map(|there| there.range) {
            // SAFETY: the pages are there, and while they are aside they are ours.
            let found = unsafe { bytes(range) };
            let first = page_count(range.start - self.buffer.start);
            for (at, page) in (first..).zip(found.chunks(PAGE_LEN)) {
                let same = match content {
                    Content::Zeros => is_zeros(page),
                    Content::Slot(_) => {
                        expected.is_some_and(|all| all[at * PAGE_LEN..][..PAGE_LEN] == *page)
                    }
                };
                verdicts[at] = if same { Verdict::Same } else { Verdict::Different };
            }
        }
        verdicts
    }

    /// The guest needs them no more.
    fn drop_part(&mut self, part: Part) {
        // SAFETY: what they hold is in the pool now, or is zero.
        unsafe { clear(part.of(self.buffer)) };
        self.dropped[part.first..][..part.pages].fill(true);
    }
}

impl Drop for Aside<'_> {
    fn drop(&mut self) {
        let Place { uffd, pagemap, guest, .. } = *self.place;
        for (part, dropped) in parts(&self.dropped[..page_count(guest.len)]) {
            if !dropped {
                // SAFETY: `take` took them from there, and both are registered until the turn ends.
                unsafe { moves::give(uffd, pagemap, part.of(guest), part.of(self.buffer).start) };
            }
        }
        // It fails only for what is no longer mapped, where nobody waits.
        let _ = uffd.wake(guest);
    }
}

/// Memory of ours, registered for ever, where a turn's pages are put aside: as many as a huge page has.
pub(crate) fn buffer(uffd: &'static Userfaultfd) -> Option<Range> {
    static BUFFER: OnceLock<Option<Reserved>> = OnceLock::new();
    let make = || {
        let place = Reserved::new(HUGE_PAGE_BYTES).ok()?;
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork] {
            // SAFETY: fresh memory. A kernel without huge pages refuses that advice, and needs none.
            let _ = unsafe { place.advise(advice) };
        }
        // SAFETY: nobody touches what is not there: `judge` looks first.
        unsafe { uffd.register(place.range()) }.ok()?;
        Some(place)
    };
    BUFFER.get_or_init(make).as_ref().map(Reserved::range)
}

/// Empties a part of the [`buffer`].
///
/// # Safety
/// Nobody needs what it holds.
pub(crate) unsafe fn clear(buffer: Range) {
    // SAFETY: as the caller promises.
    if let Err(errno) = unsafe { advise(buffer, Advice::LinuxDontNeed) } {
        crate::threads::end_process("memory of ours cannot be discarded", errno);
    }
}

/// # Safety
/// The range is there, and nobody writes to it while the slice is used.
unsafe fn bytes<'a>(range: Range) -> &'a [u8] {
    let start = std::ptr::with_exposed_provenance(usize::try_from(range.start).unwrap_or(0));
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(start, usize::try_from(range.len).unwrap_or(0)) }
}

/// Maps fresh memory over what is mapped from a pool, whose content nobody needs any more. Answers whether
/// that went well; otherwise zeros have been written there.
///
/// # Safety
/// The pages of `range` are merged, and QEMU discards them.
pub(crate) unsafe fn replace_by_fresh(block: &Block, range: Range) -> bool {
    let over = Over { range, reserve: block.reserve };
    // SAFETY: as the caller promises.
    match unsafe { over.map_fresh() } {
        Ok(()) => {
            for advice in block.own_advice() {
                // SAFETY: this advice discards nothing, and the memory is fresh.
                let _ = unsafe { advise(range, advice) };
            }
            true
        }
        Err(_) => {
            if let Ok(uffd) = crate::engine::userfaultfd() {
                unshare::let_write(uffd, range);
            }
            let start: *mut u8 =
                std::ptr::with_exposed_provenance_mut(usize::try_from(range.start).unwrap_or(0));
            // SAFETY: mapped, writable, and QEMU has said that its content may go.
            unsafe { start.write_bytes(0, usize::try_from(range.len).unwrap_or(0)) };
            false
        }
    }
}

/// Pages in so many bytes.
fn page_count(bytes: u64) -> usize {
    usize::try_from(bytes / PAGE_BYTES).unwrap_or(usize::MAX)
}

/// Pages of one run: few.
fn count(pages: usize) -> u32 {
    u32::try_from(pages).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(page: u32, pages: u32, slot: u32) -> Merge {
        Merge { page, pages, content: Content::Slot(slot) }
    }

    #[test]
    fn a_turn_is_short_and_stays_in_one_huge_page() {
        let zeros = Merge { page: 600, pages: 3, content: Content::Zeros };
        let all = turns(&[run(0, 60, 7), run(70, 10, 100), run(500, 20, 200), zeros]);
        let expected = [
            vec![run(0, 60, 7), run(70, 4, 100)],
            vec![run(74, 6, 104), run(500, 12, 200)],
            vec![run(512, 8, 212), zeros],
        ];
        assert_eq!(all, expected);
        let long = turns(&[run(5, 4096, 0)]);
        assert!(long.iter().all(|turn| page_sum(turn) <= AT_ONCE));
        assert_eq!(long.iter().map(|turn| page_sum(turn)).sum::<u32>(), 4096);
    }
}
