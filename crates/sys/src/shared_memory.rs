//! Memory that one process writes and another reads, over a sealed memfd.
//!
//! Problem: the reader must not crash (`SIGBUS`) because the writer truncated the file, and the
//! writer must not find changed what only it may change. Idea: seals. The writer maps the memory
//! first, then forbids for ever to shrink or grow it and to write to it by any new way
//! (`F_SEAL_FUTURE_WRITE`): its own mapping is the only one that can change it. The reader checks
//! size, seals and file system before it maps anything.
//!
//! Both get the same views: words (`AtomicU64`) at the start, bytes (`AtomicU8`) behind them. They
//! are atomics because the other side may write at any instant, and disjoint so that no byte is
//! ever seen in two sizes. The reader's mapping is private: it sees what the writer writes, and a
//! store that safe code may make into an atomic stays its own, instead of a `SIGSEGV`.
//!
//! Cost: none per access. Leaves out: telling the other side; that is what sockets are for.

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
/// Without these the other side could make our accesses fail.
const NEEDED_SEALS: SealFlags = SealFlags::SHRINK;

/// Why there is no shared memory.
#[derive(Debug, thiserror::Error)]
pub enum SharedMemoryError {
    /// A system call failed.
    #[error("shared memory: {call}: {errno}")]
    Call {
        /// Which.
        call: &'static str,
        /// How.
        errno: Errno,
    },
    /// There is nothing to share, or more than the address space holds.
    #[error("shared memory of {words} words and {bytes} bytes cannot be")]
    Length {
        /// Words of 8 bytes.
        words: usize,
        /// Bytes behind them.
        bytes: usize,
    },
    /// The descriptor that came is of another size.
    #[error("shared memory has {found} bytes; expected {expected}")]
    Size {
        /// Its size.
        found: u64,
        /// What was agreed upon.
        expected: u64,
    },
    /// The descriptor that came can be truncated under our feet.
    #[error("shared memory is not sealed against shrinking")]
    Unsealed,
    /// The descriptor that came is no plain memfd.
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

// SAFETY: the mapping belongs to no thread, and is only reached through atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above.
unsafe impl Sync for SharedMemory {}

impl SharedMemory {
    /// Makes memory of `words` words and `bytes` bytes behind them, all zero, and the descriptor to
    /// pass on. This mapping is the only one that can ever write to it; a forked child does not
    /// inherit it.
    ///
    /// # Errors
    /// When a length makes no sense or the kernel refuses.
    pub fn create(
        name: &str,
        words: usize,
        bytes: usize,
    ) -> Result<(Self, OwnedFd), SharedMemoryError> {
        let length = length(words, bytes)?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd("memfd_create", || rustix::fs::memfd_create(name, flags))?;
        // A memfd starts with mode 0777: whoever sees it in /proc could open it anew.
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

    /// Maps what another process made, for reading.
    ///
    /// # Errors
    /// When it is no memfd, of another size, not sealed, or the kernel refuses.
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
        // words (`length`), cannot shrink (sealed), and nobody else in this process reaches it
        // otherwise.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr().cast(), self.words) }
    }

    /// The bytes behind them.
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
        // SAFETY: mapped by us with this length; the views borrow `self`, so none is left.
        // It cannot fail for a whole mapping, and there would be nothing to do about it.
        let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Refuses what is no memfd of `expected` bytes that can never shrink: using it could end this
/// process.
pub(crate) fn check(fd: BorrowedFd<'_>, expected: u64) -> Result<(), SharedMemoryError> {
    let magic = rustix::fs::fstatfs(fd).map_err(failed("fstatfs"))?.f_type.cast_unsigned();
    // Huge-page memfds have another: touching them can fail for want of a huge page.
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

/// Bytes of the file: both parts.
fn length(words: usize, bytes: usize) -> Result<usize, SharedMemoryError> {
    words
        .checked_mul(WORD_BYTES)
        .and_then(|word_bytes| word_bytes.checked_add(bytes))
        .filter(|&length| length > 0 && isize::try_from(length).is_ok())
        .ok_or(SharedMemoryError::Length { words, bytes })
}

/// One of the calls that make a memfd fit to be shared.
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
        // Huge pages may be missing when they are touched; that they exist here is not needed.
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
