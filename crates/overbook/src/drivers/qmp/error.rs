//! What can go wrong in talking to QEMU, in words for the person who has to put it right.

use std::time::Duration;

use sys::peer::PeerError;

use super::allowance::RATE;

/// Why the connection, or one command, failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// Nobody listens, no permission, or the connection broke.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The socket has outlived its process: nothing is said to the process that has it now.
    #[error("{0}")]
    Ended(PeerError),
    /// QEMU ended, or somebody cut the connection.
    #[error("QEMU closed the connection")]
    Closed,
    /// Connected, and then nothing.
    #[error(
        "no QMP greeting in {} s: a QMP socket serves one client at a time; \
         is another one connected?",
        .0.as_secs()
    )]
    NoGreeting(Duration),
    /// Its queue is full (`EAGAIN`).
    #[error(
        "others wait for this QMP socket already: it serves one client at a time, and another one \
         is connected"
    )]
    Queue,
    /// Something else speaks on this socket.
    #[error("not QMP: first line was {0}")]
    NotQmp(String),
    /// QEMU is stuck or stopped.
    #[error("no answer to {command} in {} s", .deadline.as_secs())]
    Deadline {
        /// What was asked.
        command: &'static str,
        /// How long it was waited for.
        deadline: Duration,
    },
    /// A line has no end.
    #[error("a line of more than {limit} bytes: cut off, no QMP message is so long")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// Events come faster than the allowance of a connection.
    #[error(
        "it sends more than {} KiB of events a second: cut off, the other VMs need that time",
        RATE >> 10
    )]
    Flood,
    /// What arrived is no QMP message.
    #[error("not QMP: {0}")]
    Garbage(String),
    /// QEMU understood, and refused.
    #[error("{command}: {message}")]
    Refused {
        /// What was asked.
        command: &'static str,
        /// QEMU's words.
        message: String,
    },
    /// The answer has not the shape that QEMU documents.
    #[error("{command}: the answer makes no sense: {what}")]
    Nonsense {
        /// What was asked.
        command: &'static str,
        /// What is wrong with it.
        what: String,
    },
}

impl QmpError {
    /// Whether the connection is of no use any more. After a missed deadline it still is: the late
    /// answer is waited for before anything else is asked.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::Nonsense { .. } | Self::Deadline { .. })
    }

    /// Whether nobody listens on the socket: it outlived its QEMU.
    #[must_use]
    pub fn is_dead_socket(&self) -> bool {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Io(error) if matches!(error.kind(), ConnectionRefused | NotFound))
    }
}

/// The beginning of what a peer sent, fit for a terminal: control characters escaped, length
/// bounded.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    const SHOWN: usize = 60;
    let head = String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN)]);
    let more = if bytes.len() > SHOWN { "… (truncated)" } else { "" };
    format!("`{}`{more}", head.escape_debug())
}
