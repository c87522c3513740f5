//! Second-level caches: what a group has to spare at the moment holds pages of its data disks
//! (Kim 2014 §4.2.3).
//!
//! **Problem.** A guest that reads a disk and does not swap shows no demand, though memory would
//! help it. And surplus that nobody asks for lies idle. **Rule.** After all grants, what is left of
//! a group's own surplus is its cache's quota, as far as the host has it. It holds clean pages only
//! and is given up at once, so it is the first to give way: memory in caches counts as available to
//! everything else ([`crate::headroom`], [`crate::reclaim`]). Where the host has less than all
//! caches could use, each has the same part of what it could.
//!
//! Needs come before caches: who swaps waits for a disk as well, and its memory is its own.

use std::collections::BTreeMap;

use model::{Bytes, GroupName, HostView, Quota, Reason, Spec, Time};

use crate::{group::Group, headroom::Headroom, tuning};

/// What caches hold, which is to be had at once.
pub(crate) fn held(view: &HostView, now: Time) -> Bytes {
    let known = view.caches.values().filter(|cache| cache.age(now) <= tuning::STALE_AFTER);
    known.map(|cache| cache.value.held).sum()
}

/// What the caches of these groups may hold until the next tick, out of what the `host` has left.
pub(crate) fn quotas(
    groups: &BTreeMap<GroupName, Group<'_>>,
    spec: &Spec,
    host: &Headroom,
) -> BTreeMap<GroupName, Quota> {
    let with_cache = groups.iter().filter(|(name, _)| spec.has_cache(name));
    let spare: BTreeMap<&GroupName, Bytes> =
        with_cache.map(|(name, group)| (name, group.spare())).collect();
    let (all, left) = (spare.values().copied().sum::<Bytes>(), host.left());
    let quota = |surplus: Bytes| {
        if surplus < tuning::STEP_MIN {
            return Quota { amount: Bytes::ZERO, reason: Reason::NothingSpare };
        }
        if all <= left {
            return Quota { amount: surplus, reason: Reason::Spare { surplus } };
        }
        Quota { amount: left.share(surplus.0, all.0), reason: host.refusal() }
    };
    spare.into_iter().map(|(name, surplus)| (name.clone(), quota(surplus))).collect()
}
