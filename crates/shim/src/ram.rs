//! Finds guest RAM among QEMU's mappings.
//!
//! **Problem.** QEMU maps much memory. Only guest RAM may be touched, and only RAM of a kind that
//! can be tracked. QEMU offers no query for it, but the shim sees QEMU's calls.
//!
//! **Idea.** For each RAM block QEMU reserves addresses (`PROT_NONE`) and maps memory over them
//! (`MAP_FIXED`, readable and writable). Then it gives advice about the whole block (huge pages,
//! core dumps), and last `MADV_DONTFORK`. So a large fixed mapping is a *candidate*, and
//! `MADV_DONTFORK` of exactly that range makes it a *block*. Translation buffers, stacks and
//! heaps never do both.
//!
//! **Invariants.** The page numbers of each block begin at a multiple of 512, in the order of the
//! blocks' creation. Each change of the set of blocks increments the generation and renumbers
//! them.
//!
//! **Leaves out.** Blocks below [`SMALLEST`]: firmware, option ROMs, small video memory.

use std::sync::atomic::{AtomicU64, Ordering};

use protocol::{MAX_REGIONS, REGION_ALIGN_PAGES, Region};
use sys::memory_map::{Advice, PAGE_BYTES, Range};

/// The smallest block that is worth tracking.
pub(crate) const SMALLEST: u64 = 32 << 20;

/// The kind of memory behind a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RamKind {
    /// Private and anonymous: QEMU's default.
    Private,
    /// Shared with other processes.
    Shared,
    /// Private, over a file.
    File,
    /// Huge pages from the kernel's pool.
    HugeTlb,
}

impl RamKind {
    /// From the arguments of `mmap`.
    pub(crate) fn of(flags: i32) -> Self {
        if flags & libc::MAP_HUGETLB != 0 {
            Self::HugeTlb
        } else if flags & libc::MAP_SHARED != 0 {
            Self::Shared
        } else if flags & libc::MAP_ANONYMOUS == 0 {
            Self::File
        } else {
            Self::Private
        }
    }

    /// Why memory of this kind cannot be tracked; `None` if it can.
    fn objection(self) -> Option<&'static str> {
        match self {
            Self::Private => None,
            Self::Shared => Some(
                "guest RAM is shared memory (memory backend with share=on, as vhost-user needs): \
                 use private memory",
            ),
            Self::File => Some(
                "guest RAM is mapped from a file (mem-path, memory-backend-file): use anonymous memory",
            ),
            Self::HugeTlb => Some(
                "guest RAM is of huge pages from the kernel's pool: use transparent huge pages",
            ),
        }
    }
}

/// A large fixed mapping; after `MADV_DONTFORK`, a block of guest RAM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Block {
    pub(crate) range: Range,
    pub(crate) kind: RamKind,
    /// QEMU wants huge pages here.
    pub(crate) huge: bool,
    /// QEMU excludes it from core dumps.
    pub(crate) not_dumped: bool,
    /// The kernel may merge it with other memory (KSM).
    pub(crate) mergeable: bool,
    /// The kernel reserves memory for it (no `MAP_NORESERVE`).
    pub(crate) reserve: bool,
}

/// The known guest RAM.
#[derive(Debug)]
pub(crate) struct GuestRam {
    candidates: Vec<Block>,
    blocks: Vec<Block>,
    generation: u32,
}

/// The lowest and highest address of candidates and blocks: calls outside need no lock.
static LOWEST: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGHEST: AtomicU64 = AtomicU64::new(0);

/// Whether a range can concern guest RAM at all.
pub(crate) fn may_concern(range: Range) -> bool {
    range.start < HIGHEST.load(Ordering::Acquire)
        && end(range) > LOWEST.load(Ordering::Acquire)
        && range.len > 0
}

impl GuestRam {
    pub(crate) const fn new() -> Self {
        Self { candidates: Vec::new(), blocks: Vec::new(), generation: 0 }
    }

