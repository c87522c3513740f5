//! Memory that QEMU discards: memory that the guest has freed, and memory of its balloon.
//!
//! **Problem.** QEMU discards at once the memory that a guest reports free. The guest then pays
//! for a fault and a cleared page when it reuses the memory, even if the host had no need of it.
//! **Idea** (IMR §3): the memory is handed over to the kernel instead (`MADV_FREE`). The kernel
//! keeps it while memory is plentiful, and drops it without I/O when memory is short. Once the
//! guest writes to a page, the kernel keeps that page. This is the paper's whole protocol,
//! without a bitmap and without an exit. A worker that knows better than the kernel which memory
//! should go first, and how much, has it taken ([`take_part`]).
//!
//! **Invariants.** Only pages in place are freed: copies in staging are discarded, and merged
//! pages get fresh memory. A freed page always holds what the guest left there, or zeros. It is
//! never moved, because moved pages count as written. So it is neither merged nor revoked until
//! it is plain again.
//!
//! **Leaves out.** The balloon. QEMU discards its memory page by page, which tells it from a
//! report: a report usually covers several pages. A balloon's memory must be freed for certain,
//! and a discard of one page is cheaper than handing it over and dropping it later. Nor are
//! adjacent balloon pages discarded together: a later discard could hit pages that the guest has
//! reused without notice.
//!
//! **Cost**: some 0.1 to 0.3 µs a page, less in huge pages; taking 0.05 µs a page in huge pages,
//! 1 µs in small ones.
//!
//! Source: Wan 2013 (IMR) §3, §4.

use std::ffi::c_int;

use protocol::layout::{BLOCK_PAGES, PageState};
use protocol::{Pages, Refusal, Taken};
use sys::memory_map::{Advice, HUGE_PAGE_BYTES, PAGE_BYTES, Pagemap, Range, advise};

use crate::channel::Part;
use crate::cuts::Cuts;
use crate::errno::{fail, keep_errno};
use crate::inhibitors::Inhibitors;
use crate::page_ops::PageOps;
use crate::process::{pagemap, userfaultfd};
use crate::ram::end;
use crate::unshare;

/// The outcome for merged pages that QEMU discards.
#[derive(Default)]
struct Discarded {
    /// Ranges with fresh memory now.
    fresh: Vec<Range>,
    /// Ranges that are as they were.
    left: Vec<Range>,
}

/// Discards `range` by `call`, or hands it over if `lazily` is set; `call` is told which of the two
/// it does. Returns the result of `call`, and the ranges to which the caller must write zeros
/// after it has left the lock.
pub(crate) fn discard(
    ops: &mut PageOps,
    cuts: &mut Cuts,
    inhibitors: &Inhibitors,
    range: Range,
    lazily: bool,
    call: impl Fn(Range, bool) -> c_int,
) -> (c_int, Vec<Range>) {
    let Discarded { fresh, left } = discard_merged(ops, range);
    // Joined before anything is handed over: moved pages count as written.
    keep_errno(|| cuts.join_after_discard(ops, inhibitors, &fresh));
    // An empty range is not handed over: a guest also reports memory that it has never touched.
    let is_there = || pagemap().is_none_or(|pagemap| pagemap.populated(range) != Ok(0));
    let is_handed_over = lazily && is_there() && call(range, true) == 0;
    let result = if is_handed_over { 0 } else { call(range, false) };
    let mut comes_back = false;
    keep_errno(|| {
        if let (0, Some(channel)) = (result, &ops.channel) {
            if let Some(tracker) = &ops.tracker
                && !tracker.discarded(channel, range, |staged| {
                    call(staged, false);
                })
            {
                comes_back = true;
            } else if is_handed_over {
                channel.hand_over(range);
            } else {
                channel.count_as_plain(range);
            }
        }
    });
    // QEMU is told that the discard failed when the content would come back.
    (if comes_back { fail(libc::EAGAIN) } else { result }, left)
}

/// A range mapped from a pool would show the pool's content again after a discard. Fresh memory
/// is mapped there instead, while the kernel has room for more mappings.
fn discard_merged(ops: &mut PageOps, range: Range) -> Discarded {
    let mut discarded = Discarded::default();
    let PageOps { ram, channel: Some(channel), tracker, .. } = ops else { return discarded };
    for merged in channel.merged(range) {
        // Blocks may be adjacent, and then so are their merged pages.
        let mut rest = merged;
        while let Some(block) = ram.block(rest.start).filter(|_| rest.len > 0) {
            let len = rest.len.min(end(block.range) - rest.start);
            let part = Range { start: rest.start, len };
            rest = Range { start: rest.start + len, len: rest.len - len };
            // SAFETY: merged, and discarded by QEMU.
            if unsafe { unshare::replace_by_fresh(block, part) } {
                channel.set(part, PageState::Plain);
                if let Some(tracker) = tracker {
                    tracker.register_fresh(part);
                }
                discarded.fresh.push(part);
            } else {
                discarded.left.push(part);
            }
        }
    }
    discarded
}

