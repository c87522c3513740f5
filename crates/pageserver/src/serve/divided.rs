//! Requests that are longer than a piece.
//!
//! The layer gets a write piece by piece as its payload arrives, and a read piece by piece as
//! there is room for its data. If replies come in chunks, each piece is a chunk of its own, in
//! any order. Otherwise the pieces follow each other after one header, and no other request is
//! answered meanwhile.

use std::collections::HashMap;

use crate::nbd::Errno;
use crate::nbd::request::{Command, Request};
use crate::nbd::wire::command_flag::DF;

/// A request, or a piece of one.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// The request to the layer: offset and length are those of the piece.
    pub(super) request: Request,
    /// Number of the request that it is a piece of; `None`: it is the whole request.
    pub(super) of: Option<u64>,
}

/// The one request of a connection that is being divided.
pub(super) struct Dividing {
    pub(super) number: u64,
    pub(super) request: Request,
    /// Number of bytes passed to the layer, or skipped.
    pub(super) done: u32,
    /// Whether all data of a read follows one header.
    pub(super) is_in_one: bool,
    /// Whether that header has been written: only the data can follow.
    pub(super) has_begun: bool,
}

/// A request of which some pieces are not done yet.
struct Whole {
    request: Request,
    /// Number of pieces in the layer.
    under_way: u32,
    /// Whether all pieces have gone to the layer, or will not.
    is_divided: bool,
    failed: Option<Errno>,
}

/// Requests that were divided and are not answered yet.
#[derive(Default)]
pub(super) struct Wholes {
    next: u64,
    wholes: HashMap<u64, Whole>,
}

/// Whether the reply to a read is divided into chunks.
pub(super) fn is_chunked(request: &Request, structured: bool) -> bool {
    structured && !request.has(DF)
}

impl Dividing {
    pub(super) fn is_write(&self) -> bool {
        self.request.command == Some(Command::Write)
    }

    /// The next piece, of at most `most` bytes; `None`: none is left.
    pub(super) fn next(&self, most: usize) -> Option<Piece> {
        let left = self.request.length - self.done;
        let length = left.min(u32::try_from(most).unwrap_or(u32::MAX));
        // An invalid write is skipped, at any offset.
        let offset = self.request.offset.wrapping_add(self.done.into());
        let request = Request { offset, length, ..self.request };
        (left > 0).then_some(Piece { request, of: Some(self.number) })
    }
}

impl Wholes {
    /// Begins to divide a request; with `failed`, no piece of it goes to the layer.
    pub(super) fn divide(
        &mut self,
        request: Request,
        structured: bool,
        failed: Option<Errno>,
    ) -> Dividing {
        let number = self.next;
        self.next += 1;
        let whole = Whole { request, under_way: 0, is_divided: false, failed };
        self.wholes.insert(number, whole);
        let is_read = request.command == Some(Command::Read);
        let is_in_one = is_read && !is_chunked(&request, structured);
        Dividing { number, request, done: 0, is_in_one, has_begun: false }
    }

    /// Whether a piece of this request has failed so far.
    pub(super) fn has_failed(&self, number: u64) -> bool {
        self.wholes.get(&number).is_some_and(|whole| whole.failed.is_some())
    }

    /// Notes that the layer has a piece of this request.
    pub(super) fn begun(&mut self, number: u64) {
        if let Some(whole) = self.wholes.get_mut(&number) {
            whole.under_way += 1;
        }
    }

    /// Notes that a piece of this request has ended.
    pub(super) fn ended(&mut self, number: u64, result: Result<(), Errno>) {
        if let Some(whole) = self.wholes.get_mut(&number) {
            whole.under_way -= 1;
            whole.failed = whole.failed.or(result.err());
        }
    }

    /// Notes that no more pieces of this request will go to the layer.
    pub(super) fn divided(&mut self, number: u64) {
        if let Some(whole) = self.wholes.get_mut(&number) {
            whole.is_divided = true;
        }
    }

    /// The request and its result, if all its pieces have ended.
    pub(super) fn finish(&mut self, number: u64) -> Option<(Request, Result<(), Errno>)> {
        let whole = self.wholes.get(&number)?;
        if !whole.is_divided || whole.under_way > 0 {
            return None;
        }
        let whole = self.wholes.remove(&number)?;
        Some((whole.request, whole.failed.map_or(Ok(()), Err)))
    }
}
