//! The one gate through which memory is taken from a VM. It holds the safety rules.
//!
//! The gate returns how low a VM's target may go now, or why it may not go down at all. Rules
//! that protect a guest's correctness (fresh and plausible statistics, `min`, migration, no
//! recent kill) hold for every purpose.
//!
//! **A guest without swap** loses programs where others wait, so all rules hold for it for every
//! purpose: calm, back-off, its margin, its base. It gives memory that was free for long, in
//! small steps, and each step waits for statistics that are newer than the arrival of the
//! previous step.
//!
//! **A guest with swap** keeps its margin and its comfort (pressure, calm, back-off) too. But
//! when its group is over its budget or the host is short, its grants come back all the same:
//! otherwise memory would be taken from a VM or group that pays for it, above all from a group
//! that has lent it. The guest then swaps as it would without its grants. A guest that has almost
//! nothing available and does not swap has no place for its pages, even if it is configured as
//! one with swap: nothing is taken from it.

use model::{Bytes, Reason, Time, reason::Pressure};

use crate::{
    Rule, Rules,
    member::{GroupVm, Keeps},
    memory::BalloonTarget,
    tuning,
};

/// The purpose of a take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Idle memory goes to a VM that is short.
    Idle,
    /// The VM shrinks towards its share.
    Share,
    /// Memory goes where it saves more misses.
    Balance,
    /// The VM holds more than its maximum.
    Maximum,
    /// The group is over its budget.
    Deficit,
    /// The host is short.
    Emergency,
}

impl Purpose {
    const fn bends_comfort(self) -> bool {
        matches!(self, Self::Deficit | Self::Emergency | Self::Maximum)
    }

    const fn step_percent(self) -> u64 {
        match self {
            Self::Idle | Self::Share => tuning::STEP_PERCENT,
            Self::Balance => tuning::SHRINK_PERCENT,
            Self::Deficit | Self::Maximum => tuning::DEFICIT_STEP_PERCENT,
            Self::Emergency => tuning::EMERGENCY_STEP_PERCENT,
        }
    }
}

