//! Pages that are looked at together.

use std::ops::Range;

use pages::dedup::Book;

use super::super::granules::PAGE;

/// Pages of one VM that are looked at together: what a huge page holds.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) first: u32,
    /// In huge pages, in part at least.
    pub(super) is_huge: bool,
    pub(super) address: u64,
    pub(super) count: u32,
    /// How many of them are there: the guest's own, or merged.
    pub(super) there: u32,
    /// How many share a slot.
    pub(super) ours: u32,
    /// How many share a page of another pool, or may by now share one of ours.
    pub(super) foreign: u32,
    /// Which of them are to be read.
    pub(super) wanted: Vec<bool>,
}

impl Window {
    /// Most pages in one: those that have their turn together, or there would be no window without
    /// one that is due.
    pub(super) const PAGES: u32 = Book::TOGETHER;

    pub(super) fn pages(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    /// The number of one of its pages, and where that is.
    pub(super) fn page_at(&self, at: usize) -> u32 {
        self.first.saturating_add(u32::try_from(at).unwrap_or(u32::MAX))
    }

    pub(super) fn address_at(&self, at: usize) -> u64 {
        self.address + at as u64 * PAGE
    }

    /// Most pages to be read at once: they are hashed while they are still in the CPU's cache.
    pub(super) const RUN: u32 = 32;

    /// The pages to be read, in runs.
    pub(super) fn runs(&self) -> impl Iterator<Item = Range<u32>> {
        let mut next = self.first;
        let runs = self.wanted.chunk_by(|one, other| one == other).filter_map(move |run| {
            let pages = next..next + u32::try_from(run.len()).unwrap_or(0);
            next = pages.end;
            run[0].then_some(pages)
        });
        runs.flat_map(|Range { start, end }| {
            (start..end).step_by(Self::RUN as usize).map(move |at| at..end.min(at + Self::RUN))
        })
    }
}
