//! Anonymous memory by address: reserving, advising, mapping; what is there, `pagemap` tells.
//!
//! **Problem.** Who moves pages about must speak of memory that is not his (a guest's RAM, mapped
//! by QEMU), which no reference may ever point into: it changes, and touching it may trap.
//!
//! **Idea.** Addresses are numbers ([`Range`]). What could break somebody's memory is `unsafe`;
//! what only looks (`PAGEMAP_SCAN`, Linux 6.7) or concerns a mapping of ours ([`Reserved`]) is not.
//!
//! **Invariants.** The calls go to the kernel directly, not through the C library: a library that
//! interposes `mmap` or `madvise` does not meet itself here.
//!
//! **Leaves out.** File mappings; see `shared_memory`.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use crate::faults::{self, Call, NOWHERE};
pub use crate::pagemap::{PageSet, Pagemap, Private};
pub use crate::userfaultfd::Range;
pub use rustix::mm::Advice;

/// What a page table's lowest level holds, as the length of an array.
pub const PAGE_LEN: usize = 4096;
/// The same among addresses.
pub const PAGE_BYTES: u64 = PAGE_LEN as u64;
/// What one huge page holds on x86-64 and on arm64 with small pages.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Private anonymous memory of ours, unmapped when dropped: nothing is there until it is touched.
#[derive(Debug)]
pub struct Reserved {
    whole: Range,
    used: Range,
}

impl Reserved {
    /// Reserves `len` bytes that begin at a huge page's border. The kernel does not count them as
    /// promised memory.
    ///
    /// # Errors
    /// The kernel's; `EOVERFLOW` when there is no such length.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn new(len: u64) -> Result<Self, Errno> {
        let whole_len = len.checked_add(HUGE_PAGE_BYTES).ok_or(Errno::OVERFLOW)?;
        let bytes = usize::try_from(whole_len).map_err(|_| Errno::OVERFLOW)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the place, so nothing that exists is mapped over.
        let start = faults::call(Call::Map, NOWHERE, || unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags)
        })?;
        let whole = Range { start: start.addr() as u64, len: whole_len };
        let used = Range { start: whole.start.next_multiple_of(HUGE_PAGE_BYTES), len };
        Ok(Self { whole, used })
    }

    /// Where it is.
    #[must_use]
    pub fn range(&self) -> Range {
        self.used
    }

    /// Advises the kernel about all of it.
    ///
    /// # Safety
    /// Nobody relies on content that the advice discards.
    ///
    /// # Errors
    /// The kernel's.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: as the caller promises.
        unsafe { advise(self.used, advice) }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody keeps references into it. It cannot fail for a
        // whole mapping.
        let _ = unsafe { unmap(self.whole) };
    }
}

/// Advises the kernel about a range of this process.
///
/// # Safety
/// Nobody relies on content that the advice discards.
///
/// # Errors
/// The kernel's.
#[cfg_attr(feature = "faults", track_caller)]
pub unsafe fn advise(range: Range, advice: Advice) -> Result<(), Errno> {
    let kind = match advice {
        Advice::LinuxDontNeed => Call::DontNeed,
        Advice::LinuxPageOut => Call::PageOut,
        Advice::LinuxPopulateRead => Call::PopulateRead,
        Advice::LinuxPopulateWrite => Call::PopulateWrite,
        _ => Call::Advise,
    };
    // SAFETY: as the caller promises.
    faults::through(kind, range, |range| unsafe {
        rustix::mm::madvise(pointer(range), length(range), advice)
    })
}

/// Unmaps a range of this process.
///
/// # Safety
/// Nobody uses it.
///
/// # Errors
/// The kernel's.
#[cfg_attr(feature = "faults", track_caller)]
pub unsafe fn unmap(range: Range) -> Result<(), Errno> {
    // SAFETY: as the caller promises.
    faults::call(Call::Unmap, range, || unsafe {
        rustix::mm::munmap(pointer(range), length(range))
    })
}

/// How memory is mapped over addresses that are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// Where.
    pub range: Range,
    /// Whether the kernel counts it as promised memory.
    pub reserve: bool,
}

impl Over {
    /// Fresh private memory: zeros.
    ///
    /// # Safety
    /// Nobody relies on what is there, and no reference points to it.
    ///
    /// # Errors
    /// The kernel's: nothing has changed then. `ENOMEM` also when the process has too many
    /// mappings.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn map_fresh(self) -> Result<(), Errno> {
        let flags = self.flags();
        // SAFETY: as the caller promises.
        faults::over(Call::MapFresh, self.range, || unsafe {
            rustix::mm::mmap_anonymous(pointer(self.range), length(self.range), ACCESS, flags)
        })?;
        Ok(())
    }

    /// The same where nothing is mapped.
    ///
    /// # Errors
    /// The kernel's; `EEXIST` when something is there, and stays.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn map_fresh_into_hole(self) -> Result<(), Errno> {
        let flags = self.flags().difference(MapFlags::FIXED) | MapFlags::FIXED_NOREPLACE;
        // SAFETY: nothing that exists is mapped over.
        faults::call(Call::MapIntoHole, self.range, || unsafe {
            rustix::mm::mmap_anonymous(pointer(self.range), length(self.range), ACCESS, flags)
        })?;
        Ok(())
    }

    /// The bytes of a file from `offset` on: what is written becomes a copy.
    ///
    /// # Safety
    /// Nobody relies on what is there beyond what the file holds, and no reference points to it.
    ///
    /// # Errors
    /// As for [`Self::map_fresh`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn map_copy(self, file: BorrowedFd<'_>, offset: u64) -> Result<(), Errno> {
        let flags = self.flags();
        // SAFETY: as the caller promises.
        faults::over(Call::MapPool, self.range, || unsafe {
            rustix::mm::mmap(pointer(self.range), length(self.range), ACCESS, flags, file, offset)
        })?;
        Ok(())
    }

    fn flags(self) -> MapFlags {
        let reserve = if self.reserve { MapFlags::empty() } else { MapFlags::NORESERVE };
        MapFlags::PRIVATE | MapFlags::FIXED | reserve
    }
}

