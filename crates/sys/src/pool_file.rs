//! The memory that holds a group's shared pages.
//!
//! **Problem.** Each guest that shares a page maps it. No process may change it, because other
//! guests have it as well. **Idea.** A memfd of a fixed size, in which only slots in use take
//! memory. The owner writes through its descriptor. All other processes get one that was opened
//! for reading, which maps privately: a guest's write makes a copy of its own.
//!
//! **Invariants.** A memfd has mode 0777 at first, so a process with a read-only descriptor could
//! reopen it for writing. Therefore its mode is first restricted to the owner. It is sealed
//! against a change of size, because shrinking would destroy the copies of guests that have
//! written. A slot is emptied by punching a hole, which keeps the copies. Two workers never both
//! believe to own it: the owner alone has it open for writing. A takeover opens it for writing
//! first, and fails while another process has it open so. A lock on the file would not tell: a
//! sharer can hold it as well.
//! **Left out**: a process of the same user (root) can write to it. QEMU should run as another
//! user.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom};
use rustix::io::Errno;

use crate::faults::{self, Call, NOWHERE};
use crate::memory_map::{Over, PAGE_BYTES, PAGE_LEN, Range};
use crate::pool_maps::{self, FileId, Mapping};
use crate::shared_memory::{self, SharedMemoryError};

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);
/// The prefix of every pool's name. It identifies their pages in `/proc/<pid>/smaps`.
pub const NAME_PREFIX: &str = "overbook-pool";

/// One page of content.
pub type Page = [u8; PAGE_LEN];

/// The reason why a mapped pool cannot be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// Another worker has it.
    #[error("the pool belongs to another worker, which still runs")]
    InUse,
    /// It is not a pool of ours.
    #[error("what is mapped there is no pool of ours: {0}")]
    Foreign(&'static str),
    /// Another error of the kernel.
    #[error("the pool cannot be opened: {0}")]
    System(#[from] Errno),
}

/// A group's shared pages, in slots.
#[derive(Debug)]
pub struct PoolFile {
    file: File,
    slots: u32,
}

impl PoolFile {
    /// Makes an empty pool with room for `slots` slots.
    ///
    /// # Errors
    /// The kernel's.
    pub fn create(name: &str, slots: u32) -> Result<Self, Errno> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create(name, flags)?;
        rustix::fs::fchmod(&fd, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&fd, u64::from(slots) * PAGE_BYTES)?;
        rustix::fs::fcntl_add_seals(&fd, SEALS)?;
        Ok(Self { file: File::from(fd), slots })
    }

    /// Takes over a pool that is mapped in process `pid` and whose owner has ended. It is opened
    /// through a descriptor of the process, which takes the right to trace it; if there is none,
    /// through the mapping, which takes `CAP_CHECKPOINT_RESTORE`.
    ///
    /// # Errors
    /// [`AdoptError::InUse`]: the owner still runs. [`AdoptError::Foreign`]: it belongs to
    /// another user, other processes can write to it, or its size differs.
    pub fn adopt(pid: u32, mapping: &Mapping, slots: u32) -> Result<Self, AdoptError> {
        let Range { start, len } = mapping.range;
        let mapped = || format!("/proc/{pid}/map_files/{start:x}-{:x}", start + len).into();
        let path: PathBuf = pool_maps::descriptor(pid, mapping.file).unwrap_or_else(mapped);
        let fd = rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let pool = Self { file: File::from(fd), slots };
        let stat = rustix::fs::fstat(&pool.file)?;
        let length = u64::from(slots) * PAGE_BYTES;
        let faults = [
            (FileId::of(&stat) != mapping.file, "it has been mapped anew"),
            (stat.st_uid != rustix::process::geteuid().as_raw(), "it is another user's"),
            (stat.st_mode & 0o777 != 0o600, "others may open it"),
            (u64::try_from(stat.st_size) != Ok(length), "its size"),
            (!rustix::fs::fcntl_get_seals(&pool.file)?.contains(SEALS), "its size may change"),
        ];
        if let Some((_, fault)) = faults.into_iter().find(|(is_so, _)| *is_so) {
            return Err(AdoptError::Foreign(fault));
        }
        if pool_maps::has_other_writer(mapping.file, pool.file.as_fd()) {
            return Err(AdoptError::InUse);
        }
        Ok(pool)
    }

    /// The identity of the file.
    ///
    /// # Errors
    /// The kernel's.
    pub fn id(&self) -> Result<FileId, Errno> {
        Ok(FileId::of(&rustix::fs::fstat(&self.file)?))
    }

    /// The slots that use memory, in ascending order.
    ///
    /// # Errors
    /// The kernel's.
    pub fn filled(&self) -> Result<Vec<std::ops::Range<u32>>, Errno> {
        let seek = |from| rustix::fs::seek(&self.file, from);
        let slot = |bytes: u64| u32::try_from(bytes / PAGE_BYTES).unwrap_or(u32::MAX);
        let (mut filled, mut at) = (Vec::new(), 0);
        loop {
            let start = match seek(SeekFrom::Data(at)) {
                Ok(start) => start,
                Err(Errno::NXIO) => return Ok(filled),
                Err(error) => return Err(error),
            };
            at = seek(SeekFrom::Hole(start))?;
            filled.push(slot(start)..slot(at));
        }
    }

    /// The same file for processes that share its pages: it can be mapped, but not written.
    ///
    /// # Errors
    /// The kernel's; `ENOENT` without `/proc`.
    pub fn reader(&self) -> Result<OwnedFd, Errno> {
        let path = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Writes a page into a slot.
    ///
    /// # Errors
    /// The kernel's: there is no memory; `EINVAL`: there is no such slot.
    pub fn write(&self, slot: u32, page: &Page) -> Result<(), Errno> {
        let at = self.place(slot)?;
        self.file.write_all_at(page, at).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// Reads the content of a slot: zeros if it is empty.
    ///
    /// # Errors
    /// As for [`Self::write`].
    pub fn read(&self, slot: u32, page: &mut Page) -> Result<(), Errno> {
        let at = self.place(slot)?;
        self.file.read_exact_at(page, at).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
    }

    /// Frees a slot's memory. No process may map it any more.
    ///
    /// # Errors
    /// As for [`Self::write`].
    pub fn empty(&self, slot: u32) -> Result<(), Errno> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, flags, self.place(slot)?, PAGE_BYTES)
    }

    /// The memory that it uses.
    ///
    /// # Errors
    /// The kernel's.
    pub fn bytes(&self) -> Result<u64, Errno> {
        // The unit is 512 bytes on every file system.
        Ok(rustix::fs::fstat(&self.file)?.st_blocks.cast_unsigned() * 512)
    }

    fn place(&self, slot: u32) -> Result<u64, Errno> {
        if slot < self.slots { Ok(u64::from(slot) * PAGE_BYTES) } else { Err(Errno::INVAL) }
    }
}

