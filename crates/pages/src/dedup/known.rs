//! The pages worth a look at once: those whose content is known before any guest runs (Jia 2017
//! §3.2).
//!
//! A shared-pages table names each of its pages by words sampled at a few offsets. A guest's page
//! is looked up by its first word, and by all words only if the first is known; one word rejects
//! nearly all others. A page that passes is looked at as any other page: a table only proposes,
//! because it has no content.
//!
//! There are two bitmaps, one of first words and one of whole samples, with [`BITS_PER_PAGE`]
//! bits for each page of the tables. About one in 16 unknown pages passes each of them; a page
//! that passes both costs a look.

use crate::offline::{Sampled, Sampling, TableRef};

/// Bits of each of the two bitmaps for a page of the tables.
const BITS_PER_PAGE: usize = 16;

/// The known pages.
#[derive(Clone, Debug)]
pub struct KnownPages {
    sampling: Sampling,
    first: Bitmap,
    whole: Bitmap,
}

impl KnownPages {
    /// An empty set, made for about `pages` pages with this sampling.
    #[must_use]
    pub fn new(sampling: Sampling, pages: usize) -> Self {
        Self { sampling, first: Bitmap::for_pages(pages), whole: Bitmap::for_pages(pages) }
    }

    /// The pages of one table.
    #[must_use]
    pub fn of(table: &TableRef<'_>) -> Self {
        let mut known = Self::new(table.sampling(), table.len());
        table.records().for_each(|record| known.add(&record.sampled));
        known
    }

    /// Adds a page with these words.
    pub fn add(&mut self, sampled: &Sampled) {
        self.first.set(mixed(&sampled.0[..1]));
        self.whole.set(mixed(&sampled.0));
    }

    /// The offsets in a page at which words are sampled.
    #[must_use]
    pub fn sampling(&self) -> Sampling {
        self.sampling
    }

    /// Whether a known page has this word as its first sampled word.
    #[must_use]
    pub fn may_begin_with(&self, word: u64) -> bool {
        self.first.has(mixed(&[word]))
    }

    /// Whether a known page has these sampled words.
    #[must_use]
    pub fn may_have(&self, sampled: &Sampled) -> bool {
        self.whole.has(mixed(&sampled.0))
    }

    /// The size of the bitmaps in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        (self.first.words.len() + self.whole.words.len()) * size_of::<u64>()
    }
}

/// A hash of words, in which every bit depends on all of theirs (the finalizer of splitmix64).
fn mixed(words: &[u64]) -> u64 {
    words.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, word| {
        let mut x = (hash ^ word).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    })
}

#[derive(Clone, Debug)]
struct Bitmap {
    words: Vec<u64>,
}

impl Bitmap {
    fn for_pages(pages: usize) -> Self {
        let words = (pages * BITS_PER_PAGE).div_ceil(64).next_power_of_two();
        Self { words: vec![0; words] }
    }

    fn set(&mut self, hash: u64) {
        let (word, bit) = self.at(hash);
        self.words[word] |= bit;
    }

    fn has(&self, hash: u64) -> bool {
        let (word, bit) = self.at(hash);
        self.words[word] & bit != 0
    }

    fn at(&self, hash: u64) -> (usize, u64) {
        ((hash >> 6) as usize & (self.words.len() - 1), 1 << (hash & 63))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn known(pages: &[[u64; 4]]) -> KnownPages {
        let mut known = KnownPages::new(Sampling::default(), pages.len());
        pages.iter().for_each(|words| known.add(&Sampled(*words)));
        known
    }

    proptest! {
        #[test]
        fn what_is_known_passes(pages in proptest::collection::vec(any::<[u64; 4]>(), 0..200)) {
            let known = known(&pages);
            for words in pages {
                prop_assert!(known.may_begin_with(words[0]) && known.may_have(&Sampled(words)));
            }
        }
    }

    #[test]
    fn nearly_all_else_is_turned_away() {
        let of = |n: u64| [n, n * 3, 5, n * 7];
        let known = known(&(0..10_000).map(of).collect::<Vec<_>>());
        let other = |words: &[u64; 4]| known.may_begin_with(words[0]);
        let passed = (0..100_000).map(|n| of(n + 1_000_000)).filter(other).count();
        assert!(passed < 100_000 / 14, "{passed}");
        let same_first = (0..10_000).map(|n| [n, 1, 2, 3]);
        let passed = same_first.filter(|words| known.may_have(&Sampled(*words))).count();
        assert!(passed < 10_000 / 14, "{passed}");
        assert!(known.bytes() <= 2 * 10_000 * 2 * BITS_PER_PAGE / 8);
    }

    #[test]
    fn nothing_is_known_by_an_empty_table() {
        let known = known(&[]);
        assert!(!known.may_begin_with(0) && !known.may_have(&Sampled([0; 4])));
    }
}
