//! A lock that is held for a short turn at a time, with an order among those who want it.
//!
//! A mutex makes no promise of its own: who releases it and wants it again usually has it before the one it
//! has woken is there. A guest could so wait for a request of a thousand turns, and a request, or the
//! watchdog, or QEMU's own thread, for a guest that traps without a pause. Therefore:
//!
//! * whoever serves a fault, and QEMU's threads, go before other work between two turns of it;
//! * after each batch of faults whoever has waited gets in ([`Turns::make_way`]), unless it takes longer than
//!   a turn: then it is the machine that keeps it, and no guest waits for that.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::thread::sched_yield;

use crate::time::{Nanos, now};

/// The longest that the lock is held at a time for work that nobody waits for.
pub(crate) const TURN: Duration = Duration::from_millis(1);

/// The lock.
pub(crate) struct Turns<T> {
    mutex: Mutex<T>,
    /// How many wait that go before others.
    first: AtomicU32,
    /// How many wait that do not serve faults.
    waiting: AtomicU32,
    /// How many of those have had it, modulo 2^32.
    entered: AtomicU32,
}

/// When a turn that begins now must end.
pub(crate) fn turn() -> Nanos {
    now().after(TURN)
}

impl<T> Turns<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            mutex: Mutex::new(value),
            first: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            entered: AtomicU32::new(0),
        }
    }

    /// For work that can wait.
    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        while self.first.load(Ordering::Relaxed) > 0 {
            sched_yield();
        }
        self.enter()
    }

    /// For QEMU's threads.
    pub(crate) fn lock_first(&self) -> MutexGuard<'_, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.first.fetch_add(1, Ordering::Relaxed);
        let guard = self.enter();
        self.first.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    fn enter(&self) -> MutexGuard<'_, T> {
        let guard = self.take();
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.entered.fetch_add(1, Ordering::Relaxed);
        guard
    }

    /// For whoever serves a fault.
    pub(crate) fn lock_for_fault(&self) -> MutexGuard<'_, T> {
        self.first.fetch_add(1, Ordering::Relaxed);
        let guard = self.take();
        self.first.fetch_sub(1, Ordering::Relaxed);
        guard
    }

    /// Lets in one of those who have waited while faults were served.
    pub(crate) fn make_way(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        let (before, until) = (self.entered.load(Ordering::Relaxed), turn());
        while self.entered.load(Ordering::Relaxed) == before
            && self.waiting.load(Ordering::Relaxed) > 0
            && now() < until
        {
            sched_yield();
        }
    }

    /// A panic elsewhere does not stop faults from being served.
    fn take(&self) -> MutexGuard<'_, T> {
        self.mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;

    fn work_for(time: Duration) {
        let until = now().after(time);
        while now() < until {
            std::hint::spin_loop();
        }
    }

    /// How often one thread, which holds the lock for 0.3 ms at a time and has hardly left it when it comes
    /// back, has it while another waits for it 50 times.
    fn turns_during_50_waits(hold: fn(&Turns<()>), wait: fn(&Turns<()>)) -> u32 {
        let turns = Turns::new(());
        let (held, stop) = (AtomicU32::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    hold(&turns);
                    held.fetch_add(1, Ordering::Relaxed);
                }
            });
            let waiter = scope.spawn(|| {
                let mut during = 0;
                for _ in 0..50 {
                    thread::sleep(Duration::from_millis(1));
                    let before = held.load(Ordering::Relaxed);
                    wait(&turns);
                    during += held.load(Ordering::Relaxed) - before;
                }
                during
            });
            let during = waiter.join().expect("the waiter");
            stop.store(true, Ordering::Relaxed);
            during
        })
    }

    fn serve_faults(turns: &Turns<()>) {
        let guard = turns.lock_for_fault();
        work_for(Duration::from_micros(300));
        drop(guard);
        turns.make_way();
    }

    fn work_on_a_request(turns: &Turns<()>) {
        let _guard = turns.lock();
        work_for(Duration::from_micros(300));
    }

    #[test]
    fn a_guest_that_traps_without_a_pause_keeps_nobody_out() {
        let requests = turns_during_50_waits(serve_faults, |turns| drop(turns.lock()));
        let qemu = turns_during_50_waits(serve_faults, |turns| drop(turns.lock_first()));
        assert!(requests < 1000 && qemu < 1000, "{requests} {qemu}");
    }

    #[test]
    fn a_fault_waits_for_one_turn_and_not_for_the_whole_request() {
        let waited = turns_during_50_waits(work_on_a_request, |turns| drop(turns.lock_for_fault()));
        assert!(waited < 1000, "{waited}");
    }
}
