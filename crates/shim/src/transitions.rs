//! The places of a page's content, and every step that moves it.
//!
//! Each page of guest RAM is in exactly one state. The states are in the memory that the worker
//! reads ([`PageState`]). The page tables show where the content really is, and take precedence:
//! **each step ends by asking them (`PAGEMAP_SCAN`) whether its claim is true**. The result of a
//! call is never trusted alone: Linux 6.18 has moved a whole granule and reported that it had
//! done nothing.
//!
//! | state | place of its content |
//! |---|---|
//! | plain (`Plain`) | where QEMU expects it, or nowhere: then it is zero |
//! | staged | in staging, or nowhere |
//! | buffered (`Aside`) | in the [buffer](crate::buffer), during a turn or until it can be moved back |
//! | merged (`Merged`) | in the pool, or in the kernel's copy of it, mapped where QEMU expects it |
//! | freed | where QEMU expects it, or nowhere; the kernel may drop it |
//!
//! | from | event | to | step | by | asked afterwards |
//! |---|---|---|---|---|---|
//! | plain | revoke | staged, or plain if all of it stays | [`stage`] | control | no page is in both places |
//! | staged | touch, recall, release, any need for RAM in its place | plain | [`unstage`] | fault thread, control, watchdog, QEMU | staging holds none of it; pages that it still holds stay staged |
//! | staged | discard | the same, and nowhere | `freed` | QEMU | staging holds none of it; else QEMU is told that its discard failed |
//! | plain | merge, join | buffered, or plain if it stays | [`set_aside`] | control; fault thread (join) | no page is in both places |
//! | buffered | equal to a slot | merged | [`share`] | control | before: its place is empty; afterwards: the buffer holds none of it |
//! | buffered | zeros | plain, and nowhere | [`drop_zeros`] | control | the buffer holds none of it |
//! | buffered | different; the turn ends; the next turn begins | plain | [`put_back`] | the holder of the turn | the buffer holds none of it; pages that it still holds stay buffered |
//! | merged, not written | write, unshare | plain, by way of the buffer | [`replace`] | fault thread, control | the buffer held all of it before the place was mapped over, and none of it afterwards |
//! | merged | write, no room for mappings, or QEMU needs RAM for itself | merged | `cuts` | fault thread | – (the kernel copies) |
//! | merged | discard | plain, and nowhere | `unshare::replace_by_fresh` | QEMU | no page of a file is there; else zeros are written |
//! | plain, freed | report | freed | `freed` | QEMU | – (the kernel's `MADV_FREE` either was or was not) |
//! | freed | taken, kept, discarded, found missing at a touch | plain | `freed`, `tracker` | control, QEMU, fault thread | – (both states name the same place) |
//! | plain, nowhere | touch | plain, zeros | `tracker` | fault thread | before: staging holds nothing for it, if the page tables can be asked |
//! | any | QEMU maps something else there | plain | `interpose` | QEMU | everything was plain before |
//!
//! A step whose pages are not all in its initial state does nothing. A run that was put together
//! wrongly costs a measurement or a merge, and no page.
//!
//! All of this happens under the engine's lock. No step waits for long. A page that the kernel is
//! busy with is retried for [`HOLD`](crate::retries::HOLD) and then keeps its state; the next touch
//! and the watchdog retry it. Content of staging and buffer is discarded by the steps above only.
//! Neither is used or unmapped unless the page tables say that it is empty.
//!
//! **Inconsistencies** are repaired where the content is known. A page that cannot be moved is
//! copied; a page that is in the buffer is moved back. Three cases end QEMU with a message,
//! because going on would show the guest wrong memory: a page that is in two places
//! ([`TWO_PLACES`]), a page that could not be moved back for 10 s ([`STUCK`]), and a place in
//! guest RAM that is unmapped and cannot be mapped again (`unshare::mend`).
//!
//! The steps are generic over the [`Kernel`], so that `tests` can run them in every interleaving
//! against a model. The model has a guest that reads and writes, a disk that pins, and calls that
//! fail, do a part, or report a false result.
//!
//! **Swap.** The kernel may page out a page in any state, at any moment. Its place stays the same,
//! and it moves as a swap entry.
//!
//! Nothing here allocates or touches guest RAM.

mod host;
mod kernel;
mod moves;
#[cfg(test)]
mod tests;
mod way;

use protocol::layout::{PageState, Shared};
use protocol::{Content, Merged};
use sys::memory_map::{PAGE_BYTES, PageSet, Range};

