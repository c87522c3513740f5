//! The pages that stand for a VM's memory when it is tracked from outside.
//!
//! Paging out a single page splits the huge page that it is part of. So the sample of a VM in huge
//! pages has few of its [`BLOCK`]s: in the order of addresses, one at random of each [`STRATUM`]
//! (stratified cluster sampling: Cochran, Sampling Techniques, 1977, §5 and §9). Only these are
//! split. The sample of any other VM has all its pages.
//!
//! Pages are numbered through all spans without gaps.

use model::Bytes;
use sys::outside::Piece;

use crate::granules::PAGE;
use crate::pager::BLOCK;

/// The number of pages in a block.
const BLOCK_PAGES: u32 = 512;
/// One block of this number is in the sample: a sixteenth of the VM's RAM is split. Of the huge
/// pages of a VM that has touched a part of its RAM it may be more: 16 of 158 MiB were seen.
const STRATUM: u64 = 16;
/// The inverse of the share of huge pages in memory above which they are kept.
const FEW_HUGE: u64 = 20;
/// A VM with less resident memory has just started.
const JUST_BEGUN: Bytes = Bytes::mib(32);

/// The sample of a VM's pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PageSample {
    /// The spans, ordered by their first pages.
    spans: Vec<PageSpan>,
    /// The number of pages of the VM.
    all: u64,
}

/// A run of contiguous pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageSpan {
    address: u64,
    first: u32,
    pages: u32,
}

impl PageSample {
    /// A sample of a VM whose RAM is in these pieces.
    pub(super) fn of(pieces: &[Piece], random: &mut fastrand::Rng) -> Self {
        let all = pieces.iter().map(|piece| piece.range.len / PAGE).sum();
        let mut sample = Self { spans: Vec::new(), all };
        if in_huge_pages(pieces) {
            let blocks: Vec<u64> = pieces.iter().flat_map(blocks).collect();
            let whole = usize::try_from(STRATUM).unwrap_or(usize::MAX);
            for stratum in blocks.chunks(whole) {
                // The last stratum may be shorter: each of its blocks still has the same chance.
                if let Some(block) = stratum.get(random.usize(..whole)) {
                    sample.push(*block, BLOCK_PAGES);
                }
            }
            if let (true, Some(block)) = (sample.spans.is_empty(), blocks.first()) {
                sample.push(*block, BLOCK_PAGES);
            }
        } else {
            for piece in pieces {
                sample.push(piece.range.start, u32::try_from(piece.range.len / PAGE).unwrap_or(0));
            }
        }
        sample
    }

    fn push(&mut self, address: u64, pages: u32) {
        let first = self.pages();
        let pages = pages.min(u32::MAX - first);
        self.spans.push(PageSpan { address, first, pages });
    }

    /// The number of pages in the sample.
    pub(super) fn pages(&self) -> u32 {
        self.spans.last().map_or(0, |last| last.first + last.pages)
    }

    /// The size of the VM's memory.
    pub(super) fn ram(&self) -> Bytes {
        Bytes(self.all * PAGE)
    }

    /// The number of pages of the VM for which each page of the sample stands.
    #[expect(clippy::cast_precision_loss, reason = "a share needs three digits")]
    pub(super) fn scale(&self) -> f64 {
        self.all as f64 / f64::from(self.pages().max(1))
    }

    /// The address of a page of the sample.
    pub(super) fn address(&self, page: u32) -> u64 {
        let after = self.spans.partition_point(|span| span.first <= page);
        let span = after.checked_sub(1).and_then(|at| self.spans.get(at));
        span.map_or(0, |span| span.address + u64::from(page - span.first) * PAGE)
    }
}

/// Whether enough of this memory is in huge pages to keep them. A VM that has just started counts
/// as such: its memory may yet come in huge pages.
pub(super) fn in_huge_pages(pieces: &[Piece]) -> bool {
    let resident: Bytes = pieces.iter().map(|piece| piece.resident).sum();
    let huge: Bytes = pieces.iter().map(|piece| piece.huge).sum();
    huge.0 > resident.0 / FEW_HUGE || resident < JUST_BEGUN
}

/// The whole blocks of a piece.
fn blocks(piece: &Piece) -> impl Iterator<Item = u64> {
    let (start, len) = (piece.range.start, piece.range.len);
    (0..len / BLOCK).map(move |block| start + block * BLOCK)
}

#[cfg(test)]
mod tests {
    use sys::userfaultfd::Range;

    use super::*;

    fn piece(start: u64, len: u64, huge: u64) -> Piece {
        let range = Range { start, len };
        let resident = Bytes(len);
        Piece { range, resident, huge: Bytes(huge), is_locked: false }
    }

    #[test]
    fn all_pages_stand_for_themselves_where_none_is_in_huge_pages() {
        let filled =
            |start, pages: u64| Piece { resident: Bytes::mib(40), ..piece(start, pages * PAGE, 0) };
        let pieces = [filled(BLOCK, 3), filled(9 * BLOCK, 2)];
        let sample = PageSample::of(&pieces, &mut fastrand::Rng::with_seed(1));
        assert_eq!((sample.pages(), sample.ram()), (5, Bytes(5 * PAGE)));
        assert!((sample.scale() - 1.0).abs() < 1e-9);
        let places: Vec<u64> = (0..5).map(|page| sample.address(page)).collect();
        let of = |start| move |page| start + page * PAGE;
        assert_eq!(
            places,
            (0..3).map(of(BLOCK)).chain((0..2).map(of(9 * BLOCK))).collect::<Vec<_>>()
        );
    }

    #[test]
    fn one_block_in_sixteen_stands_for_huge_pages() {
        let pieces = [piece(0, 800 * BLOCK, 700 * BLOCK)];
        let mut chosen = vec![0_u32; 800];
        for seed in 0..400 {
            let sample = PageSample::of(&pieces, &mut fastrand::Rng::with_seed(seed));
            assert_eq!(sample.pages(), 50 * BLOCK_PAGES);
            assert!((sample.scale() - 16.0).abs() < 1e-9);
            for block in 0..50 {
                let at = sample.address(block * BLOCK_PAGES) / BLOCK;
                assert_eq!(at / STRATUM, u64::from(block), "one of each stratum");
                chosen[usize::try_from(at).unwrap()] += 1;
            }
        }
        assert!(chosen.iter().all(|times| (5..80).contains(times)), "{chosen:?}");
    }

    #[test]
    fn a_vm_of_a_few_huge_pages_is_seen_through_one_and_one_of_none_is_not_seen() {
        for blocks in 1..30 {
            let pieces = [piece(0, blocks * BLOCK, blocks * BLOCK)];
            for seed in 0..20 {
                let sample = PageSample::of(&pieces, &mut fastrand::Rng::with_seed(seed));
                let seen = u64::from(sample.pages() / BLOCK_PAGES);
                assert!((1..=blocks.div_ceil(STRATUM)).contains(&seen), "{seen} of {blocks}");
            }
        }
        let none = PageSample::of(&[], &mut fastrand::Rng::with_seed(1));
        assert_eq!((none.pages(), none.address(0)), (0, 0));
    }
}
