//! Idle memory moves to who is short: from the members that leave most unused, grants before base.
//!
//! Only memory that the guest has *free* is taken, beyond a margin that it keeps: what page cache
//! is worth needs a miss-ratio curve, and guessing at it is what users complain about most. And
//! only where taking frees something: inflating a balloon over pages that were never touched gives
//! the host nothing, and untouched memory is counted as surplus already.

use std::cmp::Reverse;

use model::{Bytes, Reason, Time, VmName};

use crate::{
    Rules,
    guard::{self, Purpose},
    member::Member,
    tuning,
};

/// Takes up to `wanted` for `needed_by` from the others. Answers what was taken.
pub(crate) fn collect(
    members: &mut [Member],
    wanted: Bytes,
    needed_by: &VmName,
    rules: Rules,
    now: Time,
) -> Bytes {
    let mut order: Vec<usize> = (0..members.len())
        .filter(|i| members[*i].name != *needed_by && members[*i].change.is_none())
        .filter(|i| !members[*i].is_balanced())
        .collect();
    order.sort_by_key(|i| (members[*i].grant().is_zero(), Reverse(members[*i].spare())));
    let mut taken = Bytes::ZERO;
    for i in order {
        let member = &mut members[i];
        let wanted = wanted.minus(taken).min(freed_by_taking(member));
        if wanted < tuning::STEP_MIN {
            continue;
        }
        match guard::lowest_target(member, wanted, Purpose::Idle, rules, now) {
            Ok(target) => {
                taken = taken.plus(member.target.minus(target));
                let free = member.guest.as_ref().map_or(Bytes::ZERO, |guest| guest.free);
                member.take(target, Reason::Idle { free, needed_by: needed_by.clone() });
            }
            Err(refusal) => member.refuse(refusal),
        }
    }
    taken
}

/// What the ledger gains at most by shrinking `member`: an untouched grant, and memory that the
/// guest once touched, has free now, and that the host still keeps for it.
fn freed_by_taking(member: &Member) -> Bytes {
    let free = member.guest.as_ref().map_or(Bytes::ZERO, |guest| guest.free);
    // A guest that counts more than its balloon leaves it has memory of other devices, too.
    let total = member.guest.as_ref().map_or(Bytes::ZERO, |guest| guest.total);
    let needed = member.limit().max(total).minus(free);
    member.promised().plus(member.used.minus(needed))
}
