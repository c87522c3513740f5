//! As shipped: each function makes the call, and vanishes.
#![allow(clippy::inline_always, reason = "nothing is to be left of them")]

use rustix::io::Errno;

use super::Call;
use crate::userfaultfd::{Progress, Range};

/// Makes a call that does all or nothing.
///
/// # Errors
/// The call's, or what the plan says.
#[inline(always)]
pub fn call<T>(_: Call, _: Range, call: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    call()
}

/// Makes a call of the C library's, which answers 0, or -1 and sets `errno`.
#[inline(always)]
pub fn outcome(_: Call, _: Range, call: impl FnOnce() -> libc::c_int) -> libc::c_int {
    call()
}

/// Makes a call that works its way through `range`, and may stop in the middle of it without saying
/// where.
#[inline(always)]
pub(crate) fn through(
    _: Call,
    range: Range,
    call: impl FnOnce(Range) -> Result<(), Errno>,
) -> Result<(), Errno> {
    call(range)
}

/// Makes a call that works its way through `range`, and says how far it got. What it puts there
/// comes from the address that follows, or from nowhere: then that is the range's own.
#[inline(always)]
pub(crate) fn progress(
    _: Call,
    range: Range,
    _: u64,
    call: impl FnOnce(Range) -> Progress,
) -> Progress {
    call(range)
}

/// Makes a call that maps something over `range`. Done by half, what was there is unmapped, and
/// nothing is in its place.
#[inline(always)]
pub(crate) fn over<T>(
    _: Call,
    _: Range,
    call: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    call()
}