/// A pool in a process that shares its pages.
#[derive(Debug)]
pub struct PoolView {
    file: File,
    slots: u32,
}

impl PoolView {
    /// Takes the descriptor that the owner's [`PoolFile::reader`] returned.
    ///
    /// # Errors
    /// When it is not a memfd of this number of slots that can never shrink.
    pub fn open(file: OwnedFd, slots: u32) -> Result<Self, SharedMemoryError> {
        shared_memory::check(file.as_fd(), u64::from(slots) * PAGE_BYTES)?;
        Ok(Self { file: File::from(file), slots })
    }

    /// Reads the content of slots from `first` on until `pages` is full: zeros where a slot is
    /// empty.
    ///
    /// # Errors
    /// The kernel's; `EINVAL`: there are no such slots.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn read(&self, first: u32, pages: &mut [u8]) -> Result<(), Errno> {
        let at = self.place(first, pages.len() as u64)?;
        let read = || {
            self.file
                .read_exact_at(pages, at)
                .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))
        };
        faults::call(Call::ReadPool, NOWHERE, read)
    }

    /// Maps slots over memory.
    ///
    /// # Safety
    /// As for [`Over::map_copy`].
    ///
    /// # Errors
    /// The kernel's: nothing has changed then. `EINVAL`: there are no such slots.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn map_over(&self, first: u32, over: Over) -> Result<(), Errno> {
        let offset = self.place(first, over.range.len)?;
        // SAFETY: as the caller promises.
        unsafe { over.map_copy(self.file.as_fd(), offset) }
    }

    fn place(&self, first: u32, bytes: u64) -> Result<u64, Errno> {
        let at = u64::from(first) * PAGE_BYTES;
        if at + bytes <= u64::from(self.slots) * PAGE_BYTES { Ok(at) } else { Err(Errno::INVAL) }
    }
}

