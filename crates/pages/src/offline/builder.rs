//! Builds a table from pages in any order.

use std::collections::HashMap;

use super::{Page, Sampled, Sampling, hash, is_zero};

/// The most distinct pages of a table: 64 GiB of contents, in a file of 0.9 GiB. Building it
/// takes up to 3.3 GiB.
pub const MOST_PAGES: usize = 1 << 24;

/// A distinct page of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Record {
    /// Its class.
    pub sampled: Sampled,
    /// The hash of its content: XXH3-128, unseeded.
    pub hash: u128,
    /// The number of its occurrences in the source.
    pub count: u32,
    /// Whether it is executable code in at least one place.
    pub is_code: bool,
}

/// There are more distinct pages than a table may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are more than {MOST_PAGES} distinct pages, the most that a table has")]
pub struct TooManyPages;

/// Collects the pages of a source. The result depends on the pages only, not on their order or
/// their distribution over builders.
#[derive(Clone, Debug)]
pub struct Builder {
    sampling: Sampling,
    seen: HashMap<(Sampled, u128), Occurrences>,
    zero_pages: u64,
}

#[derive(Clone, Copy, Debug)]
struct Occurrences {
    count: u32,
    is_code: bool,
}

/// The distinct pages of a source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    pub(super) sampling: Sampling,
    pub(super) zero_pages: u64,
    pub(super) records: Vec<Record>,
}

impl Builder {
    /// An empty builder.
    #[must_use]
    pub fn new(sampling: Sampling) -> Self {
        Self { sampling, seen: HashMap::new(), zero_pages: 0 }
    }

    /// Adds one page of the source.
    pub fn add(&mut self, page: &Page, is_code: bool) -> Result<(), TooManyPages> {
        let sampled = self.sampling.sample(page);
        if sampled == Sampled::default() && is_zero(page) {
            self.add_zeros(1);
            return Ok(());
        }
        self.put((sampled, hash(page)), Occurrences { count: 1, is_code })
    }

    /// Adds `pages` pages of zeros, which need not be read.
    pub const fn add_zeros(&mut self, pages: u64) {
        self.zero_pages = self.zero_pages.saturating_add(pages);
    }

    /// Adds everything that another builder has collected; that one is empty afterwards.
    pub fn merge(&mut self, other: &mut Self) -> Result<(), TooManyPages> {
        self.add_zeros(std::mem::take(&mut other.zero_pages));
        other.seen.drain().try_for_each(|(page, seen)| self.put(page, seen))
    }

    fn put(&mut self, page: (Sampled, u128), seen: Occurrences) -> Result<(), TooManyPages> {
        if let Some(known) = self.seen.get_mut(&page) {
            known.count = known.count.saturating_add(seen.count);
            known.is_code |= seen.is_code;
            return Ok(());
        }
        if self.seen.len() >= MOST_PAGES {
            return Err(TooManyPages);
        }
        self.seen.insert(page, seen);
        Ok(())
    }

    /// The number of distinct pages so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.seen.len()
    }

    /// Whether there are no pages with a record.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.seen.is_empty()
    }

    /// The table, with its records sorted.
    #[must_use]
    pub fn finish(self) -> Table {
        let record = |((sampled, hash), seen): (_, Occurrences)| {
            let Occurrences { count, is_code } = seen;
            Record { sampled, hash, count, is_code }
        };
        let mut records: Vec<Record> = self.seen.into_iter().map(record).collect();
        records.sort_unstable();
        Table { sampling: self.sampling, zero_pages: self.zero_pages, records }
    }
}

impl Table {
    /// The distinct pages, in order.
    #[must_use]
    pub fn records(&self) -> &[Record] {
        &self.records
    }
}
