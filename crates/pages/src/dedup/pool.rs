//! The slots of a group's pool: their use, and the order in which they are handed out.
//!
//! A slot holds one page of read-only content. It is in use as long as a page shares it. Slots
//! are handed out in ascending order: pages that are merged one after the other become adjacent
//! in the pool, as they are in the guest, and share one mapping ([`super::runs()`]).

/// The hash of content that is not read yet. Content that really has this hash is not listed.
const UNKNOWN: u64 = 0;

/// One slot. There is one for each page of the pool; it is packed, or a quarter of it would be
/// padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C, packed(4))]
struct PoolSlot {
    hash: u64,
    sharers: u32,
}

/// The slots of one group.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    slots: Vec<PoolSlot>,
    /// The slot at which the search for a free one continues.
    next: usize,
    used: u32,
    shared: u64,
    most: u32,
}

impl Pool {
    /// An empty pool that will have at most `most` slots.
    #[must_use]
    pub fn new(most: u32) -> Self {
        Self { most: most.min(super::Book::MOST_SLOTS), ..Self::default() }
    }

    /// Takes a slot for this content, with no sharer yet; the caller [shares](Self::share) or
    /// [leaves](Self::leave) it at once. `None`: all slots are in use.
    pub fn take(&mut self, hash: u64) -> Option<u32> {
        let at = self.free()?;
        if at == self.slots.len() {
            self.slots.push(PoolSlot::default());
        }
        // A slot that is taken but not yet shared counts as one sharer, or it would be handed out
        // twice.
        self.slots[at] = PoolSlot { hash, sharers: 1 };
        self.next = at + 1;
        self.used += 1;
        u32::try_from(at).ok()
    }

    /// Takes over a slot that is in use in an adopted pool. It has one sharer, as after
    /// [`Self::take`]; the caller [sets](Self::set_hash) its hash later. `false`: there is no
    /// such slot, or it is already in use.
    pub fn adopt(&mut self, slot: u32) -> bool {
        if slot >= self.most || self.hash(slot).is_some() {
            return false;
        }
        let at = slot as usize;
        if at >= self.slots.len() {
            self.slots.resize(at + 1, PoolSlot::default());
        }
        self.slots[at] = PoolSlot { hash: UNKNOWN, sharers: 1 };
        self.used += 1;
        true
    }

    /// Sets the hash of an adopted slot. `false`: it is no longer in use.
    pub fn set_hash(&mut self, slot: u32, hash: u64) -> bool {
        let slot = self.slots.get_mut(slot as usize).filter(|slot| slot.sharers > 0);
        slot.map(|slot| slot.hash = hash).is_some()
    }

    /// The next free slot after the last one handed out, with wraparound, or a new one.
    fn free(&self) -> Option<usize> {
        let is_free = |at: &usize| self.slots[*at].sharers == 0;
        if (self.used as usize) < self.slots.len() {
            let from = self.next.min(self.slots.len());
            if let Some(at) = (from..self.slots.len()).find(is_free) {
                return Some(at);
            }
            if self.slots.len() == self.most as usize || self.slots.len() > 2 * self.used as usize {
                return (0..from).find(is_free);
            }
        }
        (self.slots.len() < self.most as usize).then_some(self.slots.len())
    }

    /// Adds a sharer to a slot in use.
    pub fn share(&mut self, slot: u32) {
        if let Some(slot) = self.slots.get_mut(slot as usize).filter(|slot| slot.sharers > 0) {
            slot.sharers += 1;
            self.shared += 1;
        }
    }

    /// Removes a sharer. Returns the hash of the content if it was the last: then the slot is
    /// free, and its memory can be given back.
    pub fn leave(&mut self, slot: u32) -> Option<u64> {
        let slot = self.slots.get_mut(slot as usize).filter(|slot| slot.sharers > 0)?;
        slot.sharers -= 1;
        if slot.sharers > 0 {
            self.shared -= 1;
            return None;
        }
        self.used -= 1;
        Some(slot.hash)
    }

    /// The hash of a slot's content; `None`: the slot is not in use.
    #[must_use]
    pub fn hash(&self, slot: u32) -> Option<u64> {
        self.slots.get(slot as usize).filter(|slot| slot.sharers > 0).map(|slot| slot.hash)
    }

