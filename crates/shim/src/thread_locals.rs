//! Thread-locals without a TLS segment: one block per thread, found through a POSIX key.
//!
//! **Problem.** The TLS segment of a preloaded library lengthens a table that the C library
//! allocates for each thread. This shifts everything in QEMU's heap. TCG's speed depends on heap
//! addresses: with `malloc`, the CPU's state begins at one of four places in a cache line, and at
//! one of them guests copy memory by a tenth slower.
//!
//! **Idea.** Rust's standard library has thread-locals, and looks up each by `__tls_get_addr`, as
//! position-independent code does. So this library has that function itself, hidden from all
//! others, and is linked without the segment (`link.ld`). The loader then has nothing to
//! allocate, and gives this module the number 0.
//!
//! **Invariants.** Nothing here has a thread-local, and blocks come from the kernel. One of the
//! first 32 keys of a process is stored in the thread itself. For a later key the C library
//! allocates, once in each thread that runs code of the shim. A block lives until its thread
//! ends.
//!
//! **Cost**: some nanoseconds a use instead of one, and a page for each thread that uses a
//! thread-local of the shim.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

// Hidden: only this library uses it. Weak: the test program of this crate is linked normally.
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
    /// The initial content of a fresh block, and its end.
    static overbook_tls_image: u8;
    static overbook_tls_image_end: u8;
    /// Where blocks would end if the first began at the image.
    static overbook_tls_end: u8;
}

/// The compiler's argument: a module, and the place of a thread-local in that module's block.
#[repr(C)]
struct Index {
    /// 0: this module, which has no segment.
    module: usize,
    offset: usize,
}

/// The key of the blocks, plus one; 0: there is none yet.
static KEY: AtomicU32 = AtomicU32::new(0);

/// The address of a thread-local of this thread.
extern "C" fn address(index: &Index) -> *mut u8 {
    let key = key();
    // SAFETY: the key exists.
    let mut block = unsafe { libc::pthread_getspecific(key) }.cast::<u8>();
    if block.is_null() {
        block = new_block();
        // SAFETY: as above. The C library stores the value without allocating, except for late
        // keys.
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
    // SAFETY: a place for the key, and a function that takes the key's value.
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
    // A raw system call: `mmap` is interposed by the shim, and may need a block itself.
    // SAFETY: new memory, at an address that the kernel chooses.
    let block = unsafe {
        libc::syscall(libc::SYS_mmap, std::ptr::null::<u8>(), bytes, protection, flags, -1, 0)
    };
    let Some(block) = usize::try_from(block).ok().filter(|block| *block != usize::MAX) else {
        end()
    };
    let block = std::ptr::with_exposed_provenance_mut::<u8>(block);
    let image = &raw const overbook_tls_image;
    // SAFETY: the image lies in this library, and the block is longer.
    unsafe { image.copy_to_nonoverlapping(block, length(&raw const overbook_tls_image_end)) };
    block
}

/// The thread ends; code that it runs after this gets a new block.
extern "C" fn free_block(block: *mut c_void) {
    // SAFETY: a block of this thread, which no longer uses it.
    unsafe { libc::syscall(libc::SYS_munmap, block, length(&raw const overbook_tls_end)) };
}

/// Ends the process without memory or keys: no code that could report it would run.
fn end() -> ! {
    // SAFETY: no argument.
    unsafe { libc::abort() }
}
