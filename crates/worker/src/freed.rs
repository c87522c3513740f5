//! Memory that a guest has freed and the kernel keeps: its amount, and taking it, the oldest
//! first.
//!
//! **Problem.** The kernel drops freed memory when the whole host is short, in an order of its
//! own. The policy knows which VM should give first, and how much. Pages that the guest uses
//! again must not be touched, or they would be swapped out.
//!
//! **Idea.** The shim's page states show which pages were handed over, and the time of the last
//! free in each block. The kernel shows which of them are in use again (`sys::frames`); those are
//! skipped. The rest is requested block by block until no more is kept than the order allows.
//!
//! **Settling.** A guest that uses a page again does not report it, and until the page is looked
//! at it is neither tracked nor merged. So pages that were handed over long ago are taken in any
//! case, slowly (16 MB a second): a guest that has not used them for that long does not miss
//! them.
//!
//! Source: Wan 2013 (IMR) §3.3, §4.

mod refaults;

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use model::{Bytes, FreePages, Reading};
use protocol::layout::BLOCK_PAGES;
use protocol::{MAX_TAKE, MAX_TAKE_PAGES, Pages, Refusal, Taken};
use serde::{Deserialize, Serialize};
use sys::frames::Frames;
use sys::meminfo::MemInfo;
use sys::memory_map::Range;
use sys::memory_of;
use sys::process::Identity;

use super::clock::{boot_ago, now_us};
use super::granules::PAGE;
use super::link::{Link, LinkError};
use refaults::Refaults;

/// Memory that was freed this long ago is taken in any case.
const SETTLED: Duration = Duration::from_secs(600);
/// The freed pages are counted at most this often …
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// … and walking the page states and the kernel's page tables takes at most this part of a CPU
/// each: one in 200.
const COUNTING_SHARE: u32 = 200;
/// A count by the kernel that is overdue for this long is ignored: the guest may use all of it.
const LAZY_STALE: Duration = Duration::from_secs(30);
/// How often memory that was freed long ago is taken: 16 MB at most.
const SETTLE_EVERY: Duration = Duration::from_secs(1);
/// The number of blocks in one request.
const BLOCKS_AT_ONCE: usize = (MAX_TAKE_PAGES / BLOCK_PAGES) as usize;
/// The pause after the shim has refused.
const REST: Duration = Duration::from_secs(2);

/// The treatment of memory that the guest frees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreedOrder {
    /// It is handed over instead of discarded.
    pub is_lazy: bool,
    /// The most freed memory that is left to the guest; `None`: all.
    pub keep: Option<Bytes>,
}

/// The freed memory of one guest.
#[derive(Debug)]
pub(super) struct Freed {
    process: Identity,
    order: FreedOrder,
    /// The setting that was last sent to the shim.
    told: bool,
    frames: Option<Frames>,
    refaults: Refaults,
    rests: Option<Instant>,
    /// The time of the last walk of the page states, and of the next.
    counted: Instant,
    count_due: Instant,
    /// The blocks with freed pages, the oldest first, without those that were looked at since.
    blocks: VecDeque<(u64, u32)>,
    /// Freed pages at the last count, less those taken since.
    pages: u64,
    settle_due: Instant,
    handed_over: u64,
    /// The shim's counter at its first reading.
    handed_over_before: Option<u64>,
    lazy: Lazy,
    counts: Counts,
    why_not: Option<String>,
}

/// The memory that the host can take, by the kernel's count less the pages taken since.
#[derive(Clone, Copy, Debug)]
struct Lazy {
    bytes: Bytes,
    /// The time of the count, and of the next.
    at: Instant,
    due: Instant,
}

/// The outcome for requested pages.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    taken: u64,
    gone: u64,
    kept: u64,
}

impl Freed {
    pub(super) fn of(process: Identity) -> Self {
        let now = Instant::now();
        Self {
            process,
            order: FreedOrder::default(),
            told: false,
            frames: None,
            refaults: Refaults::default(),
            rests: None,
            counted: now,
            count_due: now,
            blocks: VecDeque::new(),
            pages: 0,
            handed_over: 0,
            handed_over_before: None,
            lazy: Lazy { bytes: Bytes::ZERO, at: now, due: now },
            settle_due: now,
            counts: Counts::default(),
            why_not: None,
        }
    }

    pub(super) fn set_order(&mut self, order: FreedOrder) {
        self.order = order;
    }

