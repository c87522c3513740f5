//! placeholder: being written by the lead; the public API below is what others may rely on.
use model::{HostView, Plan, Spec, Time};
use serde::{Deserialize, Serialize};

/// What the policy remembers from tick to tick.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// Set by `overbook pause`: nothing is changed.
    pub paused: bool,
}

/// A whole decision's input, as `overbook plan --export` writes it.
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

/// Decides.
pub fn tick(_view: &HostView, _spec: &Spec, _memory: &mut Memory, now: Time) -> Plan {
    Plan { at: now, ..Plan::default() }
}
