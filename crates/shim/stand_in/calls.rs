//! Calls of QEMU other than memory accesses: it locks its memory, watches it, passes it to the
//! kernel, and forks.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use crate::block::{PAGE, RawBlock, outcome};

const UFFDIO_API: u64 = 0xC018_AA3F;
const UFFDIO_REGISTER: u64 = 0xC020_AA00;
const UFFDIO_UNREGISTER: u64 = 0x8010_AA01;
const UFFDIO_WRITEPROTECT: u64 = 0xC018_AA06;
const MISSING: u64 = 1;
const WRITES: u64 = 2;

/// The stand-in's own userfaultfd.
static OWN: AtomicI32 = AtomicI32::new(-1);

pub(crate) fn lock_everything() -> Result<String, String> {
    // SAFETY: locks only the existing mappings, which costs memory.
    outcome(unsafe { libc::mlockall(libc::MCL_CURRENT) })
}

/// Closes everything, like a program that tidies up before it starts another.
pub(crate) fn close_everything() -> String {
    // SAFETY: this program needs only the first three.
    unsafe {
        libc::close_range(3, libc::c_uint::MAX, 0);
        let closed = (3..1024).filter(|&fd| libc::close(fd) == 0).count();
        let replaced = (3..1024).filter(|&fd| libc::dup2(1, fd) == fd).count();
        for fd in 3..1024 {
            libc::close(fd);
        }
        format!("{closed} closed one by one, {replaced} replaced")
    }
}

/// The child allocates, advises and ends; it must neither hang nor disturb its parent.
pub(crate) fn fork_and_look(block: Option<&RawBlock>) -> Result<String, String> {
    // SAFETY: the child makes plain system calls only and ends at once.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            libc::alarm(5);
            let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let memory = libc::mmap(std::ptr::null_mut(), PAGE, libc::PROT_NONE, anonymous, -1, 0);
            let advised = block.map_or(0, |block| {
                // A child has no guest RAM: the kernel must report that, not the shim.
                libc::madvise(block.page(0).cast(), PAGE, libc::MADV_DONTNEED)
            });
            libc::close_range(3, libc::c_uint::MAX, 0);
            let inert = libc::munmap(memory, PAGE) == 0 && (block.is_none() || advised == -1);
            libc::_exit(if inert { 0 } else { 1 });
        }
        let mut status = 0;
        libc::waitpid(child, &mut status, 0);
        if status == 0 { Ok(String::new()) } else { Err(format!("child's status {status:#x}")) }
    }
}

/// Registers the block as QEMU does for postcopy.
pub(crate) fn register(block: &RawBlock) -> Result<String, String> {
    register_for(block, MISSING)
}

/// Protects the block as QEMU does for background snapshots.
pub(crate) fn watch_writes(block: &RawBlock) -> Result<String, String> {
    register_for(block, WRITES)?;
    protect(block.page(0).addr(), block.pages() * PAGE, true)
}

/// Writes to a page as the guest does; `Err` if the userfaultfd did not report it.
pub(crate) fn write_seen(block: &RawBlock, page: usize) -> Result<String, String> {
    let address = block.page(page).addr();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let byte: *mut u8 = std::ptr::with_exposed_provenance_mut(address);
            // SAFETY: a byte of the block, which no other thread uses meanwhile.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        });
        let fd = OWN.load(Ordering::Relaxed);
        let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut message = [0_u64; 4];
        // SAFETY: one descriptor; the buffer has the length of a message.
        let read = unsafe {
            libc::poll(&raw mut poll, 1, 1_000);
            if poll.revents == 0 { 0 } else { libc::read(fd, message.as_mut_ptr().cast(), 32) }
        };
        protect(address, PAGE, false)?;
        if read == 32 { Ok(String::new()) } else { Err("nobody saw it".to_owned()) }
    })
}

fn protect(start: usize, len: usize, is_on: bool) -> Result<String, String> {
    let mut protect = [start as u64, len as u64, u64::from(is_on)];
    let fd = OWN.load(Ordering::Relaxed);
    // SAFETY: the structure is the one of the request.
    outcome(unsafe { libc::ioctl(fd, UFFDIO_WRITEPROTECT, protect.as_mut_ptr()) })
}

fn register_for(block: &RawBlock, mode: u64) -> Result<String, String> {
    // SAFETY: the structures are those of the requests; the block has no missing page afterwards.
    unsafe {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
        let fd = i32::try_from(libc::syscall(libc::SYS_userfaultfd, flags)).unwrap_or(-1);
        let mut api = [0xAA_u64, 0, 0];
        outcome(libc::ioctl(fd, UFFDIO_API, api.as_mut_ptr()))?;
        let mut register = [block.page(0).addr() as u64, (block.pages() * PAGE) as u64, mode, 0];
        OWN.store(fd, Ordering::Relaxed);
        outcome(libc::ioctl(fd, UFFDIO_REGISTER, register.as_mut_ptr()))
    }
}

/// Registers the block while `writers` vCPUs write to its first pages, which are all there.
pub(crate) fn register_beside_writes(
    block: &RawBlock,
    writers: usize,
    pages: usize,
) -> Result<String, String> {
    beside_writes(block, writers, pages, || {
        // While the writes are under way.
        std::thread::sleep(Duration::from_micros(300));
        register(block)
    })
}

