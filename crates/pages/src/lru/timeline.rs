//! The sequence of reference times, limited by a capacity and renumbered when it is used up.
//!
//! Invariants: `next` is the time of the next reference; exactly `live` times below `next` are
//! live. Every time from `next` on is marked live in advance, so a new reference changes nothing:
//! only times *before* an earlier one are ever counted. Renumbering keeps the order of the live
//! times.
//!
//! Cost: the capacity is [`SLACK`] times the live times, so a renumbering (one `rank` per id)
//! occurs once per `SLACK − 1` references to each id: a few per cent.

/// The times of the last touch of each id, with counts. Every time is live until it is taken.
pub trait LiveTimes {
    /// All times below `capacity` are live; an implementation may round `capacity` up.
    fn full(capacity: u32) -> Self;

    /// The number of times.
    fn capacity(&self) -> u32;

    /// The number of live times before `time`.
    fn rank(&self, time: u32) -> u32;

    /// Does the same, and `time` is no longer live.
    fn take(&mut self, time: u32) -> u32;

    /// Reads the memory that `take(time)` will read, to bring it into the cache; the result means
    /// nothing.
    fn glance(&self, time: u32) -> u64;

    /// Memory used.
    fn bytes(&self) -> usize;
}

/// Times per live one. More costs memory (10 bits per id for each 8); fewer renumbers more often.
const SLACK: usize = 8;
/// The least number of times.
const LEAST: usize = 1 << 14;

/// The times in use.
#[derive(Debug, Clone)]
pub(super) struct Timeline<L> {
    times: L,
    next: u32,
    live: u32,
}

impl<L: LiveTimes> Timeline<L> {
    pub(super) fn new(expected_ids: usize) -> Self {
        Self { times: L::full(capacity_for(expected_ids)), next: 0, live: 0 }
    }

    /// The number of times left before a renumbering.
    pub(super) fn left(&self) -> usize {
        (self.times.capacity() - self.next) as usize
    }

    /// The time of this reference; the next one gets the following time.
    pub(super) fn tick(&mut self) -> u32 {
        let now = self.next;
        self.next += 1;
        now
    }

    /// The distance of a reference whose id was last touched at `last`; that time is no longer
    /// live.
    pub(super) fn distance(&mut self, last: u32) -> u64 {
        u64::from(self.live - self.times.take(last))
    }

    /// Counts an id's first reference.
    pub(super) fn first(&mut self) {
        self.live += 1;
    }

    /// Removes an id that was last touched at `last`.
    pub(super) fn forget(&mut self, last: u32) {
        self.times.take(last);
        self.live -= 1;
    }

    pub(super) fn glance(&self, time: u32) -> u64 {
        self.times.glance(time)
    }

    /// Renumbers the live times, which are `last`, from 0 on without gaps.
    pub(super) fn renumber<'a>(&mut self, last: impl Iterator<Item = &'a mut u32>) {
        for time in last {
            *time = self.times.rank(*time);
        }
        self.times = L::full(capacity_for(self.live as usize));
        self.next = self.live;
    }

    pub(super) fn bytes(&self) -> usize {
        self.times.bytes()
    }
}

/// `SLACK` times for each id, but less than the value that means "none".
fn capacity_for(ids: usize) -> u32 {
    assert!(ids <= 1 << 31, "{ids} ids in one LRU stack; at most {} can be numbered", 1_u32 << 31);
    let wanted = ids.saturating_mul(SLACK).max(LEAST);
    u32::try_from(wanted).unwrap_or(u32::MAX - 1).min(u32::MAX - 1)
}
