//! Gives everything back without being asked when something is wrong.
//!
//! While tracking is on, the watchdog checks every [`TICK`]: is the worker silent, has the fuse
//! blown, does a fault wait too long, does QEMU migrate? While something is merged: does a fault
//! wait too long? While a page cannot be moved back: can it be moved now? Otherwise the watchdog
//! sleeps. It serves faults itself if the fault thread has stopped.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use protocol::layout::GiveBack;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use sys::faults::{self, Call, NOWHERE};
use sys::memory_map::Range;
use sys::userfaultfd::{MAX_FAULTS, PageFault, Userfaultfd};

use crate::descriptors::Guarded;
use crate::engine::{self, ENGINE};
use crate::fault_thread::{self, Reader};
use crate::qemu;
use crate::time::now;
use crate::tracker::page_of;
use crate::transitions::late;

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
const TICK: Duration = Duration::from_millis(50);
/// A worker that is silent for this long is taken for gone.
const SILENCE: Duration = Duration::from_secs(2);
/// A fault that waits longer than this is a sign of a defect.
const SLOW_FAULT: Duration = Duration::from_millis(100);

static FUSE_BLOWN: AtomicBool = AtomicBool::new(false);
static GAVE_UP: AtomicBool = AtomicBool::new(false);
/// When the worker last sent something; 0: there is no worker.
static LAST_WORD: AtomicU64 = AtomicU64::new(0);
/// A thread may still wait that should have been woken.
static NOT_WOKEN: AtomicBool = AtomicBool::new(false);
static STALLS: AtomicU64 = AtomicU64::new(0);
static BELL: OnceLock<OwnedFd> = OnceLock::new();

/// The worker sent something.
pub(crate) fn worker_spoke() {
    LAST_WORD.store(now().0, Ordering::Release);
}

/// The worker has left.
pub(crate) fn worker_left() {
    LAST_WORD.store(0, Ordering::Release);
}

/// There were more traps than allowed.
pub(crate) fn blow_fuse() {
    if !FUSE_BLOWN.swap(true, Ordering::AcqRel) {
        ring();
    }
}

/// Serving a fault failed in a way that should be impossible.
pub(crate) fn give_up() {
    GAVE_UP.store(true, Ordering::Release);
    ring();
}

/// Tracking begins: earlier events do not count.
pub(crate) fn tracking_begins() {
    FUSE_BLOWN.store(false, Ordering::Release);
    GAVE_UP.store(false, Ordering::Release);
}

/// Makes the eventfd that wakes the watchdog; called before the thread starts.
pub(crate) fn prepare() -> std::io::Result<()> {
    if BELL.get().is_none() {
        let make = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let bell = faults::call(Call::Eventfd, NOWHERE, make)?;
        std::mem::forget(Guarded::new(bell.as_raw_fd()));
        BELL.get_or_init(|| bell);
    }
    Ok(())
}

/// Wakes the watchdog: there is something to watch, or to do.
pub(crate) fn ring() {
    if let Some(bell) = BELL.get() {
        // The write fails only when the eventfd is already signalled.
        let _ = rustix::io::write(bell, &1_u64.to_ne_bytes());
    }
}

/// The thread's body. It takes the lock only if it gets it in time; otherwise it counts a stall.
pub(crate) fn run() {
    let (Some(bell), Ok(uffd)) = (BELL.get(), engine::userfaultfd()) else { return };
    let mut unread_since = None;
    loop {
        let on = engine::is_watched() || late().is_some() || NOT_WOKEN.load(Ordering::Acquire);
        wait(bell, on.then_some(TICK));
        if !on {
            unread_since = None;
            continue;
        }
        // Faults stay unread while none is being served: no thread reads.
        let read = fault_thread::faults_read();
        let unread = fault_thread::waiting_since().is_none() && uffd.wait(Some(&AT_ONCE));
        unread_since = match unread_since {
            _ if !unread => None,
            Some((before, since)) if before == read => Some((read, since)),
            _ => Some((read, now())),
        };
        let nobody_reads = unread_since.is_some_and(|(_, since)| now().since(since) > SLOW_FAULT);
        let reason = reason_to_give_back();
        let not_woken = NOT_WOKEN.swap(false, Ordering::AcqRel);
        if !nobody_reads && reason.is_none() && late().is_none() && !not_woken {
            continue;
        }
        let Some(mut engine) = ENGINE.lock_within(SLOW_FAULT) else {
            STALLS.fetch_add(1, Ordering::Relaxed);
            NOT_WOKEN.fetch_or(not_woken, Ordering::AcqRel);
            if nobody_reads {
                // The holder of the lock may wait for one of these faults. The woken threads trap
                // again.
                let mut faults = [PageFault::default(); MAX_FAULTS];
                let read = uffd.read_faults(&mut faults).unwrap_or(0);
                faults[..read].iter().for_each(|fault| wake(uffd, page_of(fault.address)));
            }
            continue;
        };
        engine.bring_home_late_pages();
        if nobody_reads || not_woken || reason == Some(GiveBack::SlowFault) {
            // A thread may have read faults without serving them: the waiting threads trap again.
            engine.wake_all();
        }
        drop(engine);
        if nobody_reads {
            fault_thread::serve_pending(uffd, Reader::Watchdog);
        }
        if let Some(reason) = reason.or(nobody_reads.then_some(GiveBack::SlowFault)) {
            engine::give_back(Some(reason));
        }
    }
}

/// Wakes threads that wait for a page of `range`; each continues, or traps again. The kernel
/// refuses this only for wrong addresses. If it refuses, the watchdog wakes all waiting threads.
pub(crate) fn wake(uffd: &Userfaultfd, range: Range) {
    if uffd.wake(range).is_err() {
        NOT_WOKEN.store(true, Ordering::Release);
        ring();
    }
}

/// Number of times that the watchdog did not get the lock in time.
pub(crate) fn stalls() -> u64 {
    STALLS.load(Ordering::Relaxed)
}

fn reason_to_give_back() -> Option<GiveBack> {
    if FUSE_BLOWN.load(Ordering::Acquire) {
        return Some(GiveBack::Fuse);
    }
    if GAVE_UP.load(Ordering::Acquire) {
        return Some(GiveBack::KernelRefused);
    }
    let now = now();
    if fault_thread::waiting_since().is_some_and(|since| now.since(since) > SLOW_FAULT) {
        return Some(GiveBack::SlowFault);
    }
    let last_word = LAST_WORD.load(Ordering::Acquire);
    if last_word == 0 {
        return Some(GiveBack::WorkerGone);
    }
    if now.since(crate::time::Nanos(last_word)) > SILENCE {
        return Some(GiveBack::WorkerSilent);
    }
    qemu::migration().map(|_| GiveBack::Migrating)
}

fn wait(bell: &OwnedFd, timeout: Option<Duration>) {
    let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
    let mut fds = [PollFd::new(bell, PollFlags::IN)];
    // Interrupted or not: the caller checks.
    let _ = poll(&mut fds, timeout.as_ref());
    let _ = rustix::io::read(bell, &mut [0; 8]);
}
