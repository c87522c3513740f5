//! `entitlement`: each member gets surplus in proportion to its contribution (Kim 2014 §4.2.2,
//! after Satori).
//!
//! ```text
//! for each member:  grant = pool × contribution / Σ contributions
//! ```
//!
//! A member contributes the part of its base that it does not occupy on the host.

use model::Bytes;

use super::{Reprovision, Shares, Standing, in_proportion};

pub(super) struct Entitlement;

impl Reprovision for Entitlement {
    fn share(&self, members: &[Standing], pool: Bytes) -> Shares {
        let weights: Vec<u64> = members.iter().map(|m| m.contribution.0).collect();
        in_proportion(members, &weights, pool)
    }
}
