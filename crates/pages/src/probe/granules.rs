//! The state of each granule, the moment of its revocation, and the random draw of the next one.
//!
//! The accessible granules are in an unordered array, and each knows its place there, so a draw,
//! a revocation and a return are O(1). A uniform draw among them makes the probes unbiased. A
//! fixed order would find each granule just one round after its last probe, and so miss short
//! returns (arrivals that see time averages: Wolff 1982).
//!
//! If there are more than [`MAX_TRACKED`](super::MAX_TRACKED) granules, one in each of that
//! number of equal parts is tracked. Moments are kept as milliseconds since the start in 32 bits;
//! the age of a granule that stays revoked for weeks stops at [`LONGEST_MS`].

use model::Time;

use super::{
    TICK,
    life_table::{FRESH, FRESH_TICKS, IDLE, UNKNOWN, class_of},
};

/// The longest time in one state that is measured: 12 days.
const LONGEST_MS: u32 = 1 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessState {
    /// The guest may touch it unseen.
    Accessible,
    /// Its revocation is requested.
    Pending,
    /// The next touch traps.
    Revoked,
    /// It cannot be revoked now: it shares all of its pages, or the guest has given them up.
    Absent,
    /// Another component uses it.
    Excluded,
}

#[derive(Clone, Copy, Debug)]
struct Granule {
    /// The moment of its revocation (or of the request), in ms since the start, modulo 2^32.
    since_ms: u32,
    /// The moment of its last touch that was seen (or of the start), likewise.
    seen_ms: u32,
    /// Its place among the accessible.
    slot: u32,
    /// Ticks for which it had not been touched when it was revoked.
    before: u16,
    state: AccessState,
    class: u8,
}

/// The tracked granules of one guest. An *index* counts tracked granules, an *id* all of them.
#[derive(Clone, Debug)]
pub(super) struct Granules {
    all: u32,
    list: Vec<Granule>,
    accessible: Vec<u32>,
    excluded: u32,
    random: fastrand::Rng,
    start: Time,
}

impl Granules {
    /// Memory per tracked granule: its state, and its place among the accessible.
    #[cfg(test)]
    pub(super) const BYTES: usize = size_of::<Granule>() + size_of::<u32>();

    pub(super) fn new(all: u32, most: u32, seed: u64, now: Time) -> Self {
        let tracked = all.min(most);
        let list = (0..tracked).map(|slot| Granule {
            since_ms: 0,
            seen_ms: 0,
            slot,
            before: 0,
            state: AccessState::Accessible,
            class: UNKNOWN,
        });
        Self {
            all,
            list: list.collect(),
            accessible: (0..tracked).collect(),
            excluded: 0,
            random: fastrand::Rng::with_seed(seed),
            start: now,
        }
    }