/// The lowest target of `member` now, at most `wanted` below its current target.
///
/// # Errors
///
/// The rule that forbids a take worth the balloon's work.
pub(crate) fn lowest_target(
    member: &GroupVm,
    wanted: Bytes,
    purpose: Purpose,
    rules: Rules,
    now: Time,
) -> Result<Bytes, Reason> {
    if let Some(reason) = &member.blocked {
        return Err(reason.clone());
    }
    if let Some(reason) = &member.avoided {
        return Err(reason.clone());
    }
    if let Some(reason) = member.spared.as_ref().filter(|_| purpose != Purpose::Emergency) {
        return Err(reason.clone());
    }
    let withheld = member.memory.withheld.refusal(now).filter(|_| rules.has(Rule::GivesBack));
    if let Some(reason) = withheld {
        return Err(reason);
    }
    if let Some(killed) = member.memory.recovers_from(now) {
        return Err(Reason::Killed { sign: killed.sign, wait: killed.until.since(now) });
    }
    if member.memory.asked.as_ref().is_some_and(|asked| asked.is_take && !asked.reached) {
        return Err(Reason::InFlight { target: member.target });
    }
    let guest = member.guest.as_ref().map_err(Clone::clone)?;
    let is_above_base = member.target > member.limits.base;
    let keeps_what_it_uses = !member.has_swap && rules.has(Rule::Swapless);
    let mut wanted = wanted;
    if keeps_what_it_uses {
        is_comfortable(member, rules, now)?;
    } else if purpose == Purpose::Balance && is_above_base {
        let ago = now.since(member.memory.seen_at);
        if rules.has(Rule::Calm) && ago < tuning::CALM {
            return Err(Reason::NotCalm { ago, needed: tuning::CALM });
        }
        // The member's misses were weighed against other members' misses.
        if let Err(reason) = is_not_backing_off(member, rules, now) {
            // Those mistakes say little about memory that was not touched for a minute.
            wanted = wanted.min(guest.free);
            if wanted < tuning::STEP_MIN {
                return Err(reason);
            }
        }
    } else if !purpose.bends_comfort() {
        is_comfortable(member, rules, now)?;
    } else if let Some(pressure @ Pressure::LowAvailable { .. }) = guest.pressure
        && guest.demand == guest.pressure
        && rules.has(Rule::Pressure)
    {
        return Err(Reason::UnderPressure { pressure });
    }

    let floor = match purpose {
        // A guest without swap that wakes loses programs before its memory is back: it keeps its
        // base.
        Purpose::Idle | Purpose::Balance if keeps_what_it_uses => member.limits.base,
        Purpose::Balance if is_above_base => member.limits.base,
        Purpose::Idle | Purpose::Balance if rules.has(Rule::Minimum) => member.limits.min,
        Purpose::Idle | Purpose::Balance => Bytes::ZERO,
        Purpose::Maximum => member.limits.max,
        Purpose::Share | Purpose::Deficit | Purpose::Emergency => member.limits.base,
    };
    let above_floor = member.target.minus(floor);
    if above_floor < tuning::STEP_MIN {
        return Err(Reason::AtFloor { floor });
    }
    if keeps_what_it_uses {
        is_watched(member)?;
    }
    let mut amount = wanted.min(above_floor);
    // Paging takes small steps by itself, and stops no guest.
    let is_gentle = member.is_paged && purpose == Purpose::Balance;
    if rules.has(Rule::InflationCap) && !is_gentle {
        let percent = purpose.step_percent();
        let is_small = keeps_what_it_uses && rules.has(Rule::Margin);
        let percent = if is_small { percent.min(tuning::SWAPLESS_STEP_PERCENT) } else { percent };
        amount = amount.min(tuning::UNIT.max(member.target.percent(percent)));
    }
    let Keeps { margin, free: lasting, .. } = member.keeps;
    let available = guest.available;
    if purpose == Purpose::Idle || keeps_what_it_uses {
        let before_the_last_step = |asked: &BalloonTarget| {
            let arrived = if keeps_what_it_uses { asked.arrived_at } else { None };
            asked.is_take && guest.at <= arrived.unwrap_or(asked.said_at)
        };
        // Free memory in statistics from before the last step is not free twice.
        if member.memory.asked.as_ref().is_some_and(before_the_last_step) {
            return Err(Reason::InFlight { target: member.target });
        }
        amount = amount.min(member.spare());
        if amount < tuning::STEP_MIN {
            return Err(if keeps_what_it_uses {
                Reason::Swapless { lasting, available, margin }
            } else {
                Reason::NothingIdle { free: guest.free, margin }
            });
        }
    } else if purpose == Purpose::Share && !member.is_paged && rules.has(Rule::Margin) {
        amount = amount.min(available.minus(margin));
        if amount < tuning::STEP_MIN {
            return Err(Reason::NothingIdle { free: available, margin });
        }
    }
    Ok(member.target.minus(amount).floor_mib().max(floor))
}

fn is_watched(member: &GroupVm) -> Result<(), Reason> {
    let needed = tuning::LASTING;
    member.keeps.unwatched.map_or(Ok(()), |ago| Err(Reason::NotWatched { ago, needed }))
}

fn is_comfortable(member: &GroupVm, rules: Rules, now: Time) -> Result<(), Reason> {
    let pressure = member.guest.as_ref().ok().and_then(|guest| guest.pressure);
    if let Some(pressure) = pressure.filter(|_| rules.has(Rule::Pressure)) {
        return Err(Reason::UnderPressure { pressure });
    }
    is_not_backing_off(member, rules, now)?;
    let ago = now.since(member.memory.calm_since);
    if rules.has(Rule::Calm) && ago < tuning::CALM {
        return Err(Reason::NotCalm { ago, needed: tuning::CALM });
    }
    Ok(())
}

fn is_not_backing_off(member: &GroupVm, rules: Rules, now: Time) -> Result<(), Reason> {
    if rules.has(Rule::BackOff) && now < member.memory.back_off_until {
        let wait = member.memory.back_off_until.since(now);
        return Err(Reason::BackOff { failures: member.memory.failures, wait });
    }
    Ok(())
}
