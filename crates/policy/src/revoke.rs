//! Grants come back: when the group is over its budget, or the host is short.
//!
//! The cheapest memory goes first: untouched grants cost nothing, then free memory of guests,
//! then memory of calm guests. Of guests under pressure only those that swap give memory. They
//! come last, when no VM holds another grant, because without their grants they swap more. A
//! guest under pressure that does not swap would lose a program; [`guard`] refuses, and the group
//! stays over its budget. Nothing below base is touched here: base is guaranteed. The memory of a
//! paged VM beyond its target is already being paged out.

use model::{Bytes, Reason, Time, reason::Pressure};

use crate::{
    Rule, Rules,
    guard::{self, Purpose},
    member::GroupVm,
    tuning,
};

/// Takes back up to `wanted` of the members' grants. Returns the amount on its way back.
pub(crate) fn take_back(
    members: &mut [GroupVm],
    wanted: Bytes,
    purpose: Purpose,
    reason: &Reason,
    rules: Rules,
    now: Time,
) -> Bytes {
    let mut order: Vec<usize> =
        (0..members.len()).filter(|i| !members[*i].grant().is_zero()).collect();
    order.sort_by_key(|i| {
        let member = &members[*i];
        let is_pressured = rules.has(Rule::Pressure) && member.is_pressured();
        (is_pressured, std::cmp::Reverse(member.promised().plus(member.spare())))
    });
    let mut left = wanted.minus(members.iter().map(GroupVm::overshoot).sum());
    let mut is_cheaper_left = false;
    for i in order {
        if left.is_zero() {
            break;
        }
        let member = &mut members[i];
        if member.change.is_some() {
            continue;
        }
        // A step's bound does not justify a take from guests that suffer: the next tick takes the
        // rest.
        if let Some(pressure) = spared(member, purpose, rules).filter(|_| is_cheaper_left) {
            member.refuse(Reason::UnderPressure { pressure });
            continue;
        }
        match guard::lowest_target(member, left, purpose, rules, now) {
            Ok(target) => {
                left = left.minus(member.target.minus(target));
                is_cheaper_left |= target.minus(member.limits.base) >= tuning::STEP_MIN;
                member.take(target, reason.clone());
            }
            Err(Reason::InFlight { target }) => {
                // A take in flight counts; otherwise the next member would lose the same amount
                // too.
                left = left.minus(member.actual.minus(target));
                is_cheaper_left |= target.minus(member.limits.base) >= tuning::STEP_MIN;
                member.refuse(Reason::InFlight { target });
            }
            Err(refusal) => member.refuse(refusal),
        }
    }
    wanted.minus(left)
}

/// The pressure for which `member` is spared while others hold grants. A short host spares no VM.
fn spared(member: &GroupVm, purpose: Purpose, rules: Rules) -> Option<Pressure> {
    let pressure = member.guest.as_ref().ok().and_then(|guest| guest.pressure);
    pressure.filter(|_| purpose == Purpose::Deficit && rules.has(Rule::Pressure))
}
