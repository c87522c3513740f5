//! `fair`: all members get the same (Kim 2014 §4.2.2).
//!
//! ```text
//! for each member:  grant = pool / members      (what one cannot hold goes to the others)
//! ```

use model::Bytes;

use super::{Reprovision, Shares, Standing, in_proportion};

pub(super) struct Fair;

impl Reprovision for Fair {
    fn share(&self, members: &[Standing], pool: Bytes) -> Shares {
        in_proportion(members, &vec![1; members.len()], pool)
    }
}
