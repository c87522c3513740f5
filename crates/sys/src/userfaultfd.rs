//! userfaultfd: pages of one's own process that trap at their next touch, and `UFFDIO_MOVE`.
//!
//! **Problem.** Detect when memory is touched, and revoke access to a page without copying it and
//! without a race against its writers.
//!
//! **Idea.** In a range that is registered for *missing* pages, a touch of a missing page stops
//! the thread, or the kernel on a thread's behalf. The reader of the descriptor puts a page there
//! and wakes them. `UFFDIO_MOVE` (Linux 6.8) moves the page-table entries of anonymous memory
//! from one place to another, atomically for every observer; a page that I/O has pinned is
//! refused (`EBUSY`). In a range that is registered for *writes*, a write to a protected page
//! stops the writer, and also the kernel before it pins the page for a device. Pages of a
//! memory-backed file can be protected, too (Linux 5.19).
//!
//! A registered mapping that is moved (`mremap`) stays registered. The call waits until the event
//! is read from the descriptor: [`Userfaultfd::read_faults`] reads and ignores it.
//!
//! **Invariants.** Only a full userfaultfd is made, never a user-mode-only one: with that, a
//! system call into a missing page fails with `EFAULT` instead of waiting. A test compares the
//! structures below with the kernel's headers (as `linux-raw-sys` ships them).
//!
//! **Cost**, measured: 0.08 µs per page moved in batches, 0.9 µs alone; a huge page whole 3 µs.
//!
//! Source: `Documentation/admin-guide/mm/userfaultfd.rst`, `include/uapi/linux/userfaultfd.h`.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::ioctl::{IoctlOutput, Opcode, Updater, ioctl, opcode};
use rustix::mm::UserfaultfdFlags;

use crate::faults::{self, Call, NOWHERE};

/// The device through which a process without `CAP_SYS_PTRACE` gets a full userfaultfd, if its
/// mode permits.
const DEVICE: &str = "/dev/userfaultfd";

const FLAGS: UserfaultfdFlags = UserfaultfdFlags::CLOEXEC.union(UserfaultfdFlags::NONBLOCK);
const FEATURE_MOVE: u64 = 1 << 16;
/// Writes to protected pages trap, also those of a memory-backed file; a mapping that is moved
/// stays registered.
const FEATURES_TO_REPLACE: u64 = FEATURE_WRITES | FEATURE_EVENT_REMAP | FEATURE_WRITES_TO_FILES;
const FEATURE_WRITES: u64 = 1;
const FEATURE_EVENT_REMAP: u64 = 1 << 2;
const FEATURE_WRITES_TO_FILES: u64 = 1 << 12;
const MODE_MISSING: u64 = 1;
const MODE_WRITES: u64 = 2;
const PROTECT: u64 = 1;
const DONT_WAKE: u64 = 1;
const ALLOW_SRC_HOLES: u64 = 2;
const EVENT_PAGEFAULT: u8 = 0x12;
const FAULT_IS_PROTECTED: u64 = 2;

/// `_IO(0xAA, 0)`, asked of [`DEVICE`].
const NEW: Opcode = opcode::none(0xAA, 0x00);
/// Registers a range. Programs also make this request on their own descriptors.
pub const REGISTER: Opcode = opcode::read_write::<RegisterArg>(0xAA, 0x00);
/// Ends a registration. The kernel's header declares it as a read by mistake, which cannot be
/// changed.
pub const UNREGISTER: Opcode = opcode::read::<Range>(0xAA, 0x01);
const WAKE: Opcode = opcode::read::<Range>(0xAA, 0x02);
const COPY: Opcode = opcode::read_write::<CopyArg>(0xAA, 0x03);
const ZEROPAGE: Opcode = opcode::read_write::<ZeroArg>(0xAA, 0x04);
const MOVE: Opcode = opcode::read_write::<CopyArg>(0xAA, 0x05);
const WRITEPROTECT: Opcode = opcode::read_write::<ProtectArg>(0xAA, 0x06);
const API: Opcode = opcode::read_write::<ApiArg>(0xAA, 0x3F);

/// A range of addresses, in the kernel's layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// Number of bytes.
    pub len: u64,
}

