//! One VM in one tick: its known state, and the decision about it.
//!
//! A member is changed at most once a tick, by the first step that has a reason to; every later
//! step leaves it alone. So the order of the steps in [`crate::group`] is the order of
//! precedence.

use model::{
    Bytes, Cold, FreePages, Link, Migration, Millis, Reading, Reason, Time, Tracking, VmLimits,
    VmName, VmView,
    reason::Pressure,
    spec::{ShareSpec, VmSpec},
    view::{Mechanism, MemoryLimit},
};

use crate::{
    Rule, Rules, cold,
    memory::{Merging, VmMemory},
    statistics::{self, GuestMemory, HostKnowledge},
    tuning,
    used::{lazy, used},
};

/// A VM of a group, during a tick.
#[derive(Debug)]
pub(crate) struct GroupVm {
    pub(crate) name: VmName,
    pub(crate) limits: VmLimits,
    pub(crate) has_swap: bool,
    /// The memory that the guest always keeps.
    pub(crate) keeps: Keeps,
    /// Whether the host pages out untouched memory; otherwise memory leaves the VM through its
    /// balloon.
    pub(crate) is_paged: bool,
    /// The location of the VM's memory, if it is paged and that is known.
    pub(crate) cold: Option<Cold>,
    /// The balloon's size; for a paged VM its resident memory, at least its target.
    pub(crate) actual: Bytes,
    /// Whether its balloon holds nothing of its `max`.
    pub(crate) is_at_max: bool,
    /// The last requested target, or the current size.
    pub(crate) target: Bytes,
    /// Memory that the guest occupies on the host.
    pub(crate) used: Bytes,
    /// The same without shared pages; `None`: no recent count.
    pub(crate) counted: Option<Bytes>,
    /// Memory that the VM still has but `used` leaves out: the host can take it without I/O.
    pub(crate) lazy: Bytes,
    /// The memory limits of QEMU's cgroups, where there is a recent reading …
    pub(crate) memory_limits: Vec<MemoryLimit>,
    /// … and the time of that reading.
    pub(crate) limits_at: Time,
    /// RAM that the balloon can change.
    pub(crate) ram: Bytes,
    /// Memory that the group pays for on behalf of the VM, where no budget is configured.
    pub(crate) paid: Bytes,
    /// Memory that a paged-out byte takes.
    pub(crate) swap_cost: f32,
    /// Whether `used` is only an upper bound, because the VM has not been counted yet.
    pub(crate) is_guessed: bool,
    pub(crate) guest: Result<GuestMemory, Reason>,
    /// Freed memory that can be taken from the VM.
    pub(crate) free_pages: FreePages,
    /// The VM's working set and curve, where they are current.
    pub(crate) tracking: Option<Tracking>,
    /// The weight of the VM's misses.
    pub(crate) share: ShareSpec,
    /// `None`: the VM's pages are not being merged.
    pub(crate) merging: Option<Merging>,
    /// Why the VM's memory cannot be changed at all, up or down.
    pub(crate) blocked: Option<Reason>,
    /// Why nothing is taken from the VM while the host has enough; grants are possible.
    pub(crate) spared: Option<Reason>,
    /// Memory that the host keeps for overloads may be granted to it.
    pub(crate) is_relieved: bool,
    /// Why the VM is planned around for now: its balloon does not follow, or another program
    /// moves it.
    pub(crate) avoided: Option<Reason>,
    pub(crate) memory: VmMemory,
    pub(crate) change: Option<Intent>,
    pub(crate) refusals: Vec<Reason>,
}

/// The memory that a guest always keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Keeps {
    /// Memory that stays available.
    pub(crate) margin: Bytes,
    /// With less than this available, the guest needs back the memory that was taken from it. It
    /// is less than the margin, so that noise in statistics moves no memory to and fro.
    pub(crate) needs: Bytes,
    /// The largest possible take: free memory, or memory that was free for long.
    pub(crate) free: Bytes,
    /// The part of `free` that stays with the guest.
    pub(crate) of_free: Bytes,
    /// Time of observation so far, if it is too short to take anything.
    pub(crate) unwatched: Option<Millis>,
}

