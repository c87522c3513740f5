//! Overload: a VM pages because it was given less memory than it was promised (Williams 2011).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Millis, Reason, VmName};

/// When a VM counts as overloaded, and for how long until that is sustained (Williams 2011 §5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverloadSpec {
    /// Paging is measured over so many seconds.
    pub interval_s: u32,
    /// Overloaded is who pages more than so many pages a second, in and out.
    pub pages_per_s: u32,
    /// How many of the last intervals are looked at.
    pub window: u32,
    /// In how many of those it must be overloaded until that is sustained.
    pub sustained: u32,
}

impl OverloadSpec {
    /// The intervals that can be written, in seconds.
    pub const INTERVALS_S: core::ops::RangeInclusive<u32> = 2..=300;
    /// The rates that can be written, in pages a second.
    pub const RATES: core::ops::RangeInclusive<u32> = 1..=1_000_000;
    /// The windows that can be written, in intervals.
    pub const WINDOWS: core::ops::RangeInclusive<u32> = 2..=60;

    /// The length of an interval.
    #[must_use]
    pub const fn interval(&self) -> Millis {
        Millis::secs(self.interval_s as u64)
    }
}

impl Default for OverloadSpec {
    fn default() -> Self {
        Self { interval_s: 10, pages_per_s: 200, window: 12, sustained: 8 }
    }
}

/// How a VM has been overloaded, learned from what it did (Williams 2011 §4.1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Intervals that were measured.
    pub intervals: u64,
    /// Those of them in transient overloads.
    pub transient: u64,
    /// Those of them in sustained overloads.
    pub sustained: u64,
    /// Transient overloads by their length in intervals: of one, of two, …
    pub lengths: Vec<u32>,
    /// Sustained overloads.
    pub sustained_overloads: u32,
}

/// How many VMs of a host were overloaded at once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Together {
    /// How often there were no VMs in a transient overload, one VM, two, …
    pub transient: Vec<u64>,
    /// The same of sustained ones.
    pub sustained: Vec<u64>,
}

/// What was learned of overloads. The daemon keeps it across restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Learned {
    /// Of each VM.
    pub profiles: BTreeMap<VmName, Profile>,
    /// Of all of them together, once an interval.
    pub together: Together,
}

/// How much a VM is overloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// It is not.
    None,
    /// For so short a time that other hosts' memory is the remedy.
    Transient,
    /// For so long that only more memory helps.
    Sustained,
}

/// What was found of one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overload {
    /// How much it is overloaded.
    pub severity: Severity,
    /// Pages a second that it paged in the latest interval, in and out.
    pub pages_per_s: u64,
    /// Why this is so.
    pub reason: Reason,
}
