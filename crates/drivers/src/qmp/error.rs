//! Errors of talking to QEMU, in words for the person who has to fix them.

use std::time::Duration;

use sys::peer::PeerError;

use super::allowance::RATE;

/// Why the connection, or one command, failed.
#[derive(Debug, thiserror::Error)]
pub enum QmpError {
    /// No process listens, permission is missing, or the connection broke.
    #[error("{0}")]
    Io(#[from] std::io::Error),
    /// The socket has outlived its process: nothing is sent to the process that holds it now.
    #[error("{0}")]
    Ended(PeerError),
    /// QEMU ended, or something else cut the connection.
    #[error("QEMU closed the connection")]
    Closed,
    /// The connection succeeded, but no greeting arrived.
    #[error(
        "no QMP greeting in {} s: a QMP socket serves one client at a time; \
         is another one connected?",
        .0.as_secs()
    )]
    NoGreeting(Duration),
    /// The socket's backlog is full (`EAGAIN`).
    #[error(
        "others wait for this QMP socket already: it serves one client at a time, and another one \
         is connected"
    )]
    Queue,
    /// Another protocol is spoken on this socket.
    #[error("not QMP: first line was {0}")]
    NotQmp(String),
    /// QEMU is stuck or stopped.
    #[error("no answer to {command} in {} s", .deadline.as_secs())]
    Deadline {
        /// The command.
        command: &'static str,
        /// The deadline that it missed.
        deadline: Duration,
    },
    /// A line is too long.
    #[error("a line of more than {limit} bytes: cut off, no QMP message is so long")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// Events exceed the connection's allowance.
    #[error(
        "it sends more than {} KiB of events a second: cut off, the other VMs need that time",
        RATE >> 10
    )]
    Flood,
    /// A message is not QMP.
    #[error("not QMP: {0}")]
    Garbage(String),
    /// QEMU understood the command, and refused it.
    #[error("{command}: {message}")]
    Refused {
        /// The command.
        command: &'static str,
        /// QEMU's words.
        message: String,
    },
    /// The answer does not have the structure that QEMU documents.
    #[error("{command}: the answer makes no sense: {what}")]
    Nonsense {
        /// The command.
        command: &'static str,
        /// The error in it.
        what: String,
    },
}

impl QmpError {
    /// Whether the connection cannot be used any more. It can be used after a missed deadline:
    /// the client waits for the late answer before it sends anything else.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::Nonsense { .. } | Self::Deadline { .. })
    }

    /// Whether no process listens on the socket, which has outlived its QEMU.
    #[must_use]
    pub fn is_dead_socket(&self) -> bool {
        use std::io::ErrorKind::{ConnectionRefused, NotFound};
        matches!(self, Self::Io(error) if matches!(error.kind(), ConnectionRefused | NotFound))
    }
}

/// The beginning of a peer's data, safe for a terminal: control characters are escaped, and the
/// length is bounded.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    const SHOWN: usize = 60;
    let head = String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN)]);
    let more = if bytes.len() > SHOWN { "… (truncated)" } else { "" };
    format!("`{}`{more}", head.escape_debug())
}
