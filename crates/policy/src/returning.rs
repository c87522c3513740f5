//! Taken memory comes back to a guest whose kernel would kill programs without it.
//!
//! A guest with swap that is short above its base waits for its group's surplus. A guest without
//! swap cannot wait. When it has clearly less available than its margin, memory that was taken
//! comes back: no more than it needs, no more than it had, and only while the host is not short.
//! Its group may then occupy more than its budget. That is for the operator to see.
//!
//! A guest whose kernel has killed a program gets at once its base and the memory that was taken
//! from it. Nothing is taken from it for minutes ([`crate::guard`]): the killed program needs its
//! memory again when it restarts.

use model::{Bytes, Reason, Time};

use crate::{Rule, Rules, headroom::Headroom, member::GroupVm, tuning};

/// Gives memory back to all `members` of a group that need it.
pub(crate) fn give_back(members: &mut [GroupVm], host: &mut Headroom, rules: Rules, now: Time) {
    for member in members.iter_mut().filter(|member| !member.is_paged) {
        let is_free_to_change = member.change.is_none() && member.blocked.is_none();
        // A guest whose kernel kills gets its base even where its balloon is planned around
        // otherwise.
        let is_killed = member.memory.recovers_from(now).is_some();
        let is_free_to_change = is_free_to_change && (member.avoided.is_none() || is_killed);
        let Some((size, reason)) = wanted(member, rules, now).filter(|_| is_free_to_change) else {
            continue;
        };
        // Base is guaranteed and needs no room.
        let owed = member.target.max(member.limits.base.min(size));
        let beyond = size.min(member.limits.max).minus(owed);
        let beyond = if member.avoided.is_some() { Bytes::ZERO } else { beyond };
        let granted = match host.short.clone() {
            Some(reason) => Err(reason),
            None if beyond.is_zero() => Ok(Bytes::ZERO),
            None => host.claim_for(true, beyond),
        };
        match granted {
            Ok(granted) => member.give(owed.plus(granted), reason),
            Err(refusal) => {
                member.give(owed, reason);
                member.refuse(refusal);
            }
        }
    }
}

/// The size that a member should have now, and the reason; `None`: no change.
fn wanted(member: &GroupVm, rules: Rules, now: Time) -> Option<(Bytes, Reason)> {
    let base = member.limits.base;
    let had = member.memory.had.map_or(base, |had| had.max(base));
    if let Some(killed) = member.memory.recovers_from(now) {
        let reason = Reason::KilledGiveBack { sign: killed.sign };
        return (had.minus(member.target) >= tuning::STEP_MIN).then_some((had, reason));
    }
    let guest = member.guest.as_ref().ok()?;
    if member.has_swap || !rules.has(Rule::Margin) || !rules.has(Rule::Swapless) {
        return None;
    }
    let (available, margin) = (guest.available, member.keeps.margin);
    let size = member.actual.plus(margin.minus(available)).min(had);
    let is_worth_it = size.minus(member.target) >= tuning::STEP_MIN;
    let is_needed = available < member.keeps.needs;
    (is_worth_it && is_needed).then_some((size, Reason::Returned { available, margin }))
}
