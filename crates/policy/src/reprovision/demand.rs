//! `demand`: surplus goes to the members that are short of memory (Kim 2014 §4.2.2).
//!
//! ```text
//! for each member in demand, the hardest swapping first:
//!     grant += min(UNIT, room below max, surplus left, max(surplus left / unserved, STEP_MIN))
//! all other members keep their grants
//! ```
//!
//! An overloaded member is not served in units: where there is memory, it gets all that it was
//! promised at once (Williams 2011 §4.1). This matters most on the host that it has been moved
//! to.
//!
//! Demand is swap activity, as in the paper. A guest that has almost nothing available counts
//! too, because one without swap never swaps. Grants stay in place when demand ends: taking them
//! back without need would only make the next demand wait.

use std::cmp::Reverse;

use model::{Bytes, reason::Pressure};

use super::{Reprovision, Shares, Standing};
use crate::tuning;

pub(super) struct Demand;

impl Reprovision for Demand {
    fn share(&self, members: &[Standing], pool: Bytes) -> Shares {
        let mut grants: Vec<Bytes> = members.iter().map(|m| m.grant).collect();
        let mut surplus = pool.minus(grants.iter().copied().sum());
        let mut short: Vec<usize> = (0..members.len())
            .filter(|i| members[*i].demand.is_some() && members[*i].can_take_more)
            .collect();
        short.sort_by_key(|i| Reverse(urgency(members[*i].demand)));
        let mut lacking = Bytes::ZERO;
        for (served, i) in short.iter().enumerate() {
            let room = members[*i].grant_max.minus(grants[*i]);
            let wanted = if members[*i].is_overloaded { room } else { tuning::UNIT.min(room) };
            let still_to_serve = u64::try_from(short.len() - served).unwrap_or(1);
            // Parts too small for a balloon's work would serve no member.
            let part = surplus.share(1, still_to_serve).max(tuning::STEP_MIN);
            let granted = wanted.min(part).min(surplus);
            grants[*i] = grants[*i].plus(granted);
            surplus = surplus.minus(granted);
            lacking = lacking.plus(wanted.minus(granted));
        }
        let unmet = short.first().filter(|_| !lacking.is_zero()).map(|i| (*i, lacking));
        Shares { grants, unmet }
    }
}

/// Members that swap come before members that are close to it; among them the heaviest first.
fn urgency(demand: Option<Pressure>) -> Bytes {
    match demand {
        Some(
            Pressure::Swapping { per_second }
            | Pressure::SwapIn { per_second }
            | Pressure::Refaults { per_second },
        ) => per_second,
        Some(Pressure::LowAvailable { .. }) | None => Bytes::ZERO,
    }
}
