//! `write_through`: the layer below has everything; a near layer before it serves reads sooner.
//!
//! The near layer may fail, be slow or lose all its pages: that costs time and nothing else. It
//! must keep one promise: from the moment a write to it begins, it answers with that write's
//! content or with an error, and never with older content. (`seal` does.)
//!
//! A write is done when the layer below has it, and the near layer has it, has failed, or took
//! longer than [`PATIENCE`]. If the near layer has not answered a read within [`HEDGE`], the read
//! also goes to the layer below, and the first answer counts.
//!
//! A read that the near layer cannot answer is served from below, and its pages are written to
//! the near layer again. So pages that were lost with a repository come back as they are needed.
//! They are current, because no write to them overlaps the read ([`order`](crate::order)).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::{Either, join, join_all, select};
use tokio::time::{sleep, timeout};

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::Extent;

/// How long a write waits for the near layer after the layer below has it.
pub const PATIENCE: Duration = Duration::from_millis(100);
/// How long a read waits for the near layer alone, or for its data to be written there.
pub const HEDGE: Duration = Duration::from_millis(5);

/// A near layer before one that has everything.
pub struct WriteThrough {
    near: Arc<dyn Layer>,
    below: Arc<dyn Layer>,
    counters: WriteThroughCounters,
}

/// Number of reads by the layer that answered them.
#[derive(Debug, Default)]
pub struct WriteThroughCounters {
    /// Answered by the near layer.
    pub near: AtomicU64,
    /// Answered by the layer below, because the near one lacks the pages.
    pub below: AtomicU64,
    /// Answered by the layer below, because the near one took too long.
    pub hedged: AtomicU64,
}

impl WriteThrough {
    /// Keeps everything in `below`, and what is possible in `near`. Both have the same size.
    #[must_use]
    pub fn new(near: Arc<dyn Layer>, below: Arc<dyn Layer>) -> Self {
        debug_assert_eq!(near.size(), below.size(), "two sizes of one export");
        Self { near, below, counters: WriteThroughCounters::default() }
    }

    /// Number of reads by the layer that answered them.
    #[must_use]
    pub fn counters(&self) -> &WriteThroughCounters {
        &self.counters
    }

    /// Reads pages that the near layer lacks, and writes them there.
    async fn fetch(&self, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let data = Bytes::from(layer::read(&*self.below, offset, length).await?);
        let near = self.write_lacking(offset, &data);
        let near = join_all(near.into_iter().map(Answer::result));
        let _costs_time_only = timeout(HEDGE, near).await;
        Ok(data.into())
    }

    /// Writes to the near layer those parts of `data` that it lacks.
    fn write_lacking(&self, offset: u64, data: &Bytes) -> Vec<Answer<'_>> {
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let (mut answers, mut begin) = (Vec::new(), 0);
        for extent in self.near.extents(offset, length) {
            let end = data.len().min(begin + extent.length as usize);
            if extent.is_hole {
                answers.push(self.near.write(offset + begin as u64, data.slice(begin..end)));
            }
            begin = end;
        }
        answers
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
                return self.fetch(offset, length).await;
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

/// Waits for both layers; the result is that of the layer below.
fn both<'a>(near: Answer<'a>, below: Answer<'a>) -> Answer<'a> {
    Answer::Later(Box::pin(async move {
        let near = async {
            let _costs_time_only = timeout(PATIENCE, near.result()).await;
        };
        join(near, below.result()).await.1
    }))
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

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        // The near layer comes first: from then on it does not show older content.
        let near = self.near.write(offset, data.clone());
        both(near, self.below.write(offset, data))
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        let near = self.near.zero(offset, length, zeros);
        both(near, self.below.zero(offset, length, zeros))
    }

    fn flush(&self) -> Answer<'_> {
        self.below.flush()
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        self.below.extents(offset, length)
    }
}