use crate::channel::Channel;

pub(crate) use host::{HostKernel, fill_hole, fill_holes, forget_late, late};
pub(crate) use kernel::{Fresh, HasKernel, Kernel, Mapper, PageComparison};
use moves::{TakeOutcome, copy_all, discard, give, take};

/// How often a move that may be skipped, or a copy that may fail, is retried.
const TRIES: u32 = 8;

/// Why QEMU is ended: the shim cannot know which of the two pages is the guest's.
pub(crate) const TWO_PLACES: &str = "a page of guest memory is in two places";
/// Why QEMU is ended: a guest that waits for ever is no better, and the page's content would be
/// lost with the next step.
pub(crate) const STUCK: &str = "guest memory cannot be given back";

/// Adjacent pages of one block: where they belong (`home`), their other place (`away`), and the
/// first one's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageRun {
    pub(crate) home: Range,
    pub(crate) away: u64,
    pub(crate) page: u32,
}

impl PageRun {
    fn place(self) -> Range {
        Range { start: self.away, len: self.home.len }
    }

    fn pages(self) -> u32 {
        // A run has at most 512 pages.
        u32::try_from(self.home.len / PAGE_BYTES).unwrap_or(u32::MAX)
    }

    /// The part of `pages` pages that starts at the run's page `first`.
    fn part(self, first: usize, pages: usize) -> Self {
        let (skipped, len) = (first as u64 * PAGE_BYTES, pages as u64 * PAGE_BYTES);
        let home = Range { start: self.home.start + skipped, len };
        let page = self.page.saturating_add(u32::try_from(first).unwrap_or(u32::MAX));
        Self { home, away: self.away + skipped, page }
    }
}

/// The result of staging, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Staged {
    /// Pages that are staged now, holes among them.
    pub(crate) staged: u32,
    /// Staged pages that have content.
    pub(crate) moved: u32,
    /// Pages that stay in place: pinned by I/O, or not movable.
    pub(crate) kept: u32,
}

/// The result of moving pages back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    /// Pages that the kernel reports as moved.
    pub(crate) moved: u64,
    /// Pages that are still away.
    pub(crate) away: PageSet,
}

/// Plain → staged, for the pages that the kernel moves.
///
/// # Safety
/// Both ranges are registered, and the fault thread serves when the lock is free.
pub(crate) unsafe fn stage<K: Kernel>(kernel: &K, shared: Shared<'_>, run: PageRun) -> Staged {
    if !is_all(shared, run, PageState::Plain) {
        return Staged::default();
    }
    mark(shared, run, PageState::Staged, |_| true);
    // SAFETY: as the caller promises.
    let taken = unsafe { take(kernel, run) };
    if matches!(taken, TakeOutcome::Nothing) {
        // The content in staging may belong to a page recorded as plain. Then it is moved there.
        // SAFETY: as the caller promises, and no other thread uses this part of staging.
        let _ = unsafe { unstage(kernel, shared, run) };
        return Staged { kept: run.pages(), ..Staged::default() };
    }
    let stays = |page: usize| matches!(&taken, TakeOutcome::Known { left, .. } if left.has(page));
    mark(shared, run, PageState::Plain, stays);
    match taken {
        TakeOutcome::Known { there, left } => {
            let kept = left.count();
            Staged { staged: run.pages() - kept, moved: there.count(), kept }
        }
        TakeOutcome::Nothing | TakeOutcome::Unknown => {
            Staged { staged: run.pages(), ..Staged::default() }
        }
    }
}

/// Staged → plain. Pages that cannot be moved keep their state. Swapped-out pages move as swap
/// entries; the kernel reads each at its touch.
///
/// # Safety
/// Both ranges are registered; the content in staging belongs to this run.
pub(crate) unsafe fn unstage<K: Kernel>(kernel: &K, shared: Shared<'_>, run: PageRun) -> Given {
    // SAFETY: as the caller promises.
    let given = unsafe { give(kernel, run) };
    mark(shared, run, PageState::Plain, |page| !given.away.has(page));
    given
}

