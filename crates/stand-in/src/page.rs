//! The expected content of each page, stored where no shim can harm it, and the comparison with
//! the actual content.
//!
//! **Problem.** A page may come back from staging as zeros, as an older version of itself, as
//! another page, or as a mixture. Threads that write and threads that only read must detect this,
//! even while the kernel writes into the page for a direct read.
//!
//! **Idea.** A page's content is a function of two numbers ([`Content`]): an id that is never
//! used twice, and a count of small changes since. Both are in the page's first two words, so
//! that a wrong page shows its origin. All other words are derived from the id. The *expected*
//! content is in a table of its own, guarded by a sequence lock per page. A writer makes the
//! sequence odd and owns the page. A reader compares first, and uses the result only if the
//! sequence has not changed.
//!
//! **Invariants.** Id 0 is the page of zeros: never touched, or discarded. A page that the host
//! may drop at any time ([`Content::freed`]) holds its old content, or zeros, until it is written
//! anew. Harm is repaired where the page is owned, so that a wrong byte counts once.
//!
//! **Cost.** About a microsecond per page compared.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use crate::rng::mix;

/// Bytes in a page.
pub(crate) const PAGE: usize = 4096;
/// Words in a page.
pub(crate) const WORDS: usize = PAGE / size_of::<u64>();

/// A page of guest memory: other threads and the kernel may write it at any moment.
pub(crate) type Words = [AtomicU64; WORDS];

/// The content of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Content {
    /// The content's id; 0 is all zeros.
    pub(crate) id: u64,
    /// Small changes since it was written.
    pub(crate) count: u64,
    /// Whether it may have become zeros by itself.
    pub(crate) is_freed: bool,
}

impl Content {
    /// The page of zeros.
    pub(crate) const ZERO: Self = Self { id: 0, count: 0, is_freed: false };

    /// The same content after the page was reported free to the host.
    pub(crate) fn freed(self) -> Self {
        Self { is_freed: (self.id, self.count) != (0, 0), ..self }
    }

    fn allows(self, index: usize, found: u64) -> bool {
        found == self.word(index) || (self.is_freed && found == 0)
    }

    fn word(self, index: usize) -> u64 {
        match (index, self.id) {
            (0, id) => id,
            (1, _) => self.count,
            (_, 0) => 0,
            (index, id) => mix(id ^ (index as u64) << 54),
        }
    }

    /// Writes all words.
    pub(crate) fn fill(self, words: &Words) {
        for (index, word) in words.iter().enumerate() {
            word.store(self.word(index), Ordering::Relaxed);
        }
    }

    /// Compares all words; `None` when each is as expected.
    pub(crate) fn compare(self, words: &Words) -> Option<Harm> {
        let mut harm = Harm { bytes: 0, first: 0, expected: self, found: Self::ZERO };
        for (index, word) in words.iter().enumerate() {
            let found = word.load(Ordering::Relaxed);
            let expected = self.word(index);
            match index {
                0 => harm.found.id = found,
                1 => harm.found.count = found,
                _ => {}
            }
            if !self.allows(index, found) {
                if harm.bytes == 0 {
                    harm.first = index * size_of::<u64>();
                }
                let differing = (found ^ expected).to_ne_bytes();
                harm.bytes += differing.iter().filter(|byte| **byte != 0).count();
            }
        }
        (harm.bytes > 0).then_some(harm)
    }

    /// Makes one small change to one word, as a guest's store does, after checking the page's id
    /// and count. Not for a freed page.
    pub(crate) fn modify(&mut self, words: &Words) -> Option<Harm> {
        let [id, count] = [0, 1].map(|index: usize| words[index].load(Ordering::Relaxed));
        if (id, count) != (self.id, self.count) {
            return self.compare(words);
        }
        self.count += 1;
        words[1].store(self.count, Ordering::Relaxed);
        None
    }
}

/// The difference between a page and its expected content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Harm {
    /// Number of wrong bytes.
    pub(crate) bytes: usize,
    /// Offset of the first wrong byte's word in the page.
    first: usize,
    expected: Content,
    /// The content that its first two words claim.
    found: Content,
}

impl Harm {
    /// One wrong word, found by a look that cannot be repeated.
    pub(crate) fn of_word(expected: Content, index: usize, found: u64) -> Self {
        let differing = (found ^ expected.word(index)).to_ne_bytes();
        let bytes = differing.iter().filter(|byte| **byte != 0).count();
        let found = Content { id: found, ..Content::ZERO };
        Self { bytes, first: index * size_of::<u64>(), expected, found }
    }
}

impl fmt::Display for Harm {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, first, expected, found } = self;
        let is_zero = if found.id == 0 { " (zeros)" } else { "" };
        write!(
            out,
            "{bytes} wrong bytes from offset {first} on: expected content {:#x} changed {} times, \
             found {:#x}{is_zero} changed {} times",
            expected.id, expected.count, found.id, found.count
        )
    }
}

