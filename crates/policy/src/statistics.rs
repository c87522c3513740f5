//! Whether a guest's statistics can be believed, and what they say.
//!
//! A guest may be stuck, rebooted, buggy or hostile, and nothing but its own word tells how much memory
//! it leaves unused. So its word is checked against what is physically possible (no more memory than
//! QEMU gave it, no swap traffic faster than memory) and against its age. What fails is doubted, and
//! nobody is shrunk on doubt. What a guest can gain by lying within the possible is bounded by its
//! group's surplus and its own `max`; what it can lose is its own.

use model::{
    Bytes, GuestStats, Reading, Reason, Time,
    reason::{Pressure, StatField},
};

use crate::{Rule, Rules, memory::VmMemory, tuning};

/// What a believable guest says.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Guest {
    pub(crate) total: Bytes,
    pub(crate) free: Bytes,
    /// It wants more.
    pub(crate) demand: Option<Pressure>,
    /// It suffers.
    pub(crate) pressure: Option<Pressure>,
}

/// Believes or doubts the statistics of a guest that was started with `ram`.
pub(crate) fn believe(
    stats: Option<Reading<GuestStats>>,
    ram: Bytes,
    memory: &mut VmMemory,
    rules: Rules,
    now: Time,
) -> Result<Guest, Reason> {
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
        possible(StatField::Total, total, ram)?;
        possible(StatField::Free, free, total)?;
        possible(StatField::Available, available, total)?;
    }
    note_counters(&reading, memory, now);
    if rules.has(Rule::PlausibleStats) {
        possible(StatField::Swap, memory.swap, tuning::SWAP_PER_SECOND_MAX)?;
        if memory.settling_until.is_some_and(|until| now < until) {
            return Err(Reason::CountersWentBack);
        }
    }
    let low = (available < total.percent(tuning::LOW_AVAILABLE_PERCENT))
        .then_some(Pressure::LowAvailable { available });
    let swapping = (memory.swap >= tuning::DEMAND_PER_SECOND)
        .then_some(Pressure::Swapping { per_second: memory.swap });
    let suffering = (memory.swap_in >= tuning::SUFFERING_PER_SECOND)
        .then_some(Pressure::SwapIn { per_second: memory.swap_in });
    Ok(Guest { total, free, demand: swapping.or(low), pressure: suffering.or(low) })
}

fn possible(field: StatField, value: Bytes, limit: Bytes) -> Result<(), Reason> {
    if value > limit { Err(Reason::ImplausibleStats { field, value, limit }) } else { Ok(()) }
}

/// Turns counters into rates.
fn note_counters(reading: &Reading<GuestStats>, memory: &mut VmMemory, now: Time) {
    let counters =
        (reading.value.swap_in.unwrap_or_default(), reading.value.swap_out.unwrap_or_default());
    memory.has_swapped |= !counters.1.is_zero();
    let latest = Reading::new(counters, reading.at);
    let Some(before) = memory.counters else {
        memory.counters = Some(latest);
        return;
    };
    let elapsed = latest.at.since(before.at);
    if counters.0 < before.value.0 || counters.1 < before.value.1 {
        memory.settling_until = Some(now.after(tuning::CALM));
        (memory.swap_in, memory.swap) = (Bytes::ZERO, Bytes::ZERO);
        memory.counters = Some(latest);
    } else if elapsed.0 > 0 {
        let swapped_in = counters.0.minus(before.value.0);
        let swapped_out = counters.1.minus(before.value.1);
        memory.swap_in = swapped_in.share(1000, elapsed.0);
        memory.swap = swapped_in.plus(swapped_out).share(1000, elapsed.0);
        memory.counters = Some(latest);
    }
}
