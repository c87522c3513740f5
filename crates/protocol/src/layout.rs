//! The layout of the memory that shim and worker share.
//!
//! ```text
//! words   0..512        header: identification, ring head, counters         one page
//!         512..66048    the ring, RING_CAPACITY traps                       512 KiB
//!         from there    time of the last free in each block of 512 pages    4 KiB per GiB
//! bytes   one per page  the page's state                                    256 KiB per GiB
//! ```
//!
//! The shim makes the memory and is the **only writer**. It seals the memory before it passes the
//! descriptor on, so a broken or hostile worker can neither change a page's state nor shrink the
//! memory. The worker checks its input: numbers that are used as indexes are checked against
//! their bounds here.
//!
//! A memory belongs to one generation of the VM's regions; hot-plugged RAM makes a new one.
//!
//! It serves workers of every version that the shim speaks. So a later layout may only use words of
//! the header that were 0, and add page states. An older worker does not read these words, and
//! merges and takes no page in a state that it does not know.
//!
//! The fault thread writes here: nothing in this module allocates or blocks, and no data of the
//! other side can make it panic. Both sides pass their views (`sys::shared_memory`) as slices of
//! atomics, so this crate needs no `unsafe`.

use crate::ring::Ring;
use crate::sync::{AtomicU8, AtomicU64, Ordering};
use crate::{REGION_ALIGN_PAGES, Region};

/// `OVERBOOK` in ASCII, as the first word.
pub const MAGIC: u64 = u64::from_le_bytes(*b"OVERBOOK");

/// The version of the protocol that introduced this layout.
const LAYOUT_VERSION: u64 = 9;

/// The number of traps in the ring: more than a second of the worst case (55,000 traps/s).
pub const RING_CAPACITY: usize = 1 << 16;

/// Pages in a block, for each of which the time of the last free is recorded: those of a huge
/// page. A block is in one region.
pub const BLOCK_PAGES: u32 = REGION_ALIGN_PAGES;

const HEADER_WORDS: usize = 512;
const WORD_MAGIC: usize = 0;
const WORD_VERSION: usize = 1;
const WORD_CAPACITY: usize = 2;
const WORD_PAGES: usize = 3;
const WORD_GENERATION: usize = 4;
const WORD_GIVEN_BACK: usize = 5;
const WORD_HEAD: usize = 8;
const WORD_COUNTERS: usize = 16;
/// The index of the first word of the blocks.
const BLOCKS: usize = HEADER_WORDS + RING_CAPACITY;

/// The size of a VM's shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pages: u32,
}

impl Layout {
    /// A layout for page numbers below `pages`.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        Self { pages }
    }

    /// A layout for these regions, in the order of their page numbers (as [`Answer::decode`]
    /// checked).
    ///
    /// [`Answer::decode`]: crate::Answer::decode
    #[must_use]
    pub fn of_regions(regions: &[Region]) -> Self {
        Self::new(regions.last().map_or(0, |last| last.first_page.saturating_add(last.pages)))
    }

    /// Words of 8 bytes: header, ring, and one for each block.
    #[must_use]
    pub fn words(self) -> usize {
        BLOCKS + self.blocks() as usize
    }

    /// The number of blocks.
    #[must_use]
    pub fn blocks(self) -> u32 {
        self.pages.div_ceil(BLOCK_PAGES)
    }

    /// Bytes after the words: the state of each page.
    #[must_use]
    pub fn bytes(self) -> usize {
        self.pages as usize
    }
}

/// The reason why a memory does not match the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A view has another size.
    #[error("shared memory: {what}: {found}; the layout asks for {expected}")]
    Size {
        /// The name of the view.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The expected length.
        expected: usize,
    },
    /// A word of the header has a wrong value.
    #[error("shared memory: {field} is {found}; expected {expected}")]
    Header {
        /// The name of the word.
        field: &'static str,
        /// The value found.
        found: u64,
        /// The expected value.
        expected: u64,
    },
}

/// Counters and gauges of the header; counters start at 0 when the memory is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Counter {
    /// Faults resolved.
    Traps,
    /// Time spent in the handler for them, in nanoseconds.
    TrapNs,
    /// Pages moved to staging: the guest's access is revoked.
    MovedOut,
    /// Pages moved back from staging.
    MovedIn,
    /// Pages that the kernel refused to move because I/O had pinned them.
    Pinned,
    /// Staged pages that QEMU discarded (balloon, free-page reports).
    Discarded,
    /// Gauge: pages that are staged now.
    StagedPages,
    /// Gauge: the cost of a trap for the touching thread, in nanoseconds, including the handler;
    /// measured on a page of the shim's own.
    RoundTripNs,
    /// CPU time that tracking used on the thread that answers the worker and revokes, in
    /// nanoseconds, as of the last answer. The time for merging, unsharing and taking freed
    /// memory is not included.
    ControlNs,
    /// The number of times everything was given back unasked.
    GivenBack,
    /// Gauge: pages that share a slot of a pool, or did until the guest wrote to them.
    MergedPages,
    /// Pages that the guest freed and that were handed over to the kernel, counted each time.
    HandedOver,
    /// Gauge: the longest time for which one of QEMU's own threads has waited for the shim, in
    /// nanoseconds.
    LongestWaitNs,
    /// Gauge: the longest time for which the shim's lock was held, in nanoseconds.
    LongestHoldNs,
    /// The number of times the watchdog could not get the lock within its timeout.
    Stalls,
}

