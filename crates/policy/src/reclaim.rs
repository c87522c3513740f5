//! Freed memory: how much of it is taken, and from whom.
//!
//! **Problem.** What guests free stays with them as long as nobody needs it. When memory is short the kernel drops it, but it knows
//! of no groups, and it begins to swap at the same time. **Rule** (Wan 2013 §3.3): while there is plenty nothing is taken. What the VMs
//! of a group that is over its budget have freed goes first. When the host would be short without what has been freed, as much is
//! taken as it would lack, from those first who have freed nothing for the longest time: they will be the last to want it back.
//!
//! The grants of all groups come back when the host's reserve is touched ([`crate::headroom`]); this begins before.

use std::collections::BTreeMap;

use model::{Bytes, GroupName, HostReading, HostView, Reason, Time, VmName, plan::Take};

use crate::{group::Group, member::Member, tuning};

/// What is taken until the next tick; from whom nothing is, is not in it.
pub(crate) fn decide(
    view: &HostView,
    groups: &BTreeMap<GroupName, Group<'_>>,
    reserve: Option<Bytes>,
    now: Time,
) -> BTreeMap<VmName, Take> {
    let mut takes = BTreeMap::new();
    let mut others: Vec<&Member> = Vec::new();
    let mut taken = Bytes::ZERO;
    for group in groups.values() {
        let deficit = group.ledger.deficit;
        for member in group.members.iter().filter(|member| !member.freed.is_zero()) {
            if deficit.is_zero() {
                others.push(member);
            } else {
                let reason = Reason::FreedOverBudget { deficit };
                takes.insert(member.name.clone(), Take { keep: Bytes::ZERO, reason });
                taken = taken.plus(member.freed);
            }
        }
    }
    let host = view.host.filter(|host| host.age(now) <= tuning::STALE_AFTER);
    let Some(short) = host.and_then(|host| shortage(&host.value, view, reserve)) else {
        return takes;
    };
    let mut needed = short.needed.minus(taken);
    others.sort_by_key(|member| member.memory.freed_at);
    for member in others {
        let part = member.freed.min(needed);
        if part.is_zero() {
            break;
        }
        needed = needed.minus(part);
        let take = Take { keep: member.freed.minus(part), reason: short.reason.clone() };
        takes.insert(member.name.clone(), take);
    }
    takes
}

/// What the host would lack if nobody had freed anything.
struct Shortage {
    needed: Bytes,
    reason: Reason,
}

fn shortage(host: &HostReading, view: &HostView, reserve: Option<Bytes>) -> Option<Shortage> {
    let lazy = |vm: &model::VmView| vm.free_pages.map_or(Bytes::ZERO, |free| free.value.lazy);
    let freed: Bytes = view.vms.values().map(lazy).sum();
    let left = host.available.minus(freed);
    let reserve = reserve.unwrap_or(host.total.percent(tuning::HOST_RESERVE_PERCENT));
    let wanted = reserve.percent(tuning::TAKE_FREED_PERCENT);
    let needed = wanted.minus(left);
    if !needed.is_zero() {
        return Some(Shortage { needed, reason: Reason::FreedHostShort { left, wanted } });
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a percentage")]
    let percent = host.psi_some_avg10.filter(|some| *some >= tuning::PRESSED_PERCENT)? as u32;
    let needed = host.total.percent(tuning::PRESSED_STEP_PERCENT);
    Some(Shortage { needed, reason: Reason::FreedHostPressed { percent } })
}
