//! A compact map from ids to 32-bit values: the last time, or a node's index.
//!
//! Problem: the standard map takes up to 37 bytes per entry and, while it doubles, half of that
//! in addition.
//!
//! Idea: open addressing with linear probing, with the entries in the order of their mixed ids
//! (as in Robin Hood hashing; Celis 1986), 12 bytes each. The home slot of an entry is its mixed
//! id scaled to the number of home slots. So a larger table has the same sequence with wider
//! gaps: it grows *in place*, by a third, and there are never two tables. The mix is a bijection,
//! so only the mixed id is stored.
//!
//! Invariants: entries are in ascending order; none is before its home slot; between an entry's
//! home slot and the entry no slot is empty; empty slots compare as the largest. The last entries
//! may overflow into slots beyond the home slots.
//!
//! Cost: 16 to 22 bytes per entry; each look-up reads four neighbouring slots. Left out:
//! resistance to ids chosen to collide, which can make a trace slow (O(N) per reference) but not
//! wrong.

use super::NONE;

/// An entry, or an empty slot if its value is [`NONE`]. The id is in two halves to avoid padding.
#[derive(Debug, Clone, Copy)]
struct HashSlot {
    high: u32,
    low: u32,
    value: u32,
}

const EMPTY: HashSlot = HashSlot { high: u32::MAX, low: u32::MAX, value: NONE };

impl HashSlot {
    #[expect(clippy::cast_possible_truncation, reason = "that is the lower half")]
    const fn new(mixed: u64, value: u32) -> Self {
        Self { high: (mixed >> 32) as u32, low: mixed as u32, value }
    }

    const fn mixed(self) -> u64 {
        (self.high as u64) << 32 | self.low as u64
    }

    const fn is_empty(self) -> bool {
        self.value == NONE
    }
}

/// Slots searched at once. The last `WINDOW` slots are always empty, so every search ends.
const WINDOW: usize = 4;
const LEAST_HOMES: usize = 64;
/// The most entries per home slot, in eighths.
const FULL_EIGHTHS: usize = 6;

/// The map.
#[derive(Debug, Clone)]
pub(super) struct HashTable {
    slots: Vec<HashSlot>,
    homes: usize,
    len: usize,
}

/// A bijection that spreads ids over all 64 bits (the finalizer of SplitMix64; Steele 2014).
#[inline]
pub(super) const fn mix(id: u64) -> u64 {
    let id = (id ^ (id >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let id = (id ^ (id >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    id ^ (id >> 31)
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "it is below `homes`")]
fn home(mixed: u64, homes: usize) -> usize {
    ((u128::from(mixed) * homes as u128) >> 64) as usize
}

impl HashTable {
    pub(super) fn new() -> Self {
        Self { slots: vec![EMPTY; LEAST_HOMES + WINDOW], homes: LEAST_HOMES, len: 0 }
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.slots.capacity() * size_of::<HashSlot>()
    }

    /// Makes room for `more` entries, so that adding them does not make the table grow.
    pub(super) fn reserve(&mut self, more: usize) {
        while (self.len + more) * 8 > self.homes * FULL_EIGHTHS {
            self.grow();
        }
    }

    /// Reads both ends of the window at the home slot of `mixed`, to bring it into the cache.
    #[inline]
    pub(super) fn glance(&self, mixed: u64) -> u32 {
        let home = home(mixed, self.homes);
        self.slots[home].low ^ self.slots[home + WINDOW - 1].low
    }

    /// Sets the value of an id, given [`mix`]ed, and returns the previous value, or [`NONE`].
    /// There must be room.
    #[inline]
    pub(super) fn replace(&mut self, mixed: u64, value: u32) -> u32 {
        let at = self.position(mixed);
        let slot = &mut self.slots[at];
        if slot.mixed() == mixed && !slot.is_empty() {
            return std::mem::replace(&mut slot.value, value);
        }
        self.insert_at(at, HashSlot::new(mixed, value));
        NONE
    }

    /// The position of an id, or the one where it would be inserted. From its home slot on come
    /// the smaller entries, then larger ones or empty slots. The smaller ones in a window are
    /// counted, which needs no branch prediction.
    #[inline]
    fn position(&self, mixed: u64) -> usize {
        let mut at = home(mixed, self.homes);
        while let Some(window) = self.slots[at..].first_chunk::<WINDOW>() {
            let smaller =
                window.iter().map(|slot| usize::from(slot.mixed() < mixed)).sum::<usize>();
            at += smaller;
            if smaller < WINDOW {
                break;
            }
        }
        at
    }

    /// The value of an id, given [`mix`]ed; `value` if it is new.
    pub(super) fn find_or_insert(&mut self, mixed: u64, value: u32) -> u32 {
        self.reserve(1);
        match self.replace(mixed, value) {
            NONE => value,
            found => {
                self.replace(mixed, found);
                found
            }
        }
    }

    /// Inserts an entry before the one at `at`, which moves up together with the entries that
    /// touch it.
    fn insert_at(&mut self, at: usize, slot: HashSlot) {
        let run = self.slots[at..].iter().position(|slot| slot.is_empty()).unwrap_or(0);
        let empty = at + run;
        if empty + WINDOW == self.slots.len() {
            self.slots.reserve_exact(16);
            self.slots.push(EMPTY);
        }
        self.slots.copy_within(at..empty, at + 1);
        self.slots[at] = slot;
        self.len += 1;
    }

    /// Removes an id, given [`mix`]ed; the entries that it had displaced move back.
    pub(super) fn remove(&mut self, mixed: u64) -> Option<u32> {
        let at = self.position(mixed);
        let found = self.slots[at];
        if found.is_empty() || found.mixed() != mixed {
            return None;
        }
        let homes = self.homes;
        let displaced = (at + 1..self.slots.len())
            .take_while(|&next| {
                let slot = self.slots[next];
                !slot.is_empty() && home(slot.mixed(), homes) < next
            })
            .count();
        self.slots.copy_within(at + 1..at + 1 + displaced, at);
        self.slots[at + displaced] = EMPTY;
        self.len -= 1;
        Some(found.value)
    }

    /// All values.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut u32> {
        self.slots.iter_mut().filter(|slot| !slot.is_empty()).map(|slot| &mut slot.value)
    }

    /// Adds a third more home slots. The entries are packed against the end, then moved forward
    /// from there. The last one's place is known to fit, so none is overwritten before it is
    /// read.
    fn grow(&mut self) {
        let homes = self.homes + self.homes / 3;
        let entries = self.slots.iter().filter(|slot| !slot.is_empty());
        let end = entries.fold(0, |free, slot| free.max(home(slot.mixed(), homes)) + 1);
        let old_end = self.slots.len();
        let new_end = end.max(homes).max(old_end) + WINDOW;
        self.slots.reserve_exact(new_end - old_end);
        self.slots.resize(new_end, EMPTY);
        let mut to = new_end;
        for from in (0..old_end).rev() {
            if !self.slots[from].is_empty() {
                to -= 1;
                self.slots.swap(from, to);
            }
        }
        let mut free = 0;
        for from in to..new_end {
            let slot = std::mem::replace(&mut self.slots[from], EMPTY);
            let at = home(slot.mixed(), homes).max(free);
            self.slots[at] = slot;
            free = at + 1;
        }
        self.homes = homes;
    }
}
