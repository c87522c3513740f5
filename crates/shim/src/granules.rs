//! The granules of a VM: their numbers, their places in guest RAM, and their places in staging.
//!
//! Page numbers run through all blocks of guest RAM, and each block begins at a multiple of the
//! largest granule. So a granule lies in one block and is cut at the block's end. Staging has the
//! shape of its block and the same offset from a huge page border, so that a huge page moves as a
//! whole.

use protocol::Region;
use protocol::layout::{PageState, Shared};
use rustix::io::Errno;
use sys::memory_map::{Advice, HUGE_PAGE_BYTES, PAGE_BYTES, Pagemap, Range, Reserved};
use sys::memory_of::STAGING_MARK;

use crate::ram::{Block, end, overlap};
use crate::transitions::PageRun;

/// All granules of a VM.
pub(crate) struct ShadowedGranules {
    shadowed: Vec<Shadowed>,
    granule_pages: u32,
}

/// A block of guest RAM with its staging.
struct Shadowed {
    region: Region,
    guest: Range,
    huge: bool,
    /// Where the block's first page is staged.
    staging: u64,
    _reserved: Reserved,
}

/// One granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Granule {
    pub(crate) number: u32,
    pub(crate) first_page: u32,
    pub(crate) pages: u32,
    pub(crate) guest: Range,
    pub(crate) staging: u64,
}

/// The part of a range of addresses that lies in one block.
pub(crate) struct BlockPiece {
    pub(crate) staging: Range,
    pub(crate) pages: std::ops::Range<u32>,
}

impl ShadowedGranules {
    /// Reserves staging for these blocks.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn new(regions: &[(Block, Region)], granule_pages: u32) -> Result<Self, Errno> {
        let shadow = |(block, region): &(Block, Region)| Shadowed::new(block, *region);
        let shadowed = regions.iter().map(shadow).collect::<Result<_, _>>()?;
        Ok(Self { shadowed, granule_pages })
    }

    /// The numbers of granules are below this.
    pub(crate) fn count(&self) -> usize {
        let last = self.shadowed.last().map(|last| last.region);
        let pages = last.map_or(0, |region| region.first_page + region.pages);
        pages.div_ceil(self.granule_pages) as usize
    }

    /// The first page that is still in staging, as the page's address in guest RAM.
    ///
    /// # Errors
    /// The page tables' of one block.
    pub(crate) fn left_in_staging(&self, pagemap: &Pagemap) -> Result<Option<u64>, Errno> {
        for Shadowed { guest, staging, .. } in &self.shadowed {
            let all = Range { start: *staging, ..*guest };
            if let Some(left) = pagemap.first_populated(all)? {
                return Ok(Some(guest.start + (left - staging)));
            }
        }
        Ok(None)
    }

    /// Guest RAM and staging: the ranges to register.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range> {
        let both = |shadowed: &Shadowed| {
            [shadowed.guest, Range { start: shadowed.staging, len: shadowed.guest.len }]
        };
        self.shadowed.iter().flat_map(both)
    }

    /// For each block the address at which its first page is staged.
    pub(crate) fn staging(&self) -> Vec<u64> {
        self.shadowed.iter().map(|shadowed| shadowed.staging).collect()
    }

    /// The granule with this number.
    pub(crate) fn get(&self, number: u32) -> Option<Granule> {
        let first_page = number.checked_mul(self.granule_pages)?;
        self.of_page(first_page)?.granule(number, self.granule_pages)
    }

    /// The granule at an address in guest RAM.
    pub(crate) fn at(&self, address: u64) -> Option<Granule> {
        let holds =
            |shadowed: &&Shadowed| shadowed.guest.start <= address && address < end(shadowed.guest);
        let shadowed = self.shadowed.iter().find(holds)?;
        let page = shadowed.page_at(address);
        shadowed.granule(page / self.granule_pages, self.granule_pages)
    }

    /// The first granule whose number is at least `number`.
    pub(crate) fn from(&self, number: u32) -> Option<Granule> {
        let first_page = number.checked_mul(self.granule_pages)?;
        let ends_later =
            |shadowed: &&Shadowed| shadowed.region.first_page + shadowed.region.pages > first_page;
        let shadowed = self.shadowed.iter().find(ends_later)?;
        let number = number.max(shadowed.region.first_page / self.granule_pages);
        shadowed.granule(number, self.granule_pages)
    }

    /// The parts of `range` that are guest RAM.
    pub(crate) fn pieces(&self, range: Range) -> impl Iterator<Item = BlockPiece> {
        let concerned = move |shadowed: &&Shadowed| overlap(shadowed.guest, range);
        self.shadowed.iter().filter(concerned).map(move |shadowed| {
            let start = range.start.max(shadowed.guest.start);
            let len = end(range).min(end(shadowed.guest)) - start;
            let staging = Range { start: shadowed.staging + (start - shadowed.guest.start), len };
            let first = shadowed.page_at(start);
            BlockPiece { staging, pages: first..first + page_count(len) }
        })
    }

    /// The 2 MiB block around a granule as addresses and page numbers, if QEMU wants huge pages
    /// there.
    pub(crate) fn huge_block(&self, granule: Granule) -> Option<(Range, std::ops::Range<u32>)> {
        let shadowed = self.of_page(granule.first_page)?;
        let start = granule.guest.start / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
        let block = Range { start, len: HUGE_PAGE_BYTES };
        let inside = start >= shadowed.guest.start && end(block) <= end(shadowed.guest);
        let first = shadowed.page_at(start);
        (shadowed.huge && inside).then(|| (block, first..first + page_count(HUGE_PAGE_BYTES)))
    }

    fn of_page(&self, page: u32) -> Option<&Shadowed> {
        let holds = |shadowed: &&Shadowed| {
            let at = page.checked_sub(shadowed.region.first_page);
            at.is_some_and(|at| at < shadowed.region.pages)
        };
        self.shadowed.iter().find(holds)
    }
}