/// A VM's terms from configuration and host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) limits: VmLimits,
    pub(crate) spec: VmSpec,
    /// Whether the group has the host page out untouched memory.
    pub(crate) pages_out: bool,
    /// Memory that a paged-out byte takes.
    pub(crate) swap_cost: f32,
    /// The host's memory.
    pub(crate) host_total: Bytes,
}

/// A decided change.
#[derive(Clone, Debug)]
pub(crate) struct Intent {
    pub(crate) target: Bytes,
    pub(crate) is_take: bool,
    pub(crate) is_repeat: bool,
    pub(crate) reason: Reason,
}

impl GroupVm {
    /// Assesses one VM.
    pub(crate) fn assess(
        name: &VmName,
        view: &VmView,
        terms: Terms,
        memory: Option<VmMemory>,
        rules: Rules,
        now: Time,
    ) -> Self {
        let Terms { limits, spec, pages_out, swap_cost, host_total } = terms;
        let mut memory = memory
            .filter(|m| m.incarnation == view.incarnation)
            .unwrap_or_else(|| VmMemory::new(view.incarnation, now));
        memory.note_ram(view.ram);
        let says_paging = memory.note_paging(pages_out, view, now);
        let is_paged = memory.resident.is_some();
        let has_swap = |memory: &VmMemory| spec.swap.unwrap_or(memory.has_swapped());
        let guest = if is_paged {
            cold::guest(view.cold, now)
        } else {
            let most = view.ram.plus(view.devices);
            let known = HostKnowledge { most, held: held(view), has_swap: has_swap(&memory) };
            statistics::believe(view.stats, known, &mut memory, rules, now)
        };
        let has_swap = is_paged || has_swap(&memory);
        match &guest {
            Ok(guest) if guest.pressure.is_none() => memory.note_calm(now),
            Ok(_) | Err(_) => memory.note_trouble(now),
        }
        let actual = match view.balloon {
            // The guest's driver writes this figure, and the host promises that memory to the
            // guest: hence the bound.
            Some(reading) => reading.value.min(view.ram),
            // A VM whose QEMU never answered runs all the same.
            None if view.ram.is_zero() => limits.base,
            None => view.ram,
        };
        let actual = match (memory.resident, view.cold) {
            (Some(target), Some(cold)) => target.max(cold.value.resident).min(view.ram),
            (Some(target), None) => target,
            (None, _) => actual,
        };
        let blocked = blocked(view, is_paged, rules, now);
        if is_paged {
            memory.follow_paging(actual, view.ram);
        } else if blocked.is_none() {
            memory.follow(actual, view.ram, now);
            if view.deflates_on_oom == Some(true) {
                memory.note_own_deflation(now);
            }
        } else {
            memory.excuse(now);
        }
        let stands = memory.resident.unwrap_or(actual);
        let target = memory.asked.as_ref().map_or(stands, |asked| asked.target);
        let out = view.cold.filter(|_| is_paged).map(|reading| reading.value);
        let counted = used(view).filter(|reading| reading.age(now) <= tuning::USED_STALE_AFTER);
        match counted.filter(|_| !is_paged) {
            Some(reading) => {
                let left = actual.plus(view.devices).plus(tuning::uncounted(view.ram));
                memory.withheld.note(reading.value, left, view.ram.minus(actual), now);
            }
            None => memory.withheld.forget(),
        }
        let charged = out.map_or(Bytes::ZERO, |cold| cold::charged(&cold, swap_cost));
        let is_new = now.since(memory.seen_at) <= tuning::USED_STALE_AFTER;
        let free = view.free_pages.filter(|reading| reading.age(now) <= tuning::FREED_STALE_AFTER);
        memory.note_freed(free.map(|reading| reading.value), now);
        let tracked = view.tracking.as_ref().filter(|t| t.age(now) <= tuning::USED_STALE_AFTER);
        let can_give = |_: &Reading<FreePages>| !view.limits.contains_key(&Mechanism::FreePages);
        let mut free_pages = free.filter(can_give).map(|free| free.value).unwrap_or_default();
        free_pages.lazy = free_pages.lazy.min(free_pages.freed);
        let memory_limits = view.memory_limits.as_ref();
        let memory_limits = memory_limits.filter(|r| r.age(now) <= tuning::USED_STALE_AFTER);
        let keeps = guest.as_ref().map_or(Keeps::default(), |guest| {
            keeps(guest, &memory, is_paged, has_swap, rules, now)
        });
        let mut member = Self {
            name: name.clone(),
            limits,
            has_swap,
            keeps,
            cold: out,
            is_paged,
            actual,
            is_at_max: view.balloon.is_some_and(|balloon| balloon.value >= limits.max),
            target,
            used: counted.map_or(actual.max(target), |reading| reading.value.plus(charged)),
            counted: counted.map(|reading| {
                // A write to a shared page makes an own page of it.
                reading.value.minus(view.pool_part)
            }),
            lazy: counted.map_or(Bytes::ZERO, |_| lazy(view)),
            limits_at: memory_limits.map_or(Time(0), |limits| limits.at),
            memory_limits: memory_limits.map_or_else(Vec::new, |limits| limits.value.clone()),
            is_guessed: counted.is_none() && is_new,
            ram: view.ram,
            paid: paid(view, limits.base.min(host_total), counted, actual.max(target)),
            swap_cost,
            guest,
            free_pages,
            tracking: tracked.map(|tracking| tracking.value.clone()),
            share: spec.share,
            merging: memory.note_merging(view.dedup),
            blocked,
            spared: None,
            is_relieved: false,
            avoided: avoided(&memory, actual, now),
            memory,
            change: says_paging.then_some(Intent {
                target,
                is_take: false,
                is_repeat: false,
                reason: Reason::Paged,
            }),
            refusals: Vec::new(),
        };
        if member.guest.is_err() || member.is_short() {
            member.memory.short_at = now;
        }
        member
    }