    /// The present state; `None`: freed memory is not to be handed over, and never was.
    pub(super) fn reading(&self) -> Option<Reading<FreePages>> {
        let bytes = |pages: u64| Bytes(pages.saturating_mul(PAGE));
        let is_known = self.lazy.due.elapsed() <= LAZY_STALE;
        let lazy = if is_known { self.lazy.bytes } else { Bytes::ZERO };
        if !self.order.is_lazy && self.handed_over == 0 {
            return None;
        }
        let value = FreePages {
            freed: bytes(self.pages),
            lazy: lazy.min(bytes(self.pages)),
            handed_over: bytes(self.handed_over),
            taken: bytes(self.counts.taken),
            dropped: bytes(self.counts.gone),
            taken_back: bytes(self.counts.kept),
            refaulted: bytes(self.refaults.pages),
        };
        let counted = if lazy.is_zero() { self.counted } else { self.counted.min(self.lazy.at) };
        Some(Reading::new(value, boot_ago(counted.elapsed())))
    }

    /// The reason why nothing is taken just now, although there is an order.
    pub(super) fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Sends the requests that are due.
    pub(super) fn step(&mut self, link: &mut Link) -> Result<(), LinkError> {
        if self.told != self.order.is_lazy && !link.is_handing_over() {
            self.told = self.order.is_lazy;
            link.hand_over(self.told)?;
        }
        let now = Instant::now();
        if link.is_taking() {
            return Ok(());
        }
        if now >= self.count_due {
            self.count(link)?;
            self.count_lazy();
            // An unreadable page table is not counted.
            let at = |block| block_range(link, block * BLOCK_PAGES);
            let _ = self.frames().and_then(|(frames, refaults)| refaults.look(frames, at));
        }
        if self.rests.is_some_and(|until| now < until) {
            return Ok(());
        }
        let keep = self.order.keep.map_or(u64::MAX, |keep| keep.0 / PAGE);
        let beyond = self.pages.saturating_sub(keep);
        let mut settled_by_ms = 0;
        if now >= self.settle_due {
            self.settle_due = now + SETTLE_EVERY;
            settled_by_ms = before_settled_ms(now_us() / 1_000);
        }
        let (runs, back) = self.choose(link, beyond, settled_by_ms)?;
        if !back.is_empty() {
            link.keep(back)?;
        }
        if !runs.is_empty() {
            link.take(runs)?;
        }
        Ok(())
    }

    fn count(&mut self, link: &Link) -> Result<(), LinkError> {
        let began = Instant::now();
        let handed_over = link.handed_over()?;
        self.handed_over =
            handed_over.saturating_sub(*self.handed_over_before.get_or_insert(handed_over));
        self.blocks = link.freed_blocks()?.into();
        self.pages = 0;
        for (_, block) in &self.blocks {
            self.pages += page_count(&link.freed_in(*block)?);
        }
        self.counted = began;
        self.count_due = Instant::now() + COUNT_EVERY.max(began.elapsed() * COUNTING_SHARE);
        Ok(())
    }

    fn count_lazy(&mut self) {
        let began = Instant::now();
        if self.pages > 0 && began < self.lazy.due {
            return;
        }
        // A process that has ended has nothing to take.
        let is_any = self.pages > 0;
        let count = || memory_of::lazily_free(self.process.pid).unwrap_or_default();
        let bytes = if is_any { count() } else { Bytes::ZERO };
        let pause = began.elapsed() * COUNTING_SHARE;
        self.lazy = Lazy { bytes, at: began, due: Instant::now() + pause };
    }

    /// The runs to take next, and the runs that are in use again: `beyond` pages, and in any case
    /// those freed before `settled_by_ms`.
    fn choose(
        &mut self,
        link: &Link,
        beyond: u64,
        settled_by_ms: u64,
    ) -> Result<(Vec<Pages>, Vec<Pages>), LinkError> {
        let (mut seen, mut runs, mut back) = (0, Vec::new(), Vec::new());
        self.why_not = None;
        for _ in 0..BLOCKS_AT_ONCE {
            let Some(&(at_ms, block)) = self.blocks.front() else { break };
            if seen >= beyond && at_ms >= settled_by_ms {
                break;
            }
            if link.freed_at_ms(block)? != Some(at_ms) {
                // It has been freed again since; it is taken up after the next count.
                self.blocks.pop_front();
                continue;
            }
            let of_block = link.freed_in(block)?;
            let pages = page_count(&of_block);
            let Some((free, used)) = self.split(link, block, of_block) else { break };
            if runs.len() + free.len() > MAX_TAKE || back.len() + used.len() >= MAX_TAKE {
                break;
            }
            self.blocks.pop_front();
            seen += pages;
            if free.is_empty() && used.is_empty() {
                // All of it was discarded, or is missing: the request makes the shim forget when
                // it was freed.
                back.push(Pages { page: block * BLOCK_PAGES, pages: 1 });
            }
            runs.extend(free);
            back.extend(used);
        }
        Ok((runs, back))
    }

