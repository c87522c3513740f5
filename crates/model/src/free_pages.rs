//! Memory that guests have freed: what is to become of it, and what has.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// What becomes of memory that a guest reports free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FreePagesSpec {
    /// QEMU discards it at once, as it does by itself.
    #[default]
    Off,
    /// The host takes it when memory is short, and until then the guest may take it back as it is
    /// (IMR §3).
    Lazy,
}

impl FreePagesSpec {
    /// Whether it is handed over.
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

/// What one VM has freed, since its worker met it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FreePages {
    /// Handed over, and neither taken nor known to be in use again: what of it the guest has taken
    /// back silently counts until it is looked at.
    pub freed: Bytes,
    /// What the host can take of it without I/O, by the kernel's count of a moment ago
    /// (`LazyFree`).
    pub lazy: Bytes,
    /// Handed over, again and again.
    pub handed_over: Bytes,
    /// Taken for the host.
    pub taken: Bytes,
    /// Dropped by the kernel itself, as far as that was seen.
    pub dropped: Bytes,
    /// Found in use again when it was to be taken.
    pub taken_back: Bytes,
    /// Taken, and touched by the guest since, as far as that was seen.
    #[serde(default)]
    pub refaulted: Bytes,
}
