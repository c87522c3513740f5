//! The blocks of 2 MiB in which a VM's memory is paged out, and the state of each.

use std::cmp::Reverse;
use std::time::Duration;

use sys::outside::Place;
use sys::userfaultfd::Range;

/// The length of a block: a huge page.
pub(in super::super) const BLOCK: u64 = 2 << 20;
/// The most memory that one call pages out, in bytes.
pub(super) const PIECE: u64 = 128 << 10;
/// A block is tried again after this time. The time doubles whenever little of it stayed out.
pub(super) const AGAIN: Duration = Duration::from_secs(60);
/// The most doublings of that time: some nine hours.
const MOST_DOUBLED: u8 = 9;
/// A trial has paid if at least one of this number of its pages stays out.
const PAYS: usize = 4;

/// A block of a VM's memory.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Block {
    /// When it may be tried next, in seconds since the pager began.
    pub(super) due_s: u32,
    /// When it was last paged out, in the same seconds; 0: never, or it was read back.
    pub(super) out_s: u32,
    /// Pages of it that were out then; 0: there is no trial to judge.
    pub(super) out: u16,
    /// The kernel was asked to page it out, and has only cleared the accessed bits.
    pub(super) is_asked: bool,
    /// How often [`AGAIN`] is doubled for it.
    pub(super) doubled: u8,
}

impl Block {
    /// Notes that `out` of its pages are out now; returns whether its trial has paid.
    pub(super) fn judge(&mut self, out: usize, now_s: u32) -> bool {
        let pays = self.out > 0 && out >= usize::from(self.out).div_ceil(PAYS);
        self.doubled = if pays { 0 } else { (self.doubled + 1).min(MOST_DOUBLED) };
        self.due_s = now_s + (seconds(AGAIN) << self.doubled);
        pays
    }
}

/// Whether `left` of the `here` resident pages of a block are enough to have paid.
pub(super) fn leaves_enough(left: usize, here: usize) -> bool {
    left >= here.div_ceil(PAYS)
}

/// The tracked pages of a block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockSample {
    pages: u32,
    in_use: u32,
    /// The shortest time since the last touch of a page that is not in use.
    ticks: u32,
}

impl BlockSample {
    pub(super) fn take(&mut self, age: Option<u32>) {
        match age {
            Some(age) if self.pages == self.in_use => self.ticks = age,
            Some(age) => self.ticks = self.ticks.min(age),
            None => self.in_use += 1,
        }
        self.pages += 1;
    }

    /// The lower rank is tried first: a small share in use, then a long time untouched. A block
    /// without tracked pages counts as half in use.
    pub(super) fn rank(self) -> (u32, Reverse<u32>) {
        let share = (self.in_use * 100).checked_div(self.pages).unwrap_or(50);
        (share, Reverse(self.ticks))
    }
}

/// The number of the block that an address is in.
pub(super) fn block_of(ranges: &[Range], address: u64) -> Option<usize> {
    let mut before = 0;
    for range in ranges {
        if let Some(offset) = address.checked_sub(range.start).filter(|it| *it < range.len) {
            return usize::try_from(before + offset / BLOCK).ok();
        }
        before += range.len.div_ceil(BLOCK);
    }
    None
}

/// The memory of a block, numbered through all of these ranges.
pub(super) fn block_range(ranges: &[Range], mut block: u64) -> Range {
    for range in ranges {
        let blocks = range.len.div_ceil(BLOCK);
        if block < blocks {
            let at = block * BLOCK;
            return Range { start: range.start + at, len: BLOCK.min(range.len - at) };
        }
        block -= blocks;
    }
    Range { start: 0, len: 0 }
}

/// The parts of a block, each of which is paged out by one call.
pub(super) fn pieces(range: Range) -> impl Iterator<Item = Range> {
    (0..range.len.div_ceil(PIECE)).map(move |piece| {
        let at = piece * PIECE;
        Range { start: range.start + at, len: PIECE.min(range.len - at) }
    })
}

/// Whole seconds.
pub(super) fn seconds(length: Duration) -> u32 {
    u32::try_from(length.as_secs()).unwrap_or(u32::MAX / 2)
}

/// How many of these pages are out.
pub(super) fn count_out(places: &[Place]) -> usize {
    places.iter().filter(|place| **place == Place::Out).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::granules::PAGE;

    #[test]
    fn a_block_that_comes_back_is_left_alone_for_longer_each_time() {
        let mut block = Block { out: 100, ..Block::default() };
        let mut pauses = Vec::new();
        for _ in 0..12 {
            assert!(!block.judge(10, 1_000));
            pauses.push(block.due_s - 1_000);
        }
        assert_eq!(pauses[..3], [120, 240, 480]);
        assert_eq!(pauses[11], 60 << MOST_DOUBLED);
        assert!(block.judge(90, 1_000) && block.due_s == 1_060);
        // No page went out: all are pinned, or the kernel has only cleared their accessed bits.
        let mut pinned = Block::default();
        assert!(!pinned.judge(0, 1_000) && pinned.due_s == 1_120);
        assert!(leaves_enough(1, 4) && !leaves_enough(1, 5) && !leaves_enough(0, 1));
    }

    #[test]
    fn blocks_cover_all_ranges_and_pieces_cover_a_block() {
        let ranges = [
            Range { start: 0x4000_0000, len: 2 * BLOCK + PAGE },
            Range { start: 0x8000_0000, len: BLOCK },
        ];
        let blocks: Vec<Range> = (0..4).map(|block| block_range(&ranges, block)).collect();
        assert_eq!(blocks[2], Range { start: 0x4000_0000 + 2 * BLOCK, len: PAGE });
        assert_eq!(blocks[3], Range { start: 0x8000_0000, len: BLOCK });
        assert_eq!(block_range(&ranges, 4).len, 0);
        for block in blocks {
            assert_eq!(pieces(block).map(|piece| piece.len).sum::<u64>(), block.len);
            assert!(pieces(block).all(|piece| piece.len <= PIECE));
        }
        let at = |address| block_of(&ranges, address);
        assert_eq!(
            [0x4000_0000, 0x4000_0000 + 2 * BLOCK, 0x8000_0001].map(at),
            [0, 2, 3].map(Some)
        );
        assert_eq!([0x3fff_ffff, 0x4000_0000 + 2 * BLOCK + PAGE].map(at), [None, None]);
    }
}
