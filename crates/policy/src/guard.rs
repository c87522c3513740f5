//! The one gate through which memory is taken from a VM. It holds the safety rules.
//!
//! The gate answers how low a VM's target may go now, or why it may not go down at all. Rules that
//! protect a guest's correctness (fresh and plausible statistics, `min`, swapless guests,
//! migration) hold for every purpose. Rules that protect its comfort (pressure, calm, back-off)
//! bend only when the group is over its budget or the host is short, because then leaving the
//! memory where it is would take it from a neighbour who has paid for it; and even then the
//! cheapest memory goes first.

use model::{Bytes, Reason, Time};

use crate::{
    Rule, Rules,
    member::{Member, margin},
    memory::Asked,
    tuning,
};

/// What memory is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Idle memory for somebody who is short.
    Idle,
    /// Towards the VM's share.
    Share,
    /// Where it saves more misses.
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

/// How low the target of `member` may go now, at most by `wanted`.
///
/// # Errors
///
/// The rule that forbids taking anything worth the balloon's work.
pub(crate) fn lowest_target(
    member: &Member,
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
    if member.memory.asked.as_ref().is_some_and(|asked| asked.is_take && !asked.reached) {
        return Err(Reason::InFlight { target: member.target });
    }
    let guest = member.guest.as_ref().map_err(Clone::clone)?;
    let is_above_base = member.target > member.limits.base;
    let mut wanted = wanted;
    if purpose == Purpose::Balance && is_above_base {
        let ago = now.since(member.memory.seen_at);
        if rules.has(Rule::Calm) && ago < tuning::CALM {
            return Err(Reason::NotCalm { ago, needed: tuning::CALM });
        }
        // What it misses then was weighed against what others miss.
        if let Err(reason) = is_not_backing_off(member, rules, now) {
            // Which mistakes those were says little of what it has not touched for a minute.
            wanted = wanted.min(guest.free);
            if wanted < tuning::STEP_MIN {
                return Err(reason);
            }
        }
    } else if !purpose.bends_comfort() {
        is_comfortable(member, rules, now)?;
    }

    let floor = match purpose {
        // A guest that wakes without swap dies before its memory is back: it keeps its base.
        Purpose::Idle | Purpose::Balance if !member.has_swap && rules.has(Rule::Swapless) => {
            member.limits.base
        }
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
    let mut amount = wanted.min(above_floor);
    // Paging takes small steps by itself, and no guest stands still for them.
    let is_gentle = member.is_paged && purpose == Purpose::Balance;
    if rules.has(Rule::InflationCap) && !is_gentle {
        amount = amount.min(tuning::UNIT.max(member.target.percent(purpose.step_percent())));
    }
    let keeps_what_it_uses = !member.has_swap && rules.has(Rule::Swapless);
    if purpose == Purpose::Idle || keeps_what_it_uses {
        let before_the_last_step = |asked: &Asked| asked.is_take && guest.at <= asked.said_at;
        // What it had free then is not free twice.
        if member.memory.asked.as_ref().is_some_and(before_the_last_step) {
            return Err(Reason::InFlight { target: member.target });
        }
        amount = amount.min(member.spare());
        if amount < tuning::STEP_MIN {
            return Err(if keeps_what_it_uses {
                Reason::Swapless { free: member.spare() }
            } else {
                Reason::NothingIdle { free: guest.free, margin: margin(guest) }
            });
        }
    }
    Ok(member.target.minus(amount).floor_mib().max(floor))
}

fn is_comfortable(member: &Member, rules: Rules, now: Time) -> Result<(), Reason> {
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

fn is_not_backing_off(member: &Member, rules: Rules, now: Time) -> Result<(), Reason> {
    if rules.has(Rule::BackOff) && now < member.memory.back_off_until {
        let wait = member.memory.back_off_until.since(now);
        return Err(Reason::BackOff { failures: member.memory.failures, wait });
    }
    Ok(())
}
