//! The descriptors that QEMU must not close.
//!
//! When the last descriptor of the shim's userfaultfd closes, the kernel ends the registration
//! and the guest reads zeros where its pages were staged. A program may close descriptors that it
//! does not know (before an exec, to tidy up). Such a call gets the result that it would get if
//! the shim's descriptors were not open. The shim's other descriptors are guarded too: if another
//! file took such a number, the shim's threads would read from it.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd};
use std::sync::atomic::{AtomicI32, Ordering};

/// userfaultfd twice, page tables, mappings, overcommit policy, eventfd, shared memory and pool
/// twice (while they change), listener, connection, and a second connection that is refused; and
/// some to spare.
const MOST: usize = 16;
/// Far above the numbers that programs close one by one.
const LEAST_SECOND: i32 = 500;

static OURS: [AtomicI32; MOST] = [const { AtomicI32::new(-1) }; MOST];

/// Guards a descriptor until it is dropped, without owning the descriptor.
#[derive(Debug)]
pub(crate) struct Guarded(usize);

impl Guarded {
    /// `None` when there are too many; the caller does without that descriptor.
    pub(crate) fn new(fd: i32) -> Option<Self> {
        let free = |slot: &AtomicI32| {
            slot.compare_exchange(-1, fd, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        OURS.iter().position(free).map(Self)
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        OURS[self.0].store(-1, Ordering::Release);
    }
}

/// Guards the one descriptor that is never closed. A second descriptor keeps the file open if the
/// first is closed by a raw system call.
pub(crate) fn guard_for_ever(fd: &impl AsFd) {
    let second = rustix::io::fcntl_dupfd_cloexec(fd, LEAST_SECOND).ok();
    for fd in [Some(fd.as_fd().as_raw_fd()), second.map(IntoRawFd::into_raw_fd)] {
        std::mem::forget(fd.and_then(Guarded::new));
    }
}

/// A file that was opened to stay open, guarded; `None` when that failed.
pub(crate) fn kept<T: AsFd>(opened: std::io::Result<T>) -> Option<T> {
    let opened = opened.ok()?;
    std::mem::forget(Guarded::new(opened.as_fd().as_raw_fd())?);
    Some(opened)
}

/// Whether a descriptor belongs to the shim.
pub(crate) fn is_ours(fd: i32) -> bool {
    fd >= 0 && OURS.iter().any(|slot| slot.load(Ordering::Acquire) == fd)
}

/// The pieces of `first..=last` without the shim's descriptors, at most [`MOST`] + 1. Unused
/// entries are `None`.
pub(crate) fn without_ours(first: u32, last: u32) -> [Option<(u32, u32)>; MOST + 1] {
    let mut ours = OURS.each_ref().map(|slot| slot.load(Ordering::Acquire));
    ours.sort_unstable();
    let mut pieces = [None; MOST + 1];
    let mut next = Some(first);
    let inside = ours.into_iter().filter_map(|fd| u32::try_from(fd).ok());
    let mut count = 0;
    for fd in inside.filter(|fd| (first..=last).contains(fd)) {
        if let Some(start) = next.filter(|&start| start < fd) {
            pieces[count] = Some((start, fd - 1));
            count += 1;
        }
        next = fd.checked_add(1);
    }
    pieces[count] = next.filter(|&start| start <= last).map(|start| (start, last));
    pieces
}

/// In a forked child: closes the shim's descriptors, so that none outlives QEMU there.
pub(crate) fn close_all_in_child() {
    for slot in &OURS {
        let fd = slot.swap(-1, Ordering::AcqRel);
        if fd >= 0 {
            // SAFETY: the child has no thread of the shim that uses it.
            unsafe { rustix::io::close(fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_cut_around_ours() {
        // One test: the table belongs to the process.
        let all = |first, last| without_ours(first, last).into_iter().flatten().collect::<Vec<_>>();
        assert_eq!(all(3, u32::MAX), [(3, u32::MAX)]);
        let (ten, eleven) = (Guarded::new(10), Guarded::new(11));
        let twenty = Guarded::new(20);
        assert!(is_ours(10) && !is_ours(12) && !is_ours(-1));
        assert_eq!(all(3, u32::MAX), [(3, 9), (12, 19), (21, u32::MAX)]);
        assert_eq!(all(10, 11), []);
        assert_eq!(all(11, 20), [(12, 19)]);
        drop((ten, eleven));
        assert_eq!(all(3, 30), [(3, 19), (21, 30)]);
        drop(twenty);
    }
}
