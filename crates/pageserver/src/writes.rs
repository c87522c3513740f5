//! Tracks the writes to a disk that are in flight, for layers that depend on their order.
//!
//! It answers two questions. Is data that was read still current? It is not if a write to the
//! same bytes was in flight when the read began, or has begun since ([`Watch`]). And when may a
//! write go on? A write may outlive its connection, and must not land after a later one
//! ([`Writing::turn`]).

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// The writes to one disk. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Writes {
    shared: Arc<WritesShared>,
}

#[derive(Debug, Default)]
struct WritesShared {
    state: Mutex<WritesState>,
    /// Notified whenever a write ends.
    ended: Notify,
}

#[derive(Debug, Default)]
struct WritesState {
    next: u64,
    /// Writes in flight, in the order in which they began.
    writes: Vec<InFlightRange>,
    /// Reads that are watched.
    watches: Vec<InFlightRange>,
}

#[derive(Debug)]
struct InFlightRange {
    number: u64,
    bytes: Range<u64>,
    /// For a read: a write has overlapped its bytes.
    is_touched: bool,
}

/// A write in flight; it ends when this is dropped, whether it has succeeded or not.
#[derive(Debug)]
pub struct Writing {
    shared: Arc<WritesShared>,
    number: u64,
    bytes: Range<u64>,
}

/// A read, and whether writes overlap it.
#[derive(Debug)]
pub struct Watch {
    shared: Arc<WritesShared>,
    number: u64,
}

impl Writes {
    /// Begins a write to these bytes, and runs `also`. No other read or write begins before
    /// `also` has returned.
    pub fn begin<T>(&self, bytes: Range<u64>, also: impl FnOnce() -> T) -> (Writing, T) {
        let mut state = self.shared.state();
        for watch in &mut state.watches {
            watch.is_touched |= overlap(&watch.bytes, &bytes);
        }
        let number = state.number();
        state.writes.push(InFlightRange { number, bytes: bytes.clone(), is_touched: false });
        (Writing { shared: self.shared.clone(), number, bytes }, also())
    }

    /// Begins a read of these bytes.
    #[must_use]
    pub fn watch(&self, bytes: Range<u64>) -> Watch {
        let mut state = self.shared.state();
        let number = state.number();
        let is_touched = state.writes.iter().any(|write| overlap(&write.bytes, &bytes));
        state.watches.push(InFlightRange { number, bytes, is_touched });
        Watch { shared: self.shared.clone(), number }
    }
}

impl Writing {
    /// Waits until all writes to the same bytes that began before this one have ended.
    pub async fn turn(&self) {
        loop {
            let ended = self.shared.ended.notified();
            let earlier = |write: &InFlightRange| {
                write.number < self.number && overlap(&write.bytes, &self.bytes)
            };
            if !self.shared.state().writes.iter().any(earlier) {
                return;
            }
            ended.await;
        }
    }
}

impl Watch {
    /// Runs `what` unless a write has overlapped the read; no write begins before `what` has
    /// returned.
    pub fn if_untouched<T>(self, what: impl FnOnce() -> T) -> Option<T> {
        let state = self.shared.state();
        let own = state.watches.iter().find(|watch| watch.number == self.number);
        let done = own.is_some_and(|watch| !watch.is_touched).then(what);
        drop(state);
        done
    }
}

impl WritesShared {
    fn state(&self) -> MutexGuard<'_, WritesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WritesState {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
}

impl Drop for Writing {
    fn drop(&mut self) {
        self.shared.state().writes.retain(|write| write.number != self.number);
        self.shared.ended.notify_waiters();
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.state().watches.retain(|watch| watch.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[test]
    fn a_read_is_touched_by_writes_before_and_after_it_began() {
        let writes = Writes::default();
        let (before, ()) = writes.begin(0..100, || ());
        let late = writes.watch(99..200);
        drop(before);
        assert_eq!(late.if_untouched(|| 1), None);
        let untouched = writes.watch(100..200);
        drop(writes.begin(0..100, || ()));
        assert_eq!(untouched.if_untouched(|| 2), Some(2));
        let early = writes.watch(100..200);
        drop(writes.begin(199..300, || ()));
        assert_eq!(early.if_untouched(|| 3), None);
        assert!(writes.shared.state().writes.is_empty());
        assert!(writes.shared.state().watches.is_empty());
    }

    #[tokio::test]
    async fn it_is_the_turn_of_whoever_began_first() {
        let writes = Writes::default();
        let (first, ()) = writes.begin(0..100, || ());
        let (second, ()) = writes.begin(50..150, || ());
        let (third, ()) = writes.begin(140..200, || ());
        let (elsewhere, ()) = writes.begin(200..300, || ());
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
}
