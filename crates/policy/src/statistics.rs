//! The plausibility of a guest's statistics, and their values.
//!
//! A guest may be stuck, rebooted, buggy or hostile, and only its own statistics tell how much
//! memory it leaves unused. So they are checked against physical limits (no more memory than QEMU
//! gave it, no swap traffic faster than memory) and against their age. Statistics that fail are
//! doubted, and no VM is shrunk on doubt. A guest that lies plausibly gains at most its
//! group's surplus, up to its own `max`; under `balance` also the memory that others of its group
//! have above their base. It can lose only its own memory.

use model::{
    Bytes, GuestStats, Reading, Reason, Time,
    reason::{KillSign, Pressure, StatField},
};

use crate::{
    Rule, Rules,
    allocation::AllocationSample,
    memory::{BalloonTarget, GuestCounters, VmMemory},
    tuning,
};

/// The values of a believable guest.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GuestMemory {
    /// Time of the statistics.
    pub(crate) at: Time,
    pub(crate) total: Bytes,
    pub(crate) free: Bytes,
    pub(crate) available: Bytes,
    /// The sign of demand.
    pub(crate) demand: Option<Pressure>,
    /// The sign of suffering.
    pub(crate) pressure: Option<Pressure>,
}

/// The host's own knowledge of a guest, used to judge its statistics.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostKnowledge {
    /// All memory of the guest, including that of other devices.
    pub(crate) most: Bytes,
    /// Memory in the balloon now, where the guest's statistics count it as its own.
    pub(crate) held: Option<Bytes>,
    pub(crate) has_swap: bool,
}

/// Believes or doubts the statistics of a guest.
pub(crate) fn believe(
    stats: Option<Reading<GuestStats>>,
    known: HostKnowledge,
    memory: &mut VmMemory,
    rules: Rules,
    now: Time,
) -> Result<GuestMemory, Reason> {
    let reading = stats.ok_or(Reason::NoStats)?;
    let age = reading.age(now);
    if rules.has(Rule::FreshStats) && age > tuning::STALE_AFTER {
        return Err(Reason::StaleStats { age, limit: tuning::STALE_AFTER });
    }
    let (Some(total), Some(free)) = (reading.value.total, reading.value.free) else {
        return Err(Reason::NoStats);
    };
    let available = reading.value.available.unwrap_or(free);
    if rules.has(Rule::PlausibleStats) {
        possible(StatField::Total, total, known.most)?;
        possible(StatField::Free, free, total)?;
        possible(StatField::Available, available, total)?;
    }
    let in_use = match known.held {
        // The balloon's size is current, but these statistics may be from a time at which it was
        // different.
        Some(held) if has_moved_since(reading.at, held, memory, now) => None,
        held => Some(total.minus(available.plus(held.unwrap_or_default()))),
    };
    let sample = Reading::new(AllocationSample { in_use, available, free }, reading.at);
    if available < total.percent(tuning::MARGIN_PERCENT) {
        memory.allocation.note_scarce(reading.at);
    }
    let before = memory.counters;
    let went_back = note_counters(&reading, memory, now);
    if !went_back {
        let jumped = memory.allocation.jump(sample, total).filter(|_| !memory.settles(now));
        note_kills(&reading, before, jumped, known, memory, now);
    }
    memory.allocation.note(sample, known.has_swap);
    if rules.has(Rule::PlausibleStats) {
        possible(StatField::Swap, memory.swap, tuning::SWAP_PER_SECOND_MAX)?;
        if memory.settles(now) {
            return Err(Reason::CountersWentBack);
        }
    }
    let low = (available < total.percent(tuning::LOW_AVAILABLE_PERCENT))
        .then_some(Pressure::LowAvailable { available });
    let swapping = (memory.swap >= tuning::DEMAND_PER_SECOND)
        .then_some(Pressure::Swapping { per_second: memory.swap });
    let suffering = (memory.swap_in >= tuning::SUFFERING_PER_SECOND)
        .then_some(Pressure::SwapIn { per_second: memory.swap_in });
    let (demand, pressure) = (swapping.or(low), suffering.or(low));
    Ok(GuestMemory { at: reading.at, total, free, available, demand, pressure })
}

/// Whether the balloon, which holds `held` now, may have held another amount at `at`.
fn has_moved_since(at: Time, held: Bytes, memory: &mut VmMemory, now: Time) -> bool {
    let is_under_way = |asked: &BalloonTarget| match asked.arrived_at {
        Some(arrived) => at <= arrived,
        None => now.since(asked.moved_at) <= tuning::STALE_AFTER,
    };
    at <= memory.allocation.note_held(held, now) || memory.asked.as_ref().is_some_and(is_under_way)
}

fn possible(field: StatField, value: Bytes, limit: Bytes) -> Result<(), Reason> {
    if value > limit { Err(Reason::ImplausibleStats { field, value, limit }) } else { Ok(()) }
}

/// Notes that the guest's kernel has killed a program: the kernel counts the kill, or memory
/// `jumped` free. With swap, a guest that does not count kills may free much memory at once for
/// other reasons.
fn note_kills(
    reading: &Reading<GuestStats>,
    before: Option<Reading<GuestCounters>>,
    jumped: Option<Bytes>,
    known: HostKnowledge,
    memory: &mut VmMemory,
    now: Time,
) {
    // Statistics of one time count once.
    let before = before.filter(|before| before.at < reading.at);
    let before = before.and_then(|counters| counters.value.kills);
    match (before, reading.value.oom_kills) {
        (Some(before), Some(kills)) if kills > before => {
            memory.note_kill(KillSign::Counted { kills }, now);
        }
        (_, None) if !known.has_swap => {
            if let Some(freed) = jumped {
                memory.note_kill(KillSign::Jumped { freed }, now);
            }
        }
        _ => {}
    }
}

/// Turns counters into rates. Every running guest has minor faults, so they show a reboot even of
/// a guest that never swapped. Returns whether the counters ran backwards.
fn note_counters(reading: &Reading<GuestStats>, memory: &mut VmMemory, now: Time) -> bool {
    let swap_in = reading.value.swap_in.unwrap_or_default();
    let counters = GuestCounters {
        swap_in,
        swap_out: reading.value.swap_out.unwrap_or_default(),
        minor_faults: reading.value.minor_faults.unwrap_or_default(),
        kills: reading.value.oom_kills,
    };
    let latest = Reading::new(counters, reading.at);
    let Some(Reading { value: before, at }) = memory.counters else {
        memory.counters = Some(latest);
        return false;
    };
    let elapsed = latest.at.since(at);
    let went_back = counters.swap_in < before.swap_in
        || counters.swap_out < before.swap_out
        || counters.minor_faults < before.minor_faults;
    if went_back {
        memory.settling_until = Some(now.after(tuning::CALM));
        (memory.swap_in, memory.swap) = (Bytes::ZERO, Bytes::ZERO);
        memory.forget_balance();
        memory.counters = Some(latest);
    } else if elapsed.0 > 0 {
        let swapped_in = counters.swap_in.minus(before.swap_in);
        let swapped_out = counters.swap_out.minus(before.swap_out);
        memory.swap_in = swapped_in.share(1000, elapsed.0);
        memory.swap = swapped_in.plus(swapped_out).share(1000, elapsed.0);
        memory.counters = Some(latest);
    }
    went_back
}
