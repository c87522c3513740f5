//! Grants come back: when the group is over its budget, or the host is short.
//!
//! The cheapest memory goes first: untouched grants cost nothing, then memory that its guest has
//! free, then that of calm guests. Of guests under pressure only those give that swap, and they
//! come last, when no VM holds anything else: without their grants they swap more. A guest under
//! pressure that does not swap would lose a program; [`guard`] refuses, and the group stays over
//! its budget. Nothing below base is touched here: base is guaranteed. The memory of a
//! paged VM beyond its target is on its way out already.

use model::{Bytes, Reason, Time, reason::Pressure};

use crate::{
    Rule, Rules,
    guard::{self, Purpose},
    member::Member,
    tuning,
};

/// Takes back up to `wanted` of the members' grants. Answers what is on its way back.
pub(crate) fn take_back(
    members: &mut [Member],
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
    let mut left = wanted.minus(members.iter().map(Member::overshoot).sum());
    let mut is_cheaper_left = false;
    for i in order {
        if left.is_zero() {
            break;
        }
        let member = &mut members[i];
        if member.change.is_some() {
            continue;
        }
        // A step's bound is no reason to go on to those that suffer: the next tick takes the rest.
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
                // What is already on its way counts, or it would be taken from the next one too.
                left = left.minus(member.actual.minus(target));
                is_cheaper_left |= target.minus(member.limits.base) >= tuning::STEP_MIN;
                member.refuse(Reason::InFlight { target });
            }
            Err(refusal) => member.refuse(refusal),
        }
    }
    wanted.minus(left)
}

/// The pressure for which `member` is spared while others hold grants. A short host spares nobody.
fn spared(member: &Member, purpose: Purpose, rules: Rules) -> Option<Pressure> {
    let pressure = member.guest.as_ref().ok().and_then(|guest| guest.pressure);
    pressure.filter(|_| purpose == Purpose::Deficit && rules.has(Rule::Pressure))
}