/// The entry of one page in the table.
#[derive(Debug, Default)]
pub(crate) struct PageEntry {
    sequence: AtomicU64,
    id: AtomicU64,
    count: AtomicU64,
    is_freed: AtomicBool,
}

impl PageEntry {
    /// Makes the caller the page's owner, unless it has one.
    pub(crate) fn own(&self) -> Option<Owned<'_>> {
        let sequence = self.sequence.load(Ordering::Relaxed);
        if sequence % 2 == 1 {
            return None;
        }
        let taken = self.sequence.compare_exchange(
            sequence,
            sequence + 1,
            Ordering::Acquire,
            Ordering::Relaxed,
        );
        taken.ok()?;
        // A reader that sees any of the owner's stores must see the odd sequence too.
        fence(Ordering::Release);
        Some(Owned(self))
    }

    /// Compares without owning; `None` when the page is owned or changed meanwhile, so that the
    /// result means nothing.
    pub(crate) fn glance(&self, words: &Words) -> Option<Result<(), Harm>> {
        let before = self.sequence.load(Ordering::Acquire);
        if before % 2 == 1 {
            return None;
        }
        let harm = self.content().compare(words);
        fence(Ordering::Acquire);
        let is_unmoved = self.sequence.load(Ordering::Relaxed) == before;
        is_unmoved.then(|| harm.map_or(Ok(()), Err))
    }

    fn content(&self) -> Content {
        Content {
            id: self.id.load(Ordering::Relaxed),
            count: self.count.load(Ordering::Relaxed),
            is_freed: self.is_freed.load(Ordering::Relaxed),
        }
    }
}

/// A page that no other thread writes, until this is dropped.
#[derive(Debug)]
pub(crate) struct Owned<'a>(&'a PageEntry);

impl Owned<'_> {
    /// The expected content.
    pub(crate) fn content(&self) -> Content {
        self.0.content()
    }

    /// Sets the expected content.
    pub(crate) fn set(&self, content: Content) {
        self.0.id.store(content.id, Ordering::Relaxed);
        self.0.count.store(content.count, Ordering::Relaxed);
        self.0.is_freed.store(content.is_freed, Ordering::Relaxed);
    }
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        let sequence = self.0.sequence.load(Ordering::Relaxed);
        self.0.sequence.store(sequence + 1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Box<Words> {
        Box::new([const { AtomicU64::new(0) }; WORDS])
    }

    const CONTENT: Content = Content { id: 7, count: 3, is_freed: false };

    #[test]
    fn content_that_was_filled_in_compares_equal_and_any_other_does_not() {
        let words = words();
        assert_eq!(Content::ZERO.compare(&words), None);
        assert!(CONTENT.compare(&words).unwrap().bytes > 3000);
        CONTENT.fill(&words);
        assert_eq!(CONTENT.compare(&words), None);
        assert!(Content { id: 8, ..CONTENT }.compare(&words).unwrap().bytes > 3000);
        assert_eq!(Content { count: 2, ..CONTENT }.compare(&words).unwrap().bytes, 1);
    }

    #[test]
    fn a_freed_page_may_have_become_zeros_but_nothing_else() {
        let words = words();
        CONTENT.fill(&words);
        words[5].store(0, Ordering::Relaxed);
        assert_eq!(CONTENT.compare(&words).unwrap().bytes, 8);
        assert_eq!(CONTENT.freed().compare(&words), None);
        words[5].store(1, Ordering::Relaxed);
        assert!(CONTENT.freed().compare(&words).is_some());
    }

    #[test]
    fn a_lost_change_is_found_by_the_next_one() {
        let words = words();
        let mut content = CONTENT;
        content.fill(&words);
        assert_eq!(content.modify(&words), None);
        words[1].store(3, Ordering::Relaxed);
        assert_eq!(content.modify(&words).unwrap().bytes, 1);
    }

    #[test]
    fn a_page_has_one_owner_and_readers_wait_for_its_end() {
        let (entry, words) = (PageEntry::default(), words());
        let owned = entry.own().unwrap();
        assert!(entry.own().is_none());
        assert!(entry.glance(&words).is_none());
        CONTENT.fill(&words);
        owned.set(CONTENT);
        drop(owned);
        assert_eq!(entry.glance(&words), Some(Ok(())));
        assert_eq!(entry.own().unwrap().content(), CONTENT);
    }

    #[test]
    fn a_reader_finds_harm() {
        let (entry, words) = (PageEntry::default(), words());
        words[100].store(1, Ordering::Relaxed);
        let harm = entry.glance(&words).unwrap().unwrap_err();
        assert_eq!((harm.bytes, harm.first), (1, 800));
    }
}
