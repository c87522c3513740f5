//! Thread-locals without a TLS segment: a block per thread, found by a POSIX key.
//!
//! **Problem.** What a preloaded library has as TLS segment lengthens a table that the C library
//! allocates for each thread, and with it the distance of everything in QEMU's heap from where it
//! would lie. TCG's speed depends on where that is: with `malloc`, the CPU's state begins at one of
//! four places in a cache line, and at one of them guests copy memory by a tenth slower.
//!
//! **Idea.** Rust's standard library has thread-locals, and asks for each by `__tls_get_addr`, as
//! position-independent code does. So the library has that function itself, hidden from all others,
//! and is linked without the segment (`link.ld`). The loader then has nothing to allocate, and
//! numbers our module 0.
//!
//! **Invariants.** Nothing here has a thread-local, and blocks come from the kernel. A key of the
//! first 32 that a process makes stands in the thread itself; for a later one the C library
//! allocates, once in each thread that runs code of ours. A block lives until its thread ends.
//!
//! **Cost**: some nanoseconds a use instead of one, and a page for each thread that runs code of
//! ours that has need of one.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

// Hidden: it is ours alone. Weak, for the test program of this crate is linked as any other.
std::arch::global_asm!(
    ".globl __tls_get_addr",
    ".hidden __tls_get_addr",
    ".type __tls_get_addr, @function",
    "__tls_get_addr: jmp {address}",
    ".weak overbook_tls_image",
    ".weak overbook_tls_image_end",
    ".weak overbook_tls_end",
    address = sym address,
);

unsafe extern "C" {
    /// What a fresh block begins with, and where that ends.
    static overbook_tls_image: u8;
    static overbook_tls_image_end: u8;
    /// Where blocks end, if the first began at the image.
    static overbook_tls_end: u8;
}

/// What the compiler hands over: where in the block of a module a thread-local lies.
#[repr(C)]
struct Index {
    /// 0: ours, which has no segment.
    module: usize,
    offset: usize,
}

/// The key of the blocks, and one more; 0: there is none yet.
static KEY: AtomicU32 = AtomicU32::new(0);

/// Where a thread-local of this thread lies.
extern "C" fn address(index: &Index) -> *mut u8 {
    let key = key();
    // SAFETY: a key that was made.
    let mut block = unsafe { libc::pthread_getspecific(key) }.cast::<u8>();
    if block.is_null() {
        block = new_block();
        // SAFETY: as above. It has room without allocating for all but the last keys of a process.
        if unsafe { libc::pthread_setspecific(key, block.cast()) } != 0 {
            end();
        }
    }
    block.wrapping_add(index.offset)
}

fn key() -> libc::pthread_key_t {
    let known = KEY.load(Ordering::Acquire);
    if known != 0 {
        return known - 1;
    }
    let mut key = 0;
    // SAFETY: a place for the key, and a function that takes what the key holds.
    if unsafe { libc::pthread_key_create(&raw mut key, Some(free_block)) } != 0 {
        end();
    }
    match KEY.compare_exchange(0, key + 1, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => key,
        Err(known) => {
            // SAFETY: another thread was first; this key holds nothing.
            unsafe { libc::pthread_key_delete(key) };
            known - 1
        }
    }
}

fn length(end: *const u8) -> usize {
    end.addr() - (&raw const overbook_tls_image).addr()
}

fn new_block() -> *mut u8 {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let bytes = length(&raw const overbook_tls_end);
    // The system call itself: `mmap` is ours, and may have need of a block.
    // SAFETY: new memory, where the kernel likes.
    let block = unsafe {
        libc::syscall(libc::SYS_mmap, std::ptr::null::<u8>(), bytes, protection, flags, -1, 0)
    };
    let Some(block) = usize::try_from(block).ok().filter(|block| *block != usize::MAX) else {
        end()
    };
    let block = std::ptr::with_exposed_provenance_mut::<u8>(block);
    let image = &raw const overbook_tls_image;
    // SAFETY: the image lies in our library, and the block is longer.
    unsafe { image.copy_to_nonoverlapping(block, length(&raw const overbook_tls_image_end)) };
    block
}

/// The thread ends; what it runs after this gets a new block.
extern "C" fn free_block(block: *mut c_void) {
    // SAFETY: a block of this thread, that it has no longer.
    unsafe { libc::syscall(libc::SYS_munmap, block, length(&raw const overbook_tls_end)) };
}

/// Neither memory nor keys: nothing that could say so would run.
fn end() -> ! {
    // SAFETY: no argument.
    unsafe { libc::abort() }
}
