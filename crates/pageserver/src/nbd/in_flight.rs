//! A client's requests in flight, and the replies to them.
//!
//! A reply belongs to the request whose cookie it names. A reply violates the protocol if its
//! cookie is unknown, if it brings data that was not asked for, or if it ends a read without all
//! data. So the data of one request is never returned for another.

use std::collections::HashMap;

use super::reply::{CHUNK, Extent, OFFSET, SIMPLE};
use super::request::Command;
use super::wire::{self, Bytes, MAX_PAYLOAD, MAX_STRING, chunk};
use super::{Errno, ProtocolError};

/// Longest content of a chunk, in bytes.
const MAX_CHUNK: u32 = MAX_PAYLOAD + MAX_ERROR;
/// Longest content of an error chunk: its message, and the fields before it.
const MAX_ERROR: u32 = MAX_STRING + 16;

/// Result of a request that has succeeded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Brought {
    /// No data.
    Done,
    /// The data read.
    Data(Vec<u8>),
    /// Block status.
    Extents(Vec<Extent>),
}

/// A request that has been answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Cookie of the request.
    pub cookie: u64,
    /// Result of the request.
    pub result: Result<Brought, Errno>,
}

/// A request that is not answered yet.
#[derive(Debug)]
struct Waiting {
    offset: u64,
    length: u32,
    brings: Brought,
    /// Number of bytes that have arrived, or whose status has.
    filled: u64,
    /// A chunk has reported an error; more chunks may come.
    failed: Option<Errno>,
}

/// The requests that are not answered yet.
#[derive(Debug, Default)]
pub struct InFlight {
    waiting: HashMap<u64, Waiting>,
    next: u64,
}

/// Header of a chunk.
struct Chunk {
    is_last: bool,
    kind: u16,
    cookie: u64,
    length: usize,
}

impl InFlight {
    /// Number of requests that are not answered yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether all requests are answered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Records a request and returns its cookie.
    pub fn ask(&mut self, command: Command, offset: u64, length: u32) -> u64 {
        let brings = match command {
            Command::Read => Brought::Data(vec![0; length as usize]),
            Command::BlockStatus => Brought::Extents(Vec::new()),
            _ => Brought::Done,
        };
        let cookie = self.next;
        self.next += 1;
        let waiting = Waiting { offset, length, brings, filled: 0, failed: None };
        self.waiting.insert(cookie, waiting);
        cookie
    }

    /// Parses one reply or chunk at the front of `input`. Returns its length, and the request
    /// that it finishes, if any; `None`: the reply is incomplete.
    ///
    /// # Errors
    ///
    /// The server breaks the protocol.
    pub fn advance(
        &mut self,
        input: &[u8],
    ) -> Result<Option<(usize, Option<Finished>)>, ProtocolError> {
        let mut bytes = Bytes::new(input);
        match bytes.u32() {
            None => Ok(None),
            Some(wire::SIMPLE_REPLY) => self.simple(input),
            Some(wire::STRUCTURED_REPLY) => self.chunk(input),
            Some(found) => Err(ProtocolError::Magic {
                what: "a reply",
                expected: wire::SIMPLE_REPLY.into(),
                found: found.into(),
            }),
        }
    }

    /// Length of the reply or chunk at the front of `input` in bytes; 0: not known yet.
    #[must_use]
    pub fn expects(&self, input: &[u8]) -> usize {
        let mut bytes = Bytes::new(input);
        let is_simple = bytes.u32() == Some(wire::SIMPLE_REPLY);
        if !is_simple {
            return Chunk::parse(input).ok().flatten().map_or(0, |chunk| CHUNK + chunk.length);
        }
        let (_, cookie) = (bytes.u32(), bytes.u64());
        let waiting = cookie.and_then(|cookie| self.waiting.get(&cookie));
        waiting.map_or(0, |waiting| match &waiting.brings {
            Brought::Data(data) => SIMPLE + data.len(),
            _ => SIMPLE,
        })
    }

    fn simple(&mut self, input: &[u8]) -> Result<Option<(usize, Option<Finished>)>, ProtocolError> {
        let Some((header, rest)) = input.split_at_checked(SIMPLE) else { return Ok(None) };
        let mut header = Bytes::new(&header[4..]);
        let (error, cookie) = (header.u32().unwrap_or(0), header.u64().unwrap_or(0));
        let waiting = self.waiting.get_mut(&cookie).ok_or(UNASKED)?;
        if waiting.filled > 0 || waiting.failed.is_some() {
            return Err(ProtocolError::Broken("a simple reply follows chunks"));
        }
        let mut used = SIMPLE;
        if error == 0 {
            match &mut waiting.brings {
                Brought::Done => {}
                Brought::Data(data) => {
                    let Some(read) = rest.get(..data.len()) else { return Ok(None) };
                    data.copy_from_slice(read);
                    (waiting.filled, used) = (waiting.length.into(), used + data.len());
                }
                Brought::Extents(_) => {
                    return Err(ProtocolError::Broken("block status comes without a chunk"));
                }
            }
        } else {
            waiting.failed = Some(Errno::of(error));
        }
        self.finish(cookie).map(|finished| Some((used, Some(finished))))
    }

    fn chunk(&mut self, input: &[u8]) -> Result<Option<(usize, Option<Finished>)>, ProtocolError> {
        let Some(chunk) = Chunk::parse(input)? else { return Ok(None) };
        let waiting = self.waiting.get_mut(&chunk.cookie).ok_or(UNASKED)?;
        if chunk.length > waiting.longest() {
            return Err(ProtocolError::Broken(
                "a chunk is longer than anything that was asked for",
            ));
        }
        let Some(content) = input[CHUNK..].get(..chunk.length) else { return Ok(None) };
        waiting.take(chunk.kind, content)?;
        let finished = if chunk.is_last { Some(self.finish(chunk.cookie)?) } else { None };
        Ok(Some((CHUNK + chunk.length, finished)))
    }