impl Shadowed {
    fn new(block: &Block, region: Region) -> Result<Self, Errno> {
        let offset = block.range.start % HUGE_PAGE_BYTES;
        let reserved = Reserved::new(block.range.len + offset)?;
        // A core dump of QEMU contains guest RAM if the operator wants that, but never staging.
        for advice in block.advice().chain([STAGING_MARK, Advice::LinuxDontDump]) {
            // SAFETY: fresh memory. A kernel without huge pages refuses that advice, and needs
            // none.
            let _ = unsafe { reserved.advise(advice) };
        }
        let staging = reserved.range().start + offset;
        Ok(Self { region, guest: block.range, huge: block.huge, staging, _reserved: reserved })
    }

    fn page_at(&self, address: u64) -> u32 {
        self.region.first_page + page_count(address.saturating_sub(self.guest.start))
    }

    fn granule(&self, number: u32, granule_pages: u32) -> Option<Granule> {
        let first_page = number.checked_mul(granule_pages)?;
        let at = first_page.checked_sub(self.region.first_page)?;
        let pages = self.region.pages.checked_sub(at).filter(|&rest| rest > 0)?.min(granule_pages);
        let offset = u64::from(at) * PAGE_BYTES;
        let guest = Range { start: self.guest.start + offset, len: u64::from(pages) * PAGE_BYTES };
        Some(Granule { number, first_page, pages, guest, staging: self.staging + offset })
    }
}

impl Granule {
    /// Whether some pages are staged: usually all that are not merged.
    pub(crate) fn is_staged(&self, shared: Shared<'_>) -> bool {
        self.numbers().any(|page| shared.state(page).is_staged())
    }

    /// The parts that have this state, each as long as possible: usually one, the whole granule.
    pub(crate) fn parts(self, shared: Shared<'_>, state: PageState) -> impl Iterator<Item = Self> {
        self.parts_that(shared, move |found| found == state)
    }

    /// The parts that are staged.
    pub(crate) fn staged_parts(self, shared: Shared<'_>) -> impl Iterator<Item = Self> {
        self.parts_that(shared, PageState::is_staged)
    }

