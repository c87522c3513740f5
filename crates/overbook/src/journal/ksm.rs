//! What KSM's settings were before Overbook changed them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sys::ksm::Knob;

/// What is to be undone on KSM, which is the whole host's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KsmRecord {
    /// The settings that are, or may be, other than they were: by file name, as they were.
    pub before: BTreeMap<String, String>,
    /// Whether pages were merged before Overbook began: those are not ours to unmerge, and nobody
    /// can tell them from others.
    pub had_merged: bool,
    /// What somebody else has changed since; KSM is then left to them.
    pub taken_over: Option<String>,
}

impl KsmRecord {
    /// What a knob said before; `None`: it is as it was, or somebody else's.
    #[must_use]
    pub fn before(&self, knob: Knob) -> Option<&str> {
        self.before.get(knob.name()).map(String::as_str)
    }

    /// Whether this can be put back: nothing but KSM's own files is ever written.
    pub(super) fn check(&self) -> Result<(), String> {
        let is_known =
            |name: &str, value: &str| Knob::named(name).is_some_and(|knob| knob.admits(value));
        match self.before.iter().find(|(name, value)| !is_known(name, value)) {
            Some((name, value)) => Err(format!("{name} = {value:?} is no setting of KSM")),
            None => Ok(()),
        }
    }
}
