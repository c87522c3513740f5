//! Maps a pool's pages in place of equal ones, in turns too short for a guest to notice.
//!
//! **Problem.** Two pages were found equal. Whether they still are can only be checked while
//! nothing can write to them: no vCPU, no thread of QEMU, no disk.
//!
//! **Idea.** A page is moved to a buffer (`UFFDIO_MOVE`) and compared there. If it is equal, the
//! pool's page is mapped in its place, copy-on-write. The kernel refuses to move a page that I/O
//! has pinned; where I/O does not pin, nothing is merged (`disks`). A thread that touches the page
//! meanwhile waits for the fault thread, which waits for the end of this turn. A page of zeros is
//! simply dropped: its place becomes a hole, which reads as zeros.
//!
//! **Invariants.** Everything here runs under the engine's lock. The steps are those of
//! [`transitions`]. Pages that a turn leaves in the buffer are moved back before the next turn
//! begins ([`PageOps::settle`]). A page's state is "merged" exactly while its place is mapped from
//! a pool. A pool's page cannot be moved, so a merged page is never taken again. Nor
//! is it ever filled with zeros: for `UFFDIO_ZEROPAGE` a pool's page that is not mapped yet is a
//! hole. A write to it traps, and has it replaced ([`unshare`]); where the kernel cannot do that,
//! it makes a copy in the same mapping.
//!
//! **Cost**: some 2 µs per page, 3 µs more per mapping and two calls to protect it; 20 µs per
//! mapping once the guest has written to a merged page ([`MergeTarget::prepared_at`]); the kernel
//! keeps some 400 bytes per mapping.
//!
//! Source: Kim 2014 §4.1; Waldspurger 2002 §4.2 (hashes propose, a comparison decides).

use std::cell::RefCell;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use protocol::layout::PageState;
use protocol::{Content, Merge, Merged, Refusal};
use sys::memory_map::{Over, PAGE_BYTES, PAGE_LEN, Range, Untouched, advise, is_zeros};
use sys::pool_file::PoolView;
use sys::slab::Slab;

use crate::buffer::{AT_ONCE, TURN_BYTES, buffer};
use crate::channel::Part;
use crate::cuts;
use crate::descriptors::Guarded;
use crate::inhibitors::Inhibitors;
use crate::page_ops::{BegunTurn, PageOps};
use crate::process::userfaultfd;
use crate::ram::Block;
use crate::remapping::RemapReadGuard;
use crate::time::now;
use crate::transitions::{self, HasKernel, HostKernel, Mapper, PageComparison, PageRun};
use crate::turns::turn;
use crate::unshare;
use crate::waiters::wake;

const ROOM: usize = AT_ONCE as usize;
/// Blocks begin at multiples of this page number, so turns are cut where huge pages begin.
const HUGE_PAGE_PAGES: u32 = protocol::REGION_ALIGN_PAGES;

/// The pool to which slot numbers refer.
pub(crate) struct AttachedPool {
    view: PoolView,
    /// Writes to its pages trap, and the pages are replaced.
    stops_writes: bool,
    /// A copy of its pages to compare with: mapping the pool would need page tables.
    pages: RefCell<Slab>,
    _guarded: Option<Guarded>,
}

impl AttachedPool {
    /// Opens the pool that came with [`protocol::Request::Pool`].
    pub(crate) fn open(fd: Option<OwnedFd>, slots: u32) -> Result<Self, Refusal> {
        let refused = |why: String| Refusal::NotMerging { why };
        let fd = fd.ok_or_else(|| refused("no pool came with the message".to_owned()))?;
        let view = PoolView::open(fd, slots).map_err(|error| refused(error.to_string()))?;
        let guarded = Guarded::new(view.as_fd().as_raw_fd());
        let pages = Slab::new(ROOM * PAGE_LEN)
            .map_err(|errno| refused(format!("no memory to compare in: {errno}")))?;
        let pages = RefCell::new(pages);
        cuts::prepare();
        let stops_writes = userfaultfd().is_ok_and(cuts::is_possible);
        Ok(Self { view, stops_writes, pages, _guarded: guarded })
    }
}

/// Splits runs into turns, in their order. Each turn has at most [`AT_ONCE`] pages, all within
/// one huge page's worth of memory.
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