    fn parts_that(
        self,
        shared: Shared<'_>,
        is_wanted: impl Fn(PageState) -> bool,
    ) -> impl Iterator<Item = Self> {
        let end = self.first_page + self.pages;
        let mut next = self.first_page;
        std::iter::from_fn(move || {
            let first_page = (next..end).find(|&page| is_wanted(shared.state(page)))?;
            next = (first_page..end).find(|&page| !is_wanted(shared.state(page))).unwrap_or(end);
            let offset = u64::from(first_page - self.first_page) * PAGE_BYTES;
            let pages = next - first_page;
            let len = u64::from(pages) * PAGE_BYTES;
            let guest = Range { start: self.guest.start + offset, len };
            Some(Self { first_page, pages, guest, staging: self.staging + offset, ..self })
        })
    }

    /// The granule's pages, and where they are staged.
    pub(crate) fn run(&self) -> PageRun {
        PageRun { home: self.guest, away: self.staging, page: self.first_page }
    }

    pub(crate) fn numbers(&self) -> std::ops::Range<u32> {
        self.first_page..self.first_page + self.pages
    }
}

/// Number of pages in `bytes` of one region, which has fewer than 2^32.
fn page_count(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ram::GuestRam;

    /// Two blocks: 33 MiB and 12 KiB from an odd address on, and 32 MiB.
    fn granules(granule_pages: u32) -> ShadowedGranules {
        let mut ram = GuestRam::new();
        for (start, len) in [(0x1000_3000, (33 << 20) + 0x3000), (0x8000_0000, 32 << 20)] {
            let range = Range { start, len };
            ram.mapped(range, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            ram.advised(range, libc::MADV_HUGEPAGE);
            ram.advised(range, libc::MADV_DONTFORK);
        }
        ShadowedGranules::new(&ram.regions(), granule_pages).unwrap()
    }

    #[test]
    fn a_granule_is_found_by_number_and_by_address() {
        let all = granules(32);
        let granule = all.get(3).unwrap();
        assert_eq!((granule.first_page, granule.pages), (96, 32));
        assert_eq!(granule.guest.start, 0x1000_3000 + 96 * PAGE_BYTES);
        assert_eq!(granule.guest.start % HUGE_PAGE_BYTES, granule.staging % HUGE_PAGE_BYTES);
        assert_eq!(all.at(granule.guest.start + 5), Some(granule));
        assert_eq!(all.at(0x1000_2FFF), None);
        assert_eq!(all.get(u32::MAX), None);
    }

    #[test]
    fn the_last_granule_of_a_block_is_cut_and_the_next_begins_in_the_next_block() {
        let all = granules(512);
        let last = all.get(16).unwrap();
        assert_eq!(last.pages, 33 * 256 + 3 - 16 * 512);
        assert_eq!(all.from(17).unwrap().guest.start, 0x8000_0000);
        let small = granules(1);
        assert_eq!(small.get(33 * 256 + 3), None, "between the blocks there is none");
        assert_eq!(small.from(33 * 256 + 3).unwrap().number, 17 * 512);
        assert_eq!(small.count(), 17 * 512 + 32 * 256);
        assert_eq!(small.from(17 * 512 + 32 * 256), None);
    }

    #[test]
    fn a_range_is_cut_into_pieces_with_their_staging() {
        let all = granules(32);
        let everything = Range { start: 0, len: u64::MAX };
        let pages: Vec<_> = all.pieces(everything).map(|piece| piece.pages).collect();
        assert_eq!(pages, [0..33 * 256 + 3, 17 * 512..17 * 512 + 32 * 256]);
        let one = all.pieces(Range { start: 0x8000_1000, len: PAGE_BYTES }).next().unwrap();
        assert_eq!(one.staging.start, all.get(17 * 16).unwrap().staging + PAGE_BYTES);
    }

    #[test]
    fn a_huge_block_lies_inside_its_ram() {
        let all = granules(32);
        assert_eq!(all.huge_block(all.get(0).unwrap()), None, "it begins before the block");
        let granule = all.at(0x8020_0000).unwrap();
        let (block, pages) = all.huge_block(granule).unwrap();
        assert_eq!(block, Range { start: 0x8020_0000, len: HUGE_PAGE_BYTES });
        assert_eq!(pages, 18 * 512..19 * 512);
    }
}
