//! Overload: a VM pages because it has less memory than it was promised (Williams 2011).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{Millis, Reason, VmName};

/// When a VM is overloaded, and when the overload is sustained (Williams 2011 §5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OverloadSpec {
    /// Length of an interval over which paging is measured, in seconds.
    pub interval_s: u32,
    /// A VM that pages more than this many pages a second, in and out, is overloaded.
    pub pages_per_s: u32,
    /// The number of latest intervals that count.
    pub window: u32,
    /// The number of overloaded intervals among those at which an overload is sustained.
    pub sustained: u32,
}

impl OverloadSpec {
    /// The intervals that the configuration accepts, in seconds.
    pub const INTERVALS_S: core::ops::RangeInclusive<u32> = 2..=300;
    /// The rates that the configuration accepts, in pages a second.
    pub const RATES: core::ops::RangeInclusive<u32> = 1..=1_000_000;
    /// The windows that the configuration accepts, in intervals.
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

/// The history of a VM's overloads (Williams 2011 §4.1).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Profile {
    /// Number of measured intervals.
    pub intervals: u64,
    /// Number of intervals in transient overloads.
    pub transient: u64,
    /// Number of intervals in sustained overloads.
    pub sustained: u64,
    /// Number of transient overloads by length in intervals: of one, of two, …
    pub lengths: Vec<u32>,
    /// Number of sustained overloads.
    pub sustained_overloads: u32,
}

/// Number of VMs of a host that were overloaded at once.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Together {
    /// Number of intervals with no VM in a transient overload, with one VM, with two, …
    pub transient: Vec<u64>,
    /// The same for sustained overloads.
    pub sustained: Vec<u64>,
}

/// Learned statistics of overloads. The daemon keeps them across restarts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Learned {
    /// The history of each VM.
    pub profiles: BTreeMap<VmName, Profile>,
    /// The history of all VMs together, one entry an interval.
    pub together: Together,
}

/// Severity of a VM's overload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// No overload.
    None,
    /// So short an overload that other hosts' memory is the remedy.
    Transient,
    /// So long an overload that only more memory helps.
    Sustained,
}

/// The verdict on one VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Overload {
    /// Severity of the VM's overload.
    pub severity: Severity,
    /// Pages paged per second in the latest interval, in and out.
    pub pages_per_s: u64,
    /// The reason for the verdict.
    pub reason: Reason,
}
