//! A group's contents, each with one place where it is found.
//!
//! The index is a table of buckets of one cache line: eight entries of a 32-bit tag and a 32-bit
//! place. The high bits of a hash choose the bucket, its low bits are the tag. So one look in
//! 2^29 confuses two contents; the comparison before a merge notices that.
//!
//! **Bounded.** The table never grows. In a full bucket a guest's page is evicted: its next look
//! enters it again. A slot of the pool is never evicted for a guest's page: without its entry no
//! page could join those that share it.

use std::ops::Range;

/// Entries in a bucket.
const WAYS: usize = 8;
/// Pages for each bucket; the spare entries are for collisions.
const PAGES_PER_BUCKET: f64 = 6.0;
/// Bytes of the index for each page.
pub(super) const BYTES_PER_PAGE: f64 = size_of::<Bucket>() as f64 / PAGES_PER_BUCKET;

/// Marks a slot of the pool among places.
const POOL: u32 = 1 << 31;
/// No place: all real places are below.
const NOWHERE: u32 = u32::MAX;

/// Where a content is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContentLocation {
    /// A page of one of the group's VMs, by its number in the group; below [`Index::MOST_PAGES`].
    Guest(u32),
    /// A slot of the group's pool; below 2^31 - 1.
    Pool(u32),
}

#[derive(Clone, Copy, Debug)]
struct IndexEntry {
    tag: u32,
    place: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Bucket([IndexEntry; WAYS]);

const EMPTY: Bucket = Bucket([IndexEntry { tag: 0, place: NOWHERE }; WAYS]);

/// The index of one group.
#[derive(Clone, Debug)]
pub struct Index {
    buckets: Vec<Bucket>,
    /// The entry at which the search for an entry to evict starts.
    turn: usize,
}

impl Index {
    /// The most guests' pages in a group: 8 TiB.
    pub const MOST_PAGES: u32 = POOL;

    /// An index for a group of `pages` pages. It also works with more, but finds fewer in one
    /// pass.
    #[must_use]
    pub fn new(pages: u32) -> Self {
        let buckets = (f64::from(pages) / PAGES_PER_BUCKET).ceil().max(1.0);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2^32")]
        let buckets = buckets as usize;
        Self { buckets: vec![EMPTY; buckets], turn: 0 }
    }

    /// A page with this content was seen. Returns where the same content is found already;
    /// otherwise the index has it at this page from now on.
    pub fn meet(&mut self, hash: u64, page: u32) -> Option<ContentLocation> {
        match self.find(hash) {
            Some(ContentLocation::Guest(known)) if known == page => None,
            Some(place) => Some(place),
            None => {
                self.set(hash, ContentLocation::Guest(page));
                None
            }
        }
    }

    /// Where a content is found.
    #[must_use]
    pub fn find(&self, hash: u64) -> Option<ContentLocation> {
        let entries = &self.buckets[self.bucket(hash)].0;
        entries.iter().find(|entry| entry.is(hash)).map(|entry| entry.place())
    }

    /// Sets the place of this content. `false`: there is no room, because too many slots fall
    /// into its bucket.
    pub fn set(&mut self, hash: u64, place: ContentLocation) -> bool {
        let (bucket, turn) = (self.bucket(hash), self.turn);
        let entries = &mut self.buckets[bucket].0;
        let is_guest = |entry: &IndexEntry| entry.place < POOL;
        let same = entries.iter().position(|entry| entry.is(hash));
        let free = || entries.iter().position(|entry| entry.place == NOWHERE);
        let guest = || (turn..turn + WAYS).map(|at| at % WAYS).find(|&at| is_guest(&entries[at]));
        let Some(at) = same.or_else(free).or_else(guest) else { return false };
        entries[at] = IndexEntry { tag: tag(hash), place: place.number() };
        self.turn = (at + 1) % WAYS;
        true
    }

    /// Removes the content's entry if it names this place; an entry with another place stays.
    pub fn remove(&mut self, hash: u64, place: ContentLocation) {
        let bucket = self.bucket(hash);
        let gone = |entry: &&mut IndexEntry| entry.is(hash) && entry.place == place.number();
        if let Some(entry) = self.buckets[bucket].0.iter_mut().find(gone) {
            entry.place = NOWHERE;
        }
    }

    /// Removes the pages of guests that no longer exist because their VM has left the group.
    pub fn forget(&mut self, pages: Range<u32>) {
        for entry in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.0) {
            if entry.place < POOL && pages.contains(&entry.place) {
                entry.place = NOWHERE;
            }
        }
    }

    /// The size of the table in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }

    /// The high bits of the hash, scaled to the number of buckets.
    #[expect(clippy::cast_possible_truncation, reason = "below the number of buckets")]
    fn bucket(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
    }
}

impl IndexEntry {
    fn is(&self, hash: u64) -> bool {
        self.place != NOWHERE && self.tag == tag(hash)
    }

    fn place(&self) -> ContentLocation {
        if self.place < POOL {
            ContentLocation::Guest(self.place)
        } else {
            ContentLocation::Pool(self.place - POOL)
        }
    }
}

