//! The shared memory that a worker reads: header, ring and page states of one generation of guest
//! RAM.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use protocol::layout::{BLOCK_PAGES, Counter, Layout, PageState, Shared};
use protocol::ring::Producer;
use protocol::{Region, Trap};
use sys::memory_map::{PAGE_BYTES, Range};
use sys::shared_memory::SharedMemory;

use crate::descriptors::Guarded;
use crate::ram::{end, overlap};
use crate::time::now;

/// Number of merged pages, for threads that may not wait for the lock.
static MERGED: AtomicU64 = AtomicU64::new(0);

/// Whether any page is merged. Takes no lock.
pub(crate) fn is_anything_merged() -> bool {
    MERGED.load(Ordering::Acquire) > 0
}

pub(crate) const EVERYTHING: Range = Range { start: 0, len: u64::MAX };

/// The shim's end of the shared memory. Only this memory records which pages are merged. So it
/// outlives tracking, and a new channel starts with the merged pages of the old one.
pub(crate) struct Channel {
    regions: Vec<Region>,
    shared: Shared<'static>,
    producer: Producer,
    fd: OwnedFd,
    generation: u32,
    /// Number of runs of merged pages.
    merged_runs: Cell<u32>,
    _guarded: Option<Guarded>,
}

/// Adjacent pages of one state.
pub(crate) struct Part {
    /// The number of the first page.
    pub(crate) page: u32,
    pub(crate) range: Range,
}

impl Channel {
    /// Makes the memory for these regions; `None` when the kernel refuses.
    pub(crate) fn new(regions: Vec<Region>, generation: u32, old: Option<&Self>) -> Option<Self> {
        let layout = Layout::of_regions(&regions);
        let created = SharedMemory::create("overbook-shim", layout.words(), layout.bytes());
        let (memory, fd) = created.ok()?;
        // Never freed, so that views of the memory need no owner: one mapping is leaked each time
        // RAM is plugged.
        let memory: &'static SharedMemory = Box::leak(Box::new(memory));
        let shared = Shared::initialise(layout, generation, memory.words(), memory.bytes()).ok()?;
        let guarded = Guarded::new(fd.as_raw_fd());
        let producer = Producer::new();
        let merged_runs = Cell::new(0);
        let channel =
            Self { regions, shared, producer, fd, generation, merged_runs, _guarded: guarded };
        for range in old.into_iter().flat_map(|old| old.merged(EVERYTHING)) {
            channel.set(range, PageState::Merged);
        }
        Some(channel)
    }

    /// The parts of `range` that are mapped from a pool, each as long as possible. Does not
    /// allocate.
    pub(crate) fn merged(&self, range: Range) -> impl Iterator<Item = Range> {
        let is_any = self.shared.get(Counter::MergedPages) > 0;
        let range = Range { len: if is_any { range.len } else { 0 }, ..range };
        let is_merged = |&(_, page): &(u64, u32)| self.is_merged(page);
        let mut pages = self.pages(range).filter(is_merged).peekable();
        std::iter::from_fn(move || {
            let (start, _) = pages.next()?;
            let mut merged = Range { start, len: PAGE_BYTES };
            while pages.next_if(|(next, _)| *next == end(merged)).is_some() {
                merged.len += PAGE_BYTES;
            }
            Some(merged)
        })
    }

    /// The parts of `range` that are not merged. One region contains all of `range` or none of
    /// it. Does not allocate.
    pub(crate) fn unmerged(&self, range: Range) -> impl Iterator<Item = Range> {
        let border = Range { start: end(range), len: 0 };
        let mut from = range.start;
        self.merged(range).chain([border]).filter_map(move |merged| {
            let start = std::mem::replace(&mut from, end(merged));
            (start < merged.start).then(|| Range { start, len: merged.start - start })
        })
    }

    /// The run of merged pages around the one at `address`, at most `most` pages (a power of
    /// two). `None`: the page is not merged. Does not allocate.
    pub(crate) fn merged_around(&self, address: u64, most: u32) -> Option<Range> {
        let bytes = u64::from(most) * PAGE_BYTES;
        let around = Range { start: address / bytes * bytes, len: bytes };
        let holds = |merged: &Range| (merged.start..end(*merged)).contains(&address);
        self.merged(around).find(holds)
    }

    /// Number of runs of merged pages. Each run is at least one mapping, and splits the mapping
    /// around it in two.
    pub(crate) fn merged_runs(&self) -> u32 {
        self.merged_runs.get()
    }

    fn is_merged(&self, page: u32) -> bool {
        self.shared.state(page) == PageState::Merged
    }

