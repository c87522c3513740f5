//! A server's replies: simple ones, or chunks if that was agreed on.
//!
//! Only reads and block status are answered in chunks; the protocol allows simple replies for the
//! rest.

use super::Errno;
use super::wire::{self, chunk};

/// Length of a simple reply without data, in bytes.
pub const SIMPLE: usize = 16;
/// Length of a chunk's header, in bytes.
pub const CHUNK: usize = 20;
/// Length of the offset before a chunk's data, in bytes.
pub const OFFSET: usize = 8;

/// A part of an export, and its block status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its length in bytes.
    pub length: u32,
    /// Whether it is a hole: nothing is allocated there, and reads return zeros.
    pub is_hole: bool,
}

/// Joins adjacent extents of the same kind, hole or data.
#[must_use]
pub fn join(stretches: impl IntoIterator<Item = Extent>) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for next in stretches {
        match extents.last_mut().filter(|last| last.is_hole == next.is_hole) {
            Some(last) => last.length += next.length,
            None => extents.push(next),
        }
    }
    extents
}

/// Appends a reply without data.
pub fn simple(out: &mut Vec<u8>, cookie: u64, result: Result<(), Errno>) {
    let error = result.map_or_else(|errno| errno as u32, |()| 0);
    out.extend_from_slice(&wire::SIMPLE_REPLY.to_be_bytes());
    out.extend_from_slice(&error.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
}

fn chunk(out: &mut Vec<u8>, kind: u16, cookie: u64, length: u32) {
    flagged_chunk(out, chunk::DONE, kind, cookie, length);
}

fn flagged_chunk(out: &mut Vec<u8>, flags: u16, kind: u16, cookie: u64, length: u32) {
    out.extend_from_slice(&wire::STRUCTURED_REPLY.to_be_bytes());
    out.extend_from_slice(&flags.to_be_bytes());
    out.extend_from_slice(&kind.to_be_bytes());
    out.extend_from_slice(&cookie.to_be_bytes());
    out.extend_from_slice(&length.to_be_bytes());
}

/// Appends the header of the `length` bytes read at `offset`.
pub fn before_data(out: &mut Vec<u8>, structured: bool, cookie: u64, offset: u64, length: u32) {
    if structured {
        chunk(out, chunk::OFFSET_DATA, cookie, length + wire::length(OFFSET));
        out.extend_from_slice(&offset.to_be_bytes());
    } else {
        simple(out, cookie, Ok(()));
    }
}

/// Appends the header of `length` bytes read at `offset`, with more chunks to follow.
pub fn before_piece(out: &mut Vec<u8>, cookie: u64, offset: u64, length: u32) {
    flagged_chunk(out, 0, chunk::OFFSET_DATA, cookie, length + wire::length(OFFSET));
    out.extend_from_slice(&offset.to_be_bytes());
}

/// Appends the end of a reply whose data has all been sent.
pub fn last_chunk(out: &mut Vec<u8>, cookie: u64) {
    chunk(out, chunk::NONE, cookie, 0);
}

/// Appends the reply to a failed read or block status request.
pub fn failed(out: &mut Vec<u8>, structured: bool, cookie: u64, errno: Errno) {
    if structured {
        chunk(out, chunk::ERROR, cookie, 6);
        out.extend_from_slice(&(errno as u32).to_be_bytes());
        out.extend_from_slice(&0_u16.to_be_bytes());
    } else {
        simple(out, cookie, Err(errno));
    }
}

/// Appends the reply to a block status request. There is at least one extent.
pub fn block_status(out: &mut Vec<u8>, cookie: u64, extents: &[Extent]) {
    chunk(out, chunk::BLOCK_STATUS, cookie, wire::length(4 + extents.len() * 8));
    out.extend_from_slice(&wire::ALLOCATION_ID.to_be_bytes());
    for extent in extents {
        let state = if extent.is_hole { wire::STATE_HOLE | wire::STATE_ZERO } else { 0 };
        out.extend_from_slice(&extent.length.to_be_bytes());
        out.extend_from_slice(&state.to_be_bytes());
    }
}