/// Plain → buffered; returns which pages are in the buffer. `None`: none is.
///
/// # Safety
/// Both ranges are registered, and the fault thread serves when the lock is free.
pub(crate) unsafe fn set_aside<K: Kernel>(
    kernel: &K,
    channel: &Channel,
    run: PageRun,
) -> Option<PageSet> {
    let shared = channel.shared();
    if !is_all(shared, run, PageState::Plain) {
        return None;
    }
    mark(shared, run, PageState::Aside, |_| true);
    // SAFETY: as the caller promises.
    let there = match unsafe { take(kernel, run) } {
        TakeOutcome::Nothing => PageSet::default(),
        TakeOutcome::Known { there, .. } => there,
        // All of it is put back.
        TakeOutcome::Unknown => return Some(PageSet::default()),
    };
    mark(shared, run, PageState::Plain, |page| !there.has(page));
    (!there.is_empty()).then_some(there)
}

/// Buffered → plain; returns whether all pages are in place.
///
/// # Safety
/// Both ranges are registered; the content in the buffer belongs to this run.
pub(crate) unsafe fn put_back<K: Kernel>(kernel: &K, channel: &Channel, run: PageRun) -> bool {
    let shared = channel.shared();
    let is_aside = |page| state(shared, run, page) == PageState::Aside;
    // Pages that have been shared or dropped since must not be moved: their place is taken, and
    // the buffer has a hole there.
    let (mut first, mut all_home) = (0, true);
    while let Some(from) = (first..pages_of(run.home)).find(|&page| is_aside(page)) {
        let to = (from..pages_of(run.home)).find(|&page| !is_aside(page));
        first = to.unwrap_or(pages_of(run.home));
        let part = run.part(from, first - from);
        // SAFETY: as the caller promises.
        let given = unsafe { give(kernel, part) };
        mark(shared, part, PageState::Plain, |page| !given.away.has(page));
        all_home &= given.away.is_empty();
    }
    all_home
}

/// Buffered → merged; returns whether the run is merged. If not, it is still buffered.
///
/// # Safety
/// All pages of the run are buffered and equal to the slots; the fault thread serves when the
/// lock is free.
pub(crate) unsafe fn share<M: Mapper>(
    mapper: &M,
    channel: &Channel,
    run: PageRun,
    slot: u32,
) -> bool {
    if !is_all(channel.shared(), run, PageState::Aside) {
        return false;
    }
    // A page that is in its place now would be lost. A page in two places is detected when it is
    // moved back.
    if !mapper.kernel().populated(run.home).is_ok_and(|at_home| at_home.is_empty()) {
        return false;
    }
    // SAFETY: the pages are in the buffer.
    if !unsafe { mapper.map_slots(slot, run.home) } {
        return false;
    }
    channel.set(run.home, PageState::Merged);
    // From here on the guest may have written there, so nothing may be mapped over it in any
    // case. SAFETY: the content is in the pool. If this fails, the buffer is not empty, and no
    // more pages are moved there.
    let _ = unsafe { discard(mapper.kernel(), run.place()) };
    true
}

/// Buffered → plain with an empty place: a hole reads as zeros.
///
/// # Safety
/// All pages of the run are buffered and hold zeros.
pub(crate) unsafe fn drop_zeros<K: Kernel>(kernel: &K, channel: &Channel, run: PageRun) -> bool {
    // SAFETY: they hold zeros.
    let is_dropped =
        is_all(channel.shared(), run, PageState::Aside) && unsafe { discard(kernel, run.place()) };
    if is_dropped {
        mark(channel.shared(), run, PageState::Plain, |_| true);
    }
    is_dropped
}

/// Merged → buffered → plain; returns whether the place is the guest's own. If so, pages that
/// cannot be moved back stay buffered. If not, the run is merged as before.
///
/// # Safety
/// The pages of the run are the pool's, and nothing can write to them. The buffer and the memory
/// mapped over them are registered, and the fault thread serves when the lock is free.
pub(crate) unsafe fn replace<F: Fresh>(mapper: &F, channel: &Channel, run: PageRun) -> bool {
    let (kernel, place) = (mapper.kernel(), run.place());
    if !is_all(channel.shared(), run, PageState::Merged) {
        return false;
    }
    if !kernel.populated(place).is_ok_and(|there| there.is_empty()) {
        return false;
    }
    // SAFETY: the buffer is registered and empty; the pool's pages can be read.
    let is_copied = unsafe { copy_all(kernel, run) };
    let there = kernel.populated(place);
    if !is_copied || !there.is_ok_and(|there| there.count() == run.pages()) {
        // SAFETY: the buffer holds copies.
        let _ = unsafe { discard(kernel, place) };
        return false;
    }
    channel.set(run.home, PageState::Aside);
    // SAFETY: a copy of the whole run is in the buffer.
    if !unsafe { mapper.map_fresh(run.home) } {
        channel.set(run.home, PageState::Merged);
        // SAFETY: the buffer holds copies.
        let _ = unsafe { discard(kernel, place) };
        return false;
    }
    // SAFETY: as the caller promises.
    unsafe { put_back(kernel, channel, run) };
    true
}