    /// A large fixed mapping was made, by a call of `mmap` with these flags.
    pub(crate) fn mapped(&mut self, range: Range, flags: i32) {
        self.candidates.retain(|candidate| !overlap(candidate.range, range));
        if self.blocks.iter().any(|block| overlap(block.range, range)) {
            return;
        }
        self.candidates.push(Block {
            range,
            kind: RamKind::of(flags),
            huge: false,
            not_dumped: false,
            mergeable: false,
            reserve: flags & libc::MAP_NORESERVE == 0,
        });
        self.publish_bounds();
    }

    /// QEMU gave advice; returns whether the set of blocks changed.
    pub(crate) fn advised(&mut self, range: Range, advice: i32) -> bool {
        let known = self.candidates.iter_mut().chain(&mut self.blocks);
        for block in known.filter(|block| block.range == range) {
            match advice {
                libc::MADV_HUGEPAGE => block.huge = true,
                libc::MADV_NOHUGEPAGE => block.huge = false,
                libc::MADV_DONTDUMP => block.not_dumped = true,
                libc::MADV_DODUMP => block.not_dumped = false,
                libc::MADV_MERGEABLE => block.mergeable = true,
                libc::MADV_UNMERGEABLE => block.mergeable = false,
                _ => {}
            }
        }
        if advice != libc::MADV_DONTFORK || self.blocks.len() == MAX_REGIONS {
            return false;
        }
        let Some(at) = self.candidates.iter().position(|candidate| candidate.range == range) else {
            return false;
        };
        self.blocks.push(self.candidates.remove(at));
        self.generation += 1;
        true
    }

    /// A range was unmapped or replaced; returns whether the set of blocks changed.
    pub(crate) fn unmapped(&mut self, range: Range) -> bool {
        let before = self.blocks.len();
        self.blocks.retain(|block| !overlap(block.range, range));
        self.candidates.retain(|candidate| !overlap(candidate.range, range));
        self.publish_bounds();
        let changed = self.blocks.len() != before;
        self.generation += u32::from(changed);
        changed
    }

    pub(crate) fn generation(&self) -> u32 {
        self.generation
    }

    /// Whether a range overlaps guest RAM.
    pub(crate) fn concerns(&self, range: Range) -> bool {
        self.blocks.iter().any(|block| overlap(block.range, range))
    }

    /// The block at an address.
    pub(crate) fn block(&self, address: u64) -> Option<&Block> {
        let holds = |block: &&Block| block.range.start <= address && address < end(block.range);
        self.blocks.iter().find(holds)
    }

    /// Whether exactly this range would become a block.
    pub(crate) fn is_candidate(&self, range: Range) -> bool {
        self.candidates.iter().any(|candidate| candidate.range == range)
    }

    /// Why this VM's memory cannot be tracked; `None` if it can.
    pub(crate) fn objection(&self) -> Option<&'static str> {
        self.blocks.iter().find_map(|block| block.kind.objection())
    }

    /// The blocks and their page numbers. Blocks past 16 TiB get none.
    pub(crate) fn regions(&self) -> Vec<(Block, Region)> {
        let mut first_page = 0_u32;
        let mut regions = Vec::with_capacity(self.blocks.len());
        for &block in &self.blocks {
            let pages = u32::try_from(block.range.len / PAGE_BYTES).ok();
            let Some((pages, end)) =
                pages.and_then(|pages| Some((pages, first_page.checked_add(pages)?)))
            else {
                break;
            };
            regions.push((block, Region { first_page, pages, address: block.range.start }));
            let Some(next) = end.checked_next_multiple_of(REGION_ALIGN_PAGES) else { break };
            first_page = next;
        }
        regions
    }

    fn publish_bounds(&self) {
        let known = || self.candidates.iter().chain(&self.blocks).map(|block| block.range);
        let lowest = known().map(|range| range.start).min().unwrap_or(u64::MAX);
        LOWEST.store(lowest, Ordering::Release);
        HIGHEST.store(known().map(end).max().unwrap_or(0), Ordering::Release);
    }
}

impl Block {
    /// The advice for memory that holds this block's pages for a while.
    pub(crate) fn advice(&self) -> impl Iterator<Item = Advice> {
        let huge = if self.huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
        self.shared_advice().chain([huge])
    }