impl AsFd for PoolView {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl AsFd for PoolFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::FlockOperation;
    use rustix::mm::{MapFlags, ProtFlags};

    use super::*;

    const PAGE: Page = [7; PAGE_LEN];

    #[test]
    fn a_slot_holds_its_page_until_it_is_emptied() {
        let pool = PoolFile::create("test", 100).unwrap();
        assert_eq!(pool.bytes(), Ok(0));
        pool.write(99, &PAGE).unwrap();
        let mut page = [0; PAGE_LEN];
        pool.read(99, &mut page).unwrap();
        assert_eq!((page, pool.bytes()), (PAGE, Ok(PAGE_BYTES)));
        pool.empty(99).unwrap();
        assert_eq!(pool.bytes(), Ok(0));
        assert_eq!(pool.write(100, &PAGE), Err(Errno::INVAL));
        assert_eq!(pool.empty(u32::MAX), Err(Errno::INVAL));
    }

    #[test]
    fn who_shares_it_can_read_and_not_write_nor_change_its_size() {
        let pool = PoolFile::create("test", 2).unwrap();
        pool.write(1, &PAGE).unwrap();
        let reader = pool.reader().unwrap();
        assert_eq!(rustix::io::pwrite(&reader, &PAGE, 0), Err(Errno::BADF));
        assert_eq!(rustix::fs::ftruncate(&reader, 0), Err(Errno::INVAL));
        assert_eq!(rustix::fs::ftruncate(&pool, 0), Err(Errno::PERM));
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let map = |flags| {
            // SAFETY: the kernel chooses the place, so nothing that exists is mapped over.
            unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), 4096, protection, flags, &reader, 4096)
            }
        };
        assert_eq!(map(MapFlags::SHARED).unwrap_err(), Errno::ACCESS);
        let copy = map(MapFlags::PRIVATE).unwrap().cast::<u8>();
        // SAFETY: the mapping is ours, of one page, and ends here.
        unsafe {
            assert_eq!(copy.read(), 7);
            copy.write(8);
            rustix::mm::munmap(copy.cast(), 4096).unwrap();
        }
        let mut page = [0; PAGE_LEN];
        pool.read(1, &mut page).unwrap();
        assert_eq!(page, PAGE, "what was written is a copy");
    }

    #[test]
    fn a_sharer_sees_what_the_owner_wrote_and_maps_it_over_memory_of_its_own() {
        let pool = PoolFile::create("test", 4).unwrap();
        pool.write(2, &PAGE).unwrap();
        let view = PoolView::open(pool.reader().unwrap(), 4).unwrap();
        let mut two = [1; 2 * PAGE_LEN];
        view.read(2, &mut two).unwrap();
        assert!(two[..4096] == PAGE && two[4096..] == [0; 4096]);
        assert_eq!(view.read(3, &mut two), Err(Errno::INVAL));
        let memory = crate::memory_map::Reserved::new(2 * PAGE_BYTES).unwrap();
        let start = memory.range().start;
        let bytes: *mut u8 = std::ptr::with_exposed_provenance_mut(usize::try_from(start).unwrap());
        let range = crate::memory_map::Range { start, len: PAGE_BYTES };
        let over = Over { range, reserve: false };
        // SAFETY: memory of ours, of two pages.
        unsafe {
            bytes.write_bytes(6, 2 * PAGE_LEN);
            view.map_over(2, over).unwrap();
            pool.write(2, &[8; PAGE_LEN]).unwrap();
            assert_eq!((bytes.read_volatile(), bytes.add(4096).read_volatile()), (8, 6));
            bytes.write_volatile(9);
            pool.write(2, &PAGE).unwrap();
            assert_eq!(bytes.read_volatile(), 9, "a copy by now");
            assert_eq!(view.map_over(4, over), Err(Errno::INVAL));
            over.map_fresh().unwrap();
            assert_eq!(bytes.read_volatile(), 0);
        }
    }

    #[test]
    fn a_pool_of_another_size_or_that_could_shrink_is_refused() {
        let pool = PoolFile::create("test", 4).unwrap();
        let open = |slots| PoolView::open(pool.reader().unwrap(), slots).map(drop);
        assert!(matches!(open(5), Err(SharedMemoryError::Size { .. })));
        let plain = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&plain, 4096).unwrap();
        assert!(matches!(PoolView::open(plain, 1), Err(SharedMemoryError::Unsealed)));
    }

    #[test]
    fn a_pool_that_is_mapped_is_found_again_when_its_owner_has_ended() {
        const NAME: &str = "overbook-pool-adopted";
        let pid = std::process::id();
        let memory = crate::memory_map::Reserved::new(4 * PAGE_BYTES).unwrap();
        let over = Over { range: memory.range(), reserve: false };
        let find = || {
            let found = crate::pool_maps::mappings(pid).unwrap();
            found.into_iter().find(|mapping| mapping.name == NAME).unwrap()
        };
        let pool = PoolFile::create(NAME, 8).unwrap();
        pool.write(3, &PAGE).unwrap();
        pool.write(6, &PAGE).unwrap();
        let view = PoolView::open(pool.reader().unwrap(), 8).unwrap();
        // SAFETY: memory of ours.
        unsafe { view.map_over(2, over) }.unwrap();
        assert!(matches!(PoolFile::adopt(pid, &find(), 8), Err(AdoptError::InUse)));
        let id = pool.id().unwrap();
        drop(pool);
        assert!(pool_maps::descriptor(pid, id).is_some());
        let adopted = PoolFile::adopt(pid, &find(), 8).unwrap();
        assert_eq!((adopted.id(), adopted.filled()), (Ok(id), Ok(vec![3..4, 6..7])));
        drop((adopted, view));
        assert!(pool_maps::descriptor(pid, id).is_none());
        let adopted = PoolFile::adopt(pid, &find(), 8).unwrap();
        let mut page = [0; PAGE_LEN];
        adopted.read(3, &mut page).unwrap();
        assert_eq!(page, PAGE);
        adopted.write(4, &PAGE).unwrap();
        assert_eq!(adopted.filled(), Ok(vec![3..5, 6..7]));
        drop(adopted);
        assert!(matches!(PoolFile::adopt(pid, &find(), 9), Err(AdoptError::Foreign("its size"))));
        let gone = PoolFile::create(NAME, 8).unwrap().id().unwrap();
        let other = Mapping { file: gone, ..find() };
        assert!(matches!(PoolFile::adopt(pid, &other, 8), Err(AdoptError::Foreign(_))));
    }

    #[test]
    fn a_pool_has_one_owner_at_a_time_also_while_a_sharer_locks_it() {
        const NAME: &str = "overbook-pool-locked";
        let pid = std::process::id();
        let memory = crate::memory_map::Reserved::new(PAGE_BYTES).unwrap();
        let pool = PoolFile::create(NAME, 1).unwrap();
        let sharer = PoolView::open(pool.reader().unwrap(), 1).unwrap();
        let over = Over { range: memory.range(), reserve: false };
        // SAFETY: memory of ours.
        unsafe { sharer.map_over(0, over) }.unwrap();
        let found = crate::pool_maps::mappings(pid).unwrap();
        let mapping = found.into_iter().find(|mapping| mapping.name == NAME).unwrap();
        let lock = |flags| rustix::fs::flock(&sharer, flags).unwrap();
        lock(FlockOperation::NonBlockingLockExclusive);
        assert!(matches!(PoolFile::adopt(pid, &mapping, 1), Err(AdoptError::InUse)));
        drop(pool);
        let adopted = PoolFile::adopt(pid, &mapping, 1).unwrap();
        assert!(matches!(PoolFile::adopt(pid, &mapping, 1), Err(AdoptError::InUse)));
        lock(FlockOperation::Unlock);
        assert!(matches!(PoolFile::adopt(pid, &mapping, 1), Err(AdoptError::InUse)));
        drop(adopted);
        PoolFile::adopt(pid, &mapping, 1).unwrap();
    }

    #[test]
    fn it_is_closed_to_everybody_but_its_owner() {
        let pool = PoolFile::create("test", 1).unwrap();
        assert_eq!(rustix::fs::fstat(&pool).unwrap().st_mode & 0o777, 0o600);
        let flags = rustix::io::fcntl_getfd(&pool).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
