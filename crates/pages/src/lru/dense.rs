//! The stack over ids from 0 to n − 1, such as the granules of a VM: a plain array of last times.

use super::{
    Bitmap, NONE, StackDistance,
    timeline::{LiveTimes, Timeline},
};

/// An LRU stack over the ids below a number.
#[derive(Debug, Clone)]
pub struct DenseStack<L = Bitmap> {
    last: Vec<u32>,
    times: Timeline<L>,
    len: usize,
}

impl<L: LiveTimes> DenseStack<L> {
    /// An empty stack for the ids below `ids`.
    #[must_use]
    pub fn new(ids: usize) -> Self {
        Self { last: vec![NONE; ids], times: Timeline::new(ids), len: 0 }
    }

    /// Removes an id from the stack; false if it is not there.
    pub fn forget(&mut self, id: u64) -> bool {
        let slot = usize::try_from(id).ok().and_then(|id| self.last.get_mut(id));
        let Some(last) = slot.filter(|last| **last != NONE) else { return false };
        self.times.forget(std::mem::replace(last, NONE));
        self.len -= 1;
        true
    }

    /// Memory used, without the allocator's overhead.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&self.last[..]) + self.times.bytes()
    }
}

impl<L: LiveTimes> StackDistance for DenseStack<L> {
    fn touch(&mut self, id: u64) -> Option<u64> {
        if self.times.left() == 0 {
            self.times.renumber(self.last.iter_mut().filter(|last| **last != NONE));
        }
        let ids = self.last.len();
        let slot = usize::try_from(id).ok().and_then(|id| self.last.get_mut(id));
        let Some(slot) = slot else { panic!("id {id} in a stack of {ids} ids") };
        let last = std::mem::replace(slot, self.times.tick());
        if last == NONE {
            self.times.first();
            self.len += 1;
            return None;
        }
        Some(self.times.distance(last))
    }

    fn len(&self) -> usize {
        self.len
    }
}