/// The reason why the shim gave everything back unasked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", self.words())]
#[repr(u8)]
pub enum GiveBack {
    /// The worker closed its connection.
    WorkerGone = 1,
    /// The worker sent no message for too long.
    WorkerSilent = 2,
    /// More traps in a second than [`crate::Tracking::max_traps_per_s`].
    Fuse = 3,
    /// A fault waited too long for its handler.
    SlowFault = 4,
    /// QEMU registered its memory with userfaultfd itself.
    QemuRegisters = 5,
    /// Regions were added or removed.
    RegionsChanged = 6,
    /// A system call failed.
    KernelRefused = 7,
    /// QEMU locked its memory.
    MemoryLocked = 8,
    /// QEMU began to migrate the VM.
    Migrating = 9,
}

impl GiveBack {
    /// The text that is shown to people.
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::WorkerGone => "the worker's connection closed",
            Self::WorkerSilent => "the worker was silent for too long",
            Self::Fuse => "more traps in one second than the fuse allows",
            Self::SlowFault => "a fault waited too long",
            Self::QemuRegisters => {
                "QEMU watches its memory itself (snapshot or incoming migration)"
            }
            Self::RegionsChanged => "guest RAM was added or removed",
            Self::KernelRefused => "the kernel refused a move",
            Self::MemoryLocked => "QEMU locks its memory",
            Self::Migrating => "QEMU migrates the VM",
        }
    }

    fn from_number(number: u64) -> Option<Self> {
        [
            Self::WorkerGone,
            Self::WorkerSilent,
            Self::Fuse,
            Self::SlowFault,
            Self::QemuRegisters,
            Self::RegionsChanged,
            Self::KernelRefused,
            Self::MemoryLocked,
            Self::Migrating,
        ]
        .into_iter()
        .find(|reason| *reason as u64 == number)
    }
}

/// The location of a page's content. The numbers never change; later mechanisms add new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PageState {
    /// At its address in guest RAM, where QEMU expects it.
    Plain = 0,
    /// In staging, or on its way there or back: the guest's next touch traps. Also a hole to
    /// which access is revoked.
    Staged = 1,
    /// Mapped from a pool, copy-on-write: shared, or the guest has written to it and has its own
    /// copy.
    Merged = 2,
    /// At its address in guest RAM, and handed over to the kernel after the guest freed it. The
    /// kernel drops it when memory is short, unless the guest writes to it first; neither is
    /// reported.
    Freed = 3,
    /// In a buffer of the shim while it is compared with the pool's page, or until it can go back
    /// to its address in guest RAM: the guest's next touch traps.
    Aside = 4,
    /// A number unknown to this version.
    Unknown = 255,
}

impl PageState {
    fn from_number(number: u8) -> Self {
        match number {
            0 => Self::Plain,
            1 => Self::Staged,
            2 => Self::Merged,
            3 => Self::Freed,
            4 => Self::Aside,
            _ => Self::Unknown,
        }
    }

    /// Whether the page is staged.
    #[must_use]
    pub const fn is_staged(self) -> bool {
        matches!(self, Self::Staged)
    }
}

/// The shared memory in either process. It is cheap to copy and to construct.
#[derive(Clone, Copy)]
pub struct Shared<'a> {
    words: &'a [AtomicU64],
    states: &'a [AtomicU8],
}

impl<'a> Shared<'a> {
    /// Used by the shim: writes the header into fresh memory (all zero).
    ///
    /// # Errors
    /// When the size of a view differs from `layout`.
    pub fn initialise(
        layout: Layout,
        generation: u32,
        words: &'a [AtomicU64],
        states: &'a [AtomicU8],
    ) -> Result<Self, LayoutError> {
        let shared = Self::of_size(layout, words, states)?;
        for (word, value) in header(layout) {
            words[word.index].store(value, Ordering::Relaxed);
        }
        words[WORD_GENERATION].store(generation.into(), Ordering::Release);
        Ok(shared)
    }

    /// Used by the worker: checks the header before anything else is used.
    ///
    /// # Errors
    /// When sizes, magic, version, capacity or number of pages differ.
    pub fn open(
        layout: Layout,
        words: &'a [AtomicU64],
        states: &'a [AtomicU8],
    ) -> Result<Self, LayoutError> {
        let shared = Self::of_size(layout, words, states)?;
        for (word, expected) in header(layout) {
            let found = words[word.index].load(Ordering::Acquire);
            if found != expected {
                return Err(LayoutError::Header { field: word.name, found, expected });
            }
        }
        Ok(shared)
    }

