//! One memory budget for all requests in flight of a process' clients.
//!
//! Problem: NBD allows requests of 32 MiB. A few clients that are stuck or hostile could
//! therefore hold all memory of a process that must not be killed. Idea: payloads are handled in
//! pieces. Each connection may always hold one piece, so no connection waits for another one for
//! ever. Bytes beyond that piece are charged to the budget before they are allocated, and are not
//! allocated if the budget is used up. So the upper bound of a process' memory is known:
//! [`BUDGET`], plus a fixed bound per connection.
//!
//! A refused connection continues when its own work is done, so no other connection has to wake
//! it. The budget remembers the refusal. If a connection holds a part of the budget and its
//! client takes no reply, it is closed then ([`Account::is_stuck`]).

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Memory for all connections of a process beyond their first pieces, in bytes: four times the
/// largest burst of one guest, which is sixteen requests of 1 MiB each.
pub const BUDGET: usize = 64 << 20;
/// The longest piece of a payload, in bytes; a multiple of every export's block. Nearly all of a
/// guest's requests are shorter.
pub const PIECE: usize = 256 << 10;
/// Step in which the budget is taken, in bytes.
const STEP: usize = 256 << 10;
/// A client that takes no reply for this long is stuck: a guest's QEMU takes replies within
/// milliseconds.
const STUCK: Duration = Duration::from_secs(10);

/// The budget of a process.
#[derive(Debug)]
pub struct Budget {
    total: usize,
    piece: usize,
    used: AtomicUsize,
    /// When a connection was last refused.
    refused: Mutex<Option<Instant>>,
}

impl Default for Budget {
    fn default() -> Self {
        Self::new(BUDGET, PIECE)
    }
}

impl Budget {
    /// A budget of `total` bytes, for payloads in pieces of at most `piece` bytes.
    #[must_use]
    pub fn new(total: usize, piece: usize) -> Self {
        Self { total, piece, used: AtomicUsize::new(0), refused: Mutex::default() }
    }

    /// The number of bytes held.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// The longest piece of a payload, in bytes.
    pub(crate) fn piece(&self) -> usize {
        self.piece
    }

    fn take(&self, bytes: usize) -> bool {
        let fits = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.total);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok();
        if !taken {
            *locked(&self.refused) = Some(Instant::now());
        }
        taken
    }

    fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Whether a connection was refused within the time after which a client is stuck.
    fn is_wanted(&self) -> bool {
        locked(&self.refused).is_some_and(|refused| refused.elapsed() < STUCK)
    }
}

/// A connection's share of the budget, as other connections see it.
#[derive(Debug, Default)]
pub struct Account {
    budget: Arc<Budget>,
    /// Time since which the connection holds a part of the budget while its client takes no
    /// reply.
    waits_since: Mutex<Option<Instant>>,
}

impl Account {
    /// An account that holds nothing.
    #[must_use]
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { budget, waits_since: Mutex::default() }
    }

    pub(crate) fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Notes whether the client takes no reply while the connection holds a part of the budget.
    pub(crate) fn waits(&self, waits: bool) {
        let mut since = locked(&self.waits_since);
        *since = if waits { since.or_else(|| Some(Instant::now())) } else { None };
    }

    /// Whether the connection is to be closed, because others need the memory that it holds.
    pub(crate) fn is_stuck(&self) -> bool {
        let waits = locked(&self.waits_since).is_some_and(|since| since.elapsed() >= STUCK);
        waits && self.budget.is_wanted()
    }
}

/// Bytes that a connection holds: the first `free` ones are not charged, all others are charged
/// to the budget.
#[derive(Debug)]
pub(crate) struct BudgetCharge {
    budget: Arc<Budget>,
    free: usize,
    bytes: usize,
    charged: usize,
}

impl BudgetCharge {
    /// Holds nothing yet; the first `free` bytes are not charged.
    pub(crate) fn new(budget: Arc<Budget>, free: usize) -> Self {
        Self { budget, free, bytes: 0, charged: 0 }
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a part of the bytes is charged to the budget.
    pub(crate) fn is_charged(&self) -> bool {
        self.charged > 0
    }

    /// Takes `bytes` more. `false`: the budget has too little left, and nothing has changed.
    pub(crate) fn take(&mut self, bytes: usize) -> bool {
        let all = self.bytes + bytes;
        let lacks = all.saturating_sub(self.free + self.charged).next_multiple_of(STEP);
        if lacks > 0 && !self.budget.take(lacks) {
            return false;
        }
        (self.bytes, self.charged) = (all, self.charged + lacks);
        true
    }

    /// Gives `bytes` back.
    pub(crate) fn give(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes);
        let needs = self.bytes.saturating_sub(self.free).next_multiple_of(STEP);
        if self.charged > needs {
            self.budget.give(self.charged - needs);
            self.charged = needs;
        }
    }
}

impl Drop for BudgetCharge {
    fn drop(&mut self) {
        self.budget.give(self.charged);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_bytes_are_free_and_all_others_are_the_budgets() {
        let budget = Arc::new(Budget::new(2 * STEP, STEP));
        let mut one = BudgetCharge::new(budget.clone(), 100);
        assert!(one.take(100) && budget.used() == 0 && !one.is_charged());
        assert!(one.take(1) && budget.used() == STEP);
        assert!(one.take(STEP) && budget.used() == 2 * STEP);
        let mut other = BudgetCharge::new(budget.clone(), 100);
        assert!(!budget.is_wanted());
        assert!(other.take(100) && !other.take(1) && other.bytes() == 100);
        assert!(budget.is_wanted(), "it is forgotten that one was refused");
        one.give(STEP + 1);
        assert!(budget.used() == 0 && other.take(1));
        drop((one, other));
        assert_eq!(budget.used(), 0);
    }
}
