//! The reasons why there is no connection to a shim.

use std::time::Duration;

use protocol::layout::LayoutError;
use protocol::{Refusal, WireError};
use sys::peer::PeerError;
use sys::seqpacket::SeqpacketError;
use sys::shared_memory::SharedMemoryError;

use super::MOST_IN_FLIGHT;
use crate::granules::TooLarge;

/// The reason why there is no connection, or why it ended.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// No process listens at the shim's address.
    #[error("QEMU (process {pid}) was started without Overbook's shim, or has not begun to run")]
    NoShim {
        /// QEMU's process.
        pid: u32,
    },
    /// QEMU has ended, or may not be inspected.
    #[error("QEMU (process {pid}): {why}")]
    Gone {
        /// Its process.
        pid: u32,
        /// The kernel's error.
        why: std::io::Error,
    },
    /// Another process listens at the address.
    #[error("the address of the shim of process {pid} belongs to process {found}")]
    Impostor {
        /// QEMU's process.
        pid: u32,
        /// The process that listens.
        found: u32,
    },
    /// It is not known which process listens at the address.
    #[error("the address of the shim of process {pid}: {error}")]
    Unidentified {
        /// QEMU's process.
        pid: u32,
        /// The reason.
        error: PeerError,
    },
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] SeqpacketError),
    /// A packet is not an answer.
    #[error("the shim's answer makes no sense: {0}")]
    Wire(#[from] WireError),
    /// An answer is of another kind than its request.
    #[error("the shim answered something else than it was asked for ({0})")]
    Unexpected(&'static str),
    /// An answer names no request in flight.
    #[error("the shim answered request {id}, which is not in flight")]
    Unknown {
        /// The number that it named.
        id: u32,
    },
    /// `MOST_IN_FLIGHT` requests are in flight: a caller exceeded its limit.
    #[error("{MOST_IN_FLIGHT} requests wait for the shim's answers already")]
    TooMany,
    /// The shim refused a request.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The shim's shared memory is not usable.
    #[error(transparent)]
    Memory(#[from] SharedMemoryError),
    /// The shim's shared memory does not have the agreed layout.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The shim tells of more guest memory than is possible.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// A request got no answer in time.
    #[error("the shim has not answered for {} s", .0.as_secs())]
    Silent(Duration),
    /// The guest's memory has changed, which takes a new connection.
    #[error("guest RAM was added or removed")]
    RegionsChanged,
}
