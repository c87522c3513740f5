//! What the policy remembers from tick to tick: rates, requests under way, and lessons learned.
//!
//! Losing it is harmless: a restarted daemon takes nothing until it has watched each guest for
//! [`tuning::CALM`], and what was asked of a balloon is seen in the balloon.

use std::collections::BTreeMap;

use model::{
    Bytes, Dedup, FreePages, GroupName, Learned, Millis, PagesPerMs, Reading, Reason, Time,
    Tracking, VmName, VmView, plan::Outcome,
};
use serde::{Deserialize, Serialize};

use crate::{experience::Experience, lending, overload, reads::Reads, tuning, typical::Tracked};

/// Everything remembered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Set by `overbook pause`: nothing is changed.
    pub paused: bool,
    pub(crate) vms: BTreeMap<VmName, VmMemory>,
    /// When somebody in the group was last short of memory that it could not get, or when the group
    /// was first seen.
    pub(crate) unmet_at: BTreeMap<GroupName, Time>,
    #[serde(default)]
    pub(crate) balances: BTreeMap<GroupName, GroupBalance>,
    /// How fast identical pages were looked for, where they were.
    #[serde(default)]
    pub(crate) scan_rates: BTreeMap<GroupName, PagesPerMs>,
    #[serde(default)]
    pub(crate) lending: lending::Book,
    /// How VMs have been overloaded. The daemon keeps this across restarts.
    #[serde(default)]
    pub learned: Learned,
    /// When it was last counted how many are overloaded at once.
    #[serde(default)]
    pub(crate) counted_at: Option<Time>,
}

impl Memory {
    /// Nothing remembered but whether the operator paused Overbook, and what was learned.
    #[must_use]
    pub fn fresh(paused: bool, learned: Learned) -> Self {
        Self { paused, learned, ..Self::default() }
    }
}

/// What is remembered of one VM in one life.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct VmMemory {
    pub(crate) incarnation: u64,
    /// When it was first seen.
    pub(crate) seen_at: Time,
    #[serde(default)]
    pub(crate) overload: overload::Watch,
    pub(crate) counters: Option<Reading<Counters>>,
    /// Swapped in per second, at the latest reading.
    pub(crate) swap_in: Bytes,
    /// Swapped in and out per second, at the latest reading.
    pub(crate) swap: Bytes,
    /// Set while counters that ran backwards settle.
    pub(crate) settling_until: Option<Time>,
    /// When it was last seen in trouble, or first seen at all.
    pub(crate) calm_since: Time,
    /// When it was last short of memory, or nobody knew whether it is.
    #[serde(default)]
    pub(crate) short_at: Time,
    pub(crate) asked: Option<Asked>,
    /// What it is to have in memory, since the host pages out what it does not touch.
    #[serde(default)]
    pub(crate) resident: Option<Bytes>,
    /// When that was last said.
    #[serde(default)]
    paging_said_at: Option<Time>,
    pub(crate) stuck: Option<Stuck>,
    pub(crate) moved_by_others: Option<MovedByOthers>,
    /// When memory was last taken for somebody else, while that is still being judged.
    pub(crate) taken_at: Option<Time>,
    pub(crate) failures: u32,
    pub(crate) back_off_until: Time,
    /// When balance last took memory from it.
    #[serde(default)]
    pub(crate) moved_away_at: Option<Time>,
    #[serde(default)]
    pub(crate) dedup: Option<Reading<Dedup>>,
    /// As of the latest of those readings.
    #[serde(default)]
    pub(crate) merging: Merging,
    /// When balance last gave it memory.
    #[serde(default)]
    pub(crate) given_at: Option<Time>,
    /// What it had handed over, and when that was last more, for all that is known.
    #[serde(default)]
    pub(crate) handed_over: Bytes,
    #[serde(default)]
    pub(crate) freed_at: Time,
    /// What it has had free for some seconds beyond what it keeps free in any case.
    #[serde(default)]
    pub(crate) idle: Bytes,
    /// Since when that is worth taking.
    #[serde(default)]
    idle_since: Option<Time>,
    /// The least that it had free while it read from its swap: what its kernel keeps free in any
    /// case.
    #[serde(default)]
    pub(crate) kept_free: Option<Bytes>,
    /// What it reads from its swap, over some seconds.
    #[serde(default)]
    pub(crate) reads: Reads,
    /// What its kernel set apart at boot: what it may use and does not count.
    #[serde(default)]
    pub(crate) set_apart: Bytes,
    /// What lies in its swap and is not missed.
    #[serde(default)]
    pub(crate) idle_swap: Bytes,
    /// What it worked on of late.
    #[serde(default)]
    pub(crate) tracked: Option<Tracked>,
    /// With how much memory it missed how much.
    #[serde(default)]
    pub(crate) experience: Experience,
    /// As of the group's last balance.
    #[serde(default)]
    pub(crate) balanced: Option<Balanced>,
    /// The balance's last move, until it is judged.
    #[serde(default)]
    pub(crate) moved: Option<Moved>,
    /// What the last one judged has saved.
    #[serde(default)]
    pub(crate) outcome: Option<Outcome>,
}

