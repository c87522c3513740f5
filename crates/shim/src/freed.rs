//! What QEMU discards: memory that the guest has freed, and that its balloon holds.
//!
//! **Problem.** What a guest reports free QEMU discards at once. So the guest pays for a fault and
//! a cleared page when it wants it back, though nobody may have needed it meanwhile. **Idea** (IMR
//! §3): it is handed over to the kernel instead (`MADV_FREE`), which keeps it while there is plenty
//! of memory, drops it without I/O when there is not, and keeps it for good once the guest writes
//! to it: the paper's whole protocol, without a bitmap and without an exit. Whoever knows better
//! than the kernel which memory is to go first, and how much, has it taken ([`take`]).
//!
//! **Invariants.** Freed is only what is in its place: copies in staging are discarded, what is
//! merged gets fresh memory. A freed page holds what the guest left there or zeros, whatever
//! happens. It is moved nowhere, for what is moved counts as written: so it is neither merged nor
//! revoked, until it is plain again.
//!
//! **Leaves out.** The balloon: QEMU discards what it holds page by page, so it is told from a
//! report, which is of several pages as a rule. It must come back for certain, and to discard a
//! page takes less than to hand it over and have it dropped. Nor are neighbours discarded together:
//! that would be later, when the guest may have them back without having said so.
//!
//! **Cost**: some 0.1 to 0.3 µs a page, less in huge pages; taking 0.05 µs a page in huge pages, 1
//! µs in small ones.
//!
//! Source: Wan 2013 (IMR) §3, §4.

use std::ffi::c_int;

use protocol::layout::{BLOCK_PAGES, PageState};
use protocol::{Pages, Refusal, Taken};
use sys::memory_map::{Advice, HUGE_PAGE_BYTES, PAGE_BYTES, Pagemap, Range, advise};

use crate::channel::{Channel, Part};
use crate::engine::{Engine, close_window, lock, userfaultfd};
use crate::interpose::{fail, keep_errno};
use crate::ram::end;
use crate::tracker::{self, Tracker};
use crate::unshare;

/// What became of merged pages that QEMU discards.
#[derive(Default)]
struct Discarded {
    /// Here is fresh memory now.
    fresh: Vec<Range>,
    /// Here they are as they were.
    left: Vec<Range>,
}

impl Engine {
    /// Whether memory that the guest frees can be handed over now, and is to be.
    pub(crate) fn hands_over(&self) -> bool {
        self.is_lazy && self.obstacle().is_none()
    }

