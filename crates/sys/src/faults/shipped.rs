//! The build without the feature: each function only makes the call, and is inlined.
#![allow(clippy::inline_always, reason = "nothing is to be left of them")]

use rustix::io::Errno;

use super::Call;
use crate::userfaultfd::{Progress, Range};

/// Makes a call that succeeds or fails as a whole.
///
/// # Errors
/// The error of the call, or the one in the plan.
#[inline(always)]
pub fn call<T>(_: Call, _: Range, call: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    call()
}

/// Makes a call of the C library, which returns 0, or -1 and sets `errno`.
#[inline(always)]
pub fn outcome(_: Call, _: Range, call: impl FnOnce() -> libc::c_int) -> libc::c_int {
    call()
}

/// Makes a call that works its way through `range` and may stop in the middle of it without
/// reporting the place.
#[inline(always)]
pub(crate) fn through(
    _: Call,
    range: Range,
    call: impl FnOnce(Range) -> Result<(), Errno>,
) -> Result<(), Errno> {
    call(range)
}

/// Makes a call that works its way through `range` and reports its progress. The third argument
/// is the address of the source; without a source it is the range's own start.
#[inline(always)]
pub(crate) fn progress(
    _: Call,
    range: Range,
    _: u64,
    call: impl FnOnce(Range) -> Progress,
) -> Progress {
    call(range)
}

/// Makes a call that maps something over `range`. Done in part, it has unmapped the old mapping
/// without making the new one.
#[inline(always)]
pub(crate) fn over<T>(
    _: Call,
    _: Range,
    call: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    call()
}
