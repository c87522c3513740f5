//! Cold memory: how it is handled, and where it is.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, Millis};

/// Whether the host pages out memory that a group's VMs do not touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColdSpec {
    /// Never; memory leaves a VM through its balloon.
    #[default]
    Off,
    /// When another VM or the host needs the memory.
    WhenNeeded,
    /// Also ahead of need. The bound is on refaults in a minute, in hundredths of a percent of
    /// the VM's working set.
    Ahead(u16),
}

impl ColdSpec {
    /// The range that the configuration accepts, in hundredths of a percent.
    pub const RANGE: core::ops::RangeInclusive<u16> = 1..=1000;

    /// Whether the host pages out memory at all.
    #[must_use]
    pub const fn is_on(self) -> bool {
        !matches!(self, Self::Off)
    }
}

impl fmt::Display for ColdSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.pad("off"),
            Self::WhenNeeded => f.pad("when-needed"),
            Self::Ahead(points) => f.pad(&format!("{} %", f64::from(*points) / 100.0)),
        }
    }
}

/// The idle times for which [`Cold::untouched`] is reported.
pub const UNTOUCHED_FOR: [Millis; 3] = [Millis::secs(10), Millis::secs(60), Millis::secs(600)];

/// The location of one VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cold {
    /// The VM's own resident memory, without shared pages.
    pub resident: Bytes,
    /// Memory in the host's swap, including QEMU's own memory.
    pub out: Bytes,
    /// The limit of resident memory; absent: the host pages nothing out.
    pub target: Option<Bytes>,
    /// Memory that was not touched for the times in [`UNTOUCHED_FOR`], resident or not.
    pub untouched: [Bytes; 3],
    /// Memory that was refaulted recently, per second.
    pub refaulted_per_s: Bytes,
    /// Recent refaults in pages per second: each is a wait.
    pub refaults_per_s: f64,
    /// Stall of a vCPU per touch of a page that is out, in nanoseconds; 0: not measured.
    pub refault_ns: u64,
    /// Paged out since the worker began to page the VM; memory that is paged out twice counts
    /// twice.
    pub paged_out: Bytes,
    /// The part of `paged_out` that was touched again or read back.
    pub returned: Bytes,
}
