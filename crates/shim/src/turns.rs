//! A lock that is held for a short turn at a time, with an order among the waiting threads.
//!
//! A plain lock promises nothing: a thread that releases it and wants it again usually gets it
//! before the thread that it has woken. A guest could then wait for a request of a thousand
//! turns. And a request, the watchdog, or QEMU's own thread could wait for a guest that traps
//! without a pause. Therefore:
//!
//! * threads that serve faults, and QEMU's threads, go before other work between two turns of it;
//! * after each batch of faults a waiting thread gets in ([`Turns::make_way`]), unless it takes
//!   longer than a turn: then the machine delays it, and no guest waits for that.
//!
//! A waiting thread sleeps, and lends its priority to the holder of the lock
//! (`PTHREAD_PRIO_INHERIT`). So a thread of QEMU's with a real-time priority does not wait for a
//! thread of the shim that gets no CPU. A vCPU that traps waits for the fault thread, and lends
//! it nothing. The longest wait for the lock and the longest hold are recorded.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::thread::futex;

use crate::time::{AsNanos, Nanos, now};

/// The longest that the lock is held at a time for work that no thread waits for.
pub(crate) const TURN: Duration = Duration::from_millis(1);
const TURN_TIME: Timespec = Timespec { tv_sec: 0, tv_nsec: 1_000_000 };

// POSIX; the `libc` crate has it for other systems only.
unsafe extern "C" {
    fn pthread_mutexattr_setprotocol(
        attributes: *mut libc::pthread_mutexattr_t,
        protocol: libc::c_int,
    ) -> libc::c_int;
}

/// The lock.
pub(crate) struct Turns<T> {
    mutex: UnsafeCell<libc::pthread_mutex_t>,
    made: Once,
    value: UnsafeCell<T>,
    /// Number of waiting threads that go first.
    first: AtomicU32,
    /// Number of waiting threads that do not serve faults.
    waiting: AtomicU32,
    /// Number of those that have had the lock, modulo 2^32.
    entered: AtomicU32,
    /// Number of threads that make way, and sleep until `entered` changes.
    making_way: AtomicU32,
    longest: Longest,
}

/// The longest times, in nanoseconds.
pub(crate) struct Longest {
    /// For which a thread of QEMU's has waited.
    pub(crate) wait: AtomicU64,
    /// For which the lock was held.
    pub(crate) hold: AtomicU64,
}

// SAFETY: the value is accessed only through a guard, and there is one at a time.
unsafe impl<T: Send> Sync for Turns<T> {}

/// Guard of the held lock.
pub(crate) struct Turn<'a, T> {
    turns: &'a Turns<T>,
    since: Nanos,
    /// Makes the guard `!Send`: the thread that has locked must unlock.
    _of_this_thread: PhantomData<*const ()>,
}

/// The end of a turn that begins now.
pub(crate) fn turn() -> Nanos {
    now().after(TURN)
}

impl<T> Turns<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self {
            mutex: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
            made: Once::new(),
            value: UnsafeCell::new(value),
            first: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            entered: AtomicU32::new(0),
            making_way: AtomicU32::new(0),
            longest: Longest { wait: AtomicU64::new(0), hold: AtomicU64::new(0) },
        }
    }

    /// Locks for work that can wait.
    pub(crate) fn lock(&self) -> Turn<'_, T> {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        loop {
            let first = self.first.load(Ordering::Acquire);
            if first == 0 {
                break;
            }
            // After a wakeup, a timeout or a spurious return, the value is checked again.
            let _ = futex::wait(&self.first, futex::Flags::PRIVATE, first, Some(&TURN_TIME));
        }
        self.enter()
    }

    /// Locks for QEMU's threads.
    pub(crate) fn lock_first(&self) -> Turn<'_, T> {
        let began = now();
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.first.fetch_add(1, Ordering::Relaxed);
        let turn = self.enter();
        self.one_first_less();
        self.waited(began);
        turn
    }

    /// Locks, giving up after `patience`.
    pub(crate) fn lock_within(&self, patience: Duration) -> Option<Turn<'_, T>> {
        let until = deadline(patience);
        // SAFETY: the mutex is initialised, and the time is valid.
        let result = unsafe { libc::pthread_mutex_timedlock(self.mutex(), &raw const until) };
        (result == 0).then(|| Turn { turns: self, since: now(), _of_this_thread: PhantomData })
    }

    fn enter(&self) -> Turn<'_, T> {
        let turn = self.take();
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        self.entered.fetch_add(1, Ordering::SeqCst);
        if self.making_way.load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(&self.entered, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
        turn
    }

    /// Locks for a thread that serves a fault.
    pub(crate) fn lock_for_fault(&self) -> Turn<'_, T> {
        self.first.fetch_add(1, Ordering::Relaxed);
        let turn = self.take();
        self.one_first_less();
        turn
    }

    fn one_first_less(&self) {
        if self.first.fetch_sub(1, Ordering::Release) == 1
            && self.waiting.load(Ordering::Relaxed) > 0
        {
            let _ = futex::wake(&self.first, futex::Flags::PRIVATE, u32::MAX >> 1);
        }
    }

    /// Lets in one of the threads that have waited while faults were served.
    pub(crate) fn make_way(&self) {
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.making_way.fetch_add(1, Ordering::SeqCst);
        let before = self.entered.load(Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            let flags = futex::Flags::PRIVATE;
            let _ = futex::wait(&self.entered, flags, before, Some(&TURN_TIME));
        }
        self.making_way.fetch_sub(1, Ordering::SeqCst);
    }

    /// Records that a thread of QEMU's has waited since `began`.
    pub(crate) fn waited(&self, began: Nanos) {
        self.longest.wait.fetch_max(now().since(began).as_nanos_u64(), Ordering::Relaxed);
    }

    pub(crate) fn longest(&self) -> &Longest {
        &self.longest
    }

    fn take(&self) -> Turn<'_, T> {
        // SAFETY: the mutex is initialised. The call fails only for a thread that holds it
        // already, which no thread of the shim does.
        let result = unsafe { libc::pthread_mutex_lock(self.mutex()) };
        assert_eq!(result, 0, "the lock is not to be had");
        Turn { turns: self, since: now(), _of_this_thread: PhantomData }
    }

    /// The mutex, which inherits priorities if the C library and the kernel support that.
    fn mutex(&self) -> *mut libc::pthread_mutex_t {
        let mutex = self.mutex.get();
        self.made.call_once(|| {
            // SAFETY: the mutex is not in use yet, and the attributes are local. A failure leaves
            // an ordinary mutex.
            unsafe {
                let mut attributes = std::mem::zeroed();
                if libc::pthread_mutexattr_init(&raw mut attributes) == 0 {
                    let inherit = libc::PTHREAD_PRIO_INHERIT;
                    pthread_mutexattr_setprotocol(&raw mut attributes, inherit);
                    libc::pthread_mutex_init(mutex, &raw const attributes);
                    libc::pthread_mutexattr_destroy(&raw mut attributes);
                }
            }
        });
        mutex
    }
}

