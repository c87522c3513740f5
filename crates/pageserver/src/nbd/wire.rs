//! The protocol's numbers, and reading and writing them: all are big-endian.

use super::ProtocolError;

/// What a server says first.
pub const NBDMAGIC: u64 = 0x4e42_444d_4147_4943;
/// What a newstyle server says then, and what each option of a client begins with.
pub const IHAVEOPT: u64 = 0x4948_4156_454f_5054;
/// What each reply to an option begins with.
pub const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
/// What each request begins with.
pub const REQUEST: u32 = 0x2560_9513;
/// What a simple reply begins with.
pub const SIMPLE_REPLY: u32 = 0x6744_6698;
/// What each chunk of a structured reply begins with.
pub const STRUCTURED_REPLY: u32 = 0x668e_33ef;

/// Longest name of an export, and longest text, in bytes.
pub const MAX_STRING: u32 = 4096;
/// Longest payload of one read or write, in bytes.
pub const MAX_PAYLOAD: u32 = 32 << 20;
/// Longest data of an option or of its reply, in bytes.
pub const MAX_OPTION: u32 = 64 << 10;

/// Flags of the handshake: the server knows fixed newstyle, so does the client.
pub const FIXED_NEWSTYLE: u16 = 1 << 0;
/// The 124 zeros behind an export's flags are left out.
pub const NO_ZEROES: u16 = 1 << 1;

/// Options of a client.
pub mod option {
    /// Chooses an export, without an error if there is none.
    pub const EXPORT_NAME: u32 = 1;
    /// Ends the negotiation.
    pub const ABORT: u32 = 2;
    /// Asks for the names of all exports.
    pub const LIST: u32 = 3;
    /// Goes on in TLS.
    pub const STARTTLS: u32 = 5;
    /// Asks about an export.
    pub const INFO: u32 = 6;
    /// Chooses an export.
    pub const GO: u32 = 7;
    /// Wants replies in chunks.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Asks what block status can tell.
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Chooses what block status tells.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Types of replies to options.
pub mod option_reply {
    /// Done.
    pub const ACK: u32 = 1;
    /// The name of an export.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// What block status can tell.
    pub const META_CONTEXT: u32 = 4;
    /// This bit stands in all errors.
    pub const ERROR: u32 = 1 << 31;
    /// The option is not known.
    pub const UNSUPPORTED: u32 = ERROR + 1;
    /// The option is not allowed.
    pub const POLICY: u32 = ERROR + 2;
    /// The option's data make no sense.
    pub const INVALID: u32 = ERROR + 3;
    /// TLS comes first.
    pub const TLS_REQUIRED: u32 = ERROR + 5;
    /// There is no such export.
    pub const UNKNOWN: u32 = ERROR + 6;
    /// The option's data are too long.
    pub const TOO_BIG: u32 = ERROR + 9;
}

/// Types of what is told about an export.
pub mod info {
    /// Its size and flags.
    pub const EXPORT: u16 = 0;
    /// The name that it is known by.
    pub const NAME: u16 = 1;
    /// Which sizes of requests it takes.
    pub const BLOCK_SIZE: u16 = 3;
}

/// Flags of an export.
pub mod export_flag {
    /// Always set.
    pub const HAS_FLAGS: u16 = 1 << 0;
    /// It cannot be written.
    pub const READ_ONLY: u16 = 1 << 1;
    /// It knows FLUSH.
    pub const FLUSH: u16 = 1 << 2;
    /// It knows the flag FUA.
    pub const FUA: u16 = 1 << 3;
    /// It knows TRIM.
    pub const TRIM: u16 = 1 << 5;
    /// It knows WRITE_ZEROES.
    pub const WRITE_ZEROES: u16 = 1 << 6;
    /// It knows the flag DF.
    pub const DF: u16 = 1 << 7;
    /// Several connections see the same.
    pub const MULTI_CONN: u16 = 1 << 8;
}

/// Flags of a request.
pub mod command_flag {
    /// It is done only when it is on stable storage.
    pub const FUA: u16 = 1 << 0;
    /// Zeros are to be allocated.
    pub const NO_HOLE: u16 = 1 << 1;
    /// The answer may not be divided.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Types of chunks.
pub mod chunk {
    /// Nothing more.
    pub const NONE: u16 = 0;
    /// Data, behind their offset.
    pub const OFFSET_DATA: u16 = 1;
    /// So many zeros, behind their offset.
    pub const OFFSET_HOLE: u16 = 2;
    /// Extents.
    pub const BLOCK_STATUS: u16 = 5;
    /// This bit stands in all errors.
    pub const ERROR_BIT: u16 = 1 << 15;
    /// The request failed.
    pub const ERROR: u16 = ERROR_BIT + 1;
    /// The last chunk of a reply.
    pub const DONE: u16 = 1;
}

/// The one thing that block status tells here: where nothing is allocated, and what reads as zeros.
pub const ALLOCATION: &str = "base:allocation";
/// Its number.
pub const ALLOCATION_ID: u32 = 1;
/// Nothing is allocated there.
pub const STATE_HOLE: u32 = 1 << 0;
/// Zeros are read there.
pub const STATE_ZERO: u32 = 1 << 1;

/// Reads numbers off the front of a message.
#[derive(Clone, Copy, Debug)]
pub struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    /// All of `bytes`.
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

    /// What is left.
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

    /// The next text, whose length stands before it. `None`: it is too long, cut off or not UTF-8.
    pub fn text(&mut self) -> Option<&'a str> {
        let length = self.u32().filter(|length| *length <= MAX_STRING)?;
        std::str::from_utf8(self.take(length as usize)?).ok()
    }
}

/// Whether `found` is the number that `what` begins with.
///
/// # Errors
///
/// It is another one.
pub fn magic(what: &'static str, found: u64, expected: u64) -> Result<(), ProtocolError> {
    if found == expected {
        return Ok(());
    }
    Err(ProtocolError::Magic { what, expected, found })
}

/// Appends `text` behind its length.
pub(super) fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&length(text.len()).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// A length that the limits above keep within 32 bits.
pub(crate) fn length(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
