//! Memory that guests have freed: the setting for it, and the measured amounts.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// The handling of memory that a guest reports free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FreePagesSpec {
    /// QEMU discards it at once, as it does by default.
    #[default]
    Off,
    /// The host takes it when memory is short. Until then the guest may reuse it unchanged (IMR
    /// §3).
    Lazy,
}

impl FreePagesSpec {
    /// Whether freed memory is handed over to the host.
    #[must_use]
    pub const fn is_lazy(self) -> bool {
        matches!(self, Self::Lazy)
    }
}

impl fmt::Display for FreePagesSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Off => "off",
            Self::Lazy => "lazy",
        })
    }
}

/// Memory that one VM has freed since its worker connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePages {
    /// Handed over, and neither taken nor known to be in use again. Memory that the guest has
    /// reused counts until its pages are inspected.
    pub freed: Bytes,
    /// The part that the host can take without I/O, by the kernel's recent count (`LazyFree`).
    pub lazy: Bytes,
    /// Handed over in total; memory that is freed twice counts twice.
    pub handed_over: Bytes,
    /// Taken for the host.
    pub taken: Bytes,
    /// Dropped by the kernel itself, where that was observed.
    pub dropped: Bytes,
    /// Found in use again when it was about to be taken.
    pub taken_back: Bytes,
    /// Taken, and touched by the guest since, where that was observed.
    #[serde(default)]
    pub refaulted: Bytes,
}
