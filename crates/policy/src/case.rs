//! A whole decision's input in one value: what `overbook plan --export` writes and `--from` reads.

use model::{HostView, Plan, Spec, Time};
use serde::{Deserialize, Serialize};

use crate::{Memory, tick};

/// Everything that one tick depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// When.
    pub now: Time,
    /// What the operator wants.
    pub spec: Spec,
    /// What was seen.
    pub view: HostView,
    /// What was remembered.
    pub memory: Memory,
}

impl Case {
    /// Decides this case with the real policy.
    #[must_use]
    pub fn decide(&self) -> Plan {
        tick(&self.view, &self.spec, &mut self.memory.clone(), self.now)
    }
}