    /// The most that the guest may occupy while its balloon moves.
    pub(crate) fn limit(&self) -> Bytes {
        self.actual.max(self.target)
    }

    /// Memory above base.
    pub(crate) fn grant(&self) -> Bytes {
        self.target.minus(self.limits.base)
    }

    /// Memory that the VM may still touch without a grant, and that the cgroups of its QEMU do
    /// not count yet. Without a count of the VM: its grant at most.
    pub(crate) fn untouched(&self) -> Bytes {
        let counted = self.counted.map(|counted| counted.plus(self.lazy));
        counted.map_or_else(|| self.grant(), |counted| self.limit().minus(counted))
    }

    /// Resident memory beyond the target: the host is paging it out.
    pub(crate) fn overshoot(&self) -> Bytes {
        if self.is_paged { self.actual.minus(self.target) } else { Bytes::ZERO }
    }

    /// Memory granted above base and not touched yet.
    pub(crate) fn promised(&self) -> Bytes {
        self.limit().minus(self.used.max(self.limits.base))
    }

    /// Whether the guest's believable statistics show pressure, harmful or not.
    pub(crate) fn is_pressured(&self) -> bool {
        self.guest.as_ref().is_ok_and(|guest| guest.pressure.is_some())
    }

    /// Whether the guest's believable statistics show suffering or demand. A guest with swap
    /// shows them by its use of swap: little available memory does no harm.
    pub(crate) fn is_short(&self) -> bool {
        self.suffers() || self.demand().is_some_and(|sign| self.is_harm(sign))
    }

    /// Whether the guest suffers from a shortage of memory.
    pub(crate) fn suffers(&self) -> bool {
        let pressure = self.guest.as_ref().ok().and_then(|guest| guest.pressure);
        pressure.is_some_and(|pressure| self.is_harm(pressure))
    }

    fn is_harm(&self, pressure: Pressure) -> bool {
        !(self.has_swap && matches!(pressure, Pressure::LowAvailable { .. }))
    }

