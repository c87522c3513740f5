//! The NBD protocol without sockets: bytes in, bytes out.
//!
//! It follows the protocol's document (`doc/proto.md` of the NBD project): fixed newstyle
//! negotiation, STARTTLS, structured replies, block status. This module checks everything that
//! the peer sends: lengths are limited before memory is reserved for them, and a violation of the
//! protocol ends the connection.
//!
//! * [`wire`]: the protocol's numbers, and their encoding in bytes;
//! * [`negotiation`]: the server's side until an export is chosen;
//! * [`request`]: a client's requests to an export, on both sides;
//! * [`reply`]: a server's replies;
//! * [`dialogue`]: the client's side until it has its export;
//! * [`in_flight`]: a client's requests in flight, and the replies to them.

pub mod dialogue;
pub mod in_flight;
pub mod negotiation;
pub mod reply;
pub mod request;
pub mod wire;

/// The peer violates the protocol: the connection ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A magic number is wrong.
    #[error("{what} begins with 0x{found:x}, not with 0x{expected:x}")]
    Magic {
        /// The message that was expected.
        what: &'static str,
        /// Its magic number.
        expected: u64,
        /// The number that was found.
        found: u64,
    },
    /// A message is longer than allowed.
    #[error("{what} is {length} bytes long; at most {most} are allowed")]
    TooLong {
        /// The message.
        what: &'static str,
        /// Its length in bytes.
        length: u64,
        /// The limit.
        most: u64,
    },
    /// Something else violates the protocol.
    #[error("{0}")]
    Broken(&'static str),
    /// The server refuses a request of the client.
    #[error("the server refuses {what}: {why}")]
    Refused {
        /// The request.
        what: HandshakeRequest,
        /// Number of the error ([`wire::option_reply`]).
        kind: u32,
        /// Name of the error, and the server's own words.
        why: String,
    },
}

/// A client's request to a server during the negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeRequest {
    /// To continue with TLS.
    Tls,
    /// To get an export.
    Export,
}

impl std::fmt::Display for HandshakeRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tls => "TLS",
            Self::Export => "the export",
        })
    }
}

/// Errors that an operation on an export can return: those that the protocol defines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u32)]
pub enum Errno {
    /// Writing is not allowed.
    #[error("operation not permitted")]
    Permission = 1,
    /// The data cannot be read or written.
    #[error("input/output error")]
    Io = 5,
    /// Memory is short.
    #[error("cannot allocate memory")]
    NoMemory = 12,
    /// The request is invalid.
    #[error("invalid argument")]
    Invalid = 22,
    /// There is no room, or the range lies beyond the end.
    #[error("no space left")]
    NoSpace = 28,
    /// The request is too large.
    #[error("value too large")]
    Overflow = 75,
    /// The export cannot do this.
    #[error("operation not supported")]
    NotSupported = 95,
    /// The server is about to end.
    #[error("the server is shutting down")]
    Shutdown = 108,
}

impl Errno {
    /// The error of this number. Unknown numbers become [`Errno::Invalid`], as the protocol
    /// demands.
    #[must_use]
    pub fn of(number: u32) -> Self {
        [
            Self::Permission,
            Self::Io,
            Self::NoMemory,
            Self::NoSpace,
            Self::Overflow,
            Self::NotSupported,
            Self::Shutdown,
        ]
        .into_iter()
        .find(|errno| *errno as u32 == number)
        .unwrap_or(Self::Invalid)
    }
}
