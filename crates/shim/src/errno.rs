//! The C library's `errno`, which QEMU must find as after the call that it made.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Fails like a function of the C library.
pub(crate) fn fail(errno: c_int) -> c_int {
    // SAFETY: the C library's `errno` of this thread.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Runs the shim's part of a call; `None` if it panicked. The panic does not reach QEMU.
pub(crate) fn quietly<T>(part: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(part)).ok()
}

/// Runs the shim's part after the call, and keeps the call's `errno`.
pub(crate) fn keep_errno(part: impl FnOnce()) {
    // SAFETY: the C library's `errno` of this thread.
    let errno = unsafe { *libc::__errno_location() };
    quietly(part);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}
