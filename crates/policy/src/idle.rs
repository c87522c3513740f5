//! Idle memory moves to VMs that are short: from the members with most unused memory, grants
//! before base. It does so where the group's budget has no more for them, and where the host has
//! no more.
//!
//! Only *free* memory of the guest is taken, beyond a margin that it keeps. The value of page
//! cache is only known from a miss-ratio curve, and a guess at it is the most common complaint of
//! users. Also, memory is only taken where that frees host memory: inflating a balloon over
//! untouched pages gives the host nothing, and untouched memory already counts as surplus.

use std::cmp::Reverse;

use model::{Bytes, Reason, Time, VmName};

use crate::{
    Rules,
    guard::{self, Purpose},
    member::GroupVm,
    tuning,
};

/// Takes up to `wanted` for `needed_by` from the other members. Returns the amount taken.
pub(crate) fn collect(
    members: &mut [GroupVm],
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

/// The ledger's largest gain from shrinking `member`: an untouched grant, and free memory of the
/// guest that it once touched and the host still backs.
fn freed_by_taking(member: &GroupVm) -> Bytes {
    let free = member.guest.as_ref().map_or(Bytes::ZERO, |guest| guest.free);
    // A guest that counts more memory than its balloon leaves it also has memory of other
    // devices.
    let total = member.guest.as_ref().map_or(Bytes::ZERO, |guest| guest.total);
    let needed = member.limit().max(total).minus(free);
    member.promised().plus(member.used.minus(needed))
}
