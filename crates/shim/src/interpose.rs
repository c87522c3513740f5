//! The functions of the C library that QEMU calls and the shim interposes.
//!
//! Almost every call is passed on at once. A call that concerns neither guest RAM, nor files for
//! direct I/O, nor the shim's descriptors takes no lock and reads a few atomics. Other calls are
//! reported to the engine: before the call where pages must first be in their places, after it
//! where only a successful call matters. QEMU gets the C library's result, `errno` included. If
//! the shim's part panics, the call has been made or is made all the same.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

use libc::{mode_t, msghdr, off_t, size_t, ssize_t};
use sys::faults::{self, Call};
use sys::memory_map::{PAGE_BYTES, Range};
use sys::userfaultfd::{REGISTER, UNREGISTER};

use crate::engine::{Engine, lock_first, lock_settled};
use crate::errno::{fail, keep_errno, quietly};
use crate::ram::{self, RamKind, SMALLEST, may_concern};
use crate::threads::BypassGuard;
use crate::{control, descriptors, disks, holds, inhibitors, next, qemu};

const KVM_RUN: u32 = 0xAE80;
const VFIO_IOMMU_MAP_DMA: u32 = 0x3B71;
const IOMMU_IOAS_MAP: u32 = 0x3B85;
/// All requests of `vhost-vdpa` (0xAF70 to 0xAF7F, of any size and direction). It maps memory for
/// its device by `write`, but QEMU sends one of these requests first.
const VDPA: u32 = 0xAF70;
const VDPA_MASK: u32 = 0xFFF0;
/// `vhost-scsi` begins to read into guest RAM, whose pages it holds without pinning them. Any
/// size and direction.
const VHOST_SCSI: u32 = 0xAF40;
const NUMBER_MASK: u32 = 0xFFFF;

/// A larger discard is done in pieces of this size, between which faults are served.
const DISCARD_PIECE: u64 = 64 << 20;

/// Interposes `mmap`.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's arguments.
    let call = || unsafe { next::mmap(address, length, protection, flags, fd, offset) };
    let wanted = range(address, length);
    let fixed = flags & libc::MAP_FIXED == libc::MAP_FIXED;
    if !fixed || (wanted.len < SMALLEST && !may_concern(wanted)) {
        return call();
    }
    let Some(_inside) = BypassGuard::enter() else { return call() };
    let over_ram = may_concern(wanted).then(|| quietly(|| holds::before_remapping(wanted)));
    let over_ram = over_ram.flatten().flatten();
    let result = call();
    keep_errno(|| {
        let usable = libc::PROT_READ | libc::PROT_WRITE;
        let is_ram =
            result != libc::MAP_FAILED && protection & usable == usable && wanted.len >= SMALLEST;
        if let Some(remapping) = over_ram {
            // QEMU replaces a page with a hardware memory error by a fresh one of the same kind.
            let same = result == libc::MAP_FAILED
                || (protection & usable == usable && RamKind::of(flags) == RamKind::Private);
            remapping.done(|engine| {
                if result != libc::MAP_FAILED {
                    engine.ops.forget_merged(wanted);
                }
                if !same {
                    engine.ops.ram.unmapped(wanted);
                }
            });
        } else if is_ram {
            lock_first().ops.ram.mapped(wanted, flags);
        }
    });
    result
}

/// Interposes `mmap64`, which is the same on 64-bit machines.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    address: *mut c_void,
    length: size_t,
    protection: c_int,
    flags: c_int,
    fd: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's arguments.
    unsafe { mmap(address, length, protection, flags, fd, offset) }
}

/// Interposes `munmap`.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(address: *mut c_void, length: size_t) -> c_int {
    // SAFETY: the caller's arguments.
    let call = || unsafe { next::munmap(address, length) };
    let gone = range(address, length);
    if !may_concern(gone) {
        return call();
    }
    let Some(_inside) = BypassGuard::enter() else { return call() };
    let of_ram = quietly(|| holds::before_remapping(gone)).flatten();
    let result = call();
    keep_errno(|| {
        if let Some(remapping) = of_ram {
            remapping.done(|engine| {
                if result == 0 {
                    engine.ops.forget_merged(gone);
                    engine.ops.ram.unmapped(gone);
                }
            });
        } else if result == 0 {
            lock_first().ops.ram.unmapped(gone);
        }
    });
    result
}

/// Interposes `madvise`.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(address: *mut c_void, length: size_t, advice: c_int) -> c_int {
    // SAFETY: the caller's arguments.
    let advise =
        |range: Range, advice| unsafe { next::madvise(pointer(range), size(range), advice) };
    let call = |range| advise(range, advice);
    let advised = range(address, length);
    if !may_concern(advised) || !advised.start.is_multiple_of(PAGE_BYTES) {
        // SAFETY: as above, and unchanged: an invalid address gets the kernel's error.
        return unsafe { next::madvise(address, length, advice) };
    }
    let Some(_inside) = BypassGuard::enter() else { return call(advised) };
    match advice {
        // `MADV_REMOVE` is for shared memory, which the shim never tracks.
        libc::MADV_DONTNEED | libc::MADV_FREE | libc::MADV_DONTNEED_LOCKED => {
            discard(advised, advice, &advise)
        }
        _ => {
            let is_last = advice == libc::MADV_DONTFORK;
            let grows = is_last.then(|| quietly(|| holds::before_growing(advised)));
            let grows = grows.flatten().flatten();
            let result = call(advised);
            keep_errno(|| {
                let mut grew = false;
                let mut advise = |engine: &mut Engine| {
                    grew = result == 0 && engine.ops.ram.advised(advised, advice);
                };
                match grows {
                    Some(remapping) => remapping.done(advise),
                    None => lock_and(&mut advise),
                }
                if grew {
                    control::start();
                }
            });
            result
        }
    }
}