    /// The slots in use with the hashes of their contents, where these are known.
    pub fn hashes(&self) -> impl Iterator<Item = (u32, u64)> {
        (0..)
            .zip(&self.slots)
            .filter(|(_, slot)| slot.sharers > 0 && slot.hash != UNKNOWN)
            .map(|(at, slot)| (at, slot.hash))
    }

    /// The number of sharers of a slot.
    #[must_use]
    pub fn sharers(&self, slot: u32) -> u32 {
        self.slots.get(slot as usize).map_or(0, |slot| slot.sharers)
    }

    /// Slots in use: pages of memory.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.used
    }

    /// Pages saved by the pool: all sharers but one of each slot.
    #[must_use]
    pub fn saved(&self) -> u64 {
        self.shared
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn twelve_bytes_a_slot() {
        assert_eq!(size_of::<PoolSlot>(), 12);
    }

    #[test]
    fn slots_lie_side_by_side_in_the_order_in_which_they_were_taken() {
        let mut pool = Pool::new(100);
        let taken: Vec<_> = (10..20).map(|hash| pool.take(hash)).collect();
        assert_eq!(taken, (0..10).map(Some).collect::<Vec<_>>());
        assert_eq!((pool.leave(3), pool.leave(4)), (Some(13), Some(14)));
        assert_eq!((pool.hash(3), pool.hash(5), pool.hashes().count()), (None, Some(15), 8));
        assert_eq!(pool.take(0), Some(10), "not into a gap while there is room behind");
    }

    #[test]
    fn a_pool_taken_over_has_its_slots_where_they_were() {
        let mut pool = Pool::new(100);
        assert!(pool.adopt(7) && pool.adopt(99) && pool.adopt(3));
        assert!(!pool.adopt(7) && !pool.adopt(100));
        assert!(pool.set_hash(7, 70) && !pool.set_hash(8, 80));
        assert_eq!(pool.hashes().collect::<Vec<_>>(), [(7, 70)]);
        assert_eq!((pool.used(), pool.saved(), pool.hash(7)), (3, 0, Some(70)));
        let taken: Vec<_> = (0..97).filter_map(|hash| pool.take(hash)).collect();
        assert_eq!((taken.len(), taken.contains(&7), pool.take(0)), (97, false, None));
        assert_eq!(pool.leave(7), Some(70));
    }

    #[test]
    fn gaps_are_used_when_the_pool_is_full_or_half_empty() {
        let mut pool = Pool::new(4);
        (0..4).for_each(|hash| assert!(pool.take(hash).is_some()));
        assert_eq!(pool.take(9), None);
        pool.leave(1);
        assert_eq!(pool.take(9), Some(1));
        let mut pool = Pool::new(1000);
        (0..10).for_each(|hash| assert!(pool.take(hash).is_some()));
        (0..8).for_each(|slot| assert!(pool.leave(slot).is_some()));
        assert_eq!(pool.take(9), Some(0));
    }

    proptest! {
        /// The used and saved numbers agree with the sharers; a slot in use is not handed out.
        #[test]
        fn nothing_leaks(steps in proptest::collection::vec((0..3_u8, 0..20_u32), 0..300)) {
            let mut pool = Pool::new(16);
            let mut truth = std::collections::BTreeMap::<u32, u64>::new();
            for (kind, number) in steps {
                match kind {
                    0 => if let Some(slot) = pool.take(number.into()) {
                        prop_assert!(truth.insert(slot, 1).is_none());
                    } else {
                        prop_assert_eq!(truth.len(), 16);
                    },
                    1 => {
                        pool.share(number);
                        truth.entry(number).and_modify(|sharers| *sharers += 1);
                    }
                    _ => {
                        let freed = pool.leave(number).is_some();
                        let left = truth.get_mut(&number).map(|sharers| { *sharers -= 1; *sharers });
                        prop_assert_eq!(freed, left == Some(0));
                        truth.retain(|_, sharers| *sharers > 0);
                    }
                }
                prop_assert_eq!(pool.used() as usize, truth.len());
                prop_assert_eq!(pool.saved(), truth.values().map(|sharers| sharers - 1).sum::<u64>());
            }
        }
    }
}
