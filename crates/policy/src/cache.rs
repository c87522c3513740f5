//! Second-level caches: a group's spare memory holds pages of its data disks (Kim 2014 §4.2.3).
//!
//! **Problem.** A guest that reads a disk and does not swap shows no demand, though memory would
//! help it. And unused surplus stays idle. **Rule.** After all grants, the rest of a group's own
//! surplus is its cache's quota, within the memory that the host has left. The cache holds only
//! clean pages and is dropped at once, so it is the first to give way: memory in caches counts as
//! available to all other uses ([`crate::headroom`], [`crate::reclaim`]). Where the host has less
//! than all caches could use, each gets the same fraction.
//!
//! Grants come before caches: a VM that swaps waits for a disk as well, and its memory is its
//! own.

use std::collections::BTreeMap;

use model::{Bytes, GroupName, HostView, Quota, Reason, Spec, Time};

use crate::{group::Group, headroom::Headroom, tuning};

/// Memory that caches hold, which can be freed at once.
pub(crate) fn held(view: &HostView, now: Time) -> Bytes {
    let known = view.caches.values().filter(|cache| cache.age(now) <= tuning::STALE_AFTER);
    known.map(|cache| cache.value.held).sum()
}

/// The sizes of these groups' caches until the next tick, from memory that `host` has left.
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