/// How the balance of a group goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupBalance {
    /// When its last round was held.
    pub(crate) held_at: Option<Time>,
    /// How often memory that seemed to be there turned out to be needed, of late.
    pub(crate) deficits: u32,
    /// When that was last so.
    pub(crate) deficit_at: Time,
    /// All that its members could have then.
    pub(crate) pool: Bytes,
    /// The most that one of them read of late: what a swap disk can answer.
    #[serde(default)]
    pub(crate) disk: Reads,
}

/// What a group's balance made of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Balanced {
    /// What it could use.
    pub(crate) need: Bytes,
    /// Whether a curve says so.
    pub(crate) is_tracked: bool,
    /// Where it should be, if not where it is.
    pub(crate) goal: Option<Goal>,
}

/// Where a VM should be at the end of a round of balancing, and what for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Goal {
    pub(crate) size: Bytes,
    /// Below this only what it has free is taken.
    #[serde(default)]
    pub(crate) lowest: Bytes,
    /// Where it should be in the end.
    #[serde(default)]
    pub(crate) wanted: Bytes,
    /// Misses per minute that it saves the VM; negative: that it costs.
    pub(crate) saves: i64,
    /// The same for the whole group.
    pub(crate) saved_in_all: u64,
    /// Whether the needs of all fit.
    pub(crate) fits: bool,
}

/// A move of the balance whose effect does not show yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moved {
    pub(crate) at: Time,
    pub(crate) from: Bytes,
    pub(crate) is_take: bool,
    /// As of [`Goal::saves`].
    pub(crate) saves: i64,
    pub(crate) faults_before: f64,
}

/// What a guest has counted since it booted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Counters {
    pub(crate) swap_in: Bytes,
    pub(crate) swap_out: Bytes,
    pub(crate) minor_faults: u64,
    #[serde(default)]
    pub(crate) major_faults: u64,
}

/// What is merged of a VM per second, and of what was merged, written again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Merging {
    pub(crate) merged: Bytes,
    pub(crate) broken: Bytes,
}

/// A target that the balloon was given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Asked {
    pub(crate) target: Bytes,
    pub(crate) is_take: bool,
    pub(crate) reason: Reason,
    /// When it was last said.
    pub(crate) said_at: Time,
    /// When the balloon last came closer, or could not be expected to.
    pub(crate) moved_at: Time,
    /// Where it stood then.
    pub(crate) stood_at: Bytes,
    pub(crate) reached: bool,
}

/// A balloon that did not follow.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stuck {
    pub(crate) since: Time,
    pub(crate) wanted: Bytes,
    pub(crate) retry_at: Time,
    pub(crate) failures: u32,
}

/// A balloon that somebody else moved.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MovedByOthers {
    pub(crate) actual: Bytes,
    pub(crate) target: Bytes,
    pub(crate) until: Time,
}

impl VmMemory {
    pub(crate) fn new(incarnation: u64, now: Time) -> Self {
        Self { incarnation, seen_at: now, calm_since: now, short_at: now, ..Self::default() }
    }

