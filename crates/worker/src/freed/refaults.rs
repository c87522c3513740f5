//! Counts the taken pages that the guest has touched again: the cost of taking them.
//!
//! **Problem.** The kernel gives a page of zeros to a guest that touches a taken page, and does
//! not report it. **Idea.** There is a bit for each taken page, and the page tables are read now
//! and then: a page that exists again was touched. Its bit is then cleared, so it is counted once
//! for each time that it was taken.

use std::collections::BTreeMap;
use std::io;

use protocol::Pages;
use protocol::layout::BLOCK_PAGES;
use sys::frames::Frames;
use sys::memory_map::Range;

/// Blocks that are read each time: some 10 µs each.
const LOOKED_AT: usize = 64;
const WORDS: usize = (BLOCK_PAGES / 64) as usize;

/// Taken pages that were not touched since, by block.
#[derive(Debug, Default)]
pub(super) struct Refaults {
    blocks: BTreeMap<u32, [u64; WORDS]>,
    /// The block at which the next look begins.
    next: u32,
    /// Pages that were touched since they were taken.
    pub(super) pages: u64,
}

impl Refaults {
    /// Records requested pages: those that do not exist now are taken. `at` gives the addresses
    /// of a block.
    pub(super) fn note(
        &mut self,
        runs: &[Pages],
        frames: &Frames,
        at: impl Fn(u32) -> Option<Range>,
    ) -> io::Result<()> {
        let mut known: Option<(u32, Vec<bool>)> = None;
        for page in runs.iter().flat_map(|run| run.page..run.page + run.pages) {
            let block = page / BLOCK_PAGES;
            if known.as_ref().is_none_or(|(of, _)| *of != block) {
                let Some(range) = at(block) else { continue };
                known = Some((block, frames.present(range)?));
            }
            let place = (page % BLOCK_PAGES) as usize;
            let is_there = known.as_ref().is_some_and(|(_, there)| there.get(place) == Some(&true));
            if !is_there {
                self.blocks.entry(block).or_default()[place / 64] |= 1 << (place % 64);
            }
        }
        Ok(())
    }

    /// Looks at some of the taken pages.
    pub(super) fn look(
        &mut self,
        frames: &Frames,
        at: impl Fn(u32) -> Option<Range>,
    ) -> io::Result<()> {
        let after = self.blocks.range(self.next..).map(|(block, _)| *block);
        let blocks: Vec<u32> = after.take(LOOKED_AT).collect();
        // After the last block it starts again.
        self.next = if blocks.len() < LOOKED_AT { 0 } else { blocks[LOOKED_AT - 1] + 1 };
        for block in blocks {
            let there = at(block).map_or_else(|| Ok(Vec::new()), |range| frames.present(range))?;
            let Some(taken) = self.blocks.get_mut(&block) else { continue };
            for place in (0..there.len()).filter(|place| there[*place]) {
                let bit = 1 << (place % 64);
                self.pages += u64::from(taken[place / 64] & bit != 0);
                taken[place / 64] &= !bit;
            }
            if there.is_empty() || taken.iter().all(|word| *word == 0) {
                self.blocks.remove(&block);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::PAGE;
    use super::*;

    #[test]
    fn what_was_taken_and_is_there_again_counts_once() {
        let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        if huge.is_ok_and(|huge| huge.contains("[always]")) {
            return;
        }
        let page = usize::try_from(PAGE).unwrap();
        // Larger than any allocator keeps for reuse: the kernel provides it as it is touched.
        let mut memory = vec![0_u8; 64 << 20];
        let first = memory.as_ptr().align_offset(page);
        let start = u64::try_from(memory.as_ptr().addr() + first).unwrap();
        let at = |block: u32| {
            let len = u64::from(BLOCK_PAGES.min(690 - block * BLOCK_PAGES)) * PAGE;
            Some(Range { start: start + u64::from(block * BLOCK_PAGES) * PAGE, len })
        };
        let mut touch = |number: usize| memory[first + number * page] = 1;
        let frames = Frames::of(std::process::id()).unwrap();
        touch(5);
        let mut refaults = Refaults::default();
        // One of these ten exists, and was not taken.
        refaults.note(&[Pages { page: 0, pages: 10 }], &frames, at).unwrap();
        refaults.look(&frames, at).unwrap();
        assert_eq!(refaults.pages, 0);
        touch(3);
        touch(600);
        refaults.look(&frames, at).unwrap();
        refaults.look(&frames, at).unwrap();
        assert_eq!(refaults.pages, 1);
    }
}
