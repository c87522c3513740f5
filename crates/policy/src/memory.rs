//! State of the policy from tick to tick: rates, requests in flight, and learned values.
//!
//! Its loss is harmless: a restarted daemon takes nothing until it has observed each guest for
//! [`tuning::CALM`], and the state of a balloon shows the last request.

use std::collections::BTreeMap;

use model::{
    Bytes, Dedup, FreePages, GroupName, Learned, Millis, PagesPerMs, Pauses, Reading, Reason, Time,
    VmName, VmView, plan::Outcome, reason::KillSign,
};
use serde::{Deserialize, Serialize};

use crate::{
    allocation::Allocation, grace::Grace, headroom, lending, overload,
    reprovision::balance::worth::Curves, tuning, withheld::Withheld,
};

/// All state.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Set by `overbook pause`: nothing is changed.
    pub paused: bool,
    /// Memory that the host keeps for overloads of its pool.
    #[serde(default)]
    pub kept: headroom::Kept,
    /// Set by `overbook pause NAME`: nothing is changed on these VMs and groups.
    #[serde(default)]
    pub pauses: Pauses,
    #[serde(default, rename = "grace_until")]
    pub(crate) grace: Grace,
    pub(crate) vms: BTreeMap<VmName, VmMemory>,
    /// The last time at which a VM of the group was short of memory that the group did not have,
    /// or the time when the group was first seen.
    pub(crate) unmet_at: BTreeMap<GroupName, Time>,
    #[serde(default)]
    pub(crate) balances: BTreeMap<GroupName, GroupBalance>,
    /// The scan rate for identical pages, where they were scanned.
    #[serde(default)]
    pub(crate) scan_rates: BTreeMap<GroupName, PagesPerMs>,
    #[serde(default)]
    pub(crate) lending: lending::Book,
    /// Learned statistics of overloads. The daemon keeps them across restarts.
    #[serde(default)]
    pub learned: Learned,
    /// The last time at which simultaneous overloads were counted.
    #[serde(default)]
    pub(crate) counted_at: Option<Time>,
}

impl Memory {
    /// Empty state, except for the pauses by the operator and the learned statistics.
    #[must_use]
    pub fn fresh(paused: bool, pauses: Pauses, learned: Learned) -> Self {
        Self { paused, pauses, learned, ..Self::default() }
    }

    /// Forgets these VMs: another program has changed them.
    pub fn forget(&mut self, is_meant: impl Fn(&VmName) -> bool) {
        self.vms.retain(|name, _| !is_meant(name));
    }

    /// Starts a time of grace: nothing is taken, unless the host runs short.
    pub fn begin_grace(&mut self, grace: Millis, now: Time) {
        self.grace = Grace::from_now(grace, now);
    }
}

