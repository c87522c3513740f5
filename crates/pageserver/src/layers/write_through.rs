//! `write_through`: everything lies in the layer below; what is near is read from there, sooner.
//!
//! The near layer may fail, be slow or lose all that it has: that costs time and nothing else. It
//! must keep one promise: from the moment that a write to it begins, it answers with that write's
//! content or with an error, and never with what was there before. (`seal` does.)
//!
//! A write is done when the layer below has it, and the near one has it, has failed, or took
//! longer than [`PATIENCE`]. A read that the near layer has not answered within [`HEDGE`] is put to
//! the layer below as well, and whoever is first is believed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::time::{sleep, timeout};

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::Extent;

/// How long a write waits for the near layer once the other has it.
pub const PATIENCE: Duration = Duration::from_millis(100);
/// How long a read waits for the near layer alone.
pub const HEDGE: Duration = Duration::from_millis(5);

/// A near layer before one that has everything.
pub struct WriteThrough {
    near: Arc<dyn Layer>,
    below: Arc<dyn Layer>,
    counters: Counters,
}

/// Where reads were answered from.
#[derive(Debug, Default)]
pub struct Counters {
    /// By the near layer.
    pub near: AtomicU64,
    /// By the layer below, because the near one does not have it.
    pub below: AtomicU64,
    /// By the layer below, because the near one took too long.
    pub hedged: AtomicU64,
}

impl WriteThrough {
    /// Has everything in `below`, and as much as can be in `near`. Both are of the same size.
    #[must_use]
    pub fn new(near: Arc<dyn Layer>, below: Arc<dyn Layer>) -> Self {
        debug_assert_eq!(near.size(), below.size(), "two sizes of one export");
        Self { near, below, counters: Counters::default() }
    }

    /// Where reads were answered from.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    async fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let near = Box::pin(layer::read(&*self.near, offset, length));
        let near = match select(near, Box::pin(sleep(HEDGE))).await {
            Either::Left((Ok(data), _)) => {
                count(&self.counters.near);
                return Ok(data);
            }
            Either::Left((Err(_), _)) => {
                count(&self.counters.below);
                return layer::read(&*self.below, offset, length).await;
            }
            Either::Right(((), near)) => near,
        };
        let below = Box::pin(layer::read(&*self.below, offset, length));
        match select(near, below).await {
            Either::Left((Ok(data), _)) => {
                count(&self.counters.near);
                Ok(data)
            }
            Either::Right((Ok(data), _)) => {
                count(&self.counters.hedged);
                Ok(data)
            }
            Either::Left((Err(_), below)) => below.await,
            Either::Right((Err(_), near)) => near.await,
        }
    }
}

impl Layer for WriteThrough {
    fn size(&self) -> u64 {
        self.below.size()
    }

    fn describe(&self) -> String {
        format!("({}) written through to {}", self.near.describe(), self.below.describe())
    }

    fn block(&self) -> u32 {
        self.near.block().max(self.below.block())
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        Read::Later(Box::pin(self.read(offset, into.len())))
    }

    fn write<'a>(&'a self, offset: u64, data: &[u8]) -> Answer<'a> {
        // From here on the near layer does not show what was there before.
        let near = self.near.write(offset, data);
        let below = self.below.write(offset, data);
        Answer::Later(Box::pin(async move {
            let near = async {
                let _costs_time_only = timeout(PATIENCE, near.result()).await;
            };
            futures_util::future::join(near, below.result()).await.1
        }))
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        let near = self.near.zero(offset, length, zeros);
        let below = self.below.zero(offset, length, zeros);
        Answer::Later(Box::pin(async move {
            let near = async {
                let _costs_time_only = timeout(PATIENCE, near.result()).await;
            };
            futures_util::future::join(near, below.result()).await.1
        }))
    }

    fn flush(&self) -> Answer<'_> {
        self.below.flush()
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        self.below.extents(offset, length)
    }
}