    /// The advice for a pool's pages that are mapped in this block.
    pub(crate) fn shared_advice(&self) -> impl Iterator<Item = Advice> {
        let dump = self.not_dumped.then_some(Advice::LinuxDontDump);
        [Advice::LinuxDontFork].into_iter().chain(dump)
    }

    /// The advice that makes fresh memory in this block like the rest, so that the kernel can
    /// join both into one mapping.
    pub(crate) fn own_advice(&self) -> impl Iterator<Item = Advice> {
        let huge = self.huge.then_some(Advice::LinuxHugepage);
        let mergeable = self.mergeable.then_some(Advice::LinuxMergeable);
        self.shared_advice().chain(huge).chain(mergeable)
    }
}

/// The first address behind a range.
pub(crate) fn end(range: Range) -> u64 {
    range.start.saturating_add(range.len)
}

/// The page that contains an address.
pub(crate) fn page_of(address: u64) -> Range {
    Range { start: address / PAGE_BYTES * PAGE_BYTES, len: PAGE_BYTES }
}

/// The intersection of two ranges; its length is 0 if they are disjoint.
pub(crate) fn common(one: Range, other: Range) -> Range {
    let start = one.start.max(other.start);
    Range { start, len: end(one).min(end(other)).saturating_sub(start) }
}

/// Whether two ranges overlap.
pub(crate) fn overlap(one: Range, other: Range) -> bool {
    one.start < end(other) && other.start < end(one)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn range(start_mib: u64, mib: u64) -> Range {
        Range { start: start_mib * MIB, len: mib * MIB }
    }

    const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

    fn with_block(ram: &mut GuestRam, range: Range, flags: i32) {
        ram.mapped(range, flags);
        assert!(ram.advised(range, libc::MADV_DONTFORK));
    }

    #[test]
    fn a_fixed_mapping_becomes_a_block_when_qemu_keeps_it_from_forks() {
        let mut ram = GuestRam::new();
        ram.mapped(range(100, 64), PRIVATE);
        assert!(!ram.advised(range(100, 64), libc::MADV_HUGEPAGE));
        assert!(!ram.advised(range(100, 32), libc::MADV_DONTFORK), "only a part");
        assert!(ram.regions().is_empty());
        assert!(ram.advised(range(100, 64), libc::MADV_DONTFORK));
        let (block, region) = ram.regions()[0];
        assert!(block.huge && !block.not_dumped && block.reserve && !block.mergeable);
        assert_eq!(ram.block(100 * MIB).map(|found| found.range), Some(block.range));
        assert!(ram.block(164 * MIB).is_none());
        assert_eq!(region, Region { first_page: 0, pages: 64 * 256, address: 100 * MIB });
        assert_eq!(ram.generation(), 1);
    }

    #[test]
    fn page_numbers_of_a_later_block_begin_at_a_multiple_of_512() {
        let mut ram = GuestRam::new();
        let odd = Range { start: 0, len: 33 * MIB + 3 * PAGE_BYTES };
        with_block(&mut ram, odd, PRIVATE);
        with_block(&mut ram, range(100, 32), PRIVATE);
        assert_eq!(ram.regions()[1].1.first_page, (33 * 256 + 3_u32).next_multiple_of(512));
    }

    #[test]
    fn an_unplugged_block_is_forgotten_and_the_rest_numbered_anew() {
        let mut ram = GuestRam::new();
        with_block(&mut ram, range(100, 64), PRIVATE);
        with_block(&mut ram, range(200, 64), PRIVATE);
        assert!(!ram.unmapped(range(164, 36)));
        assert!(ram.unmapped(range(120, 1)));
        assert_eq!(ram.regions()[0].1.first_page, 0);
        assert_eq!(ram.generation(), 3);
    }

    #[test]
    fn memory_that_cannot_be_tracked_says_why() {
        for (flags, word) in [
            (libc::MAP_SHARED, "shared memory"),
            (libc::MAP_PRIVATE, "from a file"),
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB, "huge pages"),
        ] {
            let mut ram = GuestRam::new();
            with_block(&mut ram, range(100, 64), flags);
            assert!(ram.objection().unwrap().contains(word));
        }
        assert_eq!(RamKind::of(PRIVATE | libc::MAP_NORESERVE).objection(), None);
    }
}