impl ContentLocation {
    fn number(self) -> u32 {
        match self {
            Self::Guest(page) => page % POOL,
            Self::Pool(slot) => slot.min(NOWHERE - POOL - 1) + POOL,
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
fn tag(hash: u64) -> u32 {
    hash as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum IndexOp {
        Meet { content: u64, page: u32 },
        Pool { content: u64, slot: u32 },
        Remove { content: u64 },
        Forget { first: u32 },
    }

    fn step() -> impl Strategy<Value = IndexOp> {
        let content = || 0..60_u64;
        prop_oneof![
            8 => (content(), 0..100_u32).prop_map(|(content, page)| IndexOp::Meet { content, page }),
            2 => (content(), 0..100_u32).prop_map(|(content, slot)| IndexOp::Pool { content, slot }),
            1 => content().prop_map(|content| IndexOp::Remove { content }),
            1 => (0..100_u32).prop_map(|first| IndexOp::Forget { first }),
        ]
    }

    /// Different contents have different hashes, spread over buckets and tags.
    fn hash(content: u64) -> u64 {
        (content + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }

    proptest! {
        /// A place that the index names is the last one that was set for that content and not
        /// removed.
        #[test]
        fn what_is_found_is_where_it_was_put_last(
            pages in 1..200_u32, steps in proptest::collection::vec(step(), 1..300),
        ) {
            let mut index = Index::new(pages);
            let mut truth = std::collections::BTreeMap::new();
            let bytes = index.bytes();
            for step in steps {
                match step {
                    IndexOp::Meet { content, page } => {
                        let known = truth.get(&content).copied();
                        match index.meet(hash(content), page) {
                            Some(place) => prop_assert_eq!(Some(place), known),
                            // The entry is there already, was unknown, or had been evicted.
                            None => {
                                prop_assert!(!matches!(known, Some(ContentLocation::Pool(_)))
                                    || index.find(hash(content)).is_some());
                                if index.find(hash(content)) == Some(ContentLocation::Guest(page)) {
                                    truth.insert(content, ContentLocation::Guest(page));
                                }
                            }
                        }
                    }
                    IndexOp::Pool { content, slot } => {
                        if index.set(hash(content), ContentLocation::Pool(slot)) {
                            truth.insert(content, ContentLocation::Pool(slot));
                        }
                    }
                    IndexOp::Remove { content } => {
                        if let Some(place) = truth.remove(&content) {
                            index.remove(hash(content), place);
                        }
                    }
                    IndexOp::Forget { first } => {
                        index.forget(first..first + 10);
                        truth.retain(|_, place| !matches!(
                            place, ContentLocation::Guest(page) if (first..first + 10).contains(page)
                        ));
                    }
                }
                for (content, place) in &truth {
                    let found = index.find(hash(*content));
                    match place {
                        ContentLocation::Pool(_) => prop_assert_eq!(found, Some(*place)),
                        ContentLocation::Guest(_) => prop_assert!(found.is_none() || found == Some(*place)),
                    }
                }
            }
            prop_assert_eq!(index.bytes(), bytes);
        }
    }

    #[test]
    fn nearly_all_of_a_group_is_found_again_in_the_next_pass() {
        const PAGES: u32 = 100_000;
        let mut index = Index::new(PAGES);
        (0..PAGES).for_each(|page| assert_eq!(index.meet(hash(page.into()), page), None));
        let found =
            |page: &u32| index.find(hash((*page).into())) == Some(ContentLocation::Guest(*page));
        let found = (0..PAGES).filter(found).count();
        assert!(found > PAGES as usize * 97 / 100, "{found}");
        assert!(index.bytes() as f64 <= f64::from(PAGES) * BYTES_PER_PAGE + 64.0);
    }

    #[test]
    fn a_guest_with_nothing_but_new_contents_drives_no_slot_out() {
        let mut index = Index::new(1_000);
        let slots: Vec<u32> = (0..800)
            .filter(|&slot| index.set(hash(slot.into()), ContentLocation::Pool(slot)))
            .collect();
        assert!(slots.len() > 700, "{}", slots.len());
        (0..100_000).for_each(|page| {
            index.meet(hash(u64::from(page) + 1_000_000), page);
        });
        assert!(
            slots.iter().all(|&s| index.find(hash(s.into())) == Some(ContentLocation::Pool(s)))
        );
    }

    #[test]
    fn an_index_that_is_far_too_small_stays_as_small_and_names_no_wrong_place() {
        let mut index = Index::new(60);
        let bytes = index.bytes();
        let set = (0..600)
            .filter(|&slot| index.set(hash(slot.into()), ContentLocation::Pool(slot)))
            .count();
        assert_eq!(set * size_of::<IndexEntry>(), bytes, "each entry is a slot's now");
        for page in 0..10_000_u32 {
            let content = u64::from(page % 1_000);
            match index.meet(hash(content), page) {
                Some(place) => assert_eq!(place, ContentLocation::Pool(page % 1_000)),
                None => assert_eq!(index.find(hash(content)), None, "no room for a page"),
            }
        }
        (0..600).for_each(|slot| index.remove(hash(slot.into()), ContentLocation::Pool(slot)));
        assert_eq!(index.meet(hash(7), 7).or(index.find(hash(7))), Some(ContentLocation::Guest(7)));
        assert_eq!(index.bytes(), bytes);
    }

    #[test]
    fn one_and_the_same_hash_for_everything_is_one_entry() {
        let mut index = Index::new(1_000);
        assert_eq!(index.meet(7, 1), None);
        assert_eq!(index.meet(7, 1), None, "the page itself");
        assert_eq!(index.meet(7, 2), Some(ContentLocation::Guest(1)));
        assert!(index.set(7, ContentLocation::Pool(0)));
        assert_eq!(index.meet(7, 1), Some(ContentLocation::Pool(0)));
        index.remove(7, ContentLocation::Guest(1));
        assert_eq!(
            index.find(7),
            Some(ContentLocation::Pool(0)),
            "another place is not what was removed"
        );
    }
}