    /// Discards `range` by `call`, or hands it over if it is to be done `lazily`; answers what
    /// `call` does, which is told which of the two it is, and what the caller must write zeros to
    /// when it has left the lock.
    pub(crate) fn discard(
        &mut self,
        range: Range,
        lazily: bool,
        call: impl Fn(Range, bool) -> c_int,
    ) -> (c_int, Vec<Range>) {
        let Discarded { fresh, left } = self.discard_merged(range);
        // Before anything is handed over: what is moved counts as written.
        keep_errno(|| self.join_after_discard(&fresh));
        // Where nothing is there is nothing to hand over: what the guest has never touched it
        // reports as well.
        let is_there =
            || tracker::pagemap().is_none_or(|pagemap| pagemap.populated(range) != Ok(0));
        let is_handed_over = lazily && is_there() && call(range, true) == 0;
        let result = if is_handed_over { 0 } else { call(range, false) };
        let mut comes_back = false;
        keep_errno(|| {
            if let (0, Some(channel)) = (result, &self.channel) {
                if let Some(tracker) = &self.tracker
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
        // Of what comes back QEMU is told that it has not gone.
        (if comes_back { fail(libc::EAGAIN) } else { result }, left)
    }

    /// Where `range` is mapped from a pool it would show the pool's content again: there fresh
    /// memory is mapped, as far as the kernel has room for more mappings.
    fn discard_merged(&mut self, range: Range) -> Discarded {
        let mut discarded = Discarded::default();
        let Some(channel) = &self.channel else { return discarded };
        for merged in channel.merged(range) {
            // Blocks may touch each other, and then so do their pages.
            let mut rest = merged;
            while let Some(block) = self.ram.block(rest.start).filter(|_| rest.len > 0) {
                let len = rest.len.min(end(block.range) - rest.start);
                let part = Range { start: rest.start, len };
                rest = Range { start: rest.start + len, len: rest.len - len };
                // SAFETY: merged, and discarded by QEMU.
                if unsafe { unshare::replace_by_fresh(block, part) } {
                    channel.set(part, PageState::Plain);
                    if let Some(tracker) = &mut self.tracker {
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

    /// What is freed of these pages and can be taken now.
    fn to_take(&self, of: Pages) -> Result<Vec<Part>, Refusal> {
        let refused = |why: &str| Refusal::NotTaking { why: why.to_owned() };
        if let Some(why) = self.obstacle() {
            return Err(refused(&why));
        }
        let channel = self.channel.as_ref().ok_or_else(|| refused("say Hello first"))?;
        Ok(channel.parts(of.page, of.pages, PageState::Freed))
    }

    /// These pages have been taken, or the guest has them in use again.
    fn taken(&self, pagemap: &Pagemap, part: Range, kept: u32) {
        let Some(channel) = &self.channel else { return };
        channel.count_as_plain(part);
        let has_huge_pages = self.ram.block(part.start).is_some_and(|block| block.huge);
        // QEMU may have begun to watch its memory since it was asked.
        if kept == 0 && has_huge_pages && is_huge(part) && self.obstacle().is_none() {
            self.drop_page_table(channel, pagemap, part);
        }
    }

    /// The kernel splits a huge page before it drops it, and where a page table is left there will
    /// be small pages for good. A discard drops it (Linux 6.14). Nobody can fill the block
    /// meanwhile: who touches it is served after this turn.
    fn drop_page_table(&self, channel: &Channel, pagemap: &Pagemap, block: Range) {
        let Ok(uffd) = userfaultfd() else { return };
        if self.tracker.as_ref().is_some_and(Tracker::is_incomplete) {
            return;
        }
        let Ok(window) = self.open_window(uffd, channel, &[block], 0) else { return };
        if pagemap.populated(block) == Ok(0) {
            // SAFETY: nothing is there, and nothing can come.
            let _ = unsafe { advise(block, Advice::LinuxDontNeed) };
        }
        // SAFETY: nothing was moved.
        unsafe { close_window(uffd, channel, window) };
    }
}

/// Has the kernel drop what is freed of these runs, as long as that is wanted; answers what became
/// of it.
pub(crate) fn take(runs: &[Pages], is_wanted: impl Fn() -> bool) -> Result<Taken, Refusal> {
    let mut all = None;
    for turn in runs.iter().flat_map(|run| blocks(*run)) {
        if !is_wanted() {
            break;
        }
        let taken = take_turn(turn);
        match (taken, &mut all) {
            (Ok(taken), all) => *all.get_or_insert_default() += taken,
            (Err(refusal), None) => return Err(refusal),
            // What was taken is taken.
            (Err(_), Some(_)) => break,
        }
    }
    Ok(all.unwrap_or_default())
}

/// Does that with a part of one block. The kernel drops pages while nobody holds the lock: that may
/// take a while, and whatever happens meanwhile, a freed page holds what the guest left there, or
/// zeros.
fn take_turn(of: Pages) -> Result<Taken, Refusal> {
    let no_tables = || Refusal::NotTaking { why: "no page tables".to_owned() };
    let pagemap = tracker::pagemap().ok_or_else(no_tables)?;
    let parts = lock().to_take(of)?;
    let mut taken = Taken::default();
    for (at, part) in parts.iter().enumerate() {
        match take_part(pagemap, part.range) {
            Ok(of_part) => {
                taken += of_part;
                lock().taken(pagemap, part.range, of_part.kept);
            }
            Err(refusal) if at == 0 => return Err(refusal),
            // What was taken is taken.
            Err(_) => break,
        }
    }
    if let Some(channel) = &lock().channel {
        channel.forget_empty_block(of.page / BLOCK_PAGES);
    }
    Ok(taken)
}

/// What is freed of these runs is plain again; answers how many pages.
pub(crate) fn keep(runs: &[Pages]) -> u32 {
    let keep_turn = |turn: Pages| {
        let engine = lock();
        let Some(channel) = &engine.channel else { return 0 };
        let parts = channel.parts(turn.page, turn.pages, PageState::Freed);
        parts.iter().for_each(|part| channel.count_as_plain(part.range));
        channel.forget_empty_block(turn.page / BLOCK_PAGES);
        parts.iter().map(|part| page_count(part.range)).sum()
    };
    runs.iter().flat_map(|run| blocks(*run)).map(keep_turn).sum()
}

/// Cuts a run where blocks begin: a turn is one block's part of it.
fn blocks(run: Pages) -> impl Iterator<Item = Pages> {
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

fn take_part(pagemap: &Pagemap, range: Range) -> Result<Taken, Refusal> {
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
    // SAFETY: it discards what the guest has given up and not written to since; all else keeps its
    // content.
    unsafe { advise(range, Advice::LinuxPageOut) }
        .map_err(|errno| kernel("madvise(MADV_PAGEOUT)", errno))?;
    let after = populated()?.min(before);
    Ok(Taken { taken: before - after, gone: pages.saturating_sub(before), kept: after })
}

/// Pages of a turn: few.
fn page_count(range: Range) -> u32 {
    u32::try_from(range.len / PAGE_BYTES).unwrap_or(u32::MAX)
}
