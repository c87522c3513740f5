//! Returns memory that the C library's allocator would keep after it was freed.
//!
//! Each time a large allocation is freed, glibc raises the size from which allocations are
//! mapped, up to 32 MiB. Then buffers that grow by copying leave holes in the heap, which stay
//! with the process. An explicit threshold stays fixed.

/// Allocations of this size and more go back to the kernel when they are freed.
const LARGE: libc::c_int = 128 << 10;

/// From now on large allocations go back to the kernel when they are freed, also after earlier
/// frees.
pub fn give_back_large() {
    // SAFETY: it sets a number in the allocator.
    let set = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
    debug_assert_eq!(set, 1, "it is within its limits");
}

/// Gives freed memory back now, large or small. This takes some tens of microseconds for each
/// MiB.
pub fn give_back() {
    // SAFETY: allocations in use stay as they are.
    unsafe { libc::malloc_trim(0) };
}
