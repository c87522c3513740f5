//! The whole input of a decision in one value: `overbook plan --export` writes it, `--from` reads
//! it.

use model::{HostView, Plan, Spec, Time};
use serde::{Deserialize, Serialize};

use crate::{Memory, tick};

/// All inputs of one tick.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// The time of the tick.
    pub now: Time,
    /// The configuration.
    pub spec: Spec,
    /// The observed state.
    pub view: HostView,
    /// The policy's memory.
    pub memory: Memory,
}

impl Case {
    /// Decides this case with the real policy.
    #[must_use]
    pub fn decide(&self) -> Plan {
        tick(&self.view, &self.spec, &mut self.memory.clone(), self.now)
    }
}