    pub(super) fn all(&self) -> u32 {
        self.all
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_TRACKED")]
    pub(super) fn tracked(&self) -> u32 {
        self.list.len() as u32
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_TRACKED")]
    pub(super) fn accessible(&self) -> u32 {
        self.accessible.len() as u32
    }

    /// Tracked granules that are not excluded.
    pub(super) fn counted(&self) -> u32 {
        self.tracked() - self.excluded
    }

    /// The number of granules that a counted one stands for.
    pub(super) fn scale(&self) -> f64 {
        f64::from(self.all) / f64::from(self.counted().max(1))
    }

    /// The first granule of a part.
    #[expect(clippy::cast_possible_truncation, reason = "at most `all`")]
    fn part(&self, index: u32) -> u32 {
        (u64::from(index) * u64::from(self.all) / u64::from(self.tracked().max(1))) as u32
    }

    /// The granule that stands for a part: a fixed one, at a pseudo-random offset, so that no
    /// stride of the guest matches.
    pub(super) fn id(&self, index: u32) -> u32 {
        let (first, next) = (self.part(index), self.part(index + 1));
        first + (index.wrapping_mul(0x9e37_79b9) >> 8) % (next - first).max(1)
    }

    /// The index of a granule, if it is tracked.
    #[expect(clippy::cast_possible_truncation, reason = "at most `tracked`")]
    pub(super) fn find(&self, id: u32) -> Option<u32> {
        if id >= self.all {
            return None;
        }
        let near = (u64::from(id) * u64::from(self.tracked()) / u64::from(self.all)) as u32;
        (near..=near + 1).find(|&index| index < self.tracked() && self.id(index) == id)
    }

    pub(super) fn state(&self, index: u32) -> AccessState {
        self.list[index as usize].state
    }

    /// The class of its lifetime: the class at its revocation, or the one that it would have now.
    pub(super) fn class(&mut self, index: u32, now: Time) -> u8 {
        let Granule { state, class, .. } = self.list[index as usize];
        match class {
            IDLE | FRESH if state == AccessState::Revoked => class,
            IDLE | FRESH if self.seen(index, now) < FRESH_TICKS => FRESH,
            IDLE | FRESH => IDLE,
            _ => class,
        }
    }

    /// Sets the granule's class from its lifetime in ticks.
    pub(super) fn classify(&mut self, index: u32, lifetime: u32) {
        self.list[index as usize].class = class_of(lifetime);
    }

    /// The number of whole ticks since it was revoked; 0 before that.
    pub(super) fn age(&mut self, index: u32, at: Time) -> u32 {
        let at = self.ms(at);
        ticks_since(&mut self.list[index as usize].since_ms, at)
    }

    /// Records a touch. Returns its weight as a reference: 0 if the last touch was seen just
    /// before, and 1 if that was a tick ago or more, so that a tick began in between.
    pub(super) fn saw(&mut self, index: u32, at: Time) -> f64 {
        let at = self.ms(at);
        let seen = &mut self.list[index as usize].seen_ms;
        let since = at.wrapping_sub(std::mem::replace(seen, at));
        f64::from(since.min(TICK_MS)) / f64::from(TICK_MS)
    }

    /// The number of whole ticks since its last touch that was seen.
    pub(super) fn seen(&mut self, index: u32, at: Time) -> u32 {
        let at = self.ms(at);
        ticks_since(&mut self.list[index as usize].seen_ms, at)
    }

    #[expect(clippy::cast_possible_truncation, reason = "modulo 2^32 is meant")]
    fn ms(&self, at: Time) -> u32 {
        at.since(self.start).0 as u32
    }

    /// Draws an accessible granule and makes it pending.
    pub(super) fn draw(&mut self, now: Time) -> Option<u32> {
        if self.accessible.is_empty() {
            return None;
        }
        let index = self.accessible[self.random.usize(..self.accessible.len())];
        self.remove(index);
        self.list[index as usize].state = AccessState::Pending;
        self.list[index as usize].since_ms = self.ms(now);
        Some(index)
    }

    /// Removes a granule from the accessible ones.
    fn remove(&mut self, index: u32) {
        let slot = self.list[index as usize].slot;
        self.accessible.swap_remove(slot as usize);
        if let Some(&moved) = self.accessible.get(slot as usize) {
            self.list[moved as usize].slot = slot;
        }
    }

    /// Excludes this granule from draws and from the count.
    pub(super) fn exclude(&mut self, index: u32) {
        match self.state(index) {
            AccessState::Excluded => return,
            AccessState::Accessible => self.remove(index),
            AccessState::Pending | AccessState::Revoked | AccessState::Absent => {}
        }
        self.list[index as usize].state = AccessState::Excluded;
        self.excluded += 1;
    }

    /// A pending granule was revoked, `before` ticks after its last touch.
    pub(super) fn revoke(&mut self, index: u32, at: Time, before: u32) {
        let (ms, class) = (self.ms(at), self.class(index, at));
        let granule = &mut self.list[index as usize];
        if granule.state == AccessState::Pending {
            granule.state = AccessState::Revoked;
            granule.class = class;
            granule.since_ms = ms;
            granule.before = u16::try_from(before).unwrap_or(u16::MAX);
        }
    }

    /// A pending granule cannot be revoked. If the guest has given it up, the record of its use
    /// is void.
    pub(super) fn lose(&mut self, index: u32, at: Time, is_given_up: bool) {
        let ms = self.ms(at);
        let granule = &mut self.list[index as usize];
        if granule.state == AccessState::Pending {
            granule.state = AccessState::Absent;
            granule.since_ms = ms;
            if is_given_up {
                granule.class = IDLE;
            }
        }
    }

    /// Ticks for which it had not been touched when it was revoked.
    pub(super) fn before(&self, index: u32) -> u32 {
        u32::from(self.list[index as usize].before)
    }

    /// A random number from 0 to 1.
    pub(super) fn chance(&mut self) -> f64 {
        self.random.f64()
    }

    /// Makes a granule accessible again.
    pub(super) fn admit(&mut self, index: u32) {
        let slot = self.accessible();
        let granule = &mut self.list[index as usize];
        granule.state = AccessState::Accessible;
        granule.slot = slot;
        self.accessible.push(index);
    }
}

/// Whole ticks since a moment, both in ms modulo 2^32; 0 before it. A moment that is nearly too
/// old to be distinguished from a future one is moved up.
fn ticks_since(moment_ms: &mut u32, at_ms: u32) -> u32 {
    let age = at_ms.wrapping_sub(*moment_ms);
    if age > u32::MAX / 2 + LONGEST_MS / 2 {
        return 0;
    }
    if age > LONGEST_MS {
        *moment_ms = at_ms.wrapping_sub(LONGEST_MS);
    }
    age.min(LONGEST_MS) / TICK_MS
}

#[expect(clippy::cast_possible_truncation, reason = "a constant of 100")]
const TICK_MS: u32 = TICK.0 as u32;
