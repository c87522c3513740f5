//! Reads the tracer's file; `crates/tracer/src/trace.rs` describes its format.
//!
//! The file may end anywhere: QEMU was killed, the disk was full, or the guest still runs. Only
//! whole records count. After the last one the reader answers "no more" and can be asked again
//! later. Bytes that no tracer writes are an error that names their place.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

const MAGIC: &[u8; 8] = b"OBTRACE\n";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
const CHUNK_BYTES: usize = 1 << 20;
/// The bytes of a varint of 64 bits.
const LONGEST_VARINT: u64 = 10;

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The system's error.
    #[error("{path}: {source}")]
    Io {
        /// The trace.
        path: PathBuf,
        /// The error.
        source: io::Error,
    },
    /// The file is empty, or is no trace.
    #[error("{path} is no trace of a guest's pages: its first {HEADER_BYTES} bytes are no header")]
    NotATrace {
        /// The file.
        path: PathBuf,
    },
    /// The trace is of another release.
    #[error("{path} has version {version} of the trace format; this program reads {VERSION}")]
    Version {
        /// The trace.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// No tracer wrote this.
    #[error("{path} is damaged in the record at byte {offset}: {what}")]
    Damaged {
        /// The trace.
        path: PathBuf,
        /// The start of the record.
        offset: u64,
        /// The fault.
        what: &'static str,
    },
}

/// One tick.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tick {
    /// Its end, in microseconds of CLOCK_MONOTONIC.
    pub end_us: u64,
    /// The pages that were touched in it, in order of first touch.
    pub pages: Vec<u32>,
}

/// A trace that is read tick by tick.
#[derive(Debug)]
pub struct TraceReader {
    path: PathBuf,
    file: File,
    start_us: u64,
    pages: u64,
    end_us: u64,
    /// Bytes that were read and not yet used: `buffer[used..]`.
    buffer: Vec<u8>,
    used: usize,
    /// The position of `buffer[used]` in the file.
    offset: u64,
}

impl TraceReader {
    /// Opens a trace and reads its header.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let failed = |source| TraceError::Io { path: path.to_owned(), source };
        let mut file = File::open(path).map_err(failed)?;
        let mut header = [0; HEADER_BYTES];
        let not_a_trace = || TraceError::NotATrace { path: path.to_owned() };
        match file.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(not_a_trace()),
            other => other.map_err(failed)?,
        }
        let number = |at: usize| header[at..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b));
        let long = |at: usize| header[at..].first_chunk().map_or(0, |b| u64::from_le_bytes(*b));
        let (version, start_us, pages) = (number(8), long(16), long(24));
        if !header.starts_with(MAGIC) || pages == 0 || pages > u64::from(u32::MAX) {
            return Err(not_a_trace());
        }
        if version != VERSION {
            return Err(TraceError::Version { path: path.to_owned(), version });
        }
        Ok(Self {
            path: path.to_owned(),
            file,
            start_us,
            pages,
            end_us: start_us,
            buffer: Vec::new(),
            used: 0,
            offset: HEADER_BYTES as u64,
        })
    }

    /// The start of the first tick, in microseconds of CLOCK_MONOTONIC.
    pub fn start_us(&self) -> u64 {
        self.start_us
    }

    /// The number of the guest's pages.
    pub fn pages(&self) -> u64 {
        self.pages
    }

    /// The next tick; `None`: the file has no more as yet.
    pub fn next_tick(&mut self) -> Result<Option<Tick>, TraceError> {
        if !self.have(4)? {
            return Ok(None);
        }
        let length = self.buffer[self.used..].first_chunk().map_or(0, |b| u32::from_le_bytes(*b));
        if u64::from(length) > (self.pages + 2) * LONGEST_VARINT {
            return Err(self.damaged("it is longer than all pages take"));
        }
        let length = length as usize;
        if !self.have(4 + length)? {
            return Ok(None);
        }
        let start = self.used + 4;
        let mut rest = &self.buffer[start..start + length];
        let (lasted_us, pages) = match parse(&mut rest, self.pages) {
            Ok(parsed) => parsed,
            Err(what) => return Err(self.damaged(what)),
        };
        self.used = start + length;
        self.offset += 4 + length as u64;
        self.end_us = self.end_us.saturating_add(lasted_us);
        Ok(Some(Tick { end_us: self.end_us, pages }))
    }

    /// Whether `bytes` bytes are in the buffer, after reading more if there are any.
    fn have(&mut self, bytes: usize) -> Result<bool, TraceError> {
        while self.buffer.len() - self.used < bytes {
            self.buffer.drain(..self.used);
            self.used = 0;
            let chunk = CHUNK_BYTES.max(bytes) as u64;
            let read = (&self.file).take(chunk).read_to_end(&mut self.buffer);
            let failed = |source| TraceError::Io { path: self.path.clone(), source };
            if read.map_err(failed)? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn damaged(&self, what: &'static str) -> TraceError {
        TraceError::Damaged { path: self.path.clone(), offset: self.offset, what }
    }
}

/// The length of the tick, and its pages.
fn parse(rest: &mut &[u8], all_pages: u64) -> Result<(u64, Vec<u32>), &'static str> {
    const SHORT: &str = "it ends within a number";
    let lasted_us = varint(rest).ok_or(SHORT)?;
    let count = varint(rest).ok_or(SHORT)?;
    if count > rest.len() as u64 {
        return Err("it has fewer bytes than pages");
    }
    let mut pages = Vec::with_capacity(rest.len());
    let mut page = 0_i64;
    for _ in 0..count {
        let zigzag = varint(rest).ok_or(SHORT)?;
        let difference = (zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed();
        page = page.wrapping_add(difference);
        let inside = u32::try_from(page).ok().filter(|&page| u64::from(page) < all_pages);
        pages.push(inside.ok_or("a page lies beyond the guest's RAM")?);
    }
    if rest.is_empty() { Ok((lasted_us, pages)) } else { Err("it has more bytes than pages") }
}

fn varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, others) = rest.split_first()?;
        *rest = others;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
pub(super) mod tests;
