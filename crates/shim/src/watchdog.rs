//! Gives everything back without being asked when something is wrong.
//!
//! While tracking is on, the watchdog checks every [`TICK`]: is the worker silent, has the fuse
//! blown, does a fault wait too long, does QEMU migrate? While something is merged: does a fault
//! wait too long? While a page cannot be moved back: can it be moved now? Otherwise the watchdog
//! sleeps. It serves faults itself if the fault thread has stopped.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use protocol::layout::GiveBack;
use rustix::event::Timespec;
use sys::userfaultfd::{MAX_FAULTS, PageFault};

use crate::engine::{self, ENGINE};
use crate::process::userfaultfd;
use crate::ram::page_of;
use crate::time::now;
use crate::transitions::late;
use crate::waiters::{self, Reader, wake};
use crate::{alerts, fault_thread, qemu};

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };
const TICK: Duration = Duration::from_millis(50);
/// A worker that is silent for this long is taken for gone.
const SILENCE: Duration = Duration::from_secs(2);
/// A fault that waits longer than this is a sign of a defect.
const SLOW_FAULT: Duration = Duration::from_millis(100);

static STALLS: AtomicU64 = AtomicU64::new(0);

/// The thread's body. It takes the lock only if it gets it in time; otherwise it counts a stall.
pub(crate) fn run() {
    let Ok(uffd) = userfaultfd() else { return };
    let mut unread_since = None;
    loop {
        let on = engine::is_watched() || late().is_some() || alerts::is_one_not_woken();
        if !alerts::wait(on.then_some(TICK)) {
            return;
        }
        if !on {
            unread_since = None;
            continue;
        }
        // Faults stay unread while none is being served: no thread reads.
        let read = waiters::faults_read();
        let unread = waiters::waiting_since().is_none() && uffd.wait(Some(&AT_ONCE));
        unread_since = match unread_since {
            _ if !unread => None,
            Some((before, since)) if before == read => Some((read, since)),
            _ => Some((read, now())),
        };
        let nobody_reads = unread_since.is_some_and(|(_, since)| now().since(since) > SLOW_FAULT);
        let reason = reason_to_give_back();
        let not_woken = alerts::take_not_woken();
        if !nobody_reads && reason.is_none() && late().is_none() && !not_woken {
            continue;
        }
        let Some(mut engine) = ENGINE.lock_within(SLOW_FAULT) else {
            STALLS.fetch_add(1, Ordering::Relaxed);
            alerts::restore_not_woken(not_woken);
            if nobody_reads {
                // The holder of the lock may wait for one of these faults. The woken threads trap
                // again.
                let mut faults = [PageFault::default(); MAX_FAULTS];
                let read = uffd.read_faults(&mut faults).unwrap_or(0);
                faults[..read].iter().for_each(|fault| wake(uffd, page_of(fault.address)));
            }
            continue;
        };
        engine.ops.bring_home_late_pages();
        if nobody_reads || not_woken || reason == Some(GiveBack::SlowFault) {
            // A thread may have read faults without serving them: the waiting threads trap again.
            engine.ops.wake_all();
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

/// Number of times that the watchdog did not get the lock in time.
pub(crate) fn stalls() -> u64 {
    STALLS.load(Ordering::Relaxed)
}

fn reason_to_give_back() -> Option<GiveBack> {
    if alerts::is_fuse_blown() {
        return Some(GiveBack::Fuse);
    }
    if alerts::has_given_up() {
        return Some(GiveBack::KernelRefused);
    }
    let now = now();
    if waiters::waiting_since().is_some_and(|since| now.since(since) > SLOW_FAULT) {
        return Some(GiveBack::SlowFault);
    }
    let Some(last_word) = alerts::last_word() else { return Some(GiveBack::WorkerGone) };
    if now.since(last_word) > SILENCE {
        return Some(GiveBack::WorkerSilent);
    }
    qemu::migration().map(|_| GiveBack::Migrating)
}