    fn of_size(
        layout: Layout,
        words: &'a [AtomicU64],
        states: &'a [AtomicU8],
    ) -> Result<Self, LayoutError> {
        let check = |what, found, expected| {
            if found == expected {
                Ok(())
            } else {
                Err(LayoutError::Size { what, found, expected })
            }
        };
        check("words", words.len(), layout.words())?;
        check("page states", states.len(), layout.bytes())?;
        Ok(Self { words, states })
    }

    /// The ring of traps.
    #[must_use]
    pub fn ring(self) -> Ring<'a> {
        Ring::new(&self.words[WORD_HEAD], &self.words[HEADER_WORDS..BLOCKS])
    }

    /// The generation of regions to which this memory belongs; compare with
    /// [`crate::Status::generation`].
    #[must_use]
    pub fn generation(self) -> u32 {
        u32::try_from(self.words[WORD_GENERATION].load(Ordering::Acquire)).unwrap_or(u32::MAX)
    }

    /// Reads a counter.
    #[must_use]
    pub fn get(self, counter: Counter) -> u64 {
        self.counter(counter).load(Ordering::Relaxed)
    }

    /// Adds to a counter (shim).
    pub fn add(self, counter: Counter, amount: u64) {
        self.counter(counter).fetch_add(amount, Ordering::Relaxed);
    }

    /// Sets a gauge (shim).
    pub fn set(self, counter: Counter, value: u64) {
        self.counter(counter).store(value, Ordering::Relaxed);
    }

    fn counter(self, counter: Counter) -> &'a AtomicU64 {
        &self.words[WORD_COUNTERS + counter as usize]
    }

    /// Notes that everything was given back unasked (shim).
    pub fn note_given_back(self, reason: GiveBack) {
        self.words[WORD_GIVEN_BACK].store(reason as u64, Ordering::Relaxed);
        self.add(Counter::GivenBack, 1);
    }

    /// The reason why everything was last given back unasked; `None` if it never was.
    #[must_use]
    pub fn last_given_back(self) -> Option<GiveBack> {
        GiveBack::from_number(self.words[WORD_GIVEN_BACK].load(Ordering::Relaxed))
    }

    /// A page's state; a page that does not exist is [`PageState::Unknown`].
    #[must_use]
    pub fn state(self, page: u32) -> PageState {
        self.states.get(page as usize).map_or(PageState::Unknown, |state| {
            PageState::from_number(state.load(Ordering::Acquire))
        })
    }

    /// Sets a page's state (shim). A page that does not exist is ignored.
    pub fn set_state(self, page: u32, state: PageState) {
        if let Some(byte) = self.states.get(page as usize) {
            byte.store(state as u8, Ordering::Release);
        }
    }

    /// The time when a page of a block was last handed over to the kernel, in milliseconds of
    /// `CLOCK_MONOTONIC`; `None`: never, or there is no such block.
    #[must_use]
    pub fn freed_at_ms(self, block: u32) -> Option<u64> {
        let word = self.words.get(BLOCKS + block as usize)?;
        Some(word.load(Ordering::Relaxed)).filter(|&at| at > 0)
    }

    /// Records that a page of a block is handed over now, or, with 0, that all of it is taken
    /// (shim).
    pub fn set_freed_at_ms(self, block: u32, at: u64) {
        if let Some(word) = self.words.get(BLOCKS + block as usize) {
            word.store(at, Ordering::Relaxed);
        }
    }

    /// Whether any page of a granule is staged.
    #[must_use]
    pub fn is_staged(self, granule: u32, granule_pages: u32) -> bool {
        let first = granule as usize * granule_pages as usize;
        let mut pages = self.states.iter().skip(first).take(granule_pages as usize);
        pages.any(|state| PageState::from_number(state.load(Ordering::Acquire)).is_staged())
    }
}

/// A word of the header on which both sides must agree.
struct Word {
    index: usize,
    name: &'static str,
}

fn header(layout: Layout) -> [(Word, u64); 4] {
    let word = |index, name, value| (Word { index, name }, value);
    [
        word(WORD_MAGIC, "magic", MAGIC),
        word(WORD_VERSION, "layout version", LAYOUT_VERSION),
        word(WORD_CAPACITY, "ring capacity", RING_CAPACITY as u64),
        word(WORD_PAGES, "pages", layout.pages.into()),
    ]
}

/// A granule's position in the sample: the finaliser of MurmurHash3, a permutation of the
/// numbers.
#[must_use]
pub fn hash(granule: u32) -> u32 {
    let mut hash = granule;
    hash ^= hash >> 16;
    hash = hash.wrapping_mul(0x85eb_ca6b);
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(0xc2b2_ae35);
    hash ^ (hash >> 16)
}

/// Whether a granule is in the sample of [`crate::Tracking::sample`].
#[must_use]
pub fn is_sampled(granule: u32, sample: u32) -> bool {
    sample == u32::MAX || hash(granule) < sample
}

#[cfg(test)]
mod tests;
