//! Memory that a guest has freed and the kernel keeps: how much it is, and having it taken, the oldest first.
//!
//! **Problem.** The kernel drops freed memory when the whole host is short, in an order of its own. Which VM is to give
//! first, and how much, the policy knows; and what the guest has taken back in use must not be touched, or it would be swapped out.
//!
//! **Idea.** The shim's page states tell which pages were handed over, and when something of each block was. The kernel tells
//! which of them are in use again (`sys::frames`): those are let be. The rest is asked for block by block until no more is kept
//! than the orders say.
//!
//! **Settling.** Nobody hears of it when a guest takes a page back, and until it is looked at it is neither tracked nor merged. So
//! what was handed over long ago is taken in any case, slowly: whoever has not wanted it back for that long does not miss it.
//!
//! Source: Wan 2013 (IMR) §3.3, §4.

use std::time::{Duration, Instant};

use model::{Bytes, FreePages};
use protocol::layout::BLOCK_PAGES;
use protocol::{MAX_TAKE, MAX_TAKE_PAGES, Pages, Refusal, Taken};
use serde::{Deserialize, Serialize};
use sys::frames::Frames;
use sys::meminfo::MemInfo;
use sys::memory_map::Range;
use sys::memory_of;

use super::clock::now_us;
use super::granules::PAGE;
use super::link::{Link, LinkError};

/// What is freed this long ago is taken in any case.
const SETTLED: Duration = Duration::from_secs(600);
/// How often it is counted what is freed, and some of what is that old is taken: 16 MB at most.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Counting takes this part of a CPU at most: one in 1000.
const COUNTING_SHARE: u32 = 1000;
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
    pid: u32,
    order: FreedOrder,
    /// What the shim was last told.
    told: bool,
    frames: Option<Frames>,
    is_waiting: bool,
    rests: Option<Instant>,
    count_due: Instant,
    /// Pages that were freed when they were last counted, less what has been looked at since.
    pages: u64,
    handed_over: u64,
    /// What had been when the shim was first asked.
    handed_over_before: Option<u64>,
    /// What the kernel counts, and when it is asked again.
    lazy: (Bytes, Instant),
    counts: Taken64,
    why_not: Option<String>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Taken64 {
    taken: u64,
    gone: u64,
    kept: u64,
}

impl Freed {
    pub(super) fn of(pid: u32) -> Self {
        Self {
            pid,
            order: FreedOrder::default(),
            told: false,
            frames: None,
            is_waiting: false,
            rests: None,
            count_due: Instant::now(),
            pages: 0,
            handed_over: 0,
            handed_over_before: None,
            lazy: (Bytes::ZERO, Instant::now()),
            counts: Taken64::default(),
            why_not: None,
        }
    }

    pub(super) fn set_order(&mut self, order: FreedOrder) {
        self.order = order;
    }

    /// What is known; `None`: it is not to be handed over, and never was.
    pub(super) fn reading(&self) -> Option<FreePages> {
        let bytes = |pages: u64| Bytes(pages * PAGE);
        (self.order.is_lazy || self.handed_over > 0).then(|| FreePages {
            freed: bytes(self.pages),
            lazy: self.lazy.0.min(bytes(self.pages)),
            handed_over: bytes(self.handed_over),
            taken: bytes(self.counts.taken),
            dropped: bytes(self.counts.gone),
            taken_back: bytes(self.counts.kept),
        })
    }

    /// Why nothing is taken just now, although it is to be.
    pub(super) fn why_not(&self) -> Option<&str> {
        self.why_not.as_deref()
    }

    /// Whether the shim has still to answer.
    pub(super) fn is_waiting(&self) -> bool {
        self.is_waiting
    }

    /// Asks for what is due.
    pub(super) fn step(&mut self, link: &mut Link) -> Result<(), LinkError> {
        if self.told != self.order.is_lazy {
            self.told = self.order.is_lazy;
            link.hand_over(self.told)?;
        }
        let now = Instant::now();
        let is_counted = now >= self.count_due;
        if is_counted {
            self.count_due = now + COUNT_EVERY;
            self.count(link)?;
        }
        let beyond =
            self.pages.saturating_sub(self.order.keep.map_or(u64::MAX, |keep| keep.0 / PAGE));
        let is_due = is_counted || beyond > 0;
        if self.is_waiting || !is_due || self.rests.is_some_and(|until| now < until) {
            return Ok(());
        }
        let (runs, back) = self.choose(link, beyond)?;
        if !back.is_empty() {
            link.keep(back)?;
        }
        if !runs.is_empty() {
            self.is_waiting = true;
            link.take(runs)?;
        }
        Ok(())
    }

