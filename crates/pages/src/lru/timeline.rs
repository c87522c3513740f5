//! The sequence of reference times, cut off at a capacity and renumbered when it is used up.
//!
//! Invariants: `next` is the time of the coming reference; exactly `live` times below `next` are
//! live; every time from `next` on is marked live in advance, so that a new reference changes
//! nothing: only times *before* an earlier one are ever counted. Renumbering keeps the order of the
//! live times.
//!
//! Cost: with a capacity of [`SLACK`] times the live ones, a renumbering (one `rank` per id) is
//! paid once per `SLACK − 1` references to each id: a few per cent.

/// Times of the last touch of each id, countable. Every time is live until it is taken.
pub trait LiveTimes {
    /// All times below `capacity` (rounded up to what suits) are live.
    fn full(capacity: u32) -> Self;

    /// How many times there are.
    fn capacity(&self) -> u32;

    /// How many live times lie before `time`.
    fn rank(&self, time: u32) -> u32;

    /// The same, and `time` is live no more.
    fn take(&mut self, time: u32) -> u32;

    /// Reads what `take(time)` will read, so that it is in the cache; the answer means nothing.
    fn glance(&self, time: u32) -> u64;

    /// Memory used.
    fn bytes(&self) -> usize;
}

/// Times per live one. More costs memory (10 bits per id for each 8), less renumbers more often.
const SLACK: usize = 8;
/// No fewer times than this.
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

    /// How many times are left before a renumbering.
    pub(super) fn left(&self) -> usize {
        (self.times.capacity() - self.next) as usize
    }

    /// The time of the coming reference, which is then past.
    pub(super) fn tick(&mut self) -> u32 {
        let now = self.next;
        self.next += 1;
        now
    }

    /// The distance of a reference whose last one was at `last`, which is live no more.
    pub(super) fn distance(&mut self, last: u32) -> u64 {
        u64::from(self.live - self.times.take(last))
    }

    /// Counts an id's first reference.
    pub(super) fn first(&mut self) {
        self.live += 1;
    }

    /// Takes out an id whose last reference was at `last`.
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

/// Room for the ids and as much again as `SLACK` says, short of the value that means none.
fn capacity_for(ids: usize) -> u32 {
    assert!(ids <= 1 << 31, "{ids} ids in one LRU stack; at most {} can be numbered", 1_u32 << 31);
    let wanted = ids.saturating_mul(SLACK).max(LEAST);
    u32::try_from(wanted).unwrap_or(u32::MAX - 1).min(u32::MAX - 1)
}
