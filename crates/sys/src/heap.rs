//! What the C library's allocator keeps of what was freed.
//!
//! glibc raises, with each large allocation that is freed, the size from which on memory is mapped
//! for itself, up to 32 MiB: then what grows by copying itself leaves holes that stay the
//! process's. Once that size has been set it stays.

/// Allocations of this size and more go back to the kernel when they are freed.
const LARGE: libc::c_int = 128 << 10;

/// From now on large allocations go back to the kernel when they are freed, also after others were.
pub fn give_back_large() {
    // SAFETY: it sets a number of the allocator's.
    let set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
    debug_assert_eq!(set, 1, "it is within its limits");
}

/// Gives back now what was freed, large or small. Takes some tens of microseconds for each MiB.
pub fn give_back() {
    // SAFETY: what is in use stays as it is.
    unsafe { libc::malloc_trim(0) };
}