/// Memory that nobody has touched, to be mapped over other memory in one step: what is registered
/// or advised of it, or mapped in its place, holds there from the first moment. (The kernel gives
/// memory that was never touched its place among the process's pages anew, so that it becomes one
/// mapping with what is like it on both sides.)
#[derive(Debug)]
pub struct Untouched {
    whole: Range,
    used: Range,
}

impl Untouched {
    /// So many bytes; the kernel counts them as promised memory if `reserve` says so.
    ///
    /// # Errors
    /// The kernel's; `EOVERFLOW` when there is no such length.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn new(len: u64, reserve: bool) -> Result<Self, Errno> {
        let whole_len = len.checked_add(2 * PAGE_BYTES).ok_or(Errno::OVERFLOW)?;
        let bytes = usize::try_from(whole_len).map_err(|_| Errno::OVERFLOW)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the place, so nothing that exists is mapped over.
        let start = faults::call(Call::Map, NOWHERE, || unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::empty(), flags)
        })?;
        let start = start.addr() as u64;
        let used = Range { start: start + PAGE_BYTES, len };
        // A border on both sides: it must not become one mapping with what the process has touched.
        // If this fails the kernel may have unmapped it, and others may be there by now: so the
        // addresses are left alone. SAFETY: reserved just now.
        unsafe { Over { range: used, reserve }.map_fresh() }?;
        Ok(Self { whole: Range { start, len: whole_len }, used })
    }

    /// Where it is.
    #[must_use]
    pub fn range(&self) -> Range {
        self.used
    }

    /// Maps as much as `range` has over it, and stays untouched itself. Who waits for a page of
    /// `range` has to be woken, and looks again.
    ///
    /// # Safety
    /// Nobody relies on what is there, and no reference points to it. If this is registered with a
    /// userfaultfd, another thread reads that.
    ///
    /// # Errors
    /// The kernel's. `range` may be unmapped then: [`Over::map_fresh_into_hole`] tells.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn map_over(&self, range: Range) -> Result<(), Errno> {
        let bytes = length(range);
        // `MAYMOVE | FIXED` is what moving to an address is, `DONTUNMAP` leaves the mapping here.
        let flags = MremapFlags::MAYMOVE | MremapFlags::DONTUNMAP;
        // SAFETY: as the caller promises.
        faults::over(Call::Remap, range, || unsafe {
            rustix::mm::mremap_fixed(pointer(self.used), bytes, bytes, flags, pointer(range))
        })?;
        Ok(())
    }
}

impl Drop for Untouched {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and nobody keeps references into it.
        let _ = unsafe { unmap(self.whole) };
    }
}

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Whether there is nothing but zeros in it.
#[must_use]
pub fn is_zeros(bytes: &[u8]) -> bool {
    // Without a branch for each byte the compiler takes many at once.
    bytes.chunks(64).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

pub(crate) fn pointer(range: Range) -> *mut rustix::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(length_of(range.start))
}

pub(crate) fn length(range: Range) -> usize {
    length_of(range.len)
}

/// Addresses of this process fit its words; one that does not names memory that cannot be.
fn length_of(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_memory_has_no_pages_until_it_is_touched() {
        let memory = Reserved::new(HUGE_PAGE_BYTES).unwrap();
        let pagemap = Pagemap::open().unwrap();
        assert_eq!(memory.range().start % HUGE_PAGE_BYTES, 0);
        assert_eq!(pagemap.populated(memory.range()), Ok(0));
        assert_eq!(pagemap.populated_set(memory.range()), Ok(PageSet::default()));
        // SAFETY: fresh memory of ours.
        unsafe {
            memory.advise(Advice::LinuxNoHugepage).unwrap();
            for page in (0..130).map(|index| index * 2 * PAGE_BYTES) {
                pointer(Range { start: memory.range().start + page, len: 1 }).cast::<u8>().write(1);
            }
        }
        assert_eq!(pagemap.populated(memory.range()), Ok(130));
        let set = pagemap.populated_set(memory.range()).unwrap();
        assert!(set.count() == 130 && set.has(0) && !set.has(1) && set.has(258) && !set.has(600));
        assert_eq!(pagemap.huge(memory.range()), Ok(0));
    }
}