    /// The parts of a run of pages that have this state, each as long as possible.
    pub(crate) fn parts(&self, page: u32, pages: u32, state: PageState) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let of = |region: &&Region| {
            (region.first_page..region.first_page + region.pages).contains(&page)
        };
        let Some(region) = self.regions.iter().find(of) else { return parts };
        let last = page.saturating_add(pages).min(region.first_page + region.pages);
        for page in (page..last).filter(|&page| self.shared.state(page) == state) {
            let start = region.address + u64::from(page - region.first_page) * PAGE_BYTES;
            match parts.last_mut() {
                Some(last) if end(last.range) == start => last.range.len += PAGE_BYTES,
                _ => parts.push(Part { page, range: Range { start, len: PAGE_BYTES } }),
            }
        }
        parts
    }

    /// Sets the state of all pages of `range` that are guest RAM: merged, or plain.
    pub(crate) fn set(&self, range: Range, state: PageState) {
        let (mut merged, mut runs) =
            (self.shared.get(Counter::MergedPages), self.merged_runs.get());
        for (_, page) in self.pages(range) {
            let (was, is) = (self.is_merged(page), state == PageState::Merged);
            self.shared.set_state(page, state);
            if was == is {
                continue;
            }
            // A page alone is a run. A page next to a run extends it. A page between two runs
            // joins them.
            let beside =
                [page.wrapping_sub(1), page + 1].map(|page| u32::from(self.is_merged(page)));
            let (one, others) = (1_u32, beside[0] + beside[1]);
            if is {
                merged += 1;
                runs = (runs + one).saturating_sub(others);
            } else {
                merged = merged.saturating_sub(1);
                runs = (runs + others).saturating_sub(one);
            }
        }
        self.shared.set(Counter::MergedPages, merged);
        MERGED.store(merged, Ordering::Release);
        self.merged_runs.set(runs);
    }

    /// Records that the pages of `range` that are in place were handed over to the kernel.
    pub(crate) fn hand_over(&self, range: Range) {
        let now_ms = now().0 / 1_000_000;
        let mut handed_over = 0;
        for (_, page) in self.pages(range) {
            if matches!(self.shared.state(page), PageState::Plain | PageState::Freed) {
                self.shared.set_state(page, PageState::Freed);
                self.shared.set_freed_at_ms(page / BLOCK_PAGES, now_ms);
                handed_over += 1;
            }
        }
        self.shared.add(Counter::HandedOver, handed_over);
    }

    /// Whether a page of `range` has this state.
    pub(crate) fn has(&self, range: Range, state: PageState) -> bool {
        self.pages(range).any(|(_, page)| self.shared.state(page) == state)
    }

    /// Makes the freed pages of `range` plain.
    pub(crate) fn count_as_plain(&self, range: Range) {
        for (_, page) in self.pages(range) {
            if self.shared.state(page) == PageState::Freed {
                self.shared.set_state(page, PageState::Plain);
            }
        }
    }

    /// Clears the time of a block's last hand-over if the block has no freed page left.
    pub(crate) fn forget_empty_block(&self, block: u32) {
        let pages = block * BLOCK_PAGES..(block + 1).saturating_mul(BLOCK_PAGES);
        if !pages.into_iter().any(|page| self.shared.state(page) == PageState::Freed) {
            self.shared.set_freed_at_ms(block, 0);
        }
    }

    /// The number of the page at an address.
    pub(crate) fn page_at(&self, address: u64) -> Option<u32> {
        self.pages(Range { start: address, len: PAGE_BYTES }).next().map(|(_, page)| page)
    }

    /// The pages of `range` that are guest RAM, as address and number.
    fn pages(&self, range: Range) -> impl Iterator<Item = (u64, u32)> {
        let of_region = move |region: &Region| {
            let whole = Range { start: region.address, len: u64::from(region.pages) * PAGE_BYTES };
            let (address, first_page) = (region.address, region.first_page);
            let from = range.start.max(whole.start) - whole.start;
            let to = end(range).min(end(whole)).saturating_sub(whole.start);
            let numbers = if overlap(whole, range) {
                from / PAGE_BYTES..to.div_ceil(PAGE_BYTES)
            } else {
                0..0
            };
            let page = move |at: u64| {
                (address + at * PAGE_BYTES, first_page + u32::try_from(at).unwrap_or(u32::MAX))
            };
            numbers.map(page)
        };
        self.regions.iter().flat_map(of_region)
    }

    pub(crate) fn shared(&self) -> Shared<'static> {
        self.shared
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Logs a trap for the worker.
    pub(crate) fn push(&mut self, trap: Trap) {
        self.producer.push(self.shared.ring(), trap);
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