/// Has `writers` vCPUs write to the first pages of the block what is there already.
pub(crate) fn write(
    block: &RawBlock,
    writers: usize,
    pages: usize,
    ms: usize,
) -> Result<String, String> {
    beside_writes(block, writers, pages, || {
        std::thread::sleep(Duration::from_millis(ms as u64));
        Ok(String::new())
    })
}

fn beside_writes<T>(block: &RawBlock, writers: usize, pages: usize, act: impl FnOnce() -> T) -> T {
    let is_over = AtomicBool::new(false);
    let write = |first: usize| {
        let own = (first..pages).step_by(writers).cycle();
        for page in own.take_while(|_| !is_over.load(Ordering::Relaxed)) {
            let byte = block.page(page);
            // SAFETY: a byte of the block, which no other thread uses meanwhile.
            unsafe { byte.write_volatile(byte.read_volatile()) };
        }
    };
    std::thread::scope(|scope| {
        for first in 0..writers {
            let write = &write;
            scope.spawn(move || write(first));
        }
        let done = act();
        is_over.store(true, Ordering::Relaxed);
        done
    })
}

pub(crate) fn unregister(block: &RawBlock) -> Result<String, String> {
    let fd = OWN.load(Ordering::Relaxed);
    let mut range = [block.page(0).addr() as u64, (block.pages() * PAGE) as u64];
    // SAFETY: the structure is the one of the request.
    unsafe {
        outcome(libc::ioctl(fd, UFFDIO_UNREGISTER, range.as_mut_ptr()))?;
        outcome(libc::close(fd))
    }
}

/// Reads into a page as a disk does: by the kernel, past the page cache.
pub(crate) fn read_direct(block: &RawBlock, page: usize, file: &str) -> Result<String, String> {
    let file = std::ffi::CString::new(file).map_err(|error| error.to_string())?;
    // SAFETY: a name that ends with a zero byte; a page of the block to read into.
    unsafe {
        let fd = libc::open(file.as_ptr(), libc::O_RDONLY | libc::O_DIRECT);
        let read = libc::pread(fd, block.page(page).cast(), PAGE, 0);
        let error = std::io::Error::last_os_error();
        libc::close(fd);
        if read == PAGE as isize { Ok(String::new()) } else { Err(error.to_string()) }
    }
}

/// The same for all pages of the file, several at a time.
pub(crate) fn load_direct(block: &RawBlock, file: &str) -> Result<String, String> {
    const AT_ONCE: usize = 16 * PAGE;
    let file = std::ffi::CString::new(file).map_err(|error| error.to_string())?;
    // SAFETY: a name that ends with a zero byte; the file is no longer than the block.
    unsafe {
        let flags = libc::O_RDONLY | libc::O_DIRECT;
        // Past the shim, which would wait for its lock: QEMU has opened its disks before.
        let fd = libc::syscall(libc::SYS_openat, libc::AT_FDCWD, file.as_ptr(), flags);
        let fd = i32::try_from(fd).unwrap_or(-1);
        let mut done = 0;
        let read = loop {
            let read = libc::pread(fd, block.page(done / PAGE).cast(), AT_ONCE, done as i64);
            match usize::try_from(read) {
                Ok(bytes) if bytes > 0 => done += bytes,
                _ => break read,
            }
        };
        let error = std::io::Error::last_os_error();
        libc::close(fd);
        if read == 0 { Ok((done / PAGE).to_string()) } else { Err(error.to_string()) }
    }
}

/// Has the kernel read guest RAM; returns the first word that it saw.
pub(crate) fn write_out(block: &RawBlock, page: usize) -> Result<String, String> {
    let mut ends = [0; 2];
    let mut seen = [0_u8; 16];
    // SAFETY: a local pipe; a page of the block to write from.
    unsafe {
        outcome(libc::pipe(ends.as_mut_ptr()))?;
        let written = libc::write(ends[1], block.page(page).cast(), seen.len());
        libc::read(ends[0], seen.as_mut_ptr().cast(), seen.len());
        for end in ends {
            libc::close(end);
        }
        if written != 16 {
            return Err(std::io::Error::last_os_error().to_string());
        }
    }
    Ok(u64::from_ne_bytes(seen[..8].try_into().unwrap_or_default()).to_string())
}

/// Pins pages until the process ends, as a passed-through device does: as buffers of an io_uring.
pub(crate) fn pin(block: &RawBlock, first: usize, pages: usize) -> Result<String, String> {
    const IORING_REGISTER_BUFFERS: i32 = 0;
    let mut parameters = [0_u32; 30];
    let buffer = libc::iovec { iov_base: block.page(first).cast(), iov_len: pages * PAGE };
    // SAFETY: `struct io_uring_params` has 120 bytes; one buffer of the block.
    let result = unsafe {
        let ring = libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr());
        if ring < 0 {
            return Err(format!("io_uring: {}", std::io::Error::last_os_error()));
        }
        libc::syscall(libc::SYS_io_uring_register, ring, IORING_REGISTER_BUFFERS, &buffer, 1)
    };
    outcome(i32::try_from(result).unwrap_or(-1))
}