/// Discards in pieces; see [`freed`](crate::freed).
fn discard(range: Range, advice: c_int, call: &impl Fn(Range, c_int) -> c_int) -> c_int {
    let is_balloon = range.len <= PAGE_BYTES;
    let mut start = range.start;
    loop {
        let piece = Range { start, len: DISCARD_PIECE.min(ram::end(range) - start) };
        let discarded = quietly(|| {
            let mut engine = lock_settled();
            let lazily = advice == libc::MADV_DONTNEED && !is_balloon && engine.hands_over();
            engine.discard(piece, lazily, |range, lazily| {
                let (which, advice) = if lazily {
                    (Call::HandOver, libc::MADV_FREE)
                } else {
                    (Call::Discard, advice)
                };
                faults::outcome(which, range, || call(range, advice))
            })
        });
        let result = discarded.map_or_else(
            || call(piece, advice),
            |(result, left)| {
                // Without the lock: a write to a merged page waits for the fault thread, which
                // needs the lock.
                left.into_iter().for_each(write_zeros);
                result
            },
        );
        start = ram::end(piece);
        if result != 0 || start >= ram::end(range) {
            return result;
        }
    }
}

/// Writes zeros to guest RAM that QEMU has discarded and for which the kernel had no room for a
/// fresh mapping.
fn write_zeros(range: Range) {
    // SAFETY: mapped and writable, and QEMU has discarded the content.
    unsafe { pointer(range).cast::<u8>().write_bytes(0, size(range)) };
}

/// Interposes `ioctl`: QEMU's own userfaultfd, devices that are passed through, and the first
/// time that KVM runs the guest.
///
/// # Safety
/// That of the C function, which takes at most one more argument.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // SAFETY: the caller's arguments.
    let call = || unsafe { next::ioctl(fd, request, argument) };
    // Requests are 32 bits wide; the upper half is undefined.
    #[allow(clippy::cast_possible_truncation)]
    let number = request as u32;
    match number {
        KVM_RUN => {
            qemu::guest_runs();
            call()
        }
        REGISTER | UNREGISTER if !argument.is_null() => {
            // SAFETY: both requests point to a structure that begins with a range.
            let range = unsafe { argument.cast::<Range>().read_unaligned() };
            let Some(_inside) = BypassGuard::enter() else { return call() };
            if number == REGISTER {
                let concerned = quietly(|| holds::let_go(fd, range)) == Some(true);
                let result = call();
                keep_errno(|| {
                    if result != 0 && concerned {
                        lock_first().inhibitors.qemu_unregistered(fd, Some(range));
                    }
                });
                result
            } else {
                let result = call();
                keep_errno(|| {
                    if result == 0 {
                        lock_and(|engine| engine.inhibitors.qemu_unregistered(fd, Some(range)));
                    }
                });
                result
            }
        }
        _ if [VFIO_IOMMU_MAP_DMA, IOMMU_IOAS_MAP].contains(&number)
            || number & VDPA_MASK == VDPA
            || number & NUMBER_MASK == VHOST_SCSI =>
        {
            let Some(_inside) = BypassGuard::enter() else { return call() };
            quietly(holds::pass_through);
            call()
        }
        _ => call(),
    }
}

/// Interposes `close`.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn close(fd: c_int) -> c_int {
    if descriptors::is_ours(fd) {
        let Some(_inside) = BypassGuard::enter() else {
            // SAFETY: the shim's descriptor, closed by the shim.
            return unsafe { next::close(fd) };
        };
        return bad_descriptor();
    }
    if inhibitors::qemu_has_registered(fd)
        && let Some(_inside) = BypassGuard::enter()
    {
        quietly(|| lock_and(|engine| engine.inhibitors.qemu_unregistered(fd, None)));
    }
    // SAFETY: the caller's arguments.
    unsafe { next::close(fd) }
}

/// Interposes `close_range`: skips the shim's descriptors.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    // SAFETY: the caller's range, or a part of it.
    let call = |first, last| unsafe { next::close_range(first, last, flags) };
    if first > last {
        return call(first, last);
    }
    for (first, last) in descriptors::without_ours(first, last).into_iter().flatten() {
        let result = call(first, last);
        if result != 0 {
            return result;
        }
    }
    0
}

/// Interposes `dup2`, which closes the descriptor that it replaces.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup2(old: c_int, new: c_int) -> c_int {
    if descriptors::is_ours(new) {
        return bad_descriptor();
    }
    // SAFETY: the caller's arguments.
    unsafe { next::dup2(old, new) }
}