/// The freed pages of this run that can be taken now.
///
/// # Errors
/// Nothing can be taken now, with the reason.
pub(crate) fn to_take(
    ops: &PageOps,
    inhibitors: &Inhibitors,
    of: Pages,
) -> Result<Vec<Part>, Refusal> {
    let refused = |why: &str| Refusal::NotTaking { why: why.to_owned() };
    if let Some(why) = ops.obstacle(inhibitors) {
        return Err(refused(&why));
    }
    let channel = ops.channel.as_ref().ok_or_else(|| refused("say Hello first"))?;
    Ok(channel.parts(of.page, of.pages, PageState::Freed))
}

/// Has the kernel drop the freed pages of `range`, without the lock: this may take a while.
/// Meanwhile a freed page always holds what the guest left there, or zeros.
///
/// # Errors
/// The kernel's.
pub(crate) fn take_part(pagemap: &Pagemap, range: Range) -> Result<Taken, Refusal> {
    let kernel = |call: &str, errno: rustix::io::Errno| Refusal::Kernel {
        call: call.to_owned(),
        errno: errno.raw_os_error(),
    };
    let populated = || {
        let pages = pagemap.populated(range).map_err(|errno| kernel("PAGEMAP_SCAN", errno))?;
        Ok(u32::try_from(pages).unwrap_or(u32::MAX))
    };
    let pages = page_count(range);
    let before = populated()?;
    // SAFETY: this discards memory that the guest has given up and not written to since; all
    // other memory keeps its content.
    unsafe { advise(range, Advice::LinuxPageOut) }
        .map_err(|errno| kernel("madvise(MADV_PAGEOUT)", errno))?;
    let after = populated()?.min(before);
    Ok(Taken { taken: before - after, gone: pages.saturating_sub(before), kept: after })
}

/// Makes pages plain that have been taken, or that the guest uses again.
pub(crate) fn taken(
    ops: &PageOps,
    inhibitors: &Inhibitors,
    pagemap: &Pagemap,
    part: Range,
    kept: u32,
) {
    let Some(channel) = &ops.channel else { return };
    channel.count_as_plain(part);
    let has_huge_pages = ops.ram.block(part.start).is_some_and(|block| block.huge);
    // QEMU may have begun to watch its memory since `to_take` checked.
    if kept == 0 && has_huge_pages && is_huge(part) && ops.obstacle(inhibitors).is_none() {
        drop_page_table(ops, pagemap, part);
    }
}

/// The kernel splits a huge page before it drops it. A page table left behind would keep the
/// block in small pages for ever; a discard frees that table (Linux 6.14). The block cannot be
/// filled meanwhile: a thread that touches it is served after this turn.
fn drop_page_table(ops: &PageOps, pagemap: &Pagemap, block: Range) {
    let Ok(uffd) = userfaultfd() else { return };
    let Ok(window) = ops.open_window(uffd, &[block], 0) else { return };
    if pagemap.populated(block) == Ok(0) {
        // SAFETY: nothing is there, and nothing can be put there.
        let _ = unsafe { advise(block, Advice::LinuxDontNeed) };
    }
    // SAFETY: nothing was moved.
    unsafe { ops.close_window(uffd, window) };
}

/// Makes the freed pages of a part of one block plain; returns their number.
pub(crate) fn keep(ops: &PageOps, of: Pages) -> u32 {
    let Some(channel) = &ops.channel else { return 0 };
    let parts = channel.parts(of.page, of.pages, PageState::Freed);
    parts.iter().for_each(|part| channel.count_as_plain(part.range));
    channel.forget_empty_block(of.page / BLOCK_PAGES);
    parts.iter().map(|part| page_count(part.range)).sum()
}

/// Splits a run at block borders: a turn takes one block's part of it.
pub(crate) fn blocks(run: Pages) -> impl Iterator<Item = Pages> {
    let last = run.page.saturating_add(run.pages);
    let mut page = run.page;
    std::iter::from_fn(move || {
        let border = (page / BLOCK_PAGES + 1).saturating_mul(BLOCK_PAGES).min(last);
        let part = Pages { page, pages: border.saturating_sub(page) };
        page = border;
        (part.pages > 0).then_some(part)
    })
}

fn is_huge(range: Range) -> bool {
    range.len == HUGE_PAGE_BYTES && range.start.is_multiple_of(HUGE_PAGE_BYTES)
}

/// Number of pages in `range`; a turn has few.
fn page_count(range: Range) -> u32 {
    u32::try_from(range.len / PAGE_BYTES).unwrap_or(u32::MAX)
}
