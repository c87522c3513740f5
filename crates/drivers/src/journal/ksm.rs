//! KSM's settings from before Overbook changed them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sys::ksm::Knob;

/// The changes of KSM to be undone; KSM belongs to the whole host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KsmRecord {
    /// The original values of the settings that are, or may be, changed, by file name.
    pub before: BTreeMap<String, String>,
    /// Whether pages were merged before Overbook began. Overbook must not unmerge those, and
    /// cannot tell them from others.
    pub had_merged: bool,
    /// A setting that another writer has changed since; KSM is then left to that writer.
    pub taken_over: Option<String>,
}

impl KsmRecord {
    /// The original value of a knob; `None`: it has that value, or belongs to another writer.
    #[must_use]
    pub fn before(&self, knob: Knob) -> Option<&str> {
        self.before.get(knob.name()).map(String::as_str)
    }

    /// Whether this can be restored: only KSM's own files are ever written.
    pub(super) fn check(&self) -> Result<(), String> {
        let is_known =
            |name: &str, value: &str| Knob::named(name).is_some_and(|knob| knob.admits(value));
        match self.before.iter().find(|(name, value)| !is_known(name, value)) {
            Some((name, value)) => Err(format!("{name} = {value:?} is no setting of KSM")),
            None => Ok(()),
        }
    }
}
