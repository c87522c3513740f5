//! Identical pages kept once: what is wanted of a group, and what it has come to for each VM.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// One VM's part in its group's shared pages, since its worker met it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dedup {
    /// What of its memory is shared now.
    pub shared: Bytes,
    /// Memory that it needs less therefore: of each shared page all but its part, a page among as many as
    /// share it.
    pub saved: Bytes,
    /// What was merged.
    pub merged: Bytes,
    /// Of what was merged, what the guest has written since, and has for itself again.
    pub broken: Bytes,
    /// Pages of zeros that were dropped: they take no memory until the guest writes to them.
    pub dropped: Bytes,
    /// How often all of its memory was looked at.
    pub passes: u64,
}

/// A scan rate: pages looked at in a millisecond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PagesPerMs(pub u32);

impl fmt::Display for PagesPerMs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages/ms", self.0)
    }
}

/// How a group's identical pages are to be looked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DedupSpec {
    /// Not at all; what is shared is unshared.
    #[default]
    Off,
    /// As fast as the group can afford (Kim 2014, Algorithm 1).
    Adaptive,
    /// Always at this rate.
    Fixed(PagesPerMs),
}
