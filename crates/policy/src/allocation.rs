//! A guest's rate of taking memory, and the memory that it has left unused for long.
//!
//! **Problem.** A guest's statistics are a second or two old, a decision takes a tick, and a
//! balloon takes a moment to give memory back. Memory that the guest allocates meanwhile must be
//! there, or its kernel kills a program. A fixed margin is too small for a guest that allocates
//! 300 MB/s and larger than needed for one that sleeps. **Idea.** Each reading shows the memory
//! in use: all memory of the guest except the available part. Its rise is the allocation by
//! programs, independent of the balloon's moves. The fastest rise is remembered, and so is the
//! peak use; both fade slowly. A guest keeps available the memory that it could take before a
//! grant arrives ([`surge`]).
//!
//! [`surge`]: Allocation::surge
//!
//! A guest without swap is a stricter case. It gives only memory that was free throughout the
//! last [`tuning::LASTING`], and it keeps room for its earlier peak use. Until its rate is known,
//! it counts as one that allocates fast.
//!
//! **Cost.** At most 30 numbers for each VM. **Left out.** A first burst that is faster than
//! [`tuning::FIRST_PACE`] and larger than the margin that remains after a long quiet time: no
//! statistic predicts it. Such a guest still has its base, and `deflate-on-oom`, where it is on.

use std::collections::VecDeque;

use model::{Bytes, Millis, Reading, Time};
use serde::{Deserialize, Serialize};

use crate::tuning;

/// A guest's memory by one reading of its statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct AllocationSample {
    /// Memory that programs and kernel need: neither available nor in the balloon. `None`: the
    /// balloon's size at that time is unknown.
    pub(crate) in_use: Option<Bytes>,
    pub(crate) available: Bytes,
    /// Completely unused memory.
    pub(crate) free: Bytes,
}

/// The history of a guest's allocation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Allocation {
    last: Option<Reading<AllocationSample>>,
    /// The last known memory in use.
    in_use: Option<Reading<Bytes>>,
    /// The balloon's size at its last move, and the time of that move.
    held: (Bytes, Time),
    /// Time of the last statistics that showed a shortage.
    scarce_at: Option<Time>,
    /// Start of the readings without a long gap.
    watched_since: Time,
    /// The fastest rise per second that counts most now, and its time.
    fastest: (Bytes, Time),
    /// The peak use that counts most now, and its time.
    most: (Bytes, Time),
    /// The least free memory in each of the latest slices, with the slice's start.
    lows: VecDeque<(Time, Bytes)>,
}

impl Allocation {
    /// Records a reading, unless it is no newer than the previous one.
    pub(crate) fn note(&mut self, sample: Reading<AllocationSample>, has_swap: bool) {
        let Reading { value, at } = sample;
        match self.last {
            Some(last) if last.at >= at => return,
            Some(last) if at.since(last.at) <= tuning::WATCH_GAP => {}
            _ => {
                self.watched_since = at;
                self.lows.clear();
            }
        }
        if let Some(in_use) = value.in_use {
            self.note_in_use(Reading::new(in_use, at), has_swap);
        }
        self.note_free(value.free, at);
        self.last = Some(sample);
    }

    fn note_in_use(&mut self, Reading { value, at }: Reading<Bytes>, has_swap: bool) {
        let before = self.in_use.replace(Reading::new(value, at));
        if let Some(before) = before.filter(|before| at.since(before.at) <= tuning::WATCH_GAP) {
            // Statistics have times in whole seconds: two readings are never closer than the
            // loop's period.
            let elapsed = at.since(before.at).max(tuning::PERIOD);
            let pace = value.minus(before.value).share(1000, elapsed.0);
            if pace >= self.pace(has_swap, at) {
                self.fastest = (pace, at);
            }
        }
        if value >= self.most_in_use(value, has_swap, at) {
            self.most = (value, at);
        }
    }

