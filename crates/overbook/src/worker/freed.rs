//! Memory that a guest has freed and the kernel keeps: how much it is, and having it taken, the
//! oldest first.
//!
//! **Problem.** The kernel drops freed memory when the whole host is short, in an order of its own.
//! Which VM is to give first, and how much, the policy knows; and what the guest has taken back in
//! use must not be touched, or it would be swapped out.
//!
//! **Idea.** The shim's page states tell which pages were handed over, and when something of each
//! block was. The kernel tells which of them are in use again (`sys::frames`): those are let be.
//! The rest is asked for block by block until no more is kept than the orders say.
//!
//! **Settling.** Nobody hears of it when a guest takes a page back, and until it is looked at it is
//! neither tracked nor merged. So what was handed over long ago is taken in any case, slowly (16 MB
//! a second): whoever has not wanted it back for that long does not miss it.
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

/// What is freed this long ago is taken in any case.
const SETTLED: Duration = Duration::from_secs(600);
/// How often it is looked at what is freed, at most …
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// … and neither the page states nor the kernel's page tables are walked for more than this part of
/// a CPU: one in 200.
const COUNTING_SHARE: u32 = 200;
/// What the kernel should have counted anew so long ago is not believed any more: the guest may
/// have all of it in use.
const LAZY_STALE: Duration = Duration::from_secs(30);
/// How often some of what was freed long ago is taken: 16 MB at most.
const SETTLE_EVERY: Duration = Duration::from_secs(1);
/// So many blocks fit into a request.
const BLOCKS_AT_ONCE: usize = (MAX_TAKE_PAGES / BLOCK_PAGES) as usize;
/// After the shim has refused.
const REST: Duration = Duration::from_secs(2);

/// What is to become of what the guest frees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreedOrder {
    /// It is handed over, and not discarded.
    pub is_lazy: bool,
    /// No more than this is left to the guest; `None`: all.
    pub keep: Option<Bytes>,
}

/// What one guest has freed.
#[derive(Debug)]
pub(super) struct Freed {
    process: Identity,
    order: FreedOrder,
    /// What the shim was last told.
    told: bool,
    frames: Option<Frames>,
    refaults: Refaults,
    rests: Option<Instant>,
    /// When the page states were walked, and when they are next.
    counted: Instant,
    count_due: Instant,
    /// The blocks of which something was freed, the oldest first, but those that were looked at
    /// since.
    blocks: VecDeque<(u64, u32)>,
    /// Pages that were freed when they were last counted, less what was taken since.
    pages: u64,
    settle_due: Instant,
    handed_over: u64,
    /// What had been when the shim was first asked.
    handed_over_before: Option<u64>,
    lazy: Lazy,
    counts: Counts,
    why_not: Option<String>,
}

/// What the host can take, by the kernel's count less what was taken since.
#[derive(Clone, Copy, Debug)]
struct Lazy {
    bytes: Bytes,
    /// When it was counted, and when it is anew.
    at: Instant,
    due: Instant,
}

/// What became of pages that were asked for.
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

    /// What is known; `None`: it is not to be handed over, and never was.
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

    /// Why nothing is taken just now, although it is to be.
    pub(super) fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Asks for what is due.
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
            // What cannot be seen is not counted.
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
        // Of a process that has ended nothing can be taken.
        let is_any = self.pages > 0;
        let count = || memory_of::lazily_free(self.process.pid).unwrap_or_default();
        let bytes = if is_any { count() } else { Bytes::ZERO };
        let pause = began.elapsed() * COUNTING_SHARE;
        self.lazy = Lazy { bytes, at: began, due: Instant::now() + pause };
    }

    /// The runs to be taken next, and those that are in use again, when so many pages are to be
    /// taken, and what was freed before this moment in any case.
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
                // It has been freed again since: it has its turn after it is counted again.
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
                // All of it was discarded, or found missing: the shim forgets when it was freed.
                back.push(Pages { page: block * BLOCK_PAGES, pages: 1 });
            }
            runs.extend(free);
            back.extend(used);
        }
        Ok((runs, back))
    }

    /// What of these runs of a block is not in use, and what is; `None`: that cannot be told, and
    /// must be.
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
            // Nothing can be swapped out.
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

    /// The guest's page tables, and what is known by them.
    fn frames(&mut self) -> io::Result<(&mut Frames, &mut Refaults)> {
        let frames = match self.frames.take() {
            Some(frames) => frames,
            None => self.process.still(Frames::of(self.process.pid)?)?,
        };
        Ok((self.frames.insert(frames), &mut self.refaults))
    }

    /// What became of the pages asked for: not of more than those, whoever answers.
    pub(super) fn taken(&mut self, runs: &[Pages], answer: Taken, link: &Link) {
        self.count_answer(page_count(runs), answer);
        // What cannot be seen is not counted.
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

    /// So many of these pages, which are in use again, do not count as freed any more.
    pub(super) fn kept(&mut self, runs: &[Pages], pages: u32) {
        self.count_answer(page_count(runs), Taken { kept: pages, ..Taken::default() });
    }

    /// Nothing is taken now.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        // What was asked for has its turn again.
        self.count_due = Instant::now();
        self.rests = Some(Instant::now() + REST);
        self.why_not = Some(refusal.to_string());
    }
}

/// The addresses of the block that begins with this page, as far as it is guest RAM.
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

/// What was freed before this moment is taken in any case.
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