/// State about one incarnation of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct VmMemory {
    pub(crate) incarnation: u64,
    /// The RAM at the last tick; zero: unknown.
    #[serde(default)]
    ram: Bytes,
    /// The time at which the VM was first seen.
    pub(crate) seen_at: Time,
    #[serde(default)]
    pub(crate) overload: overload::RecentPaging,
    pub(crate) counters: Option<Reading<GuestCounters>>,
    /// The guest's allocation history.
    #[serde(default)]
    pub(crate) allocation: Allocation,
    /// The last kill in the guest, for as long as it counts.
    #[serde(default)]
    pub(crate) killed: Option<Killed>,
    /// The VM's size before the balloon took memory, until the VM has that size again.
    #[serde(default)]
    pub(crate) had: Option<Bytes>,
    /// Bytes swapped in per second, at the latest reading.
    pub(crate) swap_in: Bytes,
    /// Bytes swapped in and out per second, at the latest reading.
    pub(crate) swap: Bytes,
    /// Set while counters settle after they ran backwards.
    pub(crate) settling_until: Option<Time>,
    /// The last time at which the VM was in trouble, or the time when it was first seen.
    pub(crate) calm_since: Time,
    /// The last time at which the VM was short of memory, or its state was unknown.
    #[serde(default)]
    pub(crate) short_at: Time,
    pub(crate) asked: Option<BalloonTarget>,
    /// The limit of resident memory, while the host pages out untouched memory.
    #[serde(default)]
    pub(crate) resident: Option<Bytes>,
    /// The last time at which paging was announced.
    #[serde(default)]
    paging_said_at: Option<Time>,
    pub(crate) stuck: Option<Stuck>,
    pub(crate) moved_by_others: Option<MovedByOthers>,
    /// Memory in the balloon while no request is pending, and since when.
    #[serde(default)]
    rest: Option<Reading<Bytes>>,
    /// Whether the host receives taken memory.
    #[serde(default)]
    pub(crate) withheld: Withheld,
    /// The last time at which memory was taken for another VM, while that is still being judged.
    pub(crate) taken_at: Option<Time>,
    pub(crate) failures: u32,
    pub(crate) back_off_until: Time,
    /// The last time at which balance took memory from the VM.
    #[serde(default)]
    pub(crate) moved_away_at: Option<Time>,
    #[serde(default)]
    pub(crate) dedup: Option<Reading<Dedup>>,
    /// The rates at the latest of those readings.
    #[serde(default)]
    pub(crate) merging: Merging,
    /// The total handed over, and the last time at which it was known to grow.
    #[serde(default)]
    pub(crate) handed_over: Bytes,
    #[serde(default)]
    pub(crate) freed_at: Time,
    /// The VM's recent curves.
    #[serde(default)]
    pub(crate) curves: Option<Curves>,
    /// The recent share of time for which the VM waited for memory …
    #[serde(default)]
    pub(crate) waited: f64,
    /// … and the time of its last update.
    #[serde(default)]
    waited_at: Time,
    /// The result of the group's last balance.
    #[serde(default)]
    pub(crate) balanced: Option<Balanced>,
    /// The balance's last move, until it is judged.
    #[serde(default)]
    pub(crate) moved: Option<Moved>,
    /// The saving of the last judged move.
    #[serde(default)]
    pub(crate) outcome: Option<Outcome>,
}

/// The state of a group's balance.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct GroupBalance {
    /// The time of the last round.
    pub(crate) held_at: Option<Time>,
    /// Number of recent deficits after a surplus was handed out.
    pub(crate) deficits: u32,
    /// The time of the last such deficit.
    pub(crate) deficit_at: Time,
    /// The total memory that the members could have then.
    pub(crate) pool: Bytes,
}

/// A VM's result of its group's balance.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Balanced {
    /// The size from which the VM's waits are negligible.
    pub(crate) enough: Bytes,
    /// Whether `enough` comes from a whole curve.
    pub(crate) has_curve: bool,
    /// The VM's goal, if it differs from the current size.
    pub(crate) goal: Option<Goal>,
}

/// A VM's goal for a round of balancing, and its benefit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Goal {
    pub(crate) size: Bytes,
    /// Whether the goal is below the current size.
    pub(crate) is_take: bool,
    /// The final size.
    #[serde(default)]
    pub(crate) wanted: Bytes,
    /// Misses per minute that the goal saves the VM; negative: misses that it costs.
    pub(crate) saves: i64,
    /// Misses per minute saved for the whole group.
    pub(crate) saved_in_all: u64,
}

/// A move of the balance whose effect does not show yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Moved {
    pub(crate) at: Time,
    pub(crate) from: Bytes,
    pub(crate) is_take: bool,
    /// [`Goal::saves`] of the move.
    pub(crate) saves: i64,
    /// Misses per second before the move.
    pub(crate) missed: f64,
}

/// A guest's counters since it booted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct GuestCounters {
    pub(crate) swap_in: Bytes,
    pub(crate) swap_out: Bytes,
    pub(crate) minor_faults: u64,
    #[serde(default)]
    pub(crate) kills: Option<u64>,
}

/// A kill by the guest's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Killed {
    pub(crate) sign: KillSign,
    /// The number of kills so far.
    pub(crate) times: u32,
    pub(crate) at: Time,
    /// Until when nothing is taken.
    pub(crate) until: Time,
}