/// Plain → buffered → plain, in an untouched mapping; returns whether all pages are in place.
///
/// # Safety
/// As for [`set_aside`].
pub(crate) unsafe fn map_anew<F: Fresh>(mapper: &F, channel: &Channel, run: PageRun) -> bool {
    let kernel = mapper.kernel();
    if !is_all(channel.shared(), run, PageState::Plain) {
        return true;
    }
    // SAFETY: as the caller promises.
    unsafe { set_aside(kernel, channel, run) };
    if kernel.populated(run.home).is_ok_and(|left| left.is_empty()) {
        // SAFETY: all content is in the buffer. If this fails, the old mapping stays.
        let _ = unsafe { mapper.map_fresh(run.home) };
    }
    // SAFETY: as the caller promises.
    unsafe { put_back(kernel, channel, run) }
}

/// Merges the equal pages of a plain run, and moves the others back.
///
/// # Safety
/// As for [`set_aside`] and [`share`]. The run has 64 pages at most.
pub(crate) unsafe fn merge<M: Mapper>(
    mapper: &M,
    channel: &Channel,
    run: PageRun,
    content: Content,
) -> Merged {
    let (kernel, mut merged) = (mapper.kernel(), Merged::default());
    let mut verdicts = [PageComparison::Absent; 64];
    let verdicts = &mut verdicts[..pages_of(run.home).min(64)];
    // SAFETY: as the caller promises.
    let Some(there) = (unsafe { set_aside(kernel, channel, run) }) else {
        merged.kept = run.pages();
        return merged;
    };
    mapper.judge(run.place(), content, verdicts);
    for (page, verdict) in verdicts.iter_mut().enumerate() {
        if !there.has(page) {
            *verdict = PageComparison::Absent;
        }
    }
    let mut first = 0;
    for equal in verdicts.chunk_by(|one, other| one == other) {
        let part = run.part(first, equal.len());
        let at = match (equal[0], content) {
            (PageComparison::Absent, _) => &mut merged.kept,
            (PageComparison::Different, _) => &mut merged.different,
            (PageComparison::Same, Content::Zeros) => {
                // SAFETY: they hold zeros, as was just seen.
                if unsafe { drop_zeros(kernel, channel, part) } {
                    &mut merged.dropped
                } else {
                    &mut merged.kept
                }
            }
            (PageComparison::Same, Content::Slot(slot)) => {
                let slot = slot.saturating_add(part.page - run.page);
                // SAFETY: they are in the buffer, and equal, as was just seen.
                if unsafe { share(mapper, channel, part, slot) } {
                    &mut merged.shared
                } else {
                    &mut merged.no_room
                }
            }
        };
        *at += part.pages();
        first += equal.len();
    }
    // SAFETY: as the caller promises.
    unsafe { put_back(kernel, channel, run) };
    merged
}

/// Empties the buffer when no page is buffered: it may hold a copy that could not be discarded.
/// Returns whether it is empty.
///
/// # Safety
/// No page's state says that it is buffered.
pub(crate) unsafe fn clear<K: Kernel>(kernel: &K, buffer: Range) -> bool {
    // SAFETY: as the caller promises.
    kernel.populated(buffer).is_ok_and(|left| left.is_empty()) || unsafe { discard(kernel, buffer) }
}

fn mark(shared: Shared<'_>, run: PageRun, state: PageState, is_meant: impl Fn(usize) -> bool) {
    for (at, number) in (run.page..run.page.saturating_add(run.pages())).enumerate() {
        if is_meant(at) {
            shared.set_state(number, state);
        }
    }
}

fn state(shared: Shared<'_>, run: PageRun, page: usize) -> PageState {
    shared.state(run.page.saturating_add(u32::try_from(page).unwrap_or(u32::MAX)))
}

fn is_all(shared: Shared<'_>, run: PageRun, wanted: PageState) -> bool {
    (0..pages_of(run.home)).all(|page| state(shared, run, page) == wanted)
}

fn pages_of(range: Range) -> usize {
    usize::try_from(range.len / PAGE_BYTES).unwrap_or(usize::MAX)
}
