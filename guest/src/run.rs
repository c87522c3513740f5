//! State that worker and reporter share: counters, gauges, the stop signal; and the worker's
//! handle on it.
//!
//! The worker writes, the reporter reads. Everything is a relaxed atomic, so neither ever waits
//! for the other. The only lock guards the condition variable on which the worker sleeps, so that
//! a stop ends every sleep at once.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::gap::Gap;
use crate::histogram::Histogram;
use crate::pace::Pacer;
use crate::workloads::Timing;

/// A number that a workload may or may not report.
#[derive(Debug)]
pub(crate) struct Gauge(AtomicU64);

impl Gauge {
    const ABSENT: u64 = u64::MAX;

    pub(crate) fn set(&self, value: usize) {
        self.0.store(value as u64, Ordering::Relaxed);
    }

    /// For a number that is not absent.
    pub(crate) fn add(&self, more: usize) {
        self.0.fetch_add(more as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|&value| value != Self::ABSENT)
    }
}

/// The state that the threads share.
#[derive(Debug)]
pub(crate) struct RunState {
    start: Instant,
    ops: AtomicU64,
    pub(crate) latency: Histogram,
    pub(crate) gap: Gap,
    pub(crate) mb: Gauge,
    pub(crate) phase: Gauge,
    pub(crate) step_us: Gauge,
    pub(crate) dropped: Gauge,
    pub(crate) bad_bytes: Gauge,
    pub(crate) checks: Gauge,
    pub(crate) census: Gauge,
    pub(crate) checksum: OnceLock<u64>,
    pub(crate) timing: OnceLock<Timing>,
    waiting: AtomicBool,
    stopping: AtomicBool,
    sleepers: Mutex<()>,
    wake: Condvar,
}

impl RunState {
    pub(crate) fn new() -> Self {
        let absent = || Gauge(AtomicU64::new(Gauge::ABSENT));
        Self {
            start: Instant::now(),
            ops: AtomicU64::new(0),
            latency: Histogram::new(),
            gap: Gap::new(),
            mb: absent(),
            phase: absent(),
            step_us: absent(),
            dropped: absent(),
            bad_bytes: absent(),
            checks: absent(),
            census: absent(),
            checksum: OnceLock::new(),
            timing: OnceLock::new(),
            waiting: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            sleepers: Mutex::new(()),
            wake: Condvar::new(),
        }
    }

    /// Time since the start, on the monotonic clock.
    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    pub(crate) fn ops(&self) -> u64 {
        self.ops.load(Ordering::Relaxed)
    }

    /// Asks the worker to end; wakes it if it sleeps.
    pub(crate) fn stop(&self) {
        // The lock ensures that no sleeper misses the stop between its check and its wait.
        let _guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        self.stopping.store(true, Ordering::Relaxed);
        self.wake.notify_all();
    }

    pub(crate) fn stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Whether the work is to begin later, and has not begun.
    pub(crate) fn waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Waits for the moment at which the work is to begin; false if the program is to stop.
    pub(crate) fn wait_until(&self, beginning: Duration) -> bool {
        self.waiting.store(!beginning.is_zero(), Ordering::Relaxed);
        let goes_on = self.sleep_until(beginning);
        self.waiting.store(false, Ordering::Relaxed);
        goes_on
    }

    /// Sleeps until `when` (time since the start); false if the program is to stop.
    pub(crate) fn sleep_until(&self, when: Duration) -> bool {
        let mut guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.stopping() {
            let left = when.saturating_sub(self.now());
            if left.is_zero() {
                return true;
            }
            let woken = self.wake.wait_timeout(guard, left);
            guard = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        false
    }
}

/// A workload's seed, its pace, and its counters.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) shared: Arc<RunState>,
    pub(crate) seed: u64,
    pub(crate) rate: Option<f64>,
    pacer: Pacer,
}

impl Worker {
    pub(crate) fn new(shared: Arc<RunState>, seed: u64, rate: Option<f64>) -> Self {
        Self { shared, seed, rate, pacer: Pacer::new(rate) }
    }

    /// Waits until `n` more operations are due; false if the program is to stop.
    pub(crate) fn proceed(&mut self, n: usize) -> bool {
        while !self.pacer.take(n) {
            let start = self.pacer.next_slice(n, self.shared.now());
            self.shared.gap.pause();
            if !self.shared.sleep_until(start) {
                return false;
            }
        }
        !self.shared.stopping()
    }

    /// Records that the work goes on, for the report of the longest gap; to be called every few
    /// tens of microseconds of work.
    pub(crate) fn beat(&self) {
        self.shared.gap.beat(self.shared.now());
    }

    /// Counts `n` finished operations. The worker is the only writer, so no locked instruction is
    /// needed.
    pub(crate) fn done(&self, n: usize) {
        self.shared.ops.store(self.shared.ops() + n as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
impl RunState {
    /// As if it had started some time ago.
    pub(crate) fn started(ago: Duration) -> Self {
        let mut shared = Self::new();
        shared.start -= ago;
        shared
    }
}

#[cfg(test)]
impl Worker {
    /// A worker for tests: unpaced, seed 1.
    pub(crate) fn for_test() -> Self {
        Self::new(Arc::new(RunState::new()), 1, None)
    }

    /// Stops the worker after `ops` operations, or after a minute: the machine may have other
    /// work.
    pub(crate) fn stop_after(&self, ops: u64) -> std::thread::JoinHandle<()> {
        const LIMIT: Duration = Duration::from_secs(60);
        let shared = Arc::clone(&self.shared);
        std::thread::spawn(move || {
            while shared.ops() < ops && shared.now() < LIMIT {
                std::thread::sleep(Duration::from_millis(1));
            }
            shared.stop();
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_ends_a_long_sleep_at_once() {
        let shared = Arc::new(RunState::new());
        let sleeper = Arc::clone(&shared);
        let thread = std::thread::spawn(move || sleeper.sleep_until(Duration::from_secs(60)));
        std::thread::sleep(Duration::from_millis(20));
        shared.stop();
        assert!(!thread.join().unwrap());
        assert!(shared.now() < Duration::from_secs(10));
    }

    #[test]
    fn work_that_is_to_begin_later_waits_and_says_so() {
        let shared = Arc::new(RunState::new());
        let waiting = Arc::clone(&shared);
        let thread = std::thread::spawn(move || waiting.wait_until(Duration::from_secs(60)));
        while !shared.waiting() {
            std::thread::yield_now();
        }
        shared.stop();
        assert!(!thread.join().unwrap() && !shared.waiting());
        assert!(RunState::new().wait_until(Duration::ZERO));
    }

    #[test]
    fn a_paced_worker_does_not_exceed_its_rate_on_the_real_clock() {
        let mut worker = Worker::new(Arc::new(RunState::new()), 1, Some(1000.0));
        while worker.shared.now() < Duration::from_millis(500) && worker.proceed(1) {
            worker.done(1);
        }
        let (ops, ms) = (u128::from(worker.shared.ops()), worker.shared.now().as_millis());
        assert!(ops > 0 && ops <= ms + 40, "{ops} in {ms} ms");
    }
}