    /// Notes whether the host pages out what the VM does not touch. It begins with what the balloon
    /// leaves the VM, and once begun it goes on while the group has it on. `true`: it is to be
    /// said, now or again, so that the balloon is deflated.
    pub(crate) fn note_paging(&mut self, is_on: bool, view: &VmView, now: Time) -> bool {
        let begins = is_on && self.resident.is_none() && view.cold.is_some();
        if begins {
            self.resident = Some(view.balloon.map_or(view.ram, |balloon| balloon.value));
        }
        let ends = !is_on && self.resident.take().is_some();
        if begins || ends {
            (self.asked, self.stuck, self.moved_by_others) = (None, None, None);
            self.paging_said_at = None;
        }
        let holds = view
            .balloon
            .is_some_and(|balloon| view.ram.minus(balloon.value) > tuning::tolerance(view.ram));
        let is_due =
            self.paging_said_at.is_none_or(|at| holds && now.since(at) >= tuning::REPEAT_AFTER);
        let says = self.resident.is_some() && is_due;
        if says {
            self.paging_said_at = Some(now);
        }
        says
    }

    /// Notes whether a paged VM has no more in memory than it was asked to. It may have more for a
    /// while when it wakes: nobody else has moved it.
    pub(crate) fn follow_paging(&mut self, resident: Bytes, ram: Bytes) {
        if let Some(asked) = &mut self.asked {
            asked.reached |= resident <= asked.target.plus(tuning::tolerance(ram));
        }
    }

    /// Whether the guest has used swap since it booted.
    pub(crate) fn has_swapped(&self) -> bool {
        self.counters.is_some_and(|counters| !counters.value.swap_out.is_zero())
    }

    /// Notes where the balloon stands, and whether it follows what it was asked.
    pub(crate) fn follow(&mut self, actual: Bytes, ram: Bytes, now: Time) {
        if self.moved_by_others.is_some_and(|moved| moved.until <= now) {
            self.moved_by_others = None;
        }
        let Some(asked) = &mut self.asked else { return };
        let distance = actual.0.abs_diff(asked.target.0);
        let is_near = distance <= tuning::tolerance(ram).0;
        if !is_near && !asked.is_take && !asked.reached && actual > asked.target {
            // It holds more than it was given: to insist would take memory past every safety rule.
            self.asked = None;
        } else if is_near {
            asked.reached = true;
            asked.moved_at = now;
            self.stuck = None;
        } else if asked.reached {
            let until = now.after(tuning::LEFT_ALONE);
            self.moved_by_others = Some(MovedByOthers { actual, target: asked.target, until });
            self.asked = None;
        } else {
            let before = asked.stood_at.0.abs_diff(asked.target.0);
            if before.saturating_sub(distance) >= Bytes::mib(1).0 {
                asked.moved_at = now;
                asked.stood_at = actual;
            }
        }
    }

    /// Notes what the guest does not count of what it may use, while its balloon stands still. It
    /// is the guest's word, and believed up to a part.
    pub(crate) fn note_set_apart(&mut self, actual: Bytes, total: Bytes, now: Time) {
        let stands =
            |asked: &Asked| asked.reached && now.since(asked.said_at) > tuning::STALE_AFTER;
        if self.asked.as_ref().is_none_or(stands) {
            self.set_apart = actual.minus(total).min(actual.percent(tuning::SET_APART_PERCENT));
        }
    }

    /// Turns the worker's counters into rates; `None`: its pages are not being merged. Counters
    /// that ran backwards are those of another worker, which says nothing of this second.
    pub(crate) fn note_merging(&mut self, reading: Option<Reading<Dedup>>) -> Option<Merging> {
        let latest = reading?;
        if let Some(before) = self.dedup.replace(latest)
            && before.at < latest.at
        {
            let elapsed = latest.at.since(before.at);
            let rate = |new: Bytes, old: Bytes| new.minus(old).share(1000, elapsed.0);
            self.merging = Merging {
                merged: rate(latest.value.merged, before.value.merged),
                broken: rate(latest.value.broken, before.value.broken),
            };
        }
        Some(self.merging)
    }

    /// Notes whether it has freed something since the last tick.
    pub(crate) fn note_freed(&mut self, free: Option<FreePages>, now: Time) {
        let Some(free) = free else { return };
        // It begins anew with each worker.
        if std::mem::replace(&mut self.handed_over, free.handed_over) < free.handed_over {
            self.freed_at = now;
        }
    }

