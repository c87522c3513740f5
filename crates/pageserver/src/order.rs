//! The order of a disk's requests, above all layers.
//!
//! Problem: requests for the same bytes may be in flight together, by several connections. A write
//! may land after a later one, and a page that was read may be old by the time it is cached. Idea:
//! requests are ordered here, and nowhere else. Of two requests to the same bytes, one of which
//! changes them, the later one begins when the earlier one has ended. So the last write stays, a
//! read sees all writes that came before it, and the content of a range changes in no layer during
//! a read of it. A flush waits for all earlier writes. Guests seldom send such requests together.
//!
//! A layer cannot stop a thread that waits for the disk, so a change that has begun is run to its
//! end even if its connection has gone. Such changes hold memory that no connection is charged
//! for. While there are [`MOST_LEFT`] of them, no other change begins.

use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::layer::{self, Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::Extent;

/// Changes in flight whose connections have gone, at which no other change begins. Each holds a
/// piece of a payload at most.
const MOST_LEFT: usize = 64;

/// A disk whose requests are in order.
pub struct Ordered {
    below: Arc<dyn Layer>,
    requests: Arc<RequestOrder>,
}

/// The requests to one disk that have not ended.
#[derive(Debug, Default)]
struct RequestOrder {
    state: Mutex<OrderState>,
    /// Notified whenever a request ends.
    ended: Notify,
}

#[derive(Debug, Default)]
struct OrderState {
    next: u64,
    /// In the order in which they came.
    requests: Vec<OrderedRequest>,
    /// Number of changes whose connections have gone.
    left: usize,
}

#[derive(Clone, Debug)]
struct OrderedRequest {
    number: u64,
    kind: RequestKind,
    bytes: Range<u64>,
    /// Its connection has gone.
    is_left: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Read,
    Change,
    Flush,
}

/// The place of a request in the order. The request ends when this is dropped.
#[derive(Debug)]
struct PlaceInOrder {
    order: Arc<RequestOrder>,
    number: u64,
}

impl Ordered {
    /// Orders the requests to `below`.
    #[must_use]
    pub fn over(below: Arc<dyn Layer>) -> Self {
        Self { below, requests: Arc::default() }
    }

    /// Changes these bytes by `what` when it is the turn of that.
    fn change(
        &self,
        bytes: Range<u64>,
        what: impl FnOnce(&dyn Layer) -> Answer<'_> + Send + 'static,
    ) -> Answer<'_> {
        let place = self.requests.enter(RequestKind::Change, bytes);
        let below = self.below.clone();
        Answer::Later(Box::pin(async move {
            place.turn().await;
            let (order, number) = (place.order.clone(), place.number);
            let change = Box::pin(async move {
                let _place = place;
                what(&*below).result().await
            });
            ToItsEnd { change: Some(change), order, number }.await
        }))
    }
}

/// A change that has begun. If this is dropped before the change has ended, a task runs the rest.
struct ToItsEnd {
    change: Option<BoxFuture<'static, Result<(), Errno>>>,
    order: Arc<RequestOrder>,
    number: u64,
}

impl Future for ToItsEnd {
    type Output = Result<(), Errno>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(change) = &mut self.change else { return Poll::Ready(Err(Errno::Io)) };
        let done = change.as_mut().poll(context);
        if done.is_ready() {
            self.change = None;
        }
        done
    }
}

impl Drop for ToItsEnd {
    fn drop(&mut self) {
        // Without a runtime the whole program ends.
        if let (Some(change), Ok(runtime)) = (self.change.take(), Handle::try_current()) {
            self.order.state().leave(self.number);
            runtime.spawn(change);
        }
    }
}

impl RequestOrder {
    /// A request comes.
    fn enter(self: &Arc<Self>, kind: RequestKind, bytes: Range<u64>) -> PlaceInOrder {
        let mut state = self.state();
        let number = state.next;
        state.next += 1;
        state.requests.push(OrderedRequest { number, kind, bytes, is_left: false });
        PlaceInOrder { order: self.clone(), number }
    }

    fn state(&self) -> MutexGuard<'_, OrderState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OrderedRequest {
    fn waits_for(&self, earlier: &Self) -> bool {
        let overlap = self.bytes.start < earlier.bytes.end && earlier.bytes.start < self.bytes.end;
        let changes = match earlier.kind {
            RequestKind::Change => true,
            RequestKind::Read => self.kind == RequestKind::Change,
            RequestKind::Flush => false,
        };
        overlap && changes
    }
}

impl OrderState {
    /// Whether this request may begin.
    fn is_turn(&self, number: u64) -> bool {
        let Ok(own) = self.requests.binary_search_by_key(&number, |request| request.number) else {
            return true;
        };
        let (earlier, request) = (&self.requests[..own], &self.requests[own]);
        let is_room = request.kind != RequestKind::Change || self.left < MOST_LEFT;
        is_room && !earlier.iter().any(|earlier| request.waits_for(earlier))
    }

