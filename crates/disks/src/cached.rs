//! The cache of a group's data disks, whose size the daemon orders.
//!
//! An order is valid for [`ORDER_LASTS`]. After that the cache is emptied: without a daemon it is
//! not known whether the group can still spare that memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use model::{Bytes, CacheReading};
use pageserver::layers::cache::Space;
use pageserver::layers::seal::PAGE;
use tokio::sync::watch;
use tokio::time::timeout;

use super::ORDER_LASTS;
use crate::repository::own_limit;

/// Number of sizes for which the reading tells the hit ratio: from 16 MiB on, each twice the
/// last.
const SIZES: u32 = 16;
const FIRST_SIZE: Bytes = Bytes::mib(16);

/// Memory that the process needs in addition to the cache, within its cgroup's limit: its
/// clients' budget, and as much again.
const BESIDE: Bytes = Bytes::mib(128);

/// A group's cache.
pub(super) struct Cached {
    space: Arc<Space>,
    order: watch::Sender<Bytes>,
    /// Maximum capacity; with a larger one the kernel would kill this process.
    most: Option<Bytes>,
}

impl Cached {
    /// A cache without memory, until there is an order.
    pub(super) fn new() -> Self {
        let (order, orders) = watch::channel(Bytes::ZERO);
        let space = Arc::new(Space::new());
        tokio::spawn(follow(space.clone(), orders));
        Self { space, order, most: own_limit().map(|limit| limit.minus(BESIDE)) }
    }

    /// The space that the group's disks share.
    pub(super) fn space(&self) -> Arc<Space> {
        self.space.clone()
    }

    /// Orders this capacity.
    pub(super) fn order(&self, capacity: Bytes) {
        self.order.send_replace(self.most.map_or(capacity, |most| capacity.min(most)));
    }

    /// The cache's counters and curve.
    pub(super) fn reading(&self) -> CacheReading {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counters = self.space.counters();
        let (hits, misses) = (read(&counters.hits), read(&counters.misses));
        let curve = self.space.curve();
        let sizes = (0..SIZES).map(|n| Bytes(FIRST_SIZE.0 << n));
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "a share")]
        let hit_ratio =
            |size: Bytes| 1.0 - curve.miss_ratio(size.0 as f64 / PAGE as f64).min(1.0) as f32;
        let curve = if hits + misses == 0 {
            Vec::new()
        } else {
            sizes.map(|size| (size, hit_ratio(size))).collect()
        };
        CacheReading {
            capacity: Bytes(self.space.capacity()),
            held: Bytes((self.space.pages() * PAGE) as u64),
            hits,
            misses,
            curve,
        }
    }
}

async fn follow(space: Arc<Space>, mut orders: watch::Receiver<Bytes>) {
    loop {
        let capacity = match timeout(ORDER_LASTS, orders.changed()).await {
            Ok(Ok(())) => *orders.borrow_and_update(),
            Ok(Err(_)) => return,
            Err(_) => Bytes::ZERO,
        };
        space.set_capacity(capacity.0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_nobody_orders_any_more_is_given_up() {
        let cached = Cached::new();
        let capacity = || cached.reading().capacity;
        cached.order(Bytes::mib(64));
        tokio::time::sleep(ORDER_LASTS / 2).await;
        assert_eq!(capacity(), Bytes::mib(64));
        cached.order(Bytes::mib(32));
        tokio::time::sleep(ORDER_LASTS / 2).await;
        assert_eq!(capacity(), Bytes::mib(32));
        tokio::time::sleep(ORDER_LASTS).await;
        assert_eq!(capacity(), Bytes::ZERO);
    }
}