    /// Excuses a balloon that could not be reached: only time in which it could follow counts.
    pub(crate) fn excuse(&mut self, now: Time) {
        if let Some(asked) = &mut self.asked {
            asked.moved_at = now;
        }
    }

    /// Whether the balloon has stood still for too long short of what it was last asked.
    pub(crate) fn is_stuck(&self, now: Time) -> bool {
        self.asked
            .as_ref()
            .is_some_and(|a| !a.reached && now.since(a.moved_at) >= tuning::STUCK_AFTER)
    }

    /// Marks it as uncooperative, for longer each time.
    pub(crate) fn mark_stuck(&mut self, wanted: Bytes, now: Time) {
        let failures = self.stuck.map_or(0, |s| s.failures) + 1;
        let pause = doubled(tuning::RETRY_FIRST, failures, tuning::RETRY_MAX);
        let since = self.asked.as_ref().map_or(now, |a| a.moved_at);
        self.stuck = Some(Stuck { since, wanted, retry_at: now.after(pause), failures });
    }

    /// Notes that the guest is under pressure, or that nobody knows how it is; if memory was taken
    /// a moment ago, that was a mistake.
    pub(crate) fn note_trouble(&mut self, now: Time) {
        self.calm_since = now;
        if self.taken_at.take().is_some_and(|at| now.since(at) <= tuning::WATCH) {
            self.moved_away_at = None;
            self.back_off(now);
        }
    }

    /// Takes in what it has free beyond its margin: when that is less, at once; when it is more, by
    /// a fifth of it in each second. `is_news`: the guest has said so since memory was last taken
    /// from it.
    pub(crate) fn note_spare(&mut self, spare: Bytes, is_news: bool, now: Time) {
        let more = if is_news { spare.share(1, tuning::IDLE_WITHIN.0 / 1000) } else { Bytes::ZERO };
        self.idle = spare.min(self.idle.plus(more));
        let is_idle = self.idle >= tuning::UNIT;
        self.idle_since = is_idle.then(|| self.idle_since.unwrap_or(now));
    }

    /// What has lain idle for so long that it can be taken although takes were mistakes: longer
    /// with each of them.
    pub(crate) fn idle_for_long(&self, now: Time) -> Bytes {
        let long = doubled(tuning::IDLE_WITHIN, self.failures + 1, tuning::IDLE_FOR_LONG_MAX);
        let is_long = self.idle_since.is_some_and(|since| now.since(since) >= long);
        if is_long { self.idle } else { Bytes::ZERO }
    }

    /// Takes in what tracking says now; answers what is typical of late. What lies in its swap is
    /// as of now.
    pub(crate) fn note_tracking(
        &mut self,
        latest: Option<Tracking>,
        now: Time,
    ) -> Option<Tracking> {
        let latest = latest.map(|latest| self.without_idle_swap(latest, now));
        self.tracked = latest.and_then(|latest| Tracked::with(self.tracked.take(), latest, now));
        self.tracked.as_ref().map(Tracked::typical)
    }

    /// What lay in its swap while it was not short, it does without; and what programs leave there
    /// when they end, nobody sees go.
    fn without_idle_swap(&mut self, mut latest: Tracking, now: Time) -> Tracking {
        let is_calm = now.since(self.short_at) >= tuning::CALM;
        self.idle_swap = if is_calm { latest.swapped } else { self.idle_swap.min(latest.swapped) };
        latest.swapped = latest.swapped.minus(self.idle_swap);
        latest.working_set = latest.working_set.map(|size| size.minus(self.idle_swap));
        latest
    }

    /// Whether it was tracked for long enough to take memory by that.
    pub(crate) fn is_well_tracked(&self) -> bool {
        self.tracked.as_ref().is_some_and(Tracked::is_settled)
    }

    /// Its group's memory is not balanced any more.
    pub(crate) fn forget_balance(&mut self) {
        (self.balanced, self.moved, self.outcome) = (None, None, None);
        (self.tracked, self.experience) = (None, Experience::default());
        (self.given_at, self.idle_swap) = (None, Bytes::ZERO);
    }

