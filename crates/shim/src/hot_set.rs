//! The hot set: accessible granules, oldest first (MEB §3.4). Only experiments use it, to compare
//! the paper's tracking with that of this project. The released shim is built without it
//! ([`IS_HERE`]).
//!
//! The hot set is a queue with room for every granule from the beginning, so that the fault
//! thread never allocates. A granule is pushed when its trap is served, and leaves when the queue
//! exceeds its limit. In between, touches of the granule cost nothing.

use std::collections::VecDeque;

/// Whether this shim has a hot set.
pub(crate) const IS_HERE: bool = cfg!(feature = "hot-set");

/// Granules in the order in which they became accessible.
pub(crate) struct AccessibleQueue {
    queue: VecDeque<u32>,
    most: usize,
}

impl AccessibleQueue {
    /// Has room for `granules`.
    pub(crate) fn new(granules: usize) -> Self {
        let most = if IS_HERE { granules + 1 } else { 1 };
        Self { queue: VecDeque::with_capacity(most), most }
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
    }

    /// Each granule is in the queue at most once. If that ever fails, the oldest granule is
    /// dropped.
    pub(crate) fn push(&mut self, granule: u32) {
        if self.queue.len() == self.most {
            self.queue.pop_front();
        }
        self.queue.push_back(granule);
    }

    /// Removes the oldest granule if there are more than `limit`.
    pub(crate) fn evict_beyond(&mut self, limit: u32) -> Option<u32> {
        if self.queue.len() > limit as usize { self.queue.pop_front() } else { None }
    }
}

#[cfg(all(test, feature = "hot-set"))]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_leaves_when_there_are_too_many() {
        let mut hot = AccessibleQueue::new(4);
        (1..=3).for_each(|granule| hot.push(granule));
        assert_eq!(hot.evict_beyond(3), None);
        assert_eq!((hot.evict_beyond(2), hot.evict_beyond(2)), (Some(1), None));
    }

    #[test]
    fn it_never_grows() {
        let mut hot = AccessibleQueue::new(4);
        let room = hot.queue.capacity();
        (0..100).for_each(|granule| hot.push(granule));
        assert_eq!((hot.queue.capacity(), hot.queue.len()), (room, 5));
    }
}
