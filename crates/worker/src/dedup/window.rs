//! Pages that are scanned together.

use std::ops::Range;

use pages::dedup::Book;
use protocol::layout::PageState;

use super::super::granules::PAGE;

/// A window without due or changed pages is scanned in one of this number of passes.
const LOOKED_AT_EVERY: u32 = 8;

/// The purpose of scanning a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Read the pages that are due.
    Pass,
    /// Sample the pages that exist.
    Sweep,
    /// Copy shared pages.
    Unshare,
}

/// Pages of one VM that are scanned together: those of a huge page.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) first: u32,
    /// Whether at least part of it is in huge pages.
    pub(super) is_huge: bool,
    pub(super) address: u64,
    pub(super) count: u32,
    /// The number of existing pages: the guest's own, or merged.
    pub(super) there: u32,
    /// The number of pages that share a slot.
    pub(super) ours: u32,
    /// The number of pages that share a page of another pool, or may by now share one of ours.
    pub(super) foreign: u32,
    /// Whether each page is to be read.
    pub(super) wanted: Vec<bool>,
}

impl Window {
    /// The most pages in a window: those that are due together, or no window would be without a
    /// due page.
    pub(super) const PAGES: u32 = Book::TOGETHER;

    pub(super) fn pages(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    /// Whether it has no page to read and, by the page states, no change. It is scanned
    /// occasionally all the same: if the shim cannot replace a shared page, it does not report a
    /// guest's write to it.
    pub(super) fn is_still(&self, states: &[PageState], book: &Book, pass: u32) -> bool {
        !pass.wrapping_add(self.first / Self::PAGES).is_multiple_of(LOOKED_AT_EVERY)
            && self.pages().zip(states).all(|(page, state)| match state {
                PageState::Merged => book.slot(page).is_some(),
                PageState::Plain => book.rests(page, pass),
                _ => false,
            })
    }

    /// The number of the page at this index.
    pub(super) fn page_at(&self, at: usize) -> u32 {
        self.first.saturating_add(u32::try_from(at).unwrap_or(u32::MAX))
    }

    pub(super) fn address_at(&self, at: usize) -> u64 {
        self.address + at as u64 * PAGE
    }

    /// The most pages read at once: they are hashed while they are still in the CPU's cache.
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
