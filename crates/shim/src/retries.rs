//! The wait before a page that could not be moved back is tried again.
//!
//! Another thread may move the page back, and then wakes those that wait here. The kernel wakes
//! none: it does not tell when it is done with a page. So no wait is longer than [`HOLD`].

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use rustix::event::Timespec;
use rustix::thread::futex;

/// How long a step retries a page that the kernel is busy with, and the longest wait for another
/// try.
pub(crate) const HOLD: Duration = Duration::from_millis(1);

/// Number of times that pages came back, modulo 2^32.
static CAME_BACK: AtomicU32 = AtomicU32::new(0);
/// Number of threads in [`wait`].
static WAITING: AtomicU32 = AtomicU32::new(0);

/// Pages are back in their places: threads that wait for that may go on. To be called under the
/// engine's lock.
pub(crate) fn came_back() {
    CAME_BACK.fetch_add(1, Ordering::SeqCst);
    if WAITING.load(Ordering::SeqCst) > 0 {
        let _ = futex::wake(&CAME_BACK, futex::Flags::PRIVATE, u32::MAX >> 1);
    }
}

/// The value for [`wait`]. To be read under the engine's lock, in the turn whose move has failed.
pub(crate) fn seen() -> u32 {
    CAME_BACK.load(Ordering::SeqCst)
}

/// Sleeps until pages came back since `seen`, at most for [`HOLD`]. To be called without the
/// lock.
pub(crate) fn wait(seen: u32) {
    WAITING.fetch_add(1, Ordering::SeqCst);
    // After a wakeup, a timeout or a spurious return, the caller tries again.
    let longest = Timespec { tv_sec: 0, tv_nsec: HOLD.subsec_nanos().into() };
    let _ = futex::wait(&CAME_BACK, futex::Flags::PRIVATE, seen, Some(&longest));
    WAITING.fetch_sub(1, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::now;

    #[test]
    fn a_page_that_came_back_before_the_wait_began_is_not_waited_for() {
        let before = seen();
        came_back();
        let began = now();
        (0..10_000).for_each(|_| wait(before));
        // 10,000 timeouts would take 10 s.
        assert!(now().since(began) < Duration::from_secs(5));
    }

    #[test]
    fn a_wait_ends_though_no_thread_wakes() {
        // Other tests of this process may move pages back meanwhile.
        (0..3).for_each(|_| wait(seen()));
    }
}
