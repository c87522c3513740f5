//! The functions that the shim's own interpose.
//!
//! They are those of the C library, or of another preloaded library. Each is looked up when first
//! needed, perhaps before any constructor has run. If the linker finds none, the system call
//! takes its place.
//!
//! Some of them are cancellation points (`pthread_cancel`), and cancelling unwinds through the
//! shim.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulong, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

use libc::{mode_t, msghdr, off_t, size_t, ssize_t};

/// Declares a function of the C library, and the system call to use without it.
macro_rules! next {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty, $symbol:literal, $call:expr;)*) => { $(
        /// The next definition.
        ///
        /// # Safety
        /// That of the C function.
        pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
            static ADDRESS: AtomicUsize = AtomicUsize::new(0);
            type Function = unsafe extern "C-unwind" fn($($type),*) -> $result;
            match look_up(&ADDRESS, $symbol) {
                // SAFETY: the symbol has this type; the arguments are the caller's.
                Some(address) => unsafe {
                    std::mem::transmute::<*mut c_void, Function>(address)($($arg),*)
                },
                // SAFETY: the same arguments in the same order.
                #[allow(clippy::cast_possible_truncation, clippy::useless_conversion)]
                None => unsafe { as_result(libc::syscall($call, $($arg),*)) },
            }
        }
    )* };
}

next! {
    mmap(address: *mut c_void, length: size_t, protection: c_int, flags: c_int, fd: c_int, offset: off_t)
        -> *mut c_void, c"mmap", libc::SYS_mmap;
    munmap(address: *mut c_void, length: size_t) -> c_int, c"munmap", libc::SYS_munmap;
    madvise(address: *mut c_void, length: size_t, advice: c_int) -> c_int, c"madvise", libc::SYS_madvise;
    ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int, c"ioctl", libc::SYS_ioctl;
    close(fd: c_int) -> c_int, c"close", libc::SYS_close;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, c"close_range", libc::SYS_close_range;
    dup2(old: c_int, new: c_int) -> c_int, c"dup2", libc::SYS_dup2;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int, c"dup3", libc::SYS_dup3;
    mlockall(flags: c_int) -> c_int, c"mlockall", libc::SYS_mlockall;
    open(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, c"open", libc::SYS_open;
    open64(path: *const c_char, flags: c_int, mode: mode_t) -> c_int, c"open64", libc::SYS_open;
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, c"openat", libc::SYS_openat;
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) -> c_int, c"openat64", libc::SYS_openat;
    __open_2(path: *const c_char, flags: c_int) -> c_int, c"__open_2", libc::SYS_open;
    __open64_2(path: *const c_char, flags: c_int) -> c_int, c"__open64_2", libc::SYS_open;
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int, c"__openat_2", libc::SYS_openat;
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) -> c_int, c"__openat64_2", libc::SYS_openat;
    fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int, c"fcntl64", libc::SYS_fcntl;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t, c"recvmsg", libc::SYS_recvmsg;
}

/// Declares a function of liburing. A module may have loaded liburing for itself only.
macro_rules! of_liburing {
    ($($name:ident($($arg:ident: $type:ty),*), $symbol:literal;)*) => { $(
        /// The next definition.
        ///
        /// # Safety
        /// That of the function.
        pub(crate) unsafe fn $name($($arg: $type),*) -> c_int {
            static ADDRESS: AtomicUsize = AtomicUsize::new(0);
            type Function = unsafe extern "C" fn($($type),*) -> c_int;
            match look_up(&ADDRESS, $symbol).or_else(|| look_up_in_liburing(&ADDRESS, $symbol)) {
                // SAFETY: the symbol has this type; the arguments are the caller's.
                Some(address) => unsafe {
                    std::mem::transmute::<*mut c_void, Function>(address)($($arg),*)
                },
                None => -libc::ENOSYS,
            }
        }
    )* };
}

of_liburing! {
    io_uring_register_files(ring: *mut c_void, files: *const c_int, count: c_uint), c"io_uring_register_files";
    io_uring_register_files_tags(ring: *mut c_void, files: *const c_int, tags: *const u64, count: c_uint),
        c"io_uring_register_files_tags";
    io_uring_register_files_sparse(ring: *mut c_void, count: c_uint), c"io_uring_register_files_sparse";
}

fn look_up(cache: &AtomicUsize, symbol: &CStr) -> Option<*mut c_void> {
    let mut address = cache.load(Ordering::Relaxed);
    if address == 0 {
        // SAFETY: the name ends with a zero byte.
        address = unsafe { libc::dlsym(libc::RTLD_NEXT, symbol.as_ptr()) }.expose_provenance();
        cache.store(address, Ordering::Relaxed);
    }
    (address != 0).then(|| std::ptr::with_exposed_provenance_mut(address))
}

fn look_up_in_liburing(cache: &AtomicUsize, symbol: &CStr) -> Option<*mut c_void> {
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: both names end with a zero byte. The library stays loaded: the caller runs in it.
    let address = unsafe {
        let library = libc::dlopen(c"liburing.so.2".as_ptr(), flags);
        if library.is_null() {
            return None;
        }
        libc::dlsym(library, symbol.as_ptr())
    };
    cache.store(address.expose_provenance(), Ordering::Relaxed);
    (!address.is_null()).then_some(address)
}

/// Converts the result of a system call to that of the C function.
trait AsResult {
    fn of(result: i64) -> Self;
}

impl AsResult for c_int {
    fn of(result: i64) -> Self {
        Self::try_from(result).unwrap_or(-1)
    }
}

impl AsResult for ssize_t {
    fn of(result: i64) -> Self {
        Self::try_from(result).unwrap_or(-1)
    }
}

impl AsResult for *mut c_void {
    fn of(result: i64) -> Self {
        usize::try_from(result).map_or(libc::MAP_FAILED, std::ptr::with_exposed_provenance_mut)
    }
}

fn as_result<T: AsResult>(result: i64) -> T {
    T::of(result)
}