    /// Notes that it is given memory; if balance took some a moment ago, one of the two was a
    /// mistake.
    pub(crate) fn note_gift(&mut self, now: Time) {
        self.given_at = Some(now);
        if self.moved_away_at.take().is_some_and(|at| now.since(at) <= tuning::WATCH) {
            self.taken_at = None;
            self.back_off(now);
        }
    }

    fn back_off(&mut self, now: Time) {
        self.failures += 1;
        let pause = doubled(tuning::BACK_OFF_FIRST, self.failures, tuning::BACK_OFF_MAX);
        self.back_off_until = now.after(pause);
    }

    /// Notes calm; memory that was taken long enough ago was rightly taken.
    pub(crate) fn note_calm(&mut self, now: Time) {
        let is_judged = |at: &mut Time| now.since(*at) > tuning::WATCH;
        let was_taken = self.taken_at.take_if(is_judged).is_some();
        let was_moved = self.moved_away_at.take_if(is_judged).is_some();
        if was_taken || was_moved {
            self.failures = self.failures.saturating_sub(1);
        }
    }

    /// Notes that the balloon is asked for `target` now.
    pub(crate) fn ask(
        &mut self,
        target: Bytes,
        is_take: bool,
        reason: Reason,
        actual: Bytes,
        now: Time,
    ) {
        // A target that changes every second must not hide that the balloon has not moved at all.
        let (moved_at, stood_at) = match &self.asked {
            Some(old) if !old.reached && old.is_take == is_take => (old.moved_at, old.stood_at),
            _ => (now, actual),
        };
        self.asked = Some(Asked {
            target,
            is_take,
            reason,
            said_at: now,
            moved_at,
            stood_at,
            reached: false,
        });
    }
}

/// `first`, doubled with each failure after the first, at most `max`.
pub(crate) fn doubled(first: Millis, failures: u32, max: Millis) -> Millis {
    let factor = 1u64 << failures.saturating_sub(1).min(16);
    first.times(factor).min(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lay_in_swap_while_it_was_calm_is_not_lacking() {
        let mut memory = VmMemory::new(1, Time(0));
        let mut lacks = |second: u64, mib: u64| {
            let swapped = Bytes::mib(mib);
            let latest = Tracking { swapped, working_set: Some(swapped), ..Tracking::default() };
            let now = Time(0).after(Millis::secs(second));
            memory.without_idle_swap(latest, now).swapped.0 >> 20
        };
        assert_eq!([lacks(1, 30), lacks(10, 100), lacks(11, 90)], [30, 0, 0]);
        let mut memory = VmMemory { idle_swap: Bytes::mib(90), ..VmMemory::new(1, Time(0)) };
        let mut lacks = |mib: u64| {
            let latest = Tracking { swapped: Bytes::mib(mib), ..Tracking::default() };
            memory.without_idle_swap(latest, Time(1)).swapped.0 >> 20
        };
        assert_eq!([lacks(120), lacks(60), lacks(120)], [30, 0, 60], "what is read back is in use");
    }

    #[test]
    fn what_lies_idle_is_taken_after_twice_as_long_with_each_mistake() {
        let at = |second: u64| Time(0).after(Millis::secs(second));
        let mut memory = VmMemory::new(1, at(0));
        (0..30).for_each(|second| memory.note_spare(Bytes::mib(100), true, at(second)));
        let mut mib_after = |failures, second| {
            memory.failures = failures;
            memory.idle_for_long(at(second)).0 >> 20
        };
        assert_eq!([mib_after(0, 4), mib_after(0, 5), mib_after(1, 9)], [0, 100, 0]);
        assert_eq!([mib_after(2, 19), mib_after(2, 20), mib_after(9, 119)], [0, 100, 0]);
        assert_eq!(mib_after(9, 120), 100, "at last in any case");
    }

    #[test]
    fn a_mistake_counts_once_and_a_good_take_makes_up_for_one() {
        let mut memory = VmMemory::new(1, Time(0));
        (memory.taken_at, memory.moved_away_at) = (Some(Time(0)), Some(Time(0)));
        memory.note_trouble(Time(1));
        memory.note_gift(Time(2));
        assert_eq!(memory.failures, 1);
        memory.moved_away_at = Some(Time(3));
        memory.note_calm(Time(3).after(tuning::WATCH).after(Millis(1)));
        assert_eq!(memory.failures, 0);
    }
}
