//! Memory that one process writes and another reads, over a sealed memfd.
//!
//! Problem: the reader must not crash (`SIGBUS`) because the writer truncated the file, and only
//! the writer may change the content. Idea: seals. The writer maps the memory first, then forbids
//! for ever to shrink or grow it and to write to it in any new way (`F_SEAL_FUTURE_WRITE`). So
//! its own mapping is the only one that can change the content. The reader checks size, seals and
//! file system before it maps the memory.
//!
//! Both get the same views: words (`AtomicU64`) at the start, bytes (`AtomicU8`) after them. They
//! are atomics because the other side may write at any instant, and disjoint so that no byte is
//! ever accessed in two sizes. The reader's mapping is private: it sees the writer's stores, and
//! if safe code stores into an atomic, the store stays private instead of raising `SIGSEGV`.
//!
//! Cost: none per access. Left out: notifying the other side, which sockets do.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64};

use rustix::fs::{MemfdFlags, Mode, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::faults::{self, Call, NOWHERE};

const WORD_BYTES: usize = size_of::<u64>();
/// `f_type` of tmpfs, where memfds without huge pages live.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Without these seals the other side could make our accesses fail.
const NEEDED_SEALS: SealFlags = SealFlags::SHRINK;

/// The reason why there is no shared memory.
#[derive(Debug, thiserror::Error)]
pub enum SharedMemoryError {
    /// A system call failed.
    #[error("shared memory: {call}: {errno}")]
    Call {
        /// The name of the call.
        call: &'static str,
        /// Its error.
        errno: Errno,
    },
    /// The length is 0, or more than the address space holds.
    #[error("shared memory of {words} words and {bytes} bytes cannot be")]
    Length {
        /// Words of 8 bytes.
        words: usize,
        /// The bytes after them.
        bytes: usize,
    },
    /// The received descriptor has the wrong size.
    #[error("shared memory has {found} bytes; expected {expected}")]
    Size {
        /// Its size.
        found: u64,
        /// The agreed size.
        expected: u64,
    },
    /// The received descriptor could be truncated at any time.
    #[error("shared memory is not sealed against shrinking")]
    Unsealed,
    /// The received descriptor is not a plain memfd.
    #[error("shared memory is a file on file system {magic:#x}; expected a memfd")]
    NotMemory {
        /// The file system's magic number.
        magic: u64,
    },
}

/// A mapping, unmapped when dropped.
#[derive(Debug)]
pub struct SharedMemory {
    start: NonNull<u8>,
    words: usize,
    bytes: usize,
    length: usize,
}

// SAFETY: the mapping belongs to no thread, and is accessed only through atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes memory of `words` words followed by `bytes` bytes, all zero, and returns the
    /// descriptor to pass on. This mapping is the only one that can ever write to the memory; a
    /// forked child does not inherit it.
    ///
    /// # Errors
    /// When a length is invalid or the kernel refuses.
    pub fn create(
        name: &str,
        words: usize,
        bytes: usize,
    ) -> Result<(Self, OwnedFd), SharedMemoryError> {
        let length = length(words, bytes)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd("memfd_create", || rustix::fs::memfd_create(name, flags))?;
        // A memfd starts with mode 0777: any process that sees it in /proc could reopen it.
        memfd("fchmod", || rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR))?;
        memfd("ftruncate", || rustix::fs::ftruncate(&fd, length as u64))?;
        let memory = Self::map(fd.as_fd(), words, bytes, MapFlags::SHARED)?;
        // SAFETY: the range is our own fresh mapping; the advice concerns forked children only.
        memfd("madvise", || unsafe {
            rustix::mm::madvise(memory.start.as_ptr().cast(), length, Advice::LinuxDontFork)
        })?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE | SealFlags::SEAL;
        memfd("F_ADD_SEALS", || rustix::fs::fcntl_add_seals(&fd, seals))?;
        Ok((memory, fd))
    }

    /// Maps memory that another process made, for reading.
    ///
    /// # Errors
    /// When it is not a sealed memfd of this size, or the kernel refuses.
    pub fn open(fd: BorrowedFd<'_>, words: usize, bytes: usize) -> Result<Self, SharedMemoryError> {
        let expected = length(words, bytes)? as u64;
        check(fd, expected)?;
        Self::map(fd, words, bytes, MapFlags::PRIVATE | MapFlags::NORESERVE)
    }

    fn map(
        fd: BorrowedFd<'_>,
        words: usize,
        bytes: usize,
        flags: MapFlags,
    ) -> Result<Self, SharedMemoryError> {
        let length = length(words, bytes)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses the place, so nothing that exists is mapped over.
        let start = memfd("mmap", || unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), length, protection, flags, fd, 0)
        });
        let start = start?.cast::<u8>();
        let start = NonNull::new(start).ok_or(SharedMemoryError::Length { words, bytes })?;
        Ok(Self { start, words, bytes, length })
    }

    /// The words at the start.
    #[must_use]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: the mapping is page-aligned, lives as long as `self`, holds at least `words`
        // words (`length`), and cannot shrink (sealed). No other code in this process accesses it
        // in another way.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.words) }
    }

    /// The bytes after them.
    #[must_use]
    pub fn bytes(&self) -> &[AtomicU8] {
        // SAFETY: as for the words; the bytes begin where those end, and `length` counts both.
        unsafe {
            let start = self.start.as_ptr().add(self.words * WORD_BYTES);
            std::slice::from_raw_parts(start.cast(), self.bytes)
        }
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length; the views borrow `self`, so none is left. It
        // cannot fail for a whole mapping, and an error would have no remedy.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Refuses a descriptor that is not a memfd of `expected` bytes that can never shrink: using it
/// could end this process.
pub(crate) fn check(fd: BorrowedFd<'_>, expected: u64) -> Result<(), SharedMemoryError> {
    let magic = rustix::fs::fstatfs(fd).map_err(failed("fstatfs"))?.f_type.cast_unsigned();
    // Huge-page memfds have another magic number: touching them can fail for lack of a huge page.
    if magic != TMPFS_MAGIC {
        return Err(SharedMemoryError::NotMemory { magic });
    }
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(failed("F_GET_SEALS"))?;
    if !seals.contains(NEEDED_SEALS) {
        return Err(SharedMemoryError::Unsealed);
    }
    let found = rustix::fs::fstat(fd).map_err(failed("fstat"))?.st_size.cast_unsigned();
    if found != expected {
        return Err(SharedMemoryError::Size { found, expected });
    }
    Ok(())
}

/// The length of the file: both parts.
fn length(words: usize, bytes: usize) -> Result<usize, SharedMemoryError> {
    words
        .checked_mul(WORD_BYTES)
        .and_then(|word_bytes| word_bytes.checked_add(bytes))
        .filter(|&length| length > 0 && isize::try_from(length).is_ok())
        .ok_or(SharedMemoryError::Length { words, bytes })
}

/// Makes one of the calls that prepare a memfd for sharing.
fn memfd<T>(
    name: &'static str,
    call: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, SharedMemoryError> {
    faults::call(Call::Memfd, NOWHERE, call).map_err(failed(name))
}

fn failed(call: &'static str) -> impl Fn(Errno) -> SharedMemoryError {
    move |errno| SharedMemoryError::Call { call, errno }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    fn a_memfd(length: u64, flags: MemfdFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("test", flags | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, length).unwrap();
        fd
    }

    #[test]
    fn the_reader_sees_what_the_writer_writes_later() {
        let (writer, fd) = SharedMemory::create("test", 512, 10).unwrap();
        let reader = SharedMemory::open(fd.as_fd(), 512, 10).unwrap();
        assert_eq!(reader.words()[511].load(Relaxed), 0);
        writer.words()[511].store(7, Relaxed);
        writer.bytes()[9].store(8, Relaxed);
        assert_eq!(reader.words()[511].load(Relaxed), 7);
        assert_eq!(reader.bytes()[9].load(Relaxed), 8);
        assert_eq!((reader.words().len(), reader.bytes().len()), (512, 10));
    }

    #[test]
    fn the_reader_cannot_change_what_the_writer_sees() {
        let (writer, fd) = SharedMemory::create("test", 8, 0).unwrap();
        let reader = SharedMemory::open(fd.as_fd(), 8, 0).unwrap();
        reader.words()[0].store(1, Relaxed);
        assert_eq!(writer.words()[0].load(Relaxed), 0);
        assert_eq!(rustix::io::write(&fd, b"x").unwrap_err(), Errno::PERM);
        let shared = SharedMemory::map(fd.as_fd(), 8, 0, MapFlags::SHARED).unwrap_err();
        assert!(matches!(shared, SharedMemoryError::Call { call: "mmap", errno: Errno::PERM }));
    }

    #[test]
    fn the_memory_can_neither_shrink_nor_grow_nor_be_opened_by_others() {
        let (_writer, fd) = SharedMemory::create("test", 512, 0).unwrap();
        assert_eq!(rustix::fs::ftruncate(&fd, 0).unwrap_err(), Errno::PERM);
        assert_eq!(rustix::fs::ftruncate(&fd, 8192).unwrap_err(), Errno::PERM);
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_mode & 0o777, 0o600);
        let flags = rustix::io::fcntl_getfd(&fd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn memory_that_can_shrink_is_refused() {
        let fd = a_memfd(64, MemfdFlags::empty());
        let error = SharedMemory::open(fd.as_fd(), 8, 0).unwrap_err();
        assert_eq!(error.to_string(), "shared memory is not sealed against shrinking");
    }

    #[test]
    fn memory_of_another_size_is_refused() {
        let (_writer, fd) = SharedMemory::create("test", 8, 0).unwrap();
        let error = SharedMemory::open(fd.as_fd(), 8, 4096).unwrap_err();
        assert_eq!(error.to_string(), "shared memory has 64 bytes; expected 4160");
    }

    #[test]
    fn a_descriptor_that_is_no_memfd_is_refused() {
        let file = tempfile::tempfile().unwrap();
        assert!(SharedMemory::open(file.as_fd(), 8, 0).is_err());
        let (pipe, _) = rustix::pipe::pipe().unwrap();
        assert!(SharedMemory::open(pipe.as_fd(), 8, 0).is_err());
        // A touch may fail for lack of huge pages; this host need not have any.
        if let Ok(fd) = rustix::fs::memfd_create("test", MemfdFlags::HUGETLB) {
            assert!(SharedMemory::open(fd.as_fd(), 8, 0).is_err());
        }
    }

    #[test]
    fn impossible_lengths_are_refused() {
        for (words, bytes) in [(0, 0), (usize::MAX, 0), (8, usize::MAX), (usize::MAX / 8, 0)] {
            assert!(SharedMemory::create("test", words, bytes).is_err(), "{words} {bytes}");
        }
    }
}
