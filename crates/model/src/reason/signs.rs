//! Signs that reasons refer to: of pressure, of a kill, and of implausible statistics.

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// A sign that a guest is short of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "sign")]
pub enum Pressure {
    /// The guest swaps in or out: the sign of demand (Kim 2014 §4.2.2).
    #[error("it swaps {per_second}/s")]
    Swapping {
        /// Bytes per second, in and out.
        per_second: Bytes,
    },
    /// The guest reads pages back from swap: the sign of suffering.
    #[error("it swaps in {per_second}/s")]
    SwapIn {
        /// Bytes per second.
        per_second: Bytes,
    },
    /// The guest touches memory that was paged out.
    #[error("it waits for {per_second}/s of what was paged out")]
    Refaults {
        /// Bytes per second that come back.
        per_second: Bytes,
    },
    /// The guest has almost no memory left.
    #[error("{available} available")]
    LowAvailable {
        /// Memory available by the guest's own estimate.
        available: Bytes,
    },
}

/// A sign that a guest's kernel has killed a program for want of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", tag = "sign")]
pub enum KillSign {
    /// The guest's kernel counts the kill.
    #[error("its kernel has killed {kills} programs for want of memory since it booted")]
    Counted {
        /// Kills since the guest booted.
        kills: u64,
    },
    /// The guest's driver has deflated the balloon by itself (`deflate-on-oom`).
    #[error("its kernel took {taken} back out of its balloon rather than kill a program")]
    TookBack {
        /// Memory that left the balloon.
        taken: Bytes,
    },
    /// Free memory rose abruptly. This is the sign of a kernel that does not report its count.
    #[error(
        "it had almost nothing left and {freed} became free at once, as when its kernel kills a program"
    )]
    Jumped {
        /// Memory that became free.
        freed: Bytes,
    },
}

/// A statistic that can be found implausible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum StatField {
    /// `stat-total-memory`
    #[error("total memory")]
    Total,
    /// `stat-free-memory`
    #[error("free memory")]
    Free,
    /// `stat-available-memory`
    #[error("available memory")]
    Available,
    /// `stat-swap-in` and `stat-swap-out`
    #[error("swap traffic")]
    Swap,
}