    /// The connection of this request has gone.
    fn leave(&mut self, number: u64) {
        if let Ok(own) = self.requests.binary_search_by_key(&number, |request| request.number) {
            self.requests[own].is_left = true;
            self.left += 1;
        }
    }

    /// A request ends. Returns whether no other one is left.
    fn end(&mut self, number: u64) -> bool {
        if let Ok(own) = self.requests.binary_search_by_key(&number, |request| request.number) {
            self.left -= usize::from(self.requests.remove(own).is_left);
        }
        self.requests.is_empty()
    }
}

impl PlaceInOrder {
    fn is_turn(&self) -> bool {
        self.order.state().is_turn(self.number)
    }

    /// Waits until the request may begin.
    async fn turn(&self) {
        loop {
            let ended = self.order.ended.notified();
            if self.is_turn() {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for PlaceInOrder {
    fn drop(&mut self) {
        // The state is unlocked before other requests wake.
        let is_last = self.order.state().end(self.number);
        if !is_last {
            self.order.ended.notify_waiters();
        }
    }
}

impl Layer for Ordered {
    fn size(&self) -> u64 {
        self.below.size()
    }

    fn describe(&self) -> String {
        self.below.describe()
    }

    fn block(&self) -> u32 {
        self.below.block()
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let length = into.len();
        let place = self.requests.enter(RequestKind::Read, offset..offset + length as u64);
        if !place.is_turn() {
            return Read::Later(Box::pin(async move {
                place.turn().await;
                layer::read(&*self.below, offset, length).await
            }));
        }
        match self.below.read(offset, into) {
            Read::Now(result) => Read::Now(result),
            Read::Later(future) => Read::Later(Box::pin(async move {
                let _place = place;
                future.await
            })),
        }
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        let bytes = offset..offset + data.len() as u64;
        self.change(bytes, move |below| below.write(offset, data))
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        self.change(offset..offset + length, move |below| below.zero(offset, length, zeros))
    }

    fn flush(&self) -> Answer<'_> {
        let place = self.requests.enter(RequestKind::Flush, 0..u64::MAX);
        Answer::Later(Box::pin(async move {
            place.turn().await;
            self.below.flush().result().await
        }))
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        self.below.extents(offset, length)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::path::Path;
    use std::sync::atomic::Ordering;
    use std::sync::mpsc;

    use futures_util::FutureExt;
    use tokio::runtime::Builder;
    use tokio::task::{spawn_blocking, yield_now};

    use super::*;
    use crate::layers::cache::{Cache, Space};
    use crate::layers::fault::{FaultLayer, InjectedFaults};
    use crate::layers::file::File;
    use crate::layers::memory::{Memory, SLAB};

    const SIZE: u64 = 1 << 20;
    const CUT: InjectedFaults = InjectedFaults {
        cut: true,
        delay: std::time::Duration::ZERO,
        ns_per_byte: 0.0,
        error_in: 0,
    };

    fn page(value: u8) -> Bytes {
        vec![value; 4096].into()
    }

    fn fault() -> Arc<FaultLayer> {
        Arc::new(FaultLayer::over(Arc::new(Memory::new(SIZE)), CUT))
    }

    #[tokio::test]
    async fn it_is_the_turn_of_whoever_began_first() {
        let order = Arc::new(RequestOrder::default());
        let change = |bytes| order.enter(RequestKind::Change, bytes);
        let first = change(0..100);
        let second = change(50..150);
        let third = change(140..200);
        let elsewhere = change(200..300);
        first.turn().await;
        elsewhere.turn().await;
        let (mut seconds, mut thirds) = (Box::pin(second.turn()), Box::pin(third.turn()));
        assert!((&mut seconds).now_or_never().is_none());
        assert!((&mut thirds).now_or_never().is_none());
        drop(first);
        seconds.await;
        assert!((&mut thirds).now_or_never().is_none());
        drop(second);
        thirds.await;
    }

    #[test]
    fn a_read_waits_for_changes_before_it_and_keeps_later_ones_waiting() {
        let order = Arc::new(RequestOrder::default());
        let before = order.enter(RequestKind::Change, 0..100);
        let late = order.enter(RequestKind::Read, 99..200);
        assert!(before.is_turn() && !late.is_turn());
        drop(before);
        let (other, early) =
            (order.enter(RequestKind::Read, 100..200), order.enter(RequestKind::Read, 0..300));
        assert!(late.is_turn() && other.is_turn() && early.is_turn());
        drop((late, early));
        let (beside, after) =
            (order.enter(RequestKind::Change, 0..100), order.enter(RequestKind::Change, 199..300));
        assert!(beside.is_turn() && !after.is_turn());
        drop(other);
        assert!(after.is_turn());
        drop((beside, after));
        assert!(order.state().requests.is_empty());
    }

    #[test]
    fn a_flush_waits_for_the_changes_before_it_and_nothing_waits_for_it() {
        let order = Arc::new(RequestOrder::default());
        let reading = order.enter(RequestKind::Read, 0..100);
        let before = order.enter(RequestKind::Change, 200..300);
        let flush = order.enter(RequestKind::Flush, 0..u64::MAX);
        let after = order.enter(RequestKind::Change, 300..400);
        assert!(!flush.is_turn() && after.is_turn());
        drop(before);
        assert!(flush.is_turn());
        drop((reading, after));
    }

    #[test]
    fn a_write_whose_connection_has_broken_does_not_land_after_a_later_one() {
        let runtime = Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let file = tempfile::tempfile().unwrap();
            file.set_len(1 << 20).unwrap();
            let file = Ordered::over(Arc::new(File::new(Path::new("disk"), file, 1 << 20)));
            let (release, blocked) = mpsc::channel::<()>();
            let disk = spawn_blocking(move || blocked.recv());
            // This write is queued for the one thread, which is busy.
            let mut first = Box::pin(file.write(0, vec![1; 8192].into()).result());
            assert!((&mut first).now_or_never().is_none());
            drop(first);
            let second = file.requests.enter(RequestKind::Change, 4096..8192);
            assert!(second.turn().now_or_never().is_none(), "the first one may land after it");
            release.send(()).unwrap();
            disk.await.unwrap().unwrap();
            second.turn().await;
            drop(second);
            let read = crate::layer::read(&file, 0, 8192).await.unwrap();
            assert!(read == [1; 8192]);
        });
    }

    #[tokio::test]
    async fn a_write_that_has_not_begun_ends_with_its_connection() {
        let fault = fault();
        let disk = Ordered::over(fault.clone());
        let mut first = Box::pin(disk.write(0, page(1)).result());
        let mut second = Box::pin(disk.write(0, page(2)).result());
        assert!((&mut first).now_or_never().is_none() && (&mut second).now_or_never().is_none());
        drop((first, second));
        fault.set(InjectedFaults::default());
        assert_eq!(layer::read(&disk, 0, 4096).await.unwrap(), page(1));
    }

    #[tokio::test]
    async fn changes_without_a_connection_are_bounded() {
        let fault = fault();
        let disk = Ordered::over(fault.clone());
        for number in 0..2 * MOST_LEFT as u64 {
            let mut write = Box::pin(disk.write(number * 4096, page(1)).result());
            assert!((&mut write).now_or_never().is_none());
        }
        let requests = || disk.requests.state().requests.len();
        assert_eq!((requests(), disk.requests.state().left), (MOST_LEFT, MOST_LEFT));
        let mut write = Box::pin(disk.write(0, page(2)).result());
        assert!((&mut write).now_or_never().is_none());
        fault.set(InjectedFaults::default());
        write.await.unwrap();
        while requests() > 0 {
            yield_now().await;
        }
        assert_eq!(disk.requests.state().left, 0);
    }

    #[tokio::test]
    async fn what_is_read_while_it_is_written_is_not_kept() {
        let space = Arc::new(Space::new());
        space.set_capacity(SLAB as u64).await;
        let fault = fault();
        let disk = Ordered::over(Arc::new(Cache::over(fault.clone(), space.clone())));
        let read = || Box::pin(layer::read(&disk, 8 * 4096, 4096));
        // A read comes during a write, or a write during a read.
        for (is_write_first, value, expected) in [(true, 1, 1), (false, 2, 1)] {
            fault.set(CUT);
            let write = || Box::pin(disk.write(8 * 4096, page(value)).result());
            let (mut reading, mut writing);
            if is_write_first {
                writing = write();
                assert!((&mut writing).now_or_never().is_none());
                reading = read();
                assert!((&mut reading).now_or_never().is_none());
            } else {
                space.set_capacity(0).await;
                space.set_capacity(SLAB as u64).await;
                reading = read();
                assert!((&mut reading).now_or_never().is_none());
                writing = write();
                assert!((&mut writing).now_or_never().is_none());
            }
            assert_eq!(space.pages(), 0);
            fault.set(InjectedFaults::default());
            let (found, written) = tokio::join!(reading, writing);
            written.unwrap();
            assert_eq!(found.unwrap(), page(expected));
            assert_eq!(read().await.unwrap(), page(value));
            assert_eq!(space.pages(), 1);
            let hits = space.counters().hits.load(Ordering::Relaxed);
            assert_eq!(read().await.unwrap(), page(value));
            assert_eq!(space.counters().hits.load(Ordering::Relaxed), hits + 1);
        }
    }
}