/// Merges as many of these runs as one turn can, but at least one; returns their number. On busy
/// CPUs the remapping thread reads late for each mapping that is moved. `is_written`: the guest
/// has written to a merged page.
///
/// # Errors
/// Nothing can be merged now, with the reason.
pub(crate) fn merge_turn(
    ops: &mut PageOps,
    inhibitors: &Inhibitors,
    pool: Option<&AttachedPool>,
    is_written: bool,
    runs: &[Merge],
) -> Result<(usize, Merged), Refusal> {
    let refused = |why: String| Refusal::NotMerging { why };
    if let Some(why) = ops.obstacle(inhibitors) {
        return Err(refused(why.into_owned()));
    }
    let host = HostKernel::get().ok_or_else(|| refused("no page tables".to_owned()))?;
    let Some(channel) = &ops.channel else { return Ok((runs.len(), Merged::default())) };
    let buffer = buffer(host.uffd).ok_or_else(|| refused("no memory".to_owned()))?;
    let parts: Vec<Vec<Part>> =
        runs.iter().map(|run| channel.parts(run.page, run.pages, PageState::Plain)).collect();
    let ranges: Vec<Range> = parts.iter().flatten().map(|part| part.range).collect();
    let begun = ops.begin_moving(&ranges, 0);
    let begun = begun.map_err(|errno| refused(format!("no turn can begin: {errno}")))?;
    let BegunTurn { ram, channel, run: moving, .. } = begun;
    // Only after the guest has written to a shared page: preparing takes three times as long.
    let shares = runs.iter().any(|run| run.content != Content::Zeros);
    let stops_writes = pool.is_some_and(|pool| pool.stops_writes);
    let is_prepared = shares && is_written && stops_writes && cuts::is_possible(host.uffd);
    let room = is_prepared.then(|| Untouched::new(TURN_BYTES, false).ok()).flatten();
    let prepared_at = room.as_ref();
    let _remapping = prepared_at.map(|_| RemapReadGuard::begin());
    let (mut merged, mut done, deadline) = (Merged::default(), 0, turn());
    'turn: for (run, parts) in runs.iter().zip(parts) {
        for Part { page, range: home } in parts {
            let Some(block) = ram.block(home.start) else { continue };
            let place = MergeTarget { host, block, pool, prepared_at };
            let content = run.content_at(page);
            let run = PageRun { home, away: buffer.start, page };
            *moving = Some(run);
            // SAFETY: registered, by the tracker or just now; the buffer always is.
            merged += unsafe { transitions::merge(&place, channel, run, content) };
            if channel.has(home, PageState::Aside) {
                done += 1;
                break 'turn;
            }
            wake(host.uffd, home);
        }
        done += 1;
        if now() > deadline {
            break;
        }
    }
    ops.settle();
    merged.kept = page_sum(&runs[..done])
        - merged.shared
        - merged.dropped
        - merged.different
        - merged.no_room;
    Ok((done, merged))
}

/// The number of pages in all these runs.
pub(crate) fn page_sum(runs: &[Merge]) -> u32 {
    runs.iter().map(|run| run.pages).sum()
}

/// The block in which runs are merged.
pub(crate) struct MergeTarget<'a> {
    pub(crate) host: HostKernel,
    pub(crate) block: &'a Block,
    pub(crate) pool: Option<&'a AttachedPool>,
    /// Where slots are mapped and protected before they are moved into guest RAM; it has room for
    /// a turn. Without it, a write between mapping and protecting leaves a copy in the pool's
    /// mapping.
    pub(crate) prepared_at: Option<&'a Untouched>,
}

impl HasKernel for MergeTarget<'_> {
    type Kernel = HostKernel;

    fn kernel(&self) -> &HostKernel {
        &self.host
    }
}

impl Mapper for MergeTarget<'_> {
    fn judge(&self, aside: Range, content: Content, verdicts: &mut [PageComparison]) {
        let mut pages = self.pool.map(|pool| pool.pages.borrow_mut());
        let expected = match (content, self.pool, &mut pages) {
            (Content::Slot(slot), Some(pool), Some(pages)) => {
                let pages = &mut pages.bytes_mut()[..verdicts.len() * PAGE_LEN];
                pool.view.read(slot, pages).is_ok().then_some(&*pages)
            }
            _ => None,
        };
        // Reading a missing page would be a fault that waits for this thread.
        let there = self.host.pagemap.readable(aside).unwrap_or_default();
        for range in there.iter().map(|there| there.range) {
            // SAFETY: the pages are there, and while they are in the buffer only this thread uses
            // them.
            let found = unsafe { bytes(range) };
            let first = page_count(range.start - aside.start);
            for (at, page) in (first..).zip(found.chunks(PAGE_LEN)) {
                let same = match content {
                    Content::Zeros => is_zeros(page),
                    Content::Slot(_) => {
                        expected.is_some_and(|all| all[at * PAGE_LEN..][..PAGE_LEN] == *page)
                    }
                };
                verdicts[at] = if same { PageComparison::Same } else { PageComparison::Different };
            }
        }
    }

    unsafe fn map_slots(&self, slot: u32, home: Range) -> bool {
        let Some(pool) = self.pool else { return false };
        let reserve = self.block.reserve;
        let first = self.prepared_at.map_or(home, |at| Range { len: home.len, ..at.range() });
        // SAFETY: as the caller promises; the other place is the shim's own.
        let mapped = unsafe { pool.view.map_over(slot, Over { range: first, reserve }) }.is_ok();
        if mapped {
            // SAFETY: mapped from the pool, and the fault thread serves.
            unsafe { unshare::stop_writes(self.host.uffd, first, pool.stops_writes) };
        }
        // SAFETY: as the caller promises, and the remapping thread reads while mappings are
        // moved.
        let in_place = |at: &Untouched| unsafe { at.map_over(home) }.is_ok();
        if !mapped && self.prepared_at.is_some() {
            // The preparation area is used again and unmapped later, so a hole in it is refilled.
            // SAFETY: the area is the shim's own and holds no more than the failed mapping.
            let _ = unsafe { unshare::refill(self.block, first) };
        }
        if !mapped || !self.prepared_at.is_none_or(in_place) {
            // SAFETY: the pages are in the buffer, and go back when the turn ends.
            unsafe { unshare::mend(&self.host, self.block, home) };
            return false;
        }
        for advice in self.block.shared_advice() {
            // SAFETY: this advice discards nothing. Without it a forked child has a few pages too
            // many.
            let _ = unsafe { advise(home, advice) };
        }
        true
    }
}

/// # Safety
/// The range is populated, and nothing writes to it while the slice is used.
unsafe fn bytes<'a>(range: Range) -> &'a [u8] {
    let start = std::ptr::with_exposed_provenance(usize::try_from(range.start).unwrap_or(0));
    // SAFETY: as the caller promises.
    unsafe { std::slice::from_raw_parts(start, usize::try_from(range.len).unwrap_or(0)) }
}

/// Number of pages in `bytes`.
fn page_count(bytes: u64) -> usize {
    usize::try_from(bytes / PAGE_BYTES).unwrap_or(usize::MAX)
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
