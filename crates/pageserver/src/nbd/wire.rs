//! The protocol's numbers, and their encoding: all are big-endian.

use super::ProtocolError;

/// First magic number of a server's greeting.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// Second magic number of a newstyle server's greeting, and magic number of each option.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// Magic number of each reply to an option.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// Magic number of each request.
pub const REQUEST: u32 = 0x2560_9513;
/// Magic number of a simple reply.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Magic number of each chunk of a structured reply.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Longest name of an export, and longest text, in bytes.
pub const MAX_STRING: u32 = 4096;
/// Longest payload of one read or write, in bytes.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Longest data of an option or of its reply, in bytes.
pub const MAX_OPTION: u32 = 64 << 10;

/// Handshake flag of both sides: fixed newstyle is supported.
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
/// Handshake flag: the 124 zeros after an export's flags are omitted.
pub const NO_ZEROES: u16 = 1 << 1;

/// Options of a client.
pub mod option {
    /// Chooses an export. There is no error reply: if the export does not exist, the connection
    /// ends.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the negotiation.
    pub const ABORT: u32 = 2;
    /// Asks for the names of all exports.
    pub const LIST: u32 = 3;
    /// Starts TLS.
    pub const STARTTLS: u32 = 5;
    /// Asks about an export.
    pub const INFO: u32 = 6;
    /// Chooses an export.
    pub const GO: u32 = 7;
    /// Asks for replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Lists the metadata contexts of block status.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses the metadata contexts of block status.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// The name of an export.
    pub const SERVER: u32 = 2;
    /// Information about an export.
    pub const INFO: u32 = 3;
    /// A metadata context of block status.
    pub const META_CONTEXT: u32 = 4;
    /// This bit is set in all errors.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known.
    pub const UNSUPPORTED: u32 = ERROR + 1;
    /// The option is not allowed.
    pub const POLICY: u32 = ERROR + 2;
    /// The option's data is invalid.
    pub const INVALID: u32 = ERROR + 3;
    /// TLS must be started first.
    pub const TLS_REQUIRED: u32 = ERROR + 5;
    /// There is no such export.
    pub const UNKNOWN: u32 = ERROR + 6;
    /// The option's data is too long.
    pub const TOO_BIG: u32 = ERROR + 9;
}

/// Types of information about an export.
pub mod info {
    /// Its size and flags.
    pub const EXPORT: u16 = 0;
    /// The name under which the export is known.
    pub const NAME: u16 = 1;
    /// Limits of the size of requests.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags of an export.
pub mod export_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// The export is read-only.
    pub const READ_ONLY: u16 = 1 << 1;
    /// The export supports FLUSH.
    pub const FLUSH: u16 = 1 << 2;
    /// The export supports the flag FUA.
    pub const FUA: u16 = 1 << 3;
    /// The export supports TRIM.
    pub const TRIM: u16 = 1 << 5;
    /// The export supports WRITE_ZEROES.
    pub const WRITE_ZEROES: u16 = 1 << 6;
    /// The export supports the flag DF.
    pub const DF: u16 = 1 << 7;
    /// All connections to the export see the same content.
    pub const MULTI_CONN: u16 = 1 << 8;
}

/// Flags of a request.
pub mod command_flag {
    /// The request is done only when its data is on stable storage.
    pub const FUA: u16 = 1 << 0;
    /// The zeros must be allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The answer must not be fragmented.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Types of chunks.
pub mod chunk {
    /// No content.
    pub const NONE: u16 = 0;
    /// Data, after its offset.
    pub const OFFSET_DATA: u16 = 1;
    /// A length of zeros, after its offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// This bit is set in all errors.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERROR_BIT + 1;
    /// Flag of the last chunk of a reply.
    pub const DONE: u16 = 1;
}

/// The only metadata context that is supported here: which parts are not allocated, and which
/// read as zeros.
pub const ALLOCATION: &str = "base:allocation";
/// Number of this context.
pub const ALLOCATION_ID: u32 = 1;
/// The extent is not allocated.
pub const STATE_HOLE: u32 = 1 << 0;
/// The extent reads as zeros.
pub const STATE_ZERO: u32 = 1 << 1;

/// Reads numbers from the front of a message.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    /// Starts at the front of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// The next `n` bytes; `None`: there are fewer.
    pub fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(taken)
    }

    /// The remaining bytes.
    #[must_use]
    pub fn rest(self) -> &'a [u8] {
        self.0
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    /// The next number of 16 bits.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next number of 32 bits.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next number of 64 bits.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// The next string, with its length before it. `None`: it is too long, cut off or not UTF-8.
    pub fn text(&mut self) -> Option<&'a str> {
        let length = self.u32().filter(|length| *length <= MAX_STRING)?;
        std::str::from_utf8(self.take(length as usize)?).ok()
    }
}

/// Checks the magic number at the front of `what`.
///
/// # Errors
///
/// The number is wrong.
pub fn magic(what: &'static str, found: u64, expected: u64) -> Result<(), ProtocolError> {
    if found == expected {
        return Ok(());
    }
    Err(ProtocolError::Magic { what, expected, found })
}

/// Appends the length of `text`, and `text`.
pub(super) fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&length(text.len()).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// Converts a length, which the limits above keep within 32 bits.
pub(crate) fn length(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
