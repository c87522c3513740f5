//! `write_through`: everything lies in the layer below; what is near is read from there, sooner.
//!
//! The near layer may fail, be slow or lose all that it has: that costs time and nothing else. It
//! must keep one promise: from the moment that a write to it begins, it answers with that write's
//! content or with an error, and never with what was there before. (`seal` does.)
//!
//! A write is done when the layer below has it, and the near one has it, has failed, or took
//! longer than [`PATIENCE`]. A read that the near layer has not answered within [`HEDGE`] is put to
//! the layer below as well, and whoever is first is believed.
//!
//! What the near layer does not have and a read brings from below is written there again: so what was
//! lost with a repository comes back as it is needed. Not while a write to the same pages is under way, or
//! has begun since the read did: nobody knows then whether what was read is old.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::future::{Either, join_all, select};
use tokio::time::{sleep, timeout};

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::Extent;

/// How long a write waits for the near layer once the other has it.
pub const PATIENCE: Duration = Duration::from_millis(100);
/// How long a read waits for the near layer alone, or for what it brings to be written there.
pub const HEDGE: Duration = Duration::from_millis(5);
/// Pages that share a count of writes.
const STRIPES: usize = 1024;
const PAGE: u64 = 4096;

/// A near layer before one that has everything.
pub struct WriteThrough {
    near: Arc<dyn Layer>,
    below: Arc<dyn Layer>,
    /// Held while a write begins, so that writes to the near layer begin in the order of these counts.
    writes: Mutex<Vec<Stripe>>,
    counters: Counters,
}

/// The writes to some of the pages.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Stripe {
    begun: u64,
    under_way: u64,
}

/// A write that is under way; ended when this is dropped, whatever became of it.
struct Writing<'a> {
    through: &'a WriteThrough,
    pages: Range<u64>,
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
        let writes = Mutex::new(vec![Stripe::default(); STRIPES]);
        Self { near, below, writes, counters: Counters::default() }
    }

    /// Where reads were answered from.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    fn writes(&self) -> MutexGuard<'_, Vec<Stripe>> {
        self.writes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a write to both layers.
    fn begin<'a>(
        &'a self,
        (offset, length): (u64, u64),
        near: impl FnOnce() -> Answer<'a>,
    ) -> (Writing<'a>, Answer<'a>) {
        let pages = pages_of(offset, length);
        let mut writes = self.writes();
        for page in pages.clone() {
            let stripe = &mut writes[stripe_of(page)];
            stripe.begun += 1;
            stripe.under_way += 1;
        }
        (Writing { through: self, pages }, near())
    }

    /// What is known of the writes to these pages.
    fn seen(writes: &[Stripe], pages: Range<u64>) -> Vec<Stripe> {
        pages.map(|page| writes[stripe_of(page)]).collect()
    }

    /// Reads what the near layer does not have, and writes it there.
    async fn fetch(&self, offset: u64, length: usize) -> Result<Vec<u8>, Errno> {
        let pages = || pages_of(offset, length as u64);
        let before = Self::seen(&self.writes(), pages());
        let data = layer::read(&*self.below, offset, length).await?;
        let near: Vec<Answer<'_>> = {
            let writes = self.writes();
            let is_quiet = before.iter().all(|stripe| stripe.under_way == 0);
            let is_new = is_quiet && Self::seen(&writes, pages()) == before;
            if is_new { self.write_lacking(offset, &data) } else { Vec::new() }
        };
        let near = join_all(near.into_iter().map(Answer::result));
        let _costs_time_only = timeout(HEDGE, near).await;
        Ok(data)
    }

    /// Writes to the near layer what it does not have of this.
    fn write_lacking<'a>(&'a self, offset: u64, data: &'a [u8]) -> Vec<Answer<'a>> {
        let length = u32::try_from(data.len()).unwrap_or(u32::MAX);
        let (mut answers, mut begin) = (Vec::new(), 0);
        for extent in self.near.extents(offset, length) {
            let end = data.len().min(begin + extent.length as usize);
            if extent.is_hole {
                answers.push(self.near.write(offset + begin as u64, &data[begin..end]));
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

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut writes = self.through.writes();
        for page in self.pages.clone() {
            writes[stripe_of(page)].under_way -= 1;
        }
    }
}

fn stripe_of(page: u64) -> usize {
    usize::try_from(page).unwrap_or(0) % STRIPES
}

/// The pages that a range touches, as far as they differ in their stripes.
fn pages_of(offset: u64, length: u64) -> Range<u64> {
    let first = offset / PAGE;
    first..(offset + length).div_ceil(PAGE).min(first + STRIPES as u64)
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
        let range = (offset, data.len() as u64);
        let (writing, near) = self.begin(range, || self.near.write(offset, data));
        let below = self.below.write(offset, data);
        Answer::Later(Box::pin(async move {
            let _writing = writing;
            let near = async {
                let _costs_time_only = timeout(PATIENCE, near.result()).await;
            };
            futures_util::future::join(near, below.result()).await.1
        }))
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        let range = (offset, length);
        let (writing, near) = self.begin(range, || self.near.zero(offset, length, zeros));
        let below = self.below.zero(offset, length, zeros);
        Answer::Later(Box::pin(async move {
            let _writing = writing;
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
