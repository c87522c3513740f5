//! What a guest's swap tells of how much the guest lacks.
//!
//! **Problem.** What was written to swap and not read back lies there. That is what is lacking, for
//! a program that changes what it reads: the page's place in swap is free again. Of one that
//! changes little it says nothing: what is read back is in memory *and* in swap, and Linux, while
//! no more than half of a swap is in use, drops it again without writing. **Idea.** Such a guest
//! writes everything once, and then only reads. When it has read all of that back and goes on
//! reading, what it wrote is what it works on.
//!
//! What is written while much more is read is not new: those pages had their places before. All of
//! this is said of one shortage: a guest that is calm has what it needs, whatever lies in its swap.

use model::{Bytes, Millis, Time};
use serde::{Deserialize, Serialize};

use crate::{member::with_room, memory::Counters, tuning};

/// Since the guest booted, was last calm or freed memory: programs that end give up their places,
/// and nobody sees that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Slots {
    latest: Counters,
    /// What was written and not read back …
    outside: Bytes,
    /// … since.
    since: Option<Time>,
    /// Of what was written, what was new …
    filled: Bytes,
    /// … and what was read since the last of that.
    read: Bytes,
}

impl Slots {
    /// Takes in the latest counts.
    pub(crate) fn note(&mut self, counters: Counters, now: Time) {
        let before = std::mem::replace(&mut self.latest, counters);
        let written = counters.swap_out.minus(before.swap_out);
        let read = counters.swap_in.minus(before.swap_in);
        let is_new = written > read.percent(tuning::NEW_IN_SWAP_PERCENT);
        if is_new {
            (self.filled, self.read) = (self.filled.plus(written), Bytes::ZERO);
        } else {
            self.read = self.read.plus(read);
        }
        self.outside = self.outside.plus(written).minus(read);
        self.since = (self.outside >= tuning::UNIT).then(|| self.since.unwrap_or(now));
    }

    /// Whatever had its place may have none any more, or is not missed.
    pub(crate) fn forget(&mut self) {
        *self = Self { latest: self.latest, ..Self::default() };
    }

    /// What the guest needs that has `used` of what it may have, `most`, and whose kernel has set
    /// so much apart; what lies outside counts when it has done so with `patience`.
    pub(crate) fn need(
        &self,
        used: Bytes,
        set_apart: Bytes,
        most: Bytes,
        patience: Millis,
        now: Time,
    ) -> Option<Bytes> {
        if self.since.is_some_and(|since| now.since(since) >= patience) {
            return Some(used.plus(self.outside).min(most));
        }
        let need = with_room(self.set()?.plus(set_apart)).plus(tuning::KERNEL);
        // More than it may have is no set that it could work on: places were written several times.
        (need <= most).then_some(need)
    }

    /// All that it works on but for what never was in swap, if it only reads that.
    fn set(&self) -> Option<Bytes> {
        let only_reads = self.read >= self.filled.percent(tuning::READ_AGAIN_PERCENT);
        let is_all_back = self.outside.is_zero() && only_reads;
        (self.filled >= tuning::UNIT && is_all_back).then_some(self.filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In turn, what is written and read in a second, in MiB.
    fn after(seconds: &[(u64, u64)]) -> Slots {
        let (mut slots, mut counters) = (Slots::default(), Counters::default());
        for (second, (written, read)) in (0..).zip(seconds) {
            counters.swap_out = counters.swap_out.plus(Bytes::mib(*written));
            counters.swap_in = counters.swap_in.plus(Bytes::mib(*read));
            slots.note(counters, Time(0).after(Millis::secs(second)));
        }
        slots
    }

    fn set_after(seconds: &[(u64, u64)]) -> Option<u64> {
        after(seconds).set().map(|set| set.0 >> 20)
    }

    const FILLS: [(u64, u64); 10] = [(20, 5); 10];

    #[test]
    fn who_only_reads_has_all_that_it_works_on_in_swap() {
        let sweeps = [(0, 10); 20];
        assert_eq!(set_after(&FILLS), None, "most of it was never read back");
        assert_eq!(set_after(&[&FILLS[..], &sweeps].concat()), Some(200));
        let writes_a_tenth = [(1, 10); 100];
        assert_eq!(set_after(&[&FILLS[..], &sweeps, &writes_a_tenth].concat()), Some(200));
        assert_eq!(set_after(&[(5, 8)]), None, "next to nothing");
    }

    #[test]
    fn who_writes_much_of_what_it_reads_fills_no_places_without_end() {
        let half = [(5, 10); 150];
        assert_eq!(set_after(&[&FILLS[..], &half].concat()), None);
        let all_and_reads_ahead = [(10, 11); 200];
        assert_eq!(set_after(&[&FILLS[..], &all_and_reads_ahead].concat()), None);
        let in_bursts: Vec<(u64, u64)> =
            (0..600).map(|second| if second % 10 == 0 { (10, 10) } else { (0, 10) }).collect();
        assert_eq!(set_after(&in_bursts), None);
    }

    #[test]
    fn what_is_written_later_is_missing_however_much_was_read_before() {
        let reads_long = [(0, 10); 100];
        let slots = after(&[&FILLS[..], &reads_long, &[(30, 0)]].concat());
        let need = |patience| {
            let now = Time(0).after(Millis::secs(120));
            let need = slots.need(Bytes::mib(300), Bytes::ZERO, Bytes::mib(500), patience, now);
            need.map(|need| need.0 >> 20)
        };
        assert_eq!(need(Millis::secs(10)), Some(330));
        assert_eq!(need(Millis::secs(11)), None, "not for so long");
    }

    #[test]
    fn what_a_guest_may_never_have_it_does_not_work_on() {
        let slots = after(&[&FILLS[..], &[(0, 10); 20]].concat());
        let need = |most| {
            let (apart, most) = (Bytes::mib(30), Bytes::mib(most));
            slots.need(Bytes::mib(150), apart, most, Millis(0), Time(0)).map(|need| need.0 >> 20)
        };
        assert_eq!([need(400), need(260)], [Some(266), None]);
    }

    #[test]
    fn what_was_written_before_it_was_calm_is_forgotten() {
        let mut slots = after(&[&FILLS[..], &[(0, 10); 20]].concat());
        slots.forget();
        let counters = Counters { swap_out: Bytes::mib(230), ..slots.latest };
        slots.note(counters, Time(0));
        assert_eq!((slots.filled, slots.outside), (Bytes::mib(30), Bytes::mib(30)));
    }
}
