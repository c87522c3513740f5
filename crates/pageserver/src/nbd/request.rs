//! A client's requests to an export, and whether they are valid.

use super::wire::{self, Bytes, MAX_PAYLOAD, command_flag};
use super::{Errno, ProtocolError};

/// Length of a request without its payload, in bytes.
pub const HEADER: usize = 28;

/// Properties of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    /// Its size in bytes.
    pub size: u64,
    /// Whether it cannot be written.
    pub read_only: bool,
    /// Offsets and lengths are multiples of this, in bytes; a power of two.
    pub block: u32,
}

/// Type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read.
    Read,
    /// Write the payload that follows.
    Write,
    /// End the connection.
    Disconnect,
    /// Write everything that was answered to stable storage.
    Flush,
    /// The content is not needed any more.
    Trim,
    /// Write zeros.
    WriteZeroes,
    /// Tell which parts are holes.
    BlockStatus,
}

impl Command {
    const ALL: [(Self, u16); 7] = [
        (Self::Read, 0),
        (Self::Write, 1),
        (Self::Disconnect, 2),
        (Self::Flush, 3),
        (Self::Trim, 4),
        (Self::WriteZeroes, 6),
        (Self::BlockStatus, 7),
    ];

    /// Number of the type on the wire.
    #[must_use]
    pub fn number(self) -> u16 {
        Self::ALL.iter().find(|(command, _)| *command == self).map_or(0, |(_, number)| *number)
    }

    fn of(number: u16) -> Option<Self> {
        Self::ALL.iter().find(|(_, n)| *n == number).map(|(command, _)| *command)
    }
}

/// A request in decoded form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// See [`command_flag`].
    pub flags: u16,
    /// Type of the request; `None`: the type is unknown.
    pub command: Option<Command>,
    /// Identifies the request in the reply.
    pub cookie: u64,
    /// Start of the range, in bytes.
    pub offset: u64,
    /// Length of the range, in bytes.
    pub length: u32,
}

impl Request {
    /// Parses the request at the front of `input`; `None`: it is incomplete.
    ///
    /// # Errors
    ///
    /// The bytes are no request, or its payload is longer than allowed.
    pub fn parse(input: &[u8]) -> Result<Option<Self>, ProtocolError> {
        let mut bytes = Bytes::new(input);
        let Some(header) = bytes.take(HEADER) else { return Ok(None) };
        let mut header = Bytes::new(header);
        let magic = header.u32().unwrap_or(0);
        wire::magic("a request", magic.into(), wire::REQUEST.into())?;
        let request = Self {
            flags: header.u16().unwrap_or(0),
            command: header.u16().and_then(Command::of),
            cookie: header.u64().unwrap_or(0),
            offset: header.u64().unwrap_or(0),
            length: header.u32().unwrap_or(0),
        };
        if request.payload() > MAX_PAYLOAD as usize {
            let (length, most) = (request.length.into(), MAX_PAYLOAD.into());
            return Err(ProtocolError::TooLong { what: "a write's payload", length, most });
        }
        Ok(Some(request))
    }

    /// The request without its payload.
    #[must_use]
    pub fn header(&self) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..4].copy_from_slice(&wire::REQUEST.to_be_bytes());
        header[4..6].copy_from_slice(&self.flags.to_be_bytes());
        let number = self.command.map_or(u16::MAX, Command::number);
        header[6..8].copy_from_slice(&number.to_be_bytes());
        header[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        header[16..24].copy_from_slice(&self.offset.to_be_bytes());
        header[24..].copy_from_slice(&self.length.to_be_bytes());
        header
    }

    /// Appends the request to `out`; the caller appends the payload.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.header());
    }

    /// Number of payload bytes that follow.
    #[must_use]
    pub fn payload(&self) -> usize {
        if self.command == Some(Command::Write) { self.length as usize } else { 0 }
    }

    /// Whether this flag is set.
    #[must_use]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }

    /// Checks the request against `export`; `status` says whether block status was agreed on.
    ///
    /// # Errors
    ///
    /// The error that the protocol prescribes for an invalid request.
    pub fn check(&self, export: Export, status: bool) -> Result<Command, Errno> {
        use command_flag::{DF, FUA, NO_HOLE, REQ_ONE};
        let command = self.command.ok_or(Errno::Invalid)?;
        let (flags, writes) = match command {
            Command::Disconnect | Command::Flush => return Ok(command),
            Command::Read => (FUA | DF, false),
            Command::Write | Command::Trim => (FUA, true),
            Command::WriteZeroes => (FUA | NO_HOLE, true),
            Command::BlockStatus if status => (FUA | REQ_ONE, false),
            Command::BlockStatus => return Err(Errno::Invalid),
        };
        if writes && export.read_only {
            return Err(Errno::Permission);
        }
        let mask = u64::from(export.block) - 1;
        let is_aligned = self.offset & mask == 0 && u64::from(self.length) & mask == 0;
        if self.flags & !flags != 0 || self.length == 0 || !is_aligned {
            return Err(Errno::Invalid);
        }
        if command == Command::Read && self.length > MAX_PAYLOAD {
            return Err(Errno::Invalid);
        }
        let end = self.offset.checked_add(self.length.into());
        if end.is_none_or(|end| end > export.size) {
            return Err(if writes { Errno::NoSpace } else { Errno::Invalid });
        }
        Ok(command)
    }
}