    /// Free memory of the guest beyond its margin.
    pub(crate) fn spare(&self) -> Bytes {
        let Ok(guest) = &self.guest else { return Bytes::ZERO };
        let Keeps { margin, free, of_free, unwatched, .. } = self.keeps;
        let spare = free.minus(of_free).min(guest.available.minus(margin));
        if unwatched.is_some() { Bytes::ZERO } else { spare }
    }

    /// Whether the group's balance decides over all of the VM's memory.
    pub(crate) fn is_balanced(&self) -> bool {
        self.memory.balanced.is_some_and(|balanced| balanced.has_curve)
    }

    /// Whether the VM may be given more now. Memory that could not be taken back is not given: a
    /// guest that cannot be believed gets its base and no more.
    pub(crate) fn can_take_more(&self) -> bool {
        let is_free_to_change =
            self.change.is_none() && self.blocked.is_none() && self.avoided.is_none();
        is_free_to_change && self.guest.is_ok() && !self.has_max()
    }

    /// Whether the VM is at its maximum.
    pub(crate) fn has_max(&self) -> bool {
        self.limits.max.minus(self.target) < tuning::STEP_MIN
    }

    /// The sign of demand in believable statistics.
    pub(crate) fn demand(&self) -> Option<Pressure> {
        self.guest.as_ref().ok().and_then(|guest| guest.demand)
    }

    /// Swap traffic per second that shows demand.
    pub(crate) fn swapped(&self) -> Bytes {
        match self.demand() {
            Some(Pressure::Swapping { per_second }) => per_second,
            _ => Bytes::ZERO,
        }
    }

    /// Changes nothing on the VM, because the operator has paused it.
    pub(crate) fn pause(&mut self, reason: Reason) {
        if self.change.take().is_some() {
            self.memory.unsay_paging();
        }
        self.free_pages = FreePages::default();
        self.refuse(reason.clone());
        self.blocked = Some(reason);
    }

    /// Gives the VM `target`, unless a change was decided before.
    pub(crate) fn give(&mut self, target: Bytes, reason: Reason) {
        self.decide(target.min(self.limits.max.max(self.limits.base)), false, reason);
    }

    /// Takes the VM down to `target`, unless a change was decided before.
    pub(crate) fn take(&mut self, target: Bytes, reason: Reason) {
        self.decide(target, true, reason);
    }

    /// Leaves the VM out of all plans for now. If it `withdraws`, the VM is asked to keep its
    /// current size.
    pub(crate) fn plan_around(&mut self, withdraws: bool, now: Time) {
        self.avoided = avoided(&self.memory, self.actual, now);
        let Some(reason) = self.avoided.clone() else {
            return;
        };
        if withdraws && self.blocked.is_none() {
            self.decide(self.actual, false, reason);
        }
    }

    fn decide(&mut self, target: Bytes, is_take: bool, reason: Reason) {
        let is_paused = matches!(self.blocked, Some(Reason::PausedAlone { .. }));
        if !is_paused && self.change.is_none() && target != self.target {
            self.change = Some(Intent { target, is_take, is_repeat: false, reason });
        }
    }

    /// Notes why no change was made.
    pub(crate) fn refuse(&mut self, reason: Reason) {
        if !self.refusals.contains(&reason) {
            self.refusals.push(reason);
        }
    }

    /// Repeats a target that was not reached, in case the command was lost. A change that would
    /// not be decided now is not repeated: a take on doubt, a grant while the host is short.
    pub(crate) fn repeat(&mut self, is_host_short: bool, now: Time) {
        let Some(asked) = &self.memory.asked else {
            return;
        };
        let is_due = !asked.reached && now.since(asked.said_at) >= tuning::REPEAT_AFTER;
        let is_still_right = if asked.is_take {
            self.guest.is_ok()
        } else {
            asked.target <= self.limits.base || !is_host_short
        };
        if self.change.is_none() && self.blocked.is_none() && is_due && is_still_right {
            let (target, is_take) = (asked.target, asked.is_take);
            let reason = asked.reason.clone();
            self.change = Some(Intent { target, is_take, is_repeat: true, reason });
        }
    }
}