    fn count(&mut self, link: &Link) -> Result<(), LinkError> {
        let handed_over = link.handed_over()?;
        self.handed_over =
            handed_over.saturating_sub(*self.handed_over_before.get_or_insert(handed_over));
        self.pages = 0;
        for (_, block) in link.freed_blocks()? {
            self.pages += page_count(&link.freed_in(block)?);
        }
        let now = Instant::now();
        if self.pages == 0 {
            self.lazy = (Bytes::ZERO, now);
        } else if now >= self.lazy.1 {
            // Of a process that has ended nothing can be taken.
            let lazy = memory_of::lazily_free(self.pid).unwrap_or_default();
            self.lazy = (lazy, Instant::now() + now.elapsed() * COUNTING_SHARE);
        }
        Ok(())
    }

    /// The runs to be taken next, and those that are in use again, when so many pages are to be taken.
    fn choose(&mut self, link: &Link, beyond: u64) -> Result<(Vec<Pages>, Vec<Pages>), LinkError> {
        let now_ms = now_us() / 1_000;
        let settled_ms = u64::try_from(SETTLED.as_millis()).unwrap_or(u64::MAX);
        let (mut seen, mut runs, mut back) = (0, Vec::new(), Vec::new());
        for (at_ms, block) in link.freed_blocks()?.into_iter().take(BLOCKS_AT_ONCE) {
            if seen >= beyond && now_ms.saturating_sub(at_ms) <= settled_ms {
                break;
            }
            let of_block = link.freed_in(block)?;
            seen += page_count(&of_block);
            let Some((free, used)) = self.split(link, block, of_block) else { break };
            if runs.len() + free.len() > MAX_TAKE || back.len() + used.len() >= MAX_TAKE {
                break;
            }
            if free.is_empty() && used.is_empty() {
                // All of it was discarded, or found missing: the shim forgets when it was freed.
                back.push(Pages { page: block * BLOCK_PAGES, pages: 1 });
            }
            runs.extend(free);
            back.extend(used);
        }
        Ok((runs, back))
    }

    /// What of these runs of a block is not in use, and what is; `None`: that cannot be told, and must be.
    fn split(
        &mut self,
        link: &Link,
        block: u32,
        runs: Vec<Pages>,
    ) -> Option<(Vec<Pages>, Vec<Pages>)> {
        let first = block * BLOCK_PAGES;
        let Some(range) = block_range(link, first) else { return Some((Vec::new(), runs)) };
        let in_use = self.in_use(range);
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

    fn in_use(&mut self, range: Range) -> std::io::Result<Vec<bool>> {
        if self.frames.is_none() {
            self.frames = Some(Frames::of(self.pid)?);
        }
        self.frames.as_ref().map_or_else(|| Ok(Vec::new()), |frames| frames.in_use(range))
    }

    /// What became of the pages asked for.
    pub(super) fn taken(&mut self, taken: Taken) {
        self.is_waiting = false;
        let all = [taken.taken, taken.gone, taken.kept].map(u64::from);
        self.counts.taken += all[0];
        self.counts.gone += all[1];
        self.counts.kept += all[2];
        self.pages = self.pages.saturating_sub(all.iter().sum());
    }

    /// Nothing is taken now.
    pub(super) fn refused(&mut self, refusal: &Refusal) {
        self.is_waiting = false;
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

fn page_count(runs: &[Pages]) -> u64 {
    runs.iter().map(|run| u64::from(run.pages)).sum()
}

fn push(runs: &mut Vec<Pages>, page: u32) {
    match runs.last_mut() {
        Some(last) if last.page + last.pages == page => last.pages += 1,
        _ => runs.push(Pages { page, pages: 1 }),
    }
}
