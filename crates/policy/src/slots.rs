//! What a guest's swap tells of how much the guest lacks.
//!
//! **Problem.** What was written to swap and not read back lies there. That is what is lacking, for a program that changes what it reads:
//! the page's place in swap is free again. Of one that changes little it says nothing: what is read back is in memory *and* in swap, and
//! Linux drops it again without writing. **Idea.** Such a guest writes everything once, and then only reads. When it has read as much as it
//! wrote, what it wrote is all that it works on.
//!
//! What is written while much more is read is not new: those pages had their places before.

use model::{Bytes, Millis, Time};
use serde::{Deserialize, Serialize};

use crate::{memory::Counters, tuning};

/// Since the guest booted, or last freed memory: programs that end give up their places, and nobody sees that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Slots {
    latest: Counters,
    written: Bytes,
    read: Bytes,
    /// Of what was written, what was new.
    filled: Bytes,
    /// What lay there and was not missed.
    idle: Bytes,
    /// What lies there, not in memory, and is missed …
    outside: Bytes,
    /// … since.
    since: Option<Time>,
}

impl Slots {
    /// Takes in the latest counts; `is_calm`: the guest misses nothing.
    pub(crate) fn note(&mut self, counters: Counters, is_calm: bool, now: Time) {
        let before = std::mem::replace(&mut self.latest, counters);
        let written = counters.swap_out.minus(before.swap_out);
        let read = counters.swap_in.minus(before.swap_in);
        if written >= read.percent(tuning::NEW_IN_SWAP_PERCENT) {
            self.filled = self.filled.plus(written);
        }
        (self.written, self.read) = (self.written.plus(written), self.read.plus(read));
        let outside = self.written.minus(self.read);
        self.idle = if is_calm { outside } else { self.idle.min(outside) };
        self.outside = outside.minus(self.idle);
        self.since = (self.outside >= tuning::UNIT).then(|| self.since.unwrap_or(now));
    }

    /// Whatever had its place may have none any more.
    pub(crate) fn forget(&mut self) {
        *self = Self { latest: self.latest, ..Self::default() };
    }

    /// What lies there and not in memory, and was not there already while the guest was calm; how long it has lacked that.
    pub(crate) fn outside(&self, now: Time) -> Option<(Bytes, Millis)> {
        self.since.map(|since| (self.outside, now.since(since)))
    }

    /// All that it works on but for what never was in swap, if it has read as much as it wrote.
    pub(crate) fn set(&self) -> Option<Bytes> {
        (self.filled >= tuning::UNIT && self.read >= self.written).then_some(self.filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In turn, what is written and read in a second, in MiB.
    fn set_after(seconds: &[(u64, u64)]) -> Option<u64> {
        let (mut slots, mut counters) = (Slots::default(), Counters::default());
        for (written, read) in seconds {
            counters.swap_out = counters.swap_out.plus(Bytes::mib(*written));
            counters.swap_in = counters.swap_in.plus(Bytes::mib(*read));
            slots.note(counters, false, Time(0));
        }
        slots.set().map(|set| set.0 >> 20)
    }

    #[test]
    fn who_only_reads_has_all_that_it_works_on_in_swap() {
        let fills = vec![(20, 5); 10];
        let sweeps = vec![(0, 10); 20];
        assert_eq!(set_after(&fills), None, "most of it was never read back");
        assert_eq!(set_after(&[&fills[..], &sweeps].concat()), Some(200));
        let writes_a_tenth = vec![(1, 10); 100];
        assert_eq!(set_after(&[fills, sweeps, writes_a_tenth].concat()), Some(200));
    }

    #[test]
    fn who_writes_what_it_reads_frees_its_place() {
        assert_eq!(set_after(&[vec![(20, 0); 10], vec![(10, 10); 50]].concat()), None);
        assert_eq!(set_after(&[(5, 8)]), None, "next to nothing");
    }

    #[test]
    fn what_lay_there_while_it_was_calm_is_not_lacking() {
        let counters = |out, back| {
            let (swap_out, swap_in) = (Bytes::mib(out), Bytes::mib(back));
            Counters { swap_in, swap_out, ..Counters::default() }
        };
        let mut slots = Slots::default();
        let mut outside = |out, back, is_calm| {
            slots.note(counters(out, back), is_calm, Time(out));
            slots.outside(Time(out)).map(|(outside, since)| (outside.0 >> 20, since.0))
        };
        assert_eq!([outside(60, 10, true), outside(100, 20, false)], [None, Some((30, 0))]);
        assert_eq!([outside(120, 20, false), outside(120, 70, false)], [Some((50, 20)), None]);
        assert_eq!(outside(180, 70, false), Some((60, 0)));
    }

    #[test]
    fn what_was_written_before_memory_was_freed_is_forgotten() {
        let counters = |mib| Counters {
            swap_in: Bytes::mib(mib),
            swap_out: Bytes::mib(mib),
            ..Counters::default()
        };
        let mut slots = Slots::default();
        slots.note(counters(100), false, Time(0));
        assert_eq!(slots.set(), Some(Bytes::mib(100)));
        slots.forget();
        slots.note(counters(130), false, Time(0));
        assert_eq!(slots.set(), Some(Bytes::mib(30)));
    }
}
