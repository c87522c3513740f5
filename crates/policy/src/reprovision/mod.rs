//! Who gets the surplus: one trait, one file per policy (Kim 2014 §4.2.2).
//!
//! [`balance`] decides over all of a group's memory. The other policies share out the surplus: such
//! a policy only says what each member should hold above its base; it is given the *pool* (all
//! grants of the group and its surplus) and cannot hand out more. Whether a member may be shrunk,
//! how fast, and whether the host has the memory is decided elsewhere, the same for all policies.

pub(crate) mod balance;
mod demand;
mod entitlement;
mod fair;

use model::{Bytes, Policy, reason::Pressure};

/// What a policy needs to know of a member.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Standing {
    /// What it holds above base.
    pub(crate) grant: Bytes,
    /// What it may hold above base at most.
    pub(crate) grant_max: Bytes,
    /// What it contributes: the part of its base that it does not occupy.
    pub(crate) contribution: Bytes,
    /// What shows that it wants more.
    pub(crate) demand: Option<Pressure>,
    /// Whether it was overloaded in the last interval.
    pub(crate) is_overloaded: bool,
    /// Whether it can be given more in this tick.
    pub(crate) can_take_more: bool,
}

/// What a policy wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shares {
    /// The grant that each member should hold, in the order of the members.
    pub(crate) grants: Vec<Bytes>,
    /// The member that is shortest, and what the group lacks to serve everybody who is short.
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

/// Shares out `pool` in proportion to `weights`; what a member cannot hold goes to the others.
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
