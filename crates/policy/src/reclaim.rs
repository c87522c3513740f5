//! Freed memory: the amount to take, and the VMs to take it from.
//!
//! **Problem.** Freed memory stays with its guest as long as no other VM needs it. When memory is
//! short the kernel drops it, but the kernel knows of no groups, and begins to swap at the same
//! time. **Rule** (Wan 2013 §3.3): while there is plenty nothing is taken. When the host would be
//! short without freed memory, the shortage is taken: from groups over their budget first, then
//! from the VMs that have freed nothing for the longest time, because they will be the last to
//! want it back.
//!
//! The grants of all groups come back when the host's reserve is touched ([`crate::headroom`]);
//! this begins before. Freed memory restricts no group: it does not count as used.

use std::collections::BTreeMap;

use model::{Bytes, GroupName, HostReading, HostView, Reason, Time, VmName, plan::Take};

use crate::{cache, group::Group, headroom::host_reserve, member::GroupVm, tuning};

/// The takes until the next tick. VMs that keep all their freed memory are left out.
pub(crate) fn decide(
    view: &HostView,
    groups: &BTreeMap<GroupName, Group<'_>>,
    reserve: Option<Bytes>,
    now: Time,
) -> BTreeMap<VmName, Take> {
    let host = view.host.filter(|host| host.age(now) <= tuning::STALE_AFTER);
    let cached = cache::held(view, now);
    let Some(short) = host.and_then(|host| shortage(&host.value, groups, reserve, cached)) else {
        return BTreeMap::new();
    };
    let mut members: Vec<(Bytes, &GroupVm)> = groups
        .values()
        .flat_map(|group| group.members.iter().map(|member| (group.ledger.deficit, member)))
        .filter(|(_, member)| !member.free_pages.lazy.is_zero())
        .collect();
    members.sort_by_key(|(deficit, member)| (deficit.is_zero(), member.memory.freed_at));
    let mut needed = short.needed;
    let mut takes = BTreeMap::new();
    for (deficit, member) in members {
        if needed.is_zero() {
            break;
        }
        let lazy = member.free_pages.lazy;
        // The guest has reused the rest of its freed memory, or the kernel has dropped it.
        let keep = if lazy <= needed { Bytes::ZERO } else { member.free_pages.freed.minus(needed) };
        needed = needed.minus(lazy);
        let reason = if deficit.is_zero() {
            short.reason.clone()
        } else {
            Reason::FreedOverBudget { deficit }
        };
        takes.insert(member.name.clone(), Take { keep, reason });
    }
    takes
}

/// The host's shortage without freed memory.
struct Shortage {
    needed: Bytes,
    reason: Reason,
}

fn shortage(
    host: &HostReading,
    groups: &BTreeMap<GroupName, Group<'_>>,
    reserve: Option<Bytes>,
    cached: Bytes,
) -> Option<Shortage> {
    let members = groups.values().flat_map(|group| &group.members);
    let freed: Bytes = members.map(|member| member.free_pages.lazy).sum();
    let left = host.available.plus(cached).minus(freed);
    let reserve = host_reserve(reserve, host.total);
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