    /// Splits these runs of a block into unused and used pages; `None`: that is unknown, and is
    /// required.
    fn split(
        &mut self,
        link: &Link,
        block: u32,
        runs: Vec<Pages>,
    ) -> Option<(Vec<Pages>, Vec<Pages>)> {
        let first = block * BLOCK_PAGES;
        let Some(range) = block_range(link, first) else { return Some((Vec::new(), runs)) };
        let in_use = self.frames().and_then(|(frames, _)| frames.in_use(range));
        self.why_not = in_use.as_ref().err().map(ToString::to_string);
        let in_use = match in_use {
            Ok(in_use) => in_use,
            // Without swap, nothing can be swapped out.
            Err(_) if MemInfo::read().is_ok_and(|host| host.swap_total.is_zero()) => {
                self.why_not = None;
                Vec::new()
            }
            Err(_) => return None,
        };
        let (mut free, mut used) = (Vec::new(), Vec::new());
        for page in runs.iter().flat_map(|run| run.page..run.page + run.pages) {
            let is_used = in_use.get((page - first) as usize).copied().unwrap_or(false);
            push(if is_used { &mut used } else { &mut free }, page);
        }
        Some((free, used))
    }

    /// The guest's page tables, and the record of refaults that is read from them.
    fn frames(&mut self) -> io::Result<(&mut Frames, &mut Refaults)> {
        let frames = match self.frames.take() {
            Some(frames) => frames,
            None => self.process.still(Frames::of(self.process.pid)?)?,
        };
        Ok((self.frames.insert(frames), &mut self.refaults))
    }

    /// Counts the outcome for the requested pages; an answer with more pages is cut to their
    /// number.
    pub(super) fn taken(&mut self, runs: &[Pages], answer: Taken, link: &Link) {
        self.count_answer(page_count(runs), answer);
        // An unreadable page table is not counted.
        let at = |block| block_range(link, block * BLOCK_PAGES);
        let _ = self.frames().and_then(|(frames, refaults)| refaults.note(runs, frames, at));
    }

    fn count_answer(&mut self, mut asked: u64, answer: Taken) {
        let mut part = |pages: u32| {
            let pages = u64::from(pages).min(asked);
            asked -= pages;
            pages
        };
        let (taken, gone, kept) = (part(answer.taken), part(answer.gone), part(answer.kept));
        self.counts.taken += taken;
        self.counts.gone += gone;
        self.counts.kept += kept;
        self.pages = self.pages.saturating_sub(taken + gone + kept);
        self.lazy.bytes = self.lazy.bytes.minus(Bytes(taken * PAGE));
    }

    /// Of these pages, which are in use again, `pages` no longer count as freed.
    pub(super) fn kept(&mut self, runs: &[Pages], pages: u32) {
        self.count_answer(page_count(runs), Taken { kept: pages, ..Taken::default() });
    }

    /// The shim refuses to take pages now.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        // The requested pages are counted again.
        self.count_due = Instant::now();
        self.rests = Some(Instant::now() + REST);
        self.why_not = Some(refusal.to_string());
    }
}

/// The addresses of the block that begins with this page; `None`: it is not guest RAM.
fn block_range(link: &Link, first: u32) -> Option<Range> {
    let holds = |region: &&protocol::Region| {
        (region.first_page..region.first_page + region.pages).contains(&first)
    };
    let region = link.regions().iter().find(holds)?;
    let at = first - region.first_page;
    let pages = BLOCK_PAGES.min(region.pages - at);
    let start = region.address + u64::from(at) * PAGE;
    Some(Range { start, len: u64::from(pages) * PAGE })
}

/// The time before which freed memory is taken in any case.
fn before_settled_ms(now_ms: u64) -> u64 {
    now_ms.saturating_sub(u64::try_from(SETTLED.as_millis()).unwrap_or(u64::MAX))
}

fn page_count(runs: &[Pages]) -> u64 {
    runs.iter().map(|run| u64::from(run.pages)).sum()
}

fn push(runs: &mut Vec<Pages>, page: u32) {
    match runs.last_mut() {
        Some(last) if last.page + last.pages == page => last.pages += 1,
        _ => runs.push(Pages { page, pages: 1 }),
    }
}