    /// Notes the balloon's size. Returns the time of its last change.
    pub(crate) fn note_held(&mut self, held: Bytes, now: Time) -> Time {
        if held.0.abs_diff(self.held.0.0) >= Bytes::mib(1).0 {
            self.held = (held, now);
        }
        self.held.1
    }

    /// Notes that the guest was short at this time, by its own statistics.
    pub(crate) const fn note_scarce(&mut self, at: Time) {
        self.scarce_at = Some(at);
    }

    /// Whether the guest's recent statistics showed a shortage.
    pub(crate) fn is_scarce(&self, now: Time) -> bool {
        self.scarce_at.is_some_and(|at| now.since(at) <= tuning::STALE_AFTER)
    }

    fn note_free(&mut self, free: Bytes, at: Time) {
        match self.lows.back_mut() {
            Some((began, low)) if at.since(*began) < tuning::LASTING_SLICE => *low = free.min(*low),
            _ => self.lows.push_back((at, free)),
        }
        let reach = Millis(tuning::LASTING.0 + tuning::LASTING_SLICE.0);
        while self.lows.front().is_some_and(|(began, _)| at.since(*began) > reach) {
            self.lows.pop_front();
        }
    }

    /// The guest's fastest rate per second, faded by age.
    fn pace(&self, has_swap: bool, now: Time) -> Bytes {
        faded(self.fastest.0, now.since(self.fastest.1), has_swap)
    }

    /// Memory that the guest may take before a grant arrives, given statistics from `at`.
    pub(crate) fn surge(&self, has_swap: bool, seen_at: Time, at: Time, now: Time) -> Bytes {
        let unknown = if has_swap { Bytes::ZERO } else { tuning::FIRST_PACE };
        let pace = self.pace(has_swap, now).max(faded(unknown, now.since(seen_at), has_swap));
        pace.share(now.since(at).0.saturating_add(tuning::REACTION.0), 1000)
    }

    fn most_in_use(&self, in_use: Bytes, has_swap: bool, now: Time) -> Bytes {
        in_use.plus(faded(self.most.0.minus(in_use), now.since(self.most.1), has_swap))
    }

    /// Peak use beyond the current use, faded by age.
    pub(crate) fn used_before(&self, has_swap: bool, now: Time) -> Bytes {
        let in_use = self.in_use.map_or(Bytes::ZERO, |in_use| in_use.value);
        self.most_in_use(in_use, has_swap, now).minus(in_use)
    }

    /// Memory that was free throughout [`tuning::LASTING`].
    ///
    /// # Errors
    /// The time of observation, if it is too short.
    pub(crate) fn lasting(&self, now: Time) -> Result<Bytes, Millis> {
        let watched = now.since(self.watched_since);
        let low = self.lows.iter().map(|(_, low)| *low).min();
        if watched < tuning::LASTING { Err(watched) } else { low.ok_or(Millis(0)) }
    }

    /// Memory that became free abruptly in a guest that had almost none left, as when its kernel
    /// kills a program; `None`: `sample` shows no such jump.
    pub(crate) fn jump(&self, sample: Reading<AllocationSample>, total: Bytes) -> Option<Bytes> {
        let last = self.last.filter(|last| last.at < sample.at)?.value;
        let was_short = last.available < total.percent(tuning::MARGIN_PERCENT);
        let before = self.in_use.filter(|b| sample.at.since(b.at) <= tuning::WATCH_GAP)?;
        let freed = before.value.minus(sample.value.in_use?);
        (was_short && freed >= total.percent(tuning::JUMP_PERCENT).max(tuning::UNIT))
            .then_some(freed)
    }
}