/// Interposes `dup3`, which closes the descriptor that it replaces.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dup3(old: c_int, new: c_int, flags: c_int) -> c_int {
    if descriptors::is_ours(new) {
        return bad_descriptor();
    }
    // SAFETY: the caller's arguments.
    unsafe { next::dup3(old, new, flags) }
}

/// Interposes `mlockall`: locked pages cannot be moved.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    let inside = BypassGuard::enter();
    if inside.is_some() {
        quietly(|| holds::lock_memory(true));
    }
    // SAFETY: the caller's arguments.
    let result = unsafe { next::mlockall(flags) };
    if inside.is_some() && result != 0 {
        keep_errno(|| holds::lock_memory(false));
    }
    result
}

/// Interposes the functions that open files. QEMU gets a file for direct I/O only after this is
/// recorded for the thread that merges.
macro_rules! opens {
    ($($name:ident($($arg:ident: $type:ty),*) with $flags:ident;)*) => { $(
        /// Interposes the C function of this name. A variable argument is passed on unchanged.
        ///
        /// # Safety
        /// That of the C function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C-unwind" fn $name($($arg: $type),*) -> c_int {
            // SAFETY: the caller's arguments.
            let fd = unsafe { next::$name($($arg),*) };
            if fd >= 0 && $flags & libc::O_DIRECT != 0 {
                has_opened();
            }
            fd
        }
    )* };
}

opens! {
    open(path: *const c_char, flags: c_int, mode: mode_t) with flags;
    open64(path: *const c_char, flags: c_int, mode: mode_t) with flags;
    openat(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) with flags;
    openat64(dir: c_int, path: *const c_char, flags: c_int, mode: mode_t) with flags;
    __open_2(path: *const c_char, flags: c_int) with flags;
    __open64_2(path: *const c_char, flags: c_int) with flags;
    __openat_2(dir: c_int, path: *const c_char, flags: c_int) with flags;
    __openat64_2(dir: c_int, path: *const c_char, flags: c_int) with flags;
}

/// Interposes `fcntl`, which can switch an open file to direct I/O.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller's arguments.
    let call = || unsafe { next::fcntl(fd, command, argument) };
    let flags = c_int::try_from(argument & 0xFFFF_FFFF).unwrap_or(0);
    if command != libc::F_SETFL || flags & libc::O_DIRECT == 0 {
        return call();
    }
    let Some(_inside) = BypassGuard::enter() else { return call() };
    // Other threads may be using that file, so no turn may be under way when it switches to
    // direct I/O.
    let turn = quietly(lock_first);
    let result = call();
    keep_errno(|| {
        if let Some(turn) = turn {
            disks::has_opened(&turn);
        }
    });
    result
}

/// Interposes `fcntl64`, which is the same on 64-bit machines.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn fcntl64(fd: c_int, command: c_int, argument: c_ulong) -> c_int {
    // SAFETY: the caller's arguments.
    unsafe { fcntl(fd, command, argument) }
}

/// Interposes `recvmsg`, with which QEMU receives open files.
///
/// # Safety
/// That of the C function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    // SAFETY: the caller's arguments.
    let received = unsafe { next::recvmsg(fd, message, flags) };
    // SAFETY: the kernel has just written it.
    if received >= 0 && unsafe { (*message).msg_controllen } > 0 {
        has_opened();
    }
    received
}

/// Interposes the functions of liburing that register files. Registered files can be read by
/// their number in the ring, which no interposed call shows.
macro_rules! registers {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => { $(
        /// Interposes liburing's function of this name.
        ///
        /// # Safety
        /// That of the function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            if let Some(_inside) = BypassGuard::enter() {
                quietly(|| disks::registers_files(&lock_first()));
            }
            // SAFETY: the caller's arguments.
            unsafe { next::$name($($arg),*) }
        }
    )* };
}

registers! {
    io_uring_register_files(ring: *mut c_void, files: *const c_int, count: c_uint);
    io_uring_register_files_tags(
        ring: *mut c_void, files: *const c_int, tags: *const u64, count: c_uint
    );
    io_uring_register_files_sparse(ring: *mut c_void, count: c_uint);
}

/// QEMU has got a file that may be open for direct I/O, and cannot use it before this returns.
fn has_opened() {
    if let Some(_inside) = BypassGuard::enter() {
        keep_errno(|| disks::has_opened(&lock_first()));
    }
}

fn bad_descriptor() -> c_int {
    fail(libc::EBADF)
}

fn lock_and<T>(part: impl FnOnce(&mut Engine) -> T) -> T {
    part(&mut lock_first())
}

/// Rounds the length up to whole pages, as the kernel does.
fn range(address: *mut c_void, length: size_t) -> Range {
    let len = (length as u64).checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
    Range { start: address.addr() as u64, len }
}

fn pointer(range: Range) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(usize::try_from(range.start).unwrap_or(0))
}

fn size(range: Range) -> size_t {
    usize::try_from(range.len).unwrap_or(0)
}
