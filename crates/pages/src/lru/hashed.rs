//! The stack over any 64-bit ids: a compact table of last times, and the live times.
//!
//! A reference mostly waits for memory: first for the id's slot, then for the bits of its last
//! time. [`HashedStack::touch_all`] therefore works in rounds over a batch. It reads every slot
//! once (the reads are independent, so the CPU has many in flight), then looks up all ids, then
//! reads the bits, then counts. The rounds see the same states as single references would,
//! because they use the table in order and the times in order.
//!
//! Cost: 12 bytes per slot and 10 bits of times per id; at the worst moment of growth it is less
//! than 21 bytes per id in all ([`HashedStack::bytes`]).

use std::hint::black_box;

use super::{
    Bitmap, NONE, StackDistance,
    table::{HashTable, mix},
    timeline::{LiveTimes, Timeline},
};

/// References per round: enough to keep the memory busy, few enough to stay in the L1 cache.
const BATCH: usize = 256;

/// An LRU stack over any ids.
#[derive(Debug, Clone)]
pub struct HashedStack<L = Bitmap> {
    last: HashTable,
    times: Timeline<L>,
}

impl<L: LiveTimes> HashedStack<L> {
    /// An empty stack.
    #[must_use]
    pub fn new() -> Self {
        Self { last: HashTable::new(), times: Timeline::new(0) }
    }

    /// Touches the ids in turn and passes the distance of each to `tell`.
    pub fn touch_all(&mut self, ids: &[u64], mut tell: impl FnMut(Option<u64>)) {
        for batch in ids.chunks(BATCH) {
            self.make_room(batch.len());
            let mut mixed = [0; BATCH];
            let mut read = 0;
            for (mixed, id) in mixed.iter_mut().zip(batch) {
                *mixed = mix(*id);
                read ^= self.last.glance(*mixed);
            }
            black_box(read);
            let mut last = [NONE; BATCH];
            for (last, mixed) in last.iter_mut().zip(&mixed[..batch.len()]) {
                *last = self.last.replace(*mixed, self.times.tick());
            }
            let last = &last[..batch.len()];
            let known = last.iter().filter(|last| **last != NONE);
            black_box(known.fold(0, |read, last| read ^ self.times.glance(*last)));
            for last in last {
                tell(self.distance(*last));
            }
        }
    }

    /// Removes an id from the stack; false if it is not there.
    pub fn forget(&mut self, id: u64) -> bool {
        let last = self.last.remove(mix(id));
        last.inspect(|last| self.times.forget(*last)).is_some()
    }

    /// Memory used, without the allocator's overhead.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.last.bytes() + self.times.bytes()
    }

    fn make_room(&mut self, references: usize) {
        self.last.reserve(references);
        if self.times.left() < references {
            self.times.renumber(self.last.values_mut());
        }
    }

    #[inline]
    fn distance(&mut self, last: u32) -> Option<u64> {
        if last == NONE {
            self.times.first();
            return None;
        }
        Some(self.times.distance(last))
    }
}

impl<L: LiveTimes> Default for HashedStack<L> {
    fn default() -> Self {
        Self::new()
    }
}

impl<L: LiveTimes> StackDistance for HashedStack<L> {
    fn touch(&mut self, id: u64) -> Option<u64> {
        self.make_room(1);
        let last = self.last.replace(mix(id), self.times.tick());
        self.distance(last)
    }

    fn len(&self) -> usize {
        self.last.len()
    }
}