/// `value` faded by age: half of it after each half-life.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "less than before")]
fn faded(value: Bytes, age: Millis, has_swap: bool) -> Bytes {
    let half_life = if has_swap { tuning::PACE_FADES } else { tuning::PACE_FADES_SWAPLESS };
    let half_lives = age.0 as f64 / half_life.0 as f64;
    Bytes((value.0 as f64 * (-half_lives).exp2()) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(second: u64, in_use: u64, available: u64) -> Reading<AllocationSample> {
        let [in_use, available] = [in_use, available].map(Bytes::mib);
        let in_use = Some(in_use);
        Reading::new(AllocationSample { in_use, available, free: available }, Time(second * 1000))
    }

    /// A guest of 400 MiB with these amounts in use, second by second from the tenth on.
    fn seen(in_use: impl IntoIterator<Item = u64>, has_swap: bool) -> (Allocation, Time) {
        let (mut allocation, mut second) = (Allocation::default(), 10);
        for in_use in in_use {
            allocation.note(sample(second, in_use, 400 - in_use), has_swap);
            second += 1;
        }
        (allocation, Time((second - 1) * 1000))
    }

    #[test]
    fn a_guest_keeps_what_it_can_take_before_it_is_helped_and_the_more_the_older_its_word() {
        let (allocation, now) = seen([50, 50, 90, 90], true);
        let surge = |age| allocation.surge(true, Time(0), now, now.after(Millis::secs(age)));
        // The fastest second took 40 MiB, and that fades.
        assert!((110..=120).contains(&(surge(0).0 >> 20)), "{}", surge(0));
        assert!(surge(3) > surge(0).plus(Bytes::mib(80)));
        let later = now.after(Millis::secs(600));
        assert!(allocation.surge(true, Time(0), later, later) < Bytes::mib(1));
    }

    #[test]
    fn without_swap_a_guest_that_is_not_known_is_taken_for_a_fast_one_and_trusted_slowly() {
        let (allocation, now) = seen([50, 50], false);
        let surge = |later| {
            let at = now.after(Millis::secs(later));
            allocation.surge(false, Time(10_000), at, at)
        };
        assert!(surge(0) > tuning::FIRST_PACE.share(2, 1), "{}", surge(0));
        assert!(surge(300) > surge(900) && surge(900) > surge(3600));
        assert!(surge(4 * 3600) < Bytes::mib(1));
    }

    #[test]
    fn what_was_in_use_for_a_moment_keeps_its_room_for_long() {
        let (mut allocation, now) = seen([50, 250, 50], false);
        assert!(allocation.used_before(false, now) > Bytes::mib(190));
        let later = now.after(tuning::PACE_FADES_SWAPLESS);
        assert!((95..=101).contains(&(allocation.used_before(false, later).0 >> 20)));
        allocation.note(sample(20, 300, 100), false);
        assert_eq!(allocation.used_before(false, Time(20_000)), Bytes::ZERO);
    }

    #[test]
    fn only_what_lay_free_for_the_whole_time_counts_as_lasting() {
        let (allocation, now) = seen([50; 60], false);
        assert_eq!(allocation.lasting(now), Err(Millis::secs(59)), "not watched for long enough");
        let (mut allocation, now) = seen((0..90).map(|s| if s == 40 { 300 } else { 50 }), false);
        assert_eq!(allocation.lasting(now), Ok(Bytes::mib(100)));
        for second in 100..140 {
            allocation.note(sample(second, 50, 350), false);
        }
        assert_eq!(allocation.lasting(Time(139_000)), Ok(Bytes::mib(350)));
        allocation.note(sample(180, 50, 350), false);
        assert!(allocation.lasting(Time(181_000)).is_err(), "nobody knows what it did meanwhile");
    }

    #[test]
    fn memory_that_jumps_free_in_a_short_guest_shows_a_kill() {
        let total = Bytes::mib(400);
        let (allocation, _) = seen([50, 390], false);
        assert_eq!(allocation.jump(sample(12, 150, 250), total), Some(Bytes::mib(240)));
        assert_eq!(allocation.jump(sample(12, 385, 15), total), None, "a little became free");
        assert_eq!(allocation.jump(sample(11, 150, 250), total), None, "the same reading");
        let (allocation, _) = seen([50, 300], false);
        assert_eq!(allocation.jump(sample(12, 50, 350), total), None, "it was not short");
    }
}