/// The argument of [`REGISTER`].
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct RegisterArg {
    /// The range to register.
    pub range: Range,
    mode: u64,
    ioctls: u64,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ApiArg {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_copy` and `struct uffdio_move`: the same shape.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct CopyArg {
    dst: u64,
    src: u64,
    len: u64,
    mode: u64,
    done: i64,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ZeroArg {
    range: Range,
    mode: u64,
    done: i64,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ProtectArg {
    range: Range,
    mode: u64,
}

/// A touch that waits to be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageFault {
    /// The address of the touch.
    pub address: u64,
    /// It is a write to a [protected](Userfaultfd::protect) page; otherwise the page is missing.
    pub is_protected: bool,
}

/// `struct uffd_msg` of a page fault.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Message {
    event: u8,
    reserved: [u8; 7],
    flags: u64,
    address: u64,
    feature: u64,
}

/// The reason why no userfaultfd is available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenError {
    /// Neither the system call nor the device is permitted.
    #[error(
        "userfaultfd is not permitted ({syscall}), nor is {DEVICE} ({device}): run as root, or give \
         the user access to the device"
    )]
    NotPermitted {
        /// The error of the system call.
        syscall: Errno,
        /// The error of the device.
        device: Errno,
    },
    /// The kernel has userfaultfd, but is too old.
    #[error("this kernel has no UFFDIO_MOVE: Linux 6.8 or later is needed")]
    NoMove,
    /// The kernel speaks another version of the interface.
    #[error("userfaultfd: {0}")]
    Api(Errno),
}

/// The result of an operation on a range of pages: the bytes done, and the error that stopped it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes done.
    pub bytes: u64,
    /// The error that stopped it.
    pub stopped: Option<Errno>,
}

/// A full userfaultfd of this process, close-on-exec and non-blocking (a blocking one cannot be
/// polled).
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
    can_replace: bool,
}

impl Userfaultfd {
    /// Opens a userfaultfd that can move pages.
    ///
    /// # Errors
    /// When it is not permitted, or the kernel is too old.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn open() -> Result<Self, OpenError> {
        // SAFETY: making the descriptor touches no memory; its later operations are marked
        // `unsafe` below.
        let make = || unsafe { rustix::mm::userfaultfd(FLAGS) };
        let fd = match faults::call(Call::Open, NOWHERE, make) {
            Ok(fd) => fd,
            Err(syscall) => faults::call(Call::Open, NOWHERE, from_device)
                .map_err(|device| OpenError::NotPermitted { syscall, device })?,
        };
        let mut uffd = Self { fd, can_replace: true };
        let features = match uffd.agree(FEATURES_TO_REPLACE) {
            // The kernel lacks one of the features, and may be asked again.
            Err(Errno::INVAL) => {
                uffd.can_replace = false;
                uffd.agree(0)
            }
            agreed => agreed,
        };
        let features = features.map_err(OpenError::Api)?;
        // Kernels before 6.11 agree to known features that they do not have.
        uffd.can_replace &= features & FEATURES_TO_REPLACE == FEATURES_TO_REPLACE;
        let has_move = features & FEATURE_MOVE != 0;
        if has_move { Ok(uffd) } else { Err(OpenError::NoMove) }
    }

    /// Requests features; returns those that the kernel has.
    fn agree(&self, features: u64) -> Result<u64, Errno> {
        let mut arg = ApiArg { api: 0xAA, features, ioctls: 0 };
        // SAFETY: the structure is the one of this request.
        faults::call(Call::Api, NOWHERE, || unsafe { self.ask::<API, _>(&mut arg) })?;
        Ok(arg.features)
    }

    /// Whether [`Self::register_writes`] works for pages of a memory-backed file, and a moved
    /// mapping keeps its registration.
    #[must_use]
    pub fn can_replace(&self) -> bool {
        self.can_replace
    }

    /// Makes every missing page of `range` trap. Threads that touch one wait until the fault is
    /// served.
    ///
    /// # Safety
    /// The caller serves the faults for as long as the range is registered.
    ///
    /// # Errors
    /// The kernel's: `EBUSY` if another userfaultfd has the range, `EINVAL` if it cannot be
    /// registered.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn register(&self, range: Range) -> Result<(), Errno> {
        faults::through(Call::Register, range, |range| {
            let mut arg = RegisterArg { range, mode: MODE_MISSING, ioctls: 0 };
            // SAFETY: the structure is the one of this request.
            unsafe { self.ask::<REGISTER, _>(&mut arg) }
        })
    }

    /// Makes writes to `range` trap where it is [protected](Self::protect); missing pages no
    /// longer trap.
    ///
    /// # Safety
    /// As for [`Self::register`].
    ///
    /// # Errors
    /// As for [`Self::register`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn register_writes(&self, range: Range) -> Result<(), Errno> {
        faults::through(Call::RegisterWrites, range, |range| {
            let mut arg = RegisterArg { range, mode: MODE_WRITES, ioctls: 0 };
            // SAFETY: the structure is the one of this request.
            unsafe { self.ask::<REGISTER, _>(&mut arg) }
        })
    }

    /// Stops every write to `range`, and every pin of a page for writing, until
    /// [`Self::unprotect`], the end of the registration, or a new mapping there.
    ///
    /// # Safety
    /// The range is registered for writes, and the server of its faults knows of the protection.
    ///
    /// # Errors
    /// The kernel's; a part may be protected then.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn protect(&self, range: Range) -> Result<(), Errno> {
        faults::through(Call::Protect, range, |range| {
            let mut arg = ProtectArg { range, mode: PROTECT };
            // SAFETY: the structure is the one of this request.
            unsafe { self.ask::<WRITEPROTECT, _>(&mut arg) }
        })
    }

    /// Permits writes to `range` again, and wakes waiting threads.
    ///
    /// # Safety
    /// No code relies on the absence of writes there.
    ///
    /// # Errors
    /// The kernel's.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn unprotect(&self, range: Range) -> Result<(), Errno> {
        faults::through(Call::Unprotect, range, |range| {
            let mut arg = ProtectArg { range, mode: 0 };
            // SAFETY: the structure is the one of this request.
            unsafe { self.ask::<WRITEPROTECT, _>(&mut arg) }
        })
    }

    /// Ends a registration. Threads that wait for a page of it continue, and find zeros where
    /// there is no page.
    ///
    /// # Safety
    /// Every page on which users of the range rely is in its place.
    ///
    /// # Errors
    /// The kernel's.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn unregister(&self, range: Range) -> Result<(), Errno> {
        faults::through(Call::Unregister, range, |mut range| {
            // SAFETY: the structure is the one of this request.
            unsafe { self.ask::<UNREGISTER, _>(&mut range) }
        })
    }

    /// Moves `len` bytes of pages from `src` to `dst`, which is registered; holes stay holes. No
    /// thread is woken.
    ///
    /// # Safety
    /// Users of the content at `src` must cope with missing pages.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn move_pages(&self, dst: u64, src: u64, len: u64) -> Progress {
        faults::progress(Call::Move, Range { start: dst, len }, src, |Range { len, .. }| {
            let mut arg = CopyArg { dst, src, len, mode: DONT_WAKE | ALLOW_SRC_HOLES, done: 0 };
            // SAFETY: the structure is the one of this request.
            let result = unsafe { self.ask::<MOVE, _>(&mut arg) };
            progress(result, arg.done, len)
        })
    }

    /// Copies pages to where they are missing, in a registered range. No thread is woken.
    ///
    /// # Safety
    /// `src` is readable, and has the content that belongs at `dst`.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn copy_pages(&self, dst: u64, src: u64, len: u64) -> Progress {
        faults::progress(Call::Copy, Range { start: dst, len }, src, |Range { len, .. }| {
            let mut arg = CopyArg { dst, src, len, mode: DONT_WAKE, done: 0 };
            // SAFETY: the structure is the one of this request.
            let result = unsafe { self.ask::<COPY, _>(&mut arg) };
            progress(result, arg.done, len)
        })
    }

    /// Maps the page of zeros where pages are missing, in a registered range, up to the first
    /// existing page (`EEXIST`). No thread is woken.
    ///
    /// # Safety
    /// Nothing but zeros belongs there.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn zero_pages(&self, range: Range) -> Progress {
        faults::progress(Call::Zero, range, range.start, |range| {
            let mut arg = ZeroArg { range, mode: DONT_WAKE, done: 0 };
            // SAFETY: the structure is the one of this request.
            let result = unsafe { self.ask::<ZEROPAGE, _>(&mut arg) };
            progress(result, arg.done, range.len)
        })
    }

    /// Wakes threads that wait for a page of `range`; they retry the access.
    ///
    /// # Errors
    /// The kernel's.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn wake(&self, range: Range) -> Result<(), Errno> {
        faults::through(Call::Wake, range, |mut range| {
            // SAFETY: the structure is the one of this request; a thread that is woken too early
            // traps again.
            unsafe { self.ask::<WAKE, _>(&mut range) }
        })
    }

    /// Fills in the touches since the last call and returns their number. A thread that waits in
    /// `mremap` continues. Does not allocate.
    ///
    /// # Errors
    /// The kernel's; `EAGAIN` if there are none.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn read_faults(&self, faults: &mut [PageFault; MAX_FAULTS]) -> Result<usize, Errno> {
        let mut bytes = [0_u8; MAX_FAULTS * size_of::<Message>()];
        let read = || rustix::io::read(&self.fd, &mut bytes);
        let read = faults::call(Call::ReadFaults, NOWHERE, read)?;
        let mut count = 0;
        for message in bytes[..read].chunks_exact(size_of::<Message>()) {
            let field = |at: usize| {
                let mut word = [0; 8];
                word.copy_from_slice(&message[at..at + 8]);
                u64::from_ne_bytes(word)
            };
            if message[0] == EVENT_PAGEFAULT {
                faults[count] = PageFault {
                    address: field(std::mem::offset_of!(Message, address)),
                    is_protected: field(std::mem::offset_of!(Message, flags)) & FAULT_IS_PROTECTED
                        != 0,
                };
                count += 1;
            }
        }
        Ok(count)
    }

    /// Waits at most `timeout` for a readable event, and returns whether there is one: faults, or
    /// a mapping that is being moved. Does not allocate.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn wait(&self, timeout: Option<&Timespec>) -> bool {
        let mut fds = [PollFd::new(&self.fd, PollFlags::IN)];
        let polled = faults::call(Call::Poll, NOWHERE, || poll(&mut fds, timeout));
        polled.is_ok_and(|ready| ready > 0)
    }

    /// # Safety
    /// `T` is the structure that the kernel reads and writes on `OPCODE`.
    unsafe fn ask<const OPCODE: Opcode, T>(&self, arg: &mut T) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        let request = unsafe { Updater::<OPCODE, T>::new(arg) };
        // SAFETY: the descriptor is a userfaultfd; the caller is responsible for the effect on
        // memory.
        unsafe { ioctl(&self.fd, request) }
    }
}

/// The most faults in one [`Userfaultfd::read_faults`].
pub const MAX_FAULTS: usize = 16;

impl AsFd for Userfaultfd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Userfaultfd {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn from_device() -> Result<OwnedFd, Errno> {
    let device = File::options()
        .read(true)
        .write(true)
        .open(DEVICE)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    // SAFETY: the request takes flags by value and returns a new descriptor.
    unsafe { ioctl(&device, NewDescriptor) }
}

/// [`NEW`]: its argument is the flags, its result a descriptor.
struct NewDescriptor;

// SAFETY: the kernel reads the argument as a number and writes nothing; the result is a new
// descriptor with no other owner.
unsafe impl rustix::ioctl::Ioctl for NewDescriptor {
    type Output = OwnedFd;
    const IS_MUTATING: bool = false;

    fn opcode(&self) -> Opcode {
        NEW
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        std::ptr::without_provenance_mut(FLAGS.bits() as usize)
    }

    unsafe fn output_from_ptr(
        output: IoctlOutput,
        _: *mut rustix::ffi::c_void,
    ) -> rustix::io::Result<OwnedFd> {
        // SAFETY: a fresh descriptor of ours.
        Ok(unsafe { OwnedFd::from_raw_fd(output) })
    }
}

/// The kernel reports its progress in the structure, also when it fails, or an error there
/// instead.
fn progress(result: Result<(), Errno>, done: i64, len: u64) -> Progress {
    let bytes = u64::try_from(done).unwrap_or(0).min(len);
    match result {
        Ok(()) => Progress { bytes: len, stopped: None },
        Err(errno) => Progress { bytes, stopped: Some(errno) },
    }
}

#[cfg(test)]
mod tests;
