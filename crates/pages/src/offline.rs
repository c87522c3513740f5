//! Tables of the pages of images and binaries: the pages that guests will share, known before
//! they run.
//!
//! **Problem.** To find out online that two guests run the same code, all of their pages must be
//! looked at, and it takes time until each has been seen twice.
//!
//! **Idea.** Guests mostly share code, and code is known in advance. Offline, each page of an
//! image is *classified* by four of its words at fixed offsets ([`Sampling`]). Pages that differ
//! in these words are different, so only pages of one class need to be compared. A *table* has
//! for each distinct page its class, a hash of its content and the number of its occurrences.
//! Online, four loads tell whether a guest's page may be in the table, and thus is worth a look
//! at once.
//!
//! A table has no contents and only proposes: the merge itself compares. So a wrong table costs
//! time but never corrupts memory.
//!
//! # The format `.spt`, version 1
//!
//! The file has a header of 128 bytes and then one record of 56 bytes for each distinct page. All
//! numbers are little-endian. Every field is aligned to its size, so the file can be used as it
//! is mapped.
//!
//! | bytes of the header | what |
//! |-|-|
//! | 0–7 | `OVERBSPT` |
//! | 8–11 | version: 1 |
//! | 12–15 | bytes of a record: 56 |
//! | 16–23 | number of records |
//! | 24–31 | pages of the source: the sum of the records' counts |
//! | 32–39 | the four offsets of the sampled words, 16 bits each: multiples of 8 below 4096, ascending |
//! | 40–47 | pages of zeros in the source, which have no record |
//! | 48–111 | the source's name: UTF-8 without control characters, filled up with zeros |
//! | 112–119 | checksum of all records: XXH3-64, unseeded |
//! | 120–127 | checksum of bytes 0–119: the same |
//!
//! | bytes of a record | what |
//! |-|-|
//! | 0–31 | the four sampled words, 64 bits each |
//! | 32–47 | hash of the page's 4096 bytes: XXH3-128, unseeded |
//! | 48–51 | how often the page occurs in the source: at least 1; what exceeds 32 bits is not counted |
//! | 52–55 | flags: bit 0 is set where the page is executable code; all others are 0 |
//!
//! Records ascend strictly by their sampled words, one after the other, and then by their hash,
//! each compared as a number. So the same source gives the same bytes.
//!
//! Source: Jia 2017 §3 (static memory deduplication). Left out: the paper's pool of contents,
//! because the contents are in the guests. Different: a table has all pages of its source, not
//! only those that occur twice, because it is made for guests that run the same source.

mod builder;
mod compare;
mod format;

#[cfg(test)]
mod tests;

pub use builder::{Builder, MOST_PAGES, Record, Table, TooManyPages};
pub use compare::{Amount, Overlap, Savings, Statistics, UnlikeSamplings, mix, overlap};
pub use format::{FormatError, HEADER_LEN, MOST_NAME_LEN, RECORD_LEN, TableRef};

use xxhash_rust::xxh3::xxh3_128;

/// Bytes of a page.
pub const PAGE_LEN: usize = 4096;
/// The content of a page.
pub type Page = [u8; PAGE_LEN];

/// The offsets of the sampled words in a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampling([u16; 4]);

/// Offsets at which no page can be sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the offsets are {0:?}; valid: four multiples of 8 below 4096, ascending")]
pub struct SamplingError(pub [u16; 4]);

/// The words of a page at the offsets of its sampling: its class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sampled(pub [u64; 4]);

impl Default for Sampling {
    /// The offsets of the paper.
    fn default() -> Self {
        Self([0, 1024, 2048, 3072])
    }
}

impl Sampling {
    /// Samples words at these offsets.
    pub fn new(offsets: [u16; 4]) -> Result<Self, SamplingError> {
        let fits = |offset: &u16| offset.is_multiple_of(8) && usize::from(*offset) < PAGE_LEN;
        let are_valid = offsets.iter().all(fits) && offsets.is_sorted_by(|a, b| a < b);
        if are_valid { Ok(Self(offsets)) } else { Err(SamplingError(offsets)) }
    }

    /// The offsets, ascending.
    #[must_use]
    pub const fn offsets(self) -> [u16; 4] {
        self.0
    }

    /// The words of this page at the offsets.
    #[must_use]
    pub fn sample(self, page: &Page) -> Sampled {
        Sampled(self.0.map(|offset| {
            let at = usize::from(offset);
            let word = page.get(at..at + 8).and_then(|word| word.try_into().ok());
            word.map_or(0, u64::from_le_bytes)
        }))
    }
}

/// The hash of a page's content.
#[must_use]
pub fn hash(page: &Page) -> u128 {
    xxh3_128(page)
}

/// Whether the page has only zeros.
#[must_use]
pub fn is_zero(page: &Page) -> bool {
    // Whole machine words, 64 bytes a step: as fast as the page is read.
    page.as_chunks::<64>().0.iter().all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}