/// Bytes of a VM merged per second, and merged bytes written again per second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Merging {
    pub(crate) merged: Bytes,
    pub(crate) broken: Bytes,
}

/// A target given to the balloon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct BalloonTarget {
    pub(crate) target: Bytes,
    pub(crate) is_take: bool,
    pub(crate) reason: Reason,
    /// The time of the last command.
    pub(crate) said_at: Time,
    /// The last time at which the balloon came closer, or could not be expected to.
    pub(crate) moved_at: Time,
    /// The balloon's size at that time.
    pub(crate) stood_at: Bytes,
    pub(crate) reached: bool,
    /// The time at which the balloon was first seen at its target.
    #[serde(default)]
    pub(crate) arrived_at: Option<Time>,
}

/// A balloon that did not follow.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Stuck {
    pub(crate) since: Time,
    pub(crate) wanted: Bytes,
    pub(crate) retry_at: Time,
    pub(crate) failures: u32,
}

/// A balloon that another program moved.
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

    /// Notes the size of the RAM. Plugged memory belongs to the guest until a policy decides
    /// otherwise, and unplugged memory was not taken: all remembered sizes move along.
    pub(crate) fn note_ram(&mut self, ram: Bytes) {
        let before = std::mem::replace(&mut self.ram, ram);
        if before.is_zero() || ram.is_zero() || before == ram {
            return;
        }
        let moved = |size: &mut Bytes| *size = size.plus(ram).minus(before);
        if let Some(asked) = &mut self.asked {
            moved(&mut asked.target);
            moved(&mut asked.stood_at);
        }
        self.resident.iter_mut().for_each(moved);
        self.had.iter_mut().for_each(moved);
        self.stuck.iter_mut().for_each(|stuck| moved(&mut stuck.wanted));
        if let Some(others) = &mut self.moved_by_others {
            moved(&mut others.actual);
            moved(&mut others.target);
        }
        self.forget_balance();
    }

    /// Notes whether the host pages out untouched memory of the VM. Paging starts at the size
    /// that the balloon leaves the VM, and continues while the group has it on. Returns `true` if
    /// paging is to be announced, now or again, so that the balloon is deflated.
    pub(crate) fn note_paging(&mut self, is_on: bool, view: &VmView, now: Time) -> bool {
        let begins = is_on && self.resident.is_none() && view.cold.is_some();
        if begins {
            self.resident = Some(view.balloon.map_or(view.ram, |balloon| balloon.value));
        }
        let ends = !is_on && self.resident.take().is_some();
        if begins || ends {
            (self.asked, self.stuck, self.moved_by_others) = (None, None, None);
            self.rest = None;
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

    /// Has paging announced again, because the announcement was not made.
    pub(crate) fn unsay_paging(&mut self) {
        self.paging_said_at = None;
    }

    /// Notes whether a paged VM's resident memory is within its target. It may be above for a
    /// while when the VM wakes, without a move by another program.
    pub(crate) fn follow_paging(&mut self, resident: Bytes, ram: Bytes) {
        if let Some(asked) = &mut self.asked {
            asked.reached |= resident <= asked.target.plus(tuning::tolerance(ram));
        }
    }

    /// Whether the guest has used swap since it booted.
    pub(crate) fn has_swapped(&self) -> bool {
        self.counters.is_some_and(|counters| !counters.value.swap_out.is_zero())
    }

    /// Notes the balloon's size, and whether it follows its target.
    pub(crate) fn follow(&mut self, actual: Bytes, ram: Bytes, now: Time) {
        if self.moved_by_others.is_some_and(|moved| moved.until <= now) {
            self.moved_by_others = None;
        }
        let held = ram.minus(actual);
        let Some(asked) = &mut self.asked else { return self.follow_others(held, ram, now) };
        self.rest = None;
        let distance = actual.0.abs_diff(asked.target.0);
        let is_near = distance <= tuning::tolerance(ram).0;
        if !is_near && !asked.is_take && !asked.reached && actual > asked.target {
            // The guest has more than it was given: a repeat would take memory past every safety
            // rule.
            self.asked = None;
        } else if is_near {
            asked.reached = true;
            asked.arrived_at.get_or_insert(now);
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

    /// Notes a balloon that has rested and moves without a request: another client or its guest
    /// moves it. A balloon that has not rested may follow an earlier request, or its guest boots.
    fn follow_others(&mut self, held: Bytes, ram: Bytes, now: Time) {
        let here = Reading::new(held, now);
        let rest = self.rest.filter(|_| self.stuck.is_none()).unwrap_or(here);
        let moves = held.0.abs_diff(rest.value.0) > tuning::tolerance(ram).0;
        self.rest = Some(if moves { here } else { rest });
        if moves && (rest.age(now) >= tuning::CALM || self.moved_by_others.is_some()) {
            let (actual, target) = (ram.minus(held), ram.minus(rest.value));
            let until = now.after(tuning::LEFT_ALONE);
            self.moved_by_others = Some(MovedByOthers { actual, target, until });
        }
    }

    /// Turns the worker's counters into rates; `None`: the VM's pages are not being merged.
    /// Counters that ran backwards belong to another worker, and give a rate of zero.
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

    /// Notes whether the VM has freed memory since the last tick.
    pub(crate) fn note_freed(&mut self, free: Option<FreePages>, now: Time) {
        let Some(free) = free else { return };
        // The counter restarts with each worker.
        if std::mem::replace(&mut self.handed_over, free.handed_over) < free.handed_over {
            self.freed_at = now;
        }
    }

    /// Excuses a balloon that could not be reached: only time in which it could follow counts.
    pub(crate) fn excuse(&mut self, now: Time) {
        self.rest = None;
        if let Some(asked) = &mut self.asked {
            asked.moved_at = now;
        }
    }

    /// Nothing is carried out: other programs may move balloons, and earlier requests are void.
    pub(crate) fn stand_back(&mut self) {
        (self.asked, self.moved, self.rest) = (None, None, None);
    }

    /// Whether the balloon has stopped short of its target for too long.
    pub(crate) fn is_stuck(&self, now: Time) -> bool {
        self.asked
            .as_ref()
            .is_some_and(|a| !a.reached && now.since(a.moved_at) >= tuning::STUCK_AFTER)
    }

    /// Marks the VM as uncooperative, for longer each time.
    pub(crate) fn mark_stuck(&mut self, wanted: Bytes, now: Time) {
        let failures = self.stuck.map_or(0, |s| s.failures) + 1;
        let pause = doubled(tuning::RETRY_FIRST, failures, tuning::RETRY_MAX);
        let since = self.asked.as_ref().map_or(now, |a| a.moved_at);
        self.stuck = Some(Stuck { since, wanted, retry_at: now.after(pause), failures });
    }

    /// Notes that the guest is under pressure, or that its state is unknown. If memory was taken
    /// shortly before, that was a mistake.
    pub(crate) fn note_trouble(&mut self, now: Time) {
        self.calm_since = now;
        if self.taken_at.take().is_some_and(|at| now.since(at) <= tuning::WATCH) {
            self.moved_away_at = None;
            self.back_off(now);
        }
    }

    /// Notes the share of time for which the VM waits for memory.
    pub(crate) fn note_waits(&mut self, waits: f64, now: Time) {
        let passed = now.since(self.waited_at).0 as f64 / tuning::WAITED_WITHIN.0 as f64;
        self.waited += passed.min(1.0) * (waits - self.waited);
        self.waited_at = now;
    }

    /// Drops the balance's state.
    pub(crate) fn forget_balance(&mut self) {
        (self.balanced, self.moved, self.outcome) = (None, None, None);
        self.curves = None;
    }

    /// Notes a grant to the VM. If balance took memory shortly before, one of both was wrong.
    pub(crate) fn note_gift(&mut self, now: Time) {
        if self.moved_away_at.take().is_some_and(|at| now.since(at) <= tuning::WATCH) {
            self.taken_at = None;
            self.back_off(now);
        }
    }

    /// Notes a kill by the guest's kernel; each further kill counts longer.
    pub(crate) fn note_kill(&mut self, sign: KillSign, now: Time) {
        let before = self.killed.filter(|killed| now.since(killed.at) <= tuning::KILLED_MAX);
        let times = before.map_or(0, |killed| killed.times) + 1;
        let pause = doubled(tuning::KILLED_FIRST, times, tuning::KILLED_MAX);
        self.killed = Some(Killed { sign, times, at: now, until: now.after(pause) });
        self.note_trouble(now);
    }

    /// Whether counters settle after they ran backwards: the guest has booted.
    pub(crate) fn settles(&self, now: Time) -> bool {
        self.settling_until.is_some_and(|until| now < until)
    }

    /// Notes a deflation by the guest's kernel: a balloon that has just shrunk unasked, if its
    /// driver may deflate it and the guest was short. A program was about to be killed. Otherwise
    /// the guest has booted, or another program has moved the balloon.
    pub(crate) fn note_own_deflation(&mut self, now: Time) {
        if self.settles(now) || !self.allocation.is_scarce(now) {
            return;
        }
        let is_own = |moved: &mut MovedByOthers| {
            let ago = now.after(tuning::LEFT_ALONE).since(moved.until);
            moved.actual > moved.target && ago <= tuning::STALE_AFTER
        };
        if let Some(moved) = self.moved_by_others.take_if(is_own) {
            let taken = moved.actual.minus(moved.target);
            self.note_kill(KillSign::TookBack { taken }, now);
        }
    }

    /// The last kill, as long as it forbids takes.
    pub(crate) fn recovers_from(&self, now: Time) -> Option<Killed> {
        self.killed.filter(|killed| now < killed.until)
    }

    /// Notes a take from the VM while its target is `size`.
    pub(crate) fn note_take(&mut self, size: Bytes) {
        self.had = self.had.max(Some(size));
    }

    /// Notes that the VM's target is `size` again.
    pub(crate) fn note_return(&mut self, size: Bytes) {
        self.had.take_if(|had| *had <= size);
    }

    fn back_off(&mut self, now: Time) {
        self.failures += 1;
        let pause = doubled(tuning::BACK_OFF_FIRST, self.failures, tuning::BACK_OFF_MAX);
        self.back_off_until = now.after(pause);
    }

    /// Notes calm; a take that is old enough was right.
    pub(crate) fn note_calm(&mut self, now: Time) {
        let is_judged = |at: &mut Time| now.since(*at) > tuning::WATCH;
        let was_taken = self.taken_at.take_if(is_judged).is_some();
        let was_moved = self.moved_away_at.take_if(is_judged).is_some();
        if was_taken || was_moved {
            self.failures = self.failures.saturating_sub(1);
        }
    }

    /// Notes a new target for the balloon.
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
        self.asked = Some(BalloonTarget {
            target,
            is_take,
            reason,
            said_at: now,
            moved_at,
            stood_at,
            reached: false,
            arrived_at: None,
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
    fn plugged_memory_is_the_guests_and_unplugged_memory_was_not_taken() {
        let mut memory = VmMemory::new(1, Time(0));
        memory.note_ram(Bytes::mib(512));
        memory.ask(Bytes::mib(448), true, Reason::Content, Bytes::mib(500), Time(1));
        memory.resident = Some(Bytes::mib(300));
        memory.note_ram(Bytes::mib(1024));
        let asked = memory.asked.as_ref().unwrap();
        assert_eq!((asked.target, asked.stood_at), (Bytes::mib(960), Bytes::mib(1012)));
        assert_eq!(memory.resident, Some(Bytes::mib(812)));
        memory.follow(Bytes::mib(960), Bytes::mib(1024), Time(2));
        assert!(memory.moved_by_others.is_none() && memory.asked.as_ref().unwrap().reached);
        memory.note_ram(Bytes::mib(512));
        assert_eq!(memory.asked.as_ref().unwrap().target, Bytes::mib(448));
        memory.follow(Bytes::mib(448), Bytes::mib(512), Time(3));
        assert!(memory.moved_by_others.is_none());
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