    fn finish(&mut self, cookie: u64) -> Result<Finished, ProtocolError> {
        let waiting = self.waiting.remove(&cookie).ok_or(UNASKED)?;
        if let Some(errno) = waiting.failed {
            return Ok(Finished { cookie, result: Err(errno) });
        }
        let is_whole = match &waiting.brings {
            Brought::Done => true,
            Brought::Data(_) => waiting.filled == u64::from(waiting.length),
            Brought::Extents(extents) => !extents.is_empty(),
        };
        if !is_whole {
            return Err(ProtocolError::Broken("a reply ends before all of it has come"));
        }
        Ok(Finished { cookie, result: Ok(waiting.brings) })
    }
}

const UNASKED: ProtocolError = ProtocolError::Broken("a reply names a request that is not there");

impl Chunk {
    fn parse(input: &[u8]) -> Result<Option<Self>, ProtocolError> {
        let mut bytes = Bytes::new(input);
        let Some(header) = bytes.take(CHUNK) else { return Ok(None) };
        let mut header = Bytes::new(&header[4..]);
        let (flags, kind) = (header.u16().unwrap_or(0), header.u16().unwrap_or(0));
        let (cookie, length) = (header.u64().unwrap_or(0), header.u32().unwrap_or(0));
        if length > MAX_CHUNK {
            let (length, most) = (length.into(), MAX_CHUNK.into());
            return Err(ProtocolError::TooLong { what: "a chunk", length, most });
        }
        let is_last = flags & chunk::DONE != 0;
        Ok(Some(Self { is_last, kind, cookie, length: length as usize }))
    }
}

impl Waiting {
    /// Longest valid content of a chunk for this request, in bytes.
    fn longest(&self) -> usize {
        let longest = match &self.brings {
            Brought::Done => 0,
            Brought::Data(data) => OFFSET + data.len(),
            Brought::Extents(_) => MAX_CHUNK as usize,
        };
        longest.max(MAX_ERROR as usize)
    }

    fn take(&mut self, kind: u16, content: &[u8]) -> Result<(), ProtocolError> {
        let mut bytes = Bytes::new(content);
        match kind {
            chunk::NONE if content.is_empty() => Ok(()),
            chunk::OFFSET_DATA => {
                let offset = bytes.u64().ok_or(CUT_OFF)?;
                let data = bytes.rest();
                self.part(offset, data.len())?.copy_from_slice(data);
                Ok(())
            }
            chunk::OFFSET_HOLE if content.len() == OFFSET + 4 => {
                let (offset, length) = (bytes.u64().ok_or(CUT_OFF)?, bytes.u32().ok_or(CUT_OFF)?);
                self.part(offset, length as usize)?.fill(0);
                Ok(())
            }
            chunk::BLOCK_STATUS => self.extents(bytes),
            _ if kind & chunk::ERROR_BIT != 0 => {
                self.failed = Some(Errno::of(bytes.u32().ok_or(CUT_OFF)?));
                Ok(())
            }
            _ => Err(ProtocolError::Broken("a chunk is of an unknown kind")),
        }
    }

    /// The `length` bytes of the read buffer for `offset` of the export. If the server sends some
    /// bytes twice, others are missing. These stay zero, as the buffer was at first, so a server
    /// that cheats only makes its own client read zeros.
    fn part(&mut self, offset: u64, length: usize) -> Result<&mut [u8], ProtocolError> {
        const BEYOND: ProtocolError =
            ProtocolError::Broken("a reply brings data that was not asked for");
        let Brought::Data(data) = &mut self.brings else { return Err(BEYOND) };
        let begin = offset.checked_sub(self.offset).and_then(|begin| usize::try_from(begin).ok());
        let begin = begin.filter(|_| length > 0).ok_or(BEYOND)?;
        self.filled += length as u64;
        if self.filled > self.length.into() {
            return Err(BEYOND);
        }
        data.get_mut(begin..begin.saturating_add(length)).ok_or(BEYOND)
    }

    /// Block status comes in one chunk, and only the last extent may extend beyond the range that
    /// was asked about. This bounds the server's answer. The context's number is the server's
    /// choice and is ignored, because only one context is ever asked for.
    fn extents(&mut self, mut bytes: Bytes<'_>) -> Result<(), ProtocolError> {
        let Brought::Extents(extents) = &mut self.brings else {
            return Err(ProtocolError::Broken("block status comes unasked"));
        };
        if self.filled > 0 {
            return Err(ProtocolError::Broken("block status comes twice"));
        }
        if bytes.u32().is_none() || !bytes.rest().len().is_multiple_of(8) {
            return Err(CUT_OFF);
        }
        while let (Some(length), Some(state)) = (bytes.u32(), bytes.u32()) {
            if length == 0 {
                return Err(ProtocolError::Broken("an extent is empty"));
            }
            if self.filled >= self.length.into() {
                return Err(ProtocolError::Broken("block status of more than was asked for"));
            }
            self.filled += u64::from(length);
            let is_hole = state & (wire::STATE_HOLE | wire::STATE_ZERO) != 0;
            extents.push(Extent { length, is_hole });
        }
        Ok(())
    }
}

const CUT_OFF: ProtocolError = ProtocolError::Broken("a chunk is cut off");