fn avoided(memory: &VmMemory, actual: Bytes, now: Time) -> Option<Reason> {
    if let Some(stuck) = memory.stuck.filter(|stuck| now < stuck.retry_at) {
        return Some(Reason::Uncooperative {
            actual,
            target: stuck.wanted,
            stuck: now.since(stuck.since),
            wait: stuck.retry_at.since(now),
        });
    }
    if memory.withheld.is_left_alone(now) {
        return memory.withheld.refusal(now);
    }
    memory.moved_by_others.map(|moved| Reason::MovedByOthers {
        actual: moved.actual,
        target: moved.target,
        wait: moved.until.since(now),
    })
}

/// Memory that the group pays for on behalf of a VM: its base, and the excess of its occupied
/// memory over its RAM, which is memory of other devices. The size of its RAM is QEMU's claim. So
/// memory that the host cannot see never counts as left idle by the VM.
fn paid(view: &VmView, base: Bytes, counted: Option<Reading<Bytes>>, most: Bytes) -> Bytes {
    let beyond = |used: Bytes| used.minus(view.ram).min(view.devices);
    counted.map_or(base.min(most), |used| base.plus(beyond(used.value)))
}

/// The memory that `guest` always keeps.
fn keeps(
    guest: &GuestMemory,
    memory: &VmMemory,
    is_paged: bool,
    has_swap: bool,
    rules: Rules,
    now: Time,
) -> Keeps {
    let least = guest.total.percent(tuning::MARGIN_PERCENT).max(tuning::MARGIN_MIN);
    // Memory that the host pages out is not missing: the guest can allocate from all its RAM.
    if is_paged || !rules.has(Rule::Margin) {
        return Keeps { margin: least, free: guest.free, of_free: least, ..Keeps::default() };
    }
    let allocation = &memory.allocation;
    let surge = |now| allocation.surge(has_swap, memory.seen_at, guest.at, now);
    if has_swap {
        let margin = least.max(surge(now));
        return Keeps { margin, free: guest.free, of_free: margin, ..Keeps::default() };
    }
    let room = least.plus(allocation.used_before(has_swap, now));
    let (margin, needs) = (surge(now).max(room), surge(guest.at).max(room));
    let lasting = allocation.lasting(now);
    let free = lasting.unwrap_or_default().min(guest.free);
    let needs = needs.percent(tuning::NEEDS_PERCENT);
    Keeps { margin, needs, free, of_free: least, unwatched: lasting.err() }
}

/// Memory in the balloon that the guest's statistics still count: Linux subtracts it from the
/// total only where the balloon does not deflate by itself.
fn held(view: &VmView) -> Option<Bytes> {
    let balloon = view.balloon.filter(|_| view.deflates_on_oom == Some(true));
    balloon.map(|balloon| view.ram.minus(balloon.value))
}

fn blocked(view: &VmView, is_paged: bool, rules: Rules, now: Time) -> Option<Reason> {
    if let Link::Down { why, .. } = &view.link {
        return Some(Reason::Unreachable { why: why.clone() });
    }
    if rules.has(Rule::Migration) && view.migration != Migration::None {
        return Some(Reason::Migrating);
    }
    let manager = view.manager.as_ref();
    if let Some(remedy) = manager.and_then(|manager| manager.balances.clone()) {
        return Some(Reason::ManagersBalloon { remedy });
    }
    if is_paged {
        return None;
    }
    let Some(balloon) = view.balloon else {
        let why = view.limits.get(&Mechanism::Balloon);
        let why = why.map_or("its size cannot be read", String::as_str).to_owned();
        return Some(Reason::NoBalloon { why });
    };
    let age = balloon.age(now);
    (age > tuning::STALE_AFTER)
        .then(|| Reason::Unreachable { why: format!("its balloon was last read {age} ago") })
}
