//! Distribution of the surplus: one trait, one file per policy (Kim 2014 §4.2.2).
//!
//! [`balance`] decides over all of a group's memory. The other policies share out the surplus:
//! such a policy only computes each member's memory above its base. It gets the *pool* (all
//! grants of the group and its surplus) and cannot hand out more. Whether a member may be shrunk,
//! how fast, and whether the host has the memory is decided elsewhere, the same for all policies.

pub(crate) mod balance;
mod demand;
mod entitlement;
mod fair;

use model::{Bytes, Policy, reason::Pressure};

/// The data about a member that a policy needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// The member's memory above base.
    pub(crate) grant: Bytes,
    /// The most that the member may hold above base.
    pub(crate) grant_max: Bytes,
    /// The member's contribution: the part of its base that it does not occupy.
    pub(crate) contribution: Bytes,
    /// The sign of demand.
    pub(crate) demand: Option<Pressure>,
    /// Whether the member was overloaded in the last interval.
    pub(crate) is_overloaded: bool,
    /// Whether the member can be given more in this tick.
    pub(crate) can_take_more: bool,
}

/// The result of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// The grant of each member, in the order of the members.
    pub(crate) grants: Vec<Bytes>,
    /// The member that is shortest, and the group's total shortage.
    pub(crate) unmet: Option<(usize, Bytes)>,
}

/// A way to share out a group's memory.
pub(crate) trait Reprovision {
    /// Shares out `pool` (the members' grants and the surplus).
    fn share(&self, members: &[Standing], pool: Bytes) -> Shares;
}

/// The implementation of `policy`; `None`: [`balance`], which decides over all memory.
pub(crate) fn policy(policy: Policy) -> Option<&'static dyn Reprovision> {
    match policy {
        Policy::Fair => Some(&fair::Fair),
        Policy::Entitlement => Some(&entitlement::Entitlement),
        Policy::Demand => Some(&demand::Demand),
        Policy::Balance => None,
    }
}

/// Shares out `pool` in proportion to `weights`. An amount that a member cannot hold goes to the
/// others.
fn in_proportion(members: &[Standing], weights: &[u64], pool: Bytes) -> Shares {
    let mut grants = vec![Bytes::ZERO; members.len()];
    let mut open: Vec<usize> = (0..members.len()).filter(|i| weights[*i] > 0).collect();
    let mut left = pool;
    // Each round fills at least one member up, or ends.
    while !open.is_empty() {
        let total = open.iter().fold(0u64, |sum, i| sum.saturating_add(weights[*i]));
        let is_full = |i: &usize| left.share(weights[*i], total) >= members[*i].grant_max;
        let (full, rest): (Vec<usize>, Vec<usize>) = open.iter().copied().partition(is_full);
        if full.is_empty() {
            for i in rest {
                grants[i] = left.share(weights[i], total);
            }
            break;
        }
        for i in full {
            grants[i] = members[i].grant_max;
        }
        left = pool.minus(grants.iter().copied().sum());
        open = rest;
    }
    Shares { grants, unmet: None }
}

#[cfg(test)]
mod tests;