impl<T> Deref for Turn<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held.
        unsafe { &*self.turns.value.get() }
    }
}

impl<T> DerefMut for Turn<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: the lock is held, and this is the only guard.
        unsafe { &mut *self.turns.value.get() }
    }
}

impl<T> Drop for Turn<'_, T> {
    /// A panic in the holder does not stop other threads: each step has checked what the value
    /// says.
    fn drop(&mut self) {
        let held = now().since(self.since).as_nanos_u64();
        self.turns.longest.hold.fetch_max(held, Ordering::Relaxed);
        // SAFETY: this thread holds the mutex.
        unsafe { libc::pthread_mutex_unlock(self.turns.mutex.get()) };
    }
}

/// The time `patience` from now, on the clock that `pthread_mutex_timedlock` uses.
fn deadline(patience: Duration) -> libc::timespec {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    let nanos = now.tv_nsec + i64::from(patience.subsec_nanos());
    let seconds = now.tv_sec + i64::try_from(patience.as_secs()).unwrap_or(0);
    libc::timespec { tv_sec: seconds + nanos / 1_000_000_000, tv_nsec: nanos % 1_000_000_000 }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use requires::{Requirement, requires};

    use super::*;

    fn work_for(time: Duration) {
        let until = now().after(time);
        while now() < until {
            std::hint::spin_loop();
        }
    }

    /// Number of times that one thread gets the lock while another waits for it 50 times. The
    /// first holds the lock for 0.3 ms at a time, and takes it again right after releasing it.
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

    /// Binds the calling thread to the first CPU, and gives it real-time priority `priority` if
    /// that is above 0; `false`: not permitted.
    fn run_first(priority: i32) -> bool {
        // SAFETY: local CPU sets and parameters.
        unsafe {
            let mut cpus: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(0, &mut cpus);
            let param = libc::sched_param { sched_priority: priority };
            let policy = if priority > 0 { libc::SCHED_FIFO } else { libc::SCHED_OTHER };
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const cpus) == 0
                && libc::sched_setscheduler(0, policy, &raw const param) == 0
        }
    }

    #[test]
    fn who_waits_lends_its_priority_to_who_holds_the_lock() {
        let turns = Turns::new(());
        let [is_held, is_busy, is_over] = [const { AtomicBool::new(false) }; 3];
        let wait_for = |flag: &AtomicBool| {
            while !flag.load(Ordering::Acquire) {
                thread::sleep(Duration::from_millis(1));
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                assert!(run_first(0));
                let _turn = turns.lock();
                is_held.store(true, Ordering::Release);
                wait_for(&is_busy);
                // With a priority below the one in the middle, this thread never gets here.
            });
            wait_for(&is_held);
            let waiter = scope.spawn(|| {
                let may = run_first(2);
                scope.spawn(|| {
                    let until = now().after(Duration::from_secs(20));
                    let may = run_first(1);
                    is_busy.store(true, Ordering::Release);
                    while may && !is_over.load(Ordering::Acquire) && now() < until {
                        std::hint::spin_loop();
                    }
                });
                wait_for(&is_busy);
                let began = now();
                drop(turns.lock_for_fault());
                is_over.store(true, Ordering::Release);
                may.then(|| now().since(began))
            });
            let waited = waiter.join().expect("the waiter");
            let waited = waited.ok_or("this user may not set them");
            if let Some(waited) = requires(Requirement::Priorities, waited) {
                // The kernel leaves a twentieth to ordinary threads, after most of a second.
                assert!(waited < Duration::from_millis(800), "{waited:?}");
            }
        });
    }

    #[test]
    fn who_cannot_have_the_lock_in_time_is_told() {
        let turns = Turns::new(());
        let turn = turns.lock();
        thread::scope(|scope| {
            let refused = scope.spawn(|| turns.lock_within(Duration::from_millis(20)).is_none());
            assert!(refused.join().expect("the other"));
        });
        drop(turn);
        assert!(turns.lock_within(Duration::from_millis(20)).is_some());
        assert!(turns.longest().hold.load(Ordering::Relaxed) >= 20_000_000);
    }
}
