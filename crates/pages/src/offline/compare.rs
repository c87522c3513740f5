//! Compares tables and computes their statistics in one walk through their sorted records.

use std::iter::Peekable;

use super::{Record, Sampled, Sampling, TableRef};

/// Pages, and how many of them are different.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amount {
    /// All pages.
    pub pages: u64,
    /// Distinct pages.
    pub distinct: u64,
}

/// The statistics of a table.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Statistics {
    /// All of its pages.
    pub all: Amount,
    /// The pages that are executable code.
    pub code: Amount,
    /// Pages of zeros, which are not in `all`.
    pub zeros: u64,
    /// Classes: different sampled words.
    pub classes: u64,
    /// Classes of one distinct page: there the sampled words alone identify the page.
    pub single_classes: u64,
    /// Distinct pages of the largest class.
    pub largest_class: u64,
    /// The average number of distinct pages in the class of a page of the table, including
    /// itself: the pages that a look at a page of the source must distinguish.
    pub mean_class: f64,
}

/// The pages that two tables have in common, and those of one only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overlap {
    /// Distinct pages that both have.
    pub both: u64,
    /// Of these, executable code in both.
    pub both_code: u64,
    /// Distinct pages of the first table only.
    pub only_first: u64,
    /// Distinct pages of the second table only.
    pub only_second: u64,
}

/// The possible savings by identical pages of several guests, if each has all of its source in
/// memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Savings {
    /// Pages of all guests together, without those of zeros.
    pub pages: u64,
    /// Pages beyond the first of each content.
    pub saved: u64,
}

/// Tables that cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "pages are sampled at {:?} in one table and at {:?} in the other; valid: tables of one sampling",
    .0.offsets(), .1.offsets()
)]
pub struct UnlikeSamplings(pub Sampling, pub Sampling);

impl Amount {
    fn add(&mut self, record: &Record) {
        self.pages += u64::from(record.count);
        self.distinct += 1;
    }
}

impl Statistics {
    /// Counts the statistics of a table.
    #[must_use]
    pub fn of(table: &TableRef<'_>) -> Self {
        let mut found = Self { zeros: table.zero_pages(), ..Self::default() };
        let (mut class, mut members) = (None::<Sampled>, 0_u64);
        let mut squares = 0.0;
        for record in table.records() {
            found.all.add(&record);
            if record.is_code {
                found.code.add(&record);
            }
            if class != Some(record.sampled) {
                squares += found.end_class(members);
                (class, members) = (Some(record.sampled), 0);
            }
            members += 1;
        }
        squares += found.end_class(members);
        found.mean_class = squares / (found.all.distinct as f64).max(1.0);
        found
    }

    fn end_class(&mut self, members: u64) -> f64 {
        self.classes += u64::from(members > 0);
        self.single_classes += u64::from(members == 1);
        self.largest_class = self.largest_class.max(members);
        (members as f64).powi(2)
    }
}

/// Counts the pages that both tables have, and those of one only.
pub fn overlap(first: &TableRef<'_>, second: &TableRef<'_>) -> Result<Overlap, UnlikeSamplings> {
    if first.sampling() != second.sampling() {
        return Err(UnlikeSamplings(first.sampling(), second.sampling()));
    }
    let mut found = Overlap::default();
    let mut tables = [first.records().peekable(), second.records().peekable()];
    while let Some(key) = least(&mut tables) {
        let [a, b] = [take(&mut tables[0], key), take(&mut tables[1], key)];
        match (a, b) {
            (Some(a), Some(b)) => {
                found.both += 1;
                found.both_code += u64::from(a.is_code && b.is_code);
            }
            (Some(_), None) => found.only_first += 1,
            (None, _) => found.only_second += 1,
        }
    }
    Ok(found)
}

/// The savings of the given numbers of guests of each source together.
pub fn mix(guests: &[(TableRef<'_>, u32)]) -> Result<Savings, UnlikeSamplings> {
    if let Some(unlike) = guests.windows(2).find(|two| two[0].0.sampling() != two[1].0.sampling()) {
        return Err(UnlikeSamplings(unlike[0].0.sampling(), unlike[1].0.sampling()));
    }
    let mut found = Savings::default();
    let mut tables: Vec<_> = guests.iter().map(|(table, _)| table.records().peekable()).collect();
    while let Some(key) = least(&mut tables) {
        let mut copies = 0_u64;
        for (table, (_, number)) in tables.iter_mut().zip(guests) {
            let count = take(table, key).map_or(0, |record| record.count);
            copies = copies.saturating_add(u64::from(count) * u64::from(*number));
        }
        found.pages = found.pages.saturating_add(copies);
        found.saved = found.saved.saturating_add(copies.saturating_sub(1));
    }
    Ok(found)
}

/// The sort key of a table.
type Key = (Sampled, u128);

const fn key(record: &Record) -> Key {
    (record.sampled, record.hash)
}

/// The next page in any of them.
fn least<I: Iterator<Item = Record>>(tables: &mut [Peekable<I>]) -> Option<Key> {
    tables.iter_mut().filter_map(|table| table.peek().map(key)).min()
}

/// Takes that page's record if it is this table's next one.
fn take<I: Iterator<Item = Record>>(table: &mut Peekable<I>, wanted: Key) -> Option<Record> {
    table.next_if(|record| key(record) == wanted)
}
