//! A layer of the stack behind an export.
//!
//! Each layer is one file in [`crate::layers`] and does one thing. Most layers forward to the one
//! below. Most requests are answered at once, from memory. A server that handles a million of
//! them a second cannot afford an allocation for each. So a layer returns [`Answer::Now`] where
//! it can, and a future where it has to wait.
//!
//! No layer keeps the order of requests. Layers that answer later are served through
//! [`order::Ordered`](crate::order::Ordered): of two requests to the same bytes, one of which
//! changes them, the later one begins when the earlier one has ended.

use bytes::Bytes;
use futures_util::future::BoxFuture;

use crate::nbd::Errno;
use crate::nbd::reply::Extent;

/// A layer's answer to a request that returns no data.
pub enum Answer<'a> {
    /// The request is done, or has failed.
    Now(Result<(), Errno>),
    /// The request takes a while.
    Later(BoxFuture<'a, Result<(), Errno>>),
}

/// A layer's answer to a read.
pub enum Read<'a> {
    /// The data is in the caller's buffer, or the read has failed.
    Now(Result<(), Errno>),
    /// The read takes a while; the future returns all data that was asked for.
    Later(BoxFuture<'a, Result<Vec<u8>, Errno>>),
}

/// How a range is to be zeroed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// The content is not needed any more: later reads return zeros or the old content, or fail.
    Trim,
    /// Later reads return zeros. A layer that cannot keep this promise refuses the request.
    Write,
}

/// A layer. Offsets and lengths are in bytes and lie within its size; the caller has checked
/// that.
pub trait Layer: Send + Sync {
    /// Its size in bytes.
    fn size(&self) -> u64;

    /// The layer and those below it, in words: `count over file /var/lib/swap`.
    fn describe(&self) -> String;

    /// Offsets and lengths are multiples of this, in bytes; a power of two.
    fn block(&self) -> u32 {
        1
    }

    /// Reads `into.len()` bytes. The content of `into` is valid only if the answer is
    /// `Now(Ok(()))`.
    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a>;

    /// Writes `data` at `offset`. A layer may keep `data` until the write has ended, and needs no
    /// copy of it for that.
    fn write(&self, offset: u64, data: Bytes) -> Answer<'_>;

    /// Zeroes a range, or discards it.
    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_>;

    /// Writes everything that was answered so far to stable storage, if the layer has any.
    fn flush(&self) -> Answer<'_>;

    /// The known extents of a range, in order. They start at `offset`, and cover a part of the
    /// range that is not empty. In a layer that may lose pages, holes are the pages that it lacks.
    fn extents(&self, _offset: u64, length: u32) -> Vec<Extent> {
        vec![Extent { length, is_hole: false }]
    }
}

impl Answer<'_> {
    /// Waits for the answer.
    ///
    /// # Errors
    ///
    /// Errors of the layer.
    pub async fn result(self) -> Result<(), Errno> {
        match self {
            Answer::Now(result) => result,
            Answer::Later(future) => future.await,
        }
    }
}

/// Waits for the data that `layer` reads.
///
/// # Errors
///
/// Errors of the layer.
pub async fn read(layer: &dyn Layer, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut data = vec![0; length];
    let answer = layer.read(offset, &mut data);
    match answer {
        Read::Now(result) => result.map(|()| data),
        Read::Later(future) => future.await,
    }
}
