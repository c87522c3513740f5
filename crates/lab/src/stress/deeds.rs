//! The deeds and observations of a tormentor: lines of JSON, so that those of a killed one are
//! not lost.

use std::collections::BTreeMap;

use protocol::layout::{Counter, Shared};
use serde::{Deserialize, Serialize};

/// Counts since a tormentor began, or of all tormentors.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Deeds {
    /// Messages sent, good and bad.
    pub requests: u64,
    /// Answers that refused a request.
    pub refusals: u64,
    /// Granules that the shim says it revoked.
    pub revoked: u64,
    /// Pages that the shim says it merged.
    pub merged: u64,
    /// Pages that it had unshared, and that were merged at that moment.
    pub unshared: u64,
    /// Freed pages that it had the shim take, and that the shim took.
    pub taken: u64,
    /// Releases, after each of which no page was staged.
    pub releases: u64,
    /// Connections.
    pub connections: u64,
    /// Connections that have ended.
    pub disconnects: u64,
    /// Messages that were invalid, or invalid at that moment.
    pub garbage: u64,
    /// Traps read from the ring.
    pub traps_read: u64,
    /// Traps overwritten before they were read.
    pub traps_lost: u64,
    /// The longest time for an answer, in microseconds.
    pub longest_answer_us: u64,
    /// The shim's counters for each generation of guest RAM.
    pub counters: BTreeMap<u32, DeedCounters>,
    /// Violations of the protocol or of an invariant.
    pub complaints: Vec<String>,
}

/// The shim's own counters, in the order of generations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeedCounters {
    /// Faults served.
    pub traps: u64,
    /// Pages moved out.
    pub moved_out: u64,
    /// Pages moved back.
    pub moved_in: u64,
    /// Pages that the kernel refused to move out.
    pub pinned: u64,
    /// Staged pages that were discarded.
    pub discarded: u64,
    /// Number of times that the shim restored everything without a request.
    pub given_back: u64,
    /// Freed pages that were handed over to the kernel.
    pub handed_over: u64,
    /// The longest time for which a thread of QEMU's own has waited for the shim, in nanoseconds.
    pub longest_wait_ns: u64,
}

impl DeedCounters {
    fn of(shared: Shared<'_>) -> Self {
        Self {
            traps: shared.get(Counter::Traps),
            moved_out: shared.get(Counter::MovedOut),
            moved_in: shared.get(Counter::MovedIn),
            pinned: shared.get(Counter::Pinned),
            discarded: shared.get(Counter::Discarded),
            given_back: shared.get(Counter::GivenBack),
            handed_over: shared.get(Counter::HandedOver),
            longest_wait_ns: shared.get(Counter::LongestWaitNs),
        }
    }

    fn most(self, other: Self) -> Self {
        Self {
            traps: self.traps.max(other.traps),
            moved_out: self.moved_out.max(other.moved_out),
            moved_in: self.moved_in.max(other.moved_in),
            pinned: self.pinned.max(other.pinned),
            discarded: self.discarded.max(other.discarded),
            given_back: self.given_back.max(other.given_back),
            handed_over: self.handed_over.max(other.handed_over),
            longest_wait_ns: self.longest_wait_ns.max(other.longest_wait_ns),
        }
    }
}

impl Deeds {
    /// Records the shim's counters.
    pub(crate) fn note(&mut self, shared: Shared<'_>) {
        let known = self.counters.entry(shared.generation()).or_default();
        *known = known.most(DeedCounters::of(shared));
    }

    /// Adds the counts of another tormentor of the same shim.
    pub(crate) fn add(&mut self, other: Self) {
        self.requests += other.requests;
        self.refusals += other.refusals;
        self.revoked += other.revoked;
        self.merged += other.merged;
        self.unshared += other.unshared;
        self.taken += other.taken;
        self.releases += other.releases;
        self.connections += other.connections;
        self.disconnects += other.disconnects;
        self.garbage += other.garbage;
        self.traps_read += other.traps_read;
        self.traps_lost += other.traps_lost;
        self.longest_answer_us = self.longest_answer_us.max(other.longest_answer_us);
        for (generation, counters) in other.counters {
            let known = self.counters.entry(generation).or_default();
            *known = known.most(counters);
        }
        self.complaints.extend(other.complaints);
    }

    /// The sum of one of the shim's counters over all generations.
    pub fn total(&self, counter: impl Fn(&DeedCounters) -> u64) -> u64 {
        self.counters.values().map(counter).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_one_generation_are_not_counted_twice() {
        let seen = |generation, traps| Deeds {
            counters: [(generation, DeedCounters { traps, ..DeedCounters::default() })].into(),
            ..Deeds::default()
        };
        let mut all = seen(1, 10);
        all.add(seen(1, 30));
        all.add(seen(2, 5));
        assert_eq!(all.total(|counters| counters.traps), 35);
    }
}
