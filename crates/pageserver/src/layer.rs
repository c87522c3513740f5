//! A layer of the stack that an export is made of.
//!
//! Each layer is one file in [`crate::layers`] and does one thing; most of them pass on to the one
//! below. Most requests are answered at once, out of memory, and a server that has a million of
//! them a second can afford no allocation for each. So a layer answers [`Answer::Now`] where it
//! can, and with a future where it has to wait.

use futures_util::future::BoxFuture;

use crate::nbd::Errno;
use crate::nbd::reply::Extent;

/// What a layer answers to a request that brings no data.
pub enum Answer<'a> {
    /// It is done, or has failed.
    Now(Result<(), Errno>),
    /// It takes a while.
    Later(BoxFuture<'a, Result<(), Errno>>),
}

/// What a layer answers to a read.
pub enum Read<'a> {
    /// What was read lies where it was wanted, or it has failed.
    Now(Result<(), Errno>),
    /// It takes a while, and brings all that was asked for.
    Later(BoxFuture<'a, Result<Vec<u8>, Errno>>),
}

/// What zeros are to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Zeros {
    /// The content is not needed any more: zeros, or what was there before.
    Trim,
    /// Zeros are read from now on.
    Write,
}

/// A layer. Offsets and lengths are in bytes, and lie within its size: who calls has checked that.
pub trait Layer: Send + Sync {
    /// Its size in bytes.
    fn size(&self) -> u64;

    /// What it is, and what it stands on: `count over file /var/lib/swap`.
    fn describe(&self) -> String;

    /// Offsets and lengths are multiples of this, in bytes; a power of two.
    fn block(&self) -> u32 {
        1
    }

    /// Reads `into.len()` bytes. What `into` holds is of no meaning unless the answer is
    /// `Now(Ok(()))`.
    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a>;

    /// Writes.
    fn write<'a>(&'a self, offset: u64, data: &[u8]) -> Answer<'a>;

    /// Writes zeros, or gives up.
    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_>;

    /// Puts everything that was answered on stable storage, if there is any.
    fn flush(&self) -> Answer<'_>;

    /// What is known of a range: extents in their order, which cover a part of it that begins at
    /// its begin, and is not empty.
    fn extents(&self, _offset: u64, length: u32) -> Vec<Extent> {
        vec![Extent { length, is_hole: false }]
    }
}

impl Answer<'_> {
    /// Waits for the answer.
    ///
    /// # Errors
    ///
    /// The layer's.
    pub async fn result(self) -> Result<(), Errno> {
        match self {
            Answer::Now(result) => result,
            Answer::Later(future) => future.await,
        }
    }
}

/// Waits for what `layer` reads.
///
/// # Errors
///
/// The layer's.
pub async fn read(layer: &dyn Layer, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
    let mut data = vec![0; length];
    let answer = layer.read(offset, &mut data);
    match answer {
        Read::Now(result) => result.map(|()| data),
        Read::Later(future) => future.await,
    }
}
