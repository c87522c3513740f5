//! Balloons that give the host nothing back: memory taken is compared with memory received.
//!
//! **Problem.** Locked memory, memory pinned by a device, and preallocated huge pages stay with
//! QEMU when the balloon takes them from the guest. The guest loses them, and the host gains
//! nothing: a neighbour that needs its memory is shrunk next.
//!
//! **Idea.** A guest occupies no more on the host than its balloon leaves it. Memory counted
//! beyond that is withheld. If most of the memory that this daemon took is withheld, for longer
//! than a reading is late, taking stops, all of it goes back, and the VM is left alone, for
//! longer each time.
//!
//! **Leaves out.** Paged VMs: their balloon holds nothing.

use model::{Bytes, Reason, Time};
use serde::{Deserialize, Serialize};

use crate::{memory::doubled, tuning};

/// The state of a balloon that may give nothing back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Withheld {
    /// The amount withheld when that was last seen.
    amount: Bytes,
    /// Since when memory is withheld; `None`: none is.
    since: Option<Time>,
    /// The balloon's size before this daemon took anything.
    held_before: Option<Bytes>,
    /// Until when the VM is left alone.
    until: Option<Time>,
    /// Number of times that the balloon gave nothing back.
    failures: u32,
}

impl Withheld {
    /// Notes the host's count of a VM whose balloon holds `held`, and leaves it `left`.
    pub(crate) fn note(&mut self, counted: Bytes, left: Bytes, held: Bytes, now: Time) {
        let amount = counted.minus(left);
        // Some of the earlier balloon's memory may never have been touched.
        let taken = held.minus(self.held_before.unwrap_or_default());
        if amount >= tuning::WITHHELD_MIN && amount >= taken.share(1, 2) {
            self.amount = amount;
            self.since.get_or_insert(now);
            return;
        }
        self.since = None;
        let gives_back = held >= tuning::WITHHELD_MIN.plus(tuning::WITHHELD_MIN);
        if gives_back && self.until.is_some_and(|until| now.since(until) > tuning::WATCH) {
            (self.until, self.failures) = (None, 0);
        }
    }

    /// The VM was not counted: nothing is known.
    pub(crate) fn forget(&mut self) {
        self.since = None;
    }

    /// Notes a take from the VM while its balloon holds `held`, or a grant to it.
    pub(crate) fn note_change(&mut self, is_take: bool, held: Bytes) {
        self.held_before = match self.held_before {
            None if is_take => Some(held),
            Some(before) if !is_take && held <= before => None,
            before => before,
        };
    }

    /// Why nothing more is taken now.
    pub(crate) fn refusal(&self, now: Time) -> Option<Reason> {
        let wait = self.until.unwrap_or(now).since(now);
        let is_refused = self.since.is_some() || self.is_left_alone(now);
        is_refused.then_some(Reason::GivesNothingBack { amount: self.amount, wait })
    }

    /// Whether the VM is left alone.
    pub(crate) fn is_left_alone(&self, now: Time) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// If the balloon now turns out to give nothing back: the amount withheld, and the balloon's
    /// size before the first take, if there was one.
    pub(crate) fn turns_out(&mut self, now: Time) -> Option<(Bytes, Option<Bytes>)> {
        let is_certain = self.since.is_some_and(|at| now.since(at) >= tuning::WITHHELD_FOR);
        if !is_certain || self.is_left_alone(now) {
            return None;
        }
        self.failures += 1;
        let pause = doubled(tuning::BACK_OFF_FIRST, self.failures, tuning::BACK_OFF_MAX);
        self.until = Some(now.after(pause));
        Some((self.amount, self.held_before.take()))
    }
}

#[cfg(test)]
mod tests {
    use model::Millis;

    use super::*;

    const LEFT: Bytes = Bytes::mib(400);
    const HELD: Bytes = Bytes::mib(112);

    fn at(s: u64) -> Time {
        Time(s * 1000)
    }

    #[test]
    fn a_reading_that_is_late_is_no_withholding_and_a_lasting_one_is() {
        let mut withheld = Withheld::default();
        withheld.note_change(true, Bytes::mib(12));
        withheld.note(Bytes::mib(512), LEFT, HELD, at(0));
        assert!(withheld.refusal(at(0)).is_some(), "no more is taken meanwhile");
        withheld.note(LEFT, LEFT, HELD, at(1));
        assert_eq!((withheld.refusal(at(1)), withheld.turns_out(at(9))), (None, None));
        for second in 10..30 {
            withheld.note(Bytes::mib(512), LEFT, HELD, at(second));
        }
        assert_eq!(withheld.turns_out(at(29)), None, "not certain yet");
        let turned_out = withheld.turns_out(at(30));
        assert_eq!(turned_out, Some((HELD, Some(Bytes::mib(12)))));
        assert_eq!(withheld.turns_out(at(31)), None, "said once");
    }

    #[test]
    fn each_time_the_pause_is_longer_until_the_balloon_gives_back() {
        let mut withheld = Withheld::default();
        let mut now = 0;
        let mut pause = |withheld: &mut Withheld| {
            while withheld.turns_out(at(now)).is_none() {
                withheld.note(Bytes::mib(512), LEFT, HELD, at(now));
                now += 1;
            }
            let Some(Reason::GivesNothingBack { wait, .. }) = withheld.refusal(at(now)) else {
                panic!("left alone")
            };
            now += wait.0 / 1000;
            wait
        };
        let pauses = [(); 3].map(|()| pause(&mut withheld));
        assert_eq!(pauses, [60, 120, 240].map(Millis::secs));
        withheld.note(LEFT, LEFT, HELD, at(now).after(tuning::WATCH).after(Millis(1)));
        assert_eq!(withheld.refusal(at(now + 100)), None);
    }

    #[test]
    fn a_little_beyond_is_page_tables_and_nothing_else() {
        let mut withheld = Withheld::default();
        withheld.note(Bytes::mib(420), LEFT, HELD, at(0));
        withheld.note(Bytes::mib(440), LEFT, HELD, at(60));
        assert_eq!(withheld.refusal(at(60)), None, "most of it came back");
    }
}
