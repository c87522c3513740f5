//! Memory that nobody touches: what is to become of it, and where it is.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, Millis};

/// Whether the host pages out what a group's VMs do not touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColdSpec {
    /// It does not; memory leaves a VM by its balloon.
    #[default]
    Off,
    /// When somebody needs the memory.
    WhenNeeded,
    /// Also before that, as long as the VM touches at most so many hundredths of a percent of its
    /// working set in a minute that were paged out.
    Ahead(u16),
}

impl ColdSpec {
    /// The least and the most that can be written, in hundredths of a percent.
    pub const RANGE: core::ops::RangeInclusive<u16> = 1..=1000;

    /// Whether the host pages out at all.
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

/// For how long memory was not touched, where that is told.
pub const UNTOUCHED_FOR: [Millis; 3] = [Millis::secs(10), Millis::secs(60), Millis::secs(600)];

/// Where one VM's memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cold {
    /// In memory, and its own: what it shares with others is not counted.
    pub resident: Bytes,
    /// In the host's swap, QEMU's own memory among it.
    pub out: Bytes,
    /// What it is to have resident at most; absent: nothing is to be paged out.
    pub target: Option<Bytes>,
    /// What was not touched for as long as [`UNTOUCHED_FOR`] says, wherever it is.
    pub untouched: [Bytes; 3],
    /// What was paged out and touched again, per second, of late: whole pieces of memory, though
    /// the kernel reads no more of them than is touched.
    pub refaulted_per_s: Bytes,
    /// The same, in pieces of memory: each is a wait.
    pub refaults_per_s: f64,
    /// What one touch of a page that is out holds its vCPU, in nanoseconds; 0: not measured.
    pub refault_ns: u64,
    /// Paged out since the worker last connected, again and again.
    pub paged_out: Bytes,
    /// Touched again of it, or read back.
    pub returned: Bytes,
}
