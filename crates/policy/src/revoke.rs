//! Grants come back: when the group is over its budget, or the host is short.
//!
//! The cheapest memory goes first: untouched grants cost nothing, then memory that its guest has free,
//! then that of calm guests, and that of a guest under pressure only when nobody holds anything else
//! (PEERS §4.5). Nothing below base is touched here: base is guaranteed.

use model::{Bytes, Reason, Time};

use crate::{
    Rule, Rules,
    guard::{self, Purpose},
    member::Member,
};

/// Takes back up to `wanted` of the members' grants.
pub(crate) fn take_back(
    members: &mut [Member],
    wanted: Bytes,
    purpose: Purpose,
    reason: &Reason,
    rules: Rules,
    now: Time,
) {
    let mut order: Vec<usize> =
        (0..members.len()).filter(|i| !members[*i].grant().is_zero()).collect();
    order.sort_by_key(|i| {
        let member = &members[*i];
        let is_pressured = rules.has(Rule::Pressure) && member.is_pressured();
        (is_pressured, std::cmp::Reverse(member.promised().plus(member.spare())))
    });
    let mut left = wanted;
    for i in order {
        if left.is_zero() {
            break;
        }
        let member = &mut members[i];
        if member.change.is_some() {
            continue;
        }
        match guard::lowest_target(member, left, purpose, rules, now) {
            Ok(target) => {
                left = left.minus(member.target.minus(target));
                member.take(target, reason.clone());
            }
            Err(Reason::InFlight { target }) => {
                // What is already on its way counts, or it would be taken from the next one too.
                left = left.minus(member.actual.minus(target));
                member.refuse(Reason::InFlight { target });
            }
            Err(refusal) => member.refuse(refusal),
        }
    }
}
