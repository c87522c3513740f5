//! Buffers for guests' pages, in memory that is excluded from core dumps.

use sys::memory_map::PAGE_LEN;
use sys::pool_file::Page;
use sys::slab::Slab;

/// Room for `PAGES` pages.
#[derive(Debug, Default)]
pub(super) struct Buffer<const PAGES: usize>(Option<Slab>);

impl<const PAGES: usize> Buffer<PAGES> {
    /// The whole buffer; empty while the kernel has no memory for it.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        if self.0.is_none() {
            self.0 = Slab::new(PAGES * PAGE_LEN).ok();
        }
        self.0.as_mut().map_or(&mut [], Slab::bytes_mut)
    }

    /// The same, read-only.
    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_ref().map_or(&[], Slab::bytes)
    }

    /// Returns the memory to the kernel.
    fn discard(&mut self) {
        self.0 = None;
    }
}

/// Consecutive copies of at most `PAGES` pages.
#[derive(Debug, Default)]
pub(super) struct Kept<const PAGES: usize> {
    buffer: Buffer<PAGES>,
    count: usize,
    /// The most pages that its memory has held at once.
    most: usize,
}

impl<const PAGES: usize> Kept<PAGES> {
    /// Keeps a page; `false`: there is no room for it.
    pub(super) fn push(&mut self, page: &[u8]) -> bool {
        let room = self.buffer.bytes_mut().as_chunks_mut().0.get_mut(self.count);
        let Some(room) = room.filter(|_| page.len() == PAGE_LEN) else { return false };
        let room: &mut Page = room;
        room.copy_from_slice(page);
        self.count += 1;
        self.most = self.most.max(self.count);
        true
    }

    /// The pages in their order.
    pub(super) fn pages(&self) -> impl Iterator<Item = &Page> {
        self.buffer.bytes().as_chunks().0.iter().take(self.count)
    }

    /// Empties it, and returns its memory if that was much too large: when little changes, few
    /// pages are kept.
    pub(super) fn empty(&mut self) {
        if self.count < self.most / 8 {
            self.buffer.discard();
            self.most = 0;
        }
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_kept_in_their_order_up_to_the_room_there_is() {
        let mut kept = Kept::<3>::default();
        assert_eq!(kept.pages().count(), 0);
        for byte in 1..=3 {
            assert!(kept.push(&[byte; PAGE_LEN]));
        }
        assert!(!kept.push(&[4; PAGE_LEN]), "there is no room for a fourth");
        assert!(kept.pages().map(|page| page[0]).eq([1, 2, 3]));
        kept.empty();
        assert_eq!(kept.pages().count(), 0);
        assert!(!kept.push(&[5; 100]), "that is no page");
        assert!(kept.push(&[6; PAGE_LEN]));
        assert!(kept.pages().map(|page| page[4095]).eq([6]));
    }
}
