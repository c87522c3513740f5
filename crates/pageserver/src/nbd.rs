//! The NBD protocol without sockets: bytes in, bytes out.
//!
//! After the protocol's document (`doc/proto.md` of the NBD project): fixed newstyle negotiation,
//! STARTTLS, structured replies, block status. What the other side says is checked here: lengths
//! are limited before anything is reserved for them, and what breaks the protocol ends the
//! connection.
//!
//! * [`wire`]: the numbers, and how they lie in bytes;
//! * [`negotiation`]: the server's side until an export is chosen;
//! * [`request`]: what a client may ask of an export, on both sides;
//! * [`reply`]: how a server answers;
//! * [`dialogue`]: the client's side until it has its export;
//! * [`in_flight`]: what a client has asked for, and the replies to that.

pub mod dialogue;
pub mod in_flight;
pub mod negotiation;
pub mod reply;
pub mod request;
pub mod wire;

/// The other side breaks the protocol: the connection ends.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// A number that is the same in every message is another one.
    #[error("{what} begins with 0x{found:x}, not with 0x{expected:x}")]
    Magic {
        /// What was to come.
        what: &'static str,
        /// What it should begin with.
        expected: u64,
        /// What it begins with.
        found: u64,
    },
    /// Something is longer than allowed.
    #[error("{what} is {length} bytes long; at most {most} are allowed")]
    TooLong {
        /// What it is.
        what: &'static str,
        /// Its length in bytes.
        length: u64,
        /// The limit.
        most: u64,
    },
    /// Something is against the protocol.
    #[error("{0}")]
    Broken(&'static str),
    /// The server refuses what the client asked for.
    #[error("the server refuses {what}: {why}")]
    Refused {
        /// What was asked for.
        what: Asked,
        /// The error's number ([`wire::option_reply`]).
        kind: u32,
        /// Its name of the error, and its words.
        why: String,
    },
}

/// What a client asks a server for before there are requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// To go on by TLS.
    Tls,
    /// An export.
    Export,
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Tls => "TLS",
            Self::Export => "the export",
        })
    }
}

/// Why an operation on an export fails: the errors that the protocol knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u32)]
pub enum Errno {
    /// Writing is not allowed.
    #[error("operation not permitted")]
    Permission = 1,
    /// The data cannot be read or written.
    #[error("input/output error")]
    Io = 5,
    /// There is no memory for it.
    #[error("cannot allocate memory")]
    NoMemory = 12,
    /// The request makes no sense.
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
    /// The error of this number. Others stand for [`Errno::Invalid`], as the protocol demands.
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
