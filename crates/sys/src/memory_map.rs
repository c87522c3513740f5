//! Anonymous memory by address: reserving, advising, mapping; `pagemap` reports its pages.
//!
//! **Problem.** Code that moves pages must address memory that it does not own (a guest's RAM,
//! mapped by QEMU). No reference may ever point into that memory: it changes, and touching it may
//! trap.
//!
//! **Idea.** Addresses are numbers ([`Range`]). Calls that could corrupt memory are `unsafe`;
//! calls that only read (`PAGEMAP_SCAN`, Linux 6.7) or concern a mapping of ours ([`Reserved`])
//! are not.
//!
//! **Invariants.** The calls go to the kernel directly, not through the C library, so a library
//! that interposes `mmap` or `madvise` does not intercept its own calls here.
//!
//! **Left out**: file mappings; see `shared_memory`.

use std::os::fd::BorrowedFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use crate::faults::{self, Call, NOWHERE};
pub use crate::pagemap::{PageSet, Pagemap, Private};
pub use crate::userfaultfd::Range;
pub use rustix::mm::Advice;

/// The size of a page, as the length of an array.
pub const PAGE_LEN: usize = 4096;
/// The size of a page, for addresses.
pub const PAGE_BYTES: u64 = PAGE_LEN as u64;
/// The size of a huge page on x86-64 and on arm64 with 4 KiB pages.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

/// Private anonymous memory of ours, without pages until it is touched, and unmapped when
/// dropped.
#[derive(Debug)]
pub struct Reserved {
    whole: Range,
    used: Range,
}

impl Reserved {
    /// Reserves `len` bytes that begin at a huge page's boundary. The kernel does not account
    /// them as committed memory.
    ///
    /// # Errors
    /// The kernel's; `EOVERFLOW` if the length is impossible.
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

    /// Its addresses.
    #[must_use]
    pub fn range(&self) -> Range {
        self.used
    }

    /// Advises the kernel about all of it.
    ///
    /// # Safety
    /// No code relies on content that the advice discards.
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
        // SAFETY: the mapping is ours and no references into it are left. Unmapping a whole
        // mapping cannot fail.
        let _ = unsafe { unmap(self.whole) };
    }
}

/// Advises the kernel about a range of this process.
///
/// # Safety
/// No code relies on content that the advice discards.
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
/// No code uses it.
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

/// A mapping over addresses that are in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Over {
    /// Its addresses.
    pub range: Range,
    /// Whether the kernel accounts it as committed memory.
    pub reserve: bool,
}

impl Over {
    /// Maps fresh private memory: zeros.
    ///
    /// # Safety
    /// No code relies on the old content, and no reference points to it.
    ///
    /// # Errors
    /// The kernel's; nothing has changed then. `ENOMEM` also if the process has too many
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

    /// Does the same where nothing is mapped.
    ///
    /// # Errors
    /// The kernel's; `EEXIST` if there is a mapping, which stays.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn map_fresh_into_hole(self) -> Result<(), Errno> {
        let flags = self.flags().difference(MapFlags::FIXED) | MapFlags::FIXED_NOREPLACE;
        // SAFETY: nothing that exists is mapped over.
        faults::call(Call::MapIntoHole, self.range, || unsafe {
            rustix::mm::mmap_anonymous(pointer(self.range), length(self.range), ACCESS, flags)
        })?;
        Ok(())
    }

    /// Maps the bytes of a file from `offset` on; a write makes a private copy.
    ///
    /// # Safety
    /// No code relies on the old content unless the file holds the same, and no reference points
    /// to it.
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

/// Untouched memory, to be mapped over other memory in one step. A registration, an advice or a
/// mapping in it then applies at the target from the first moment. (The kernel computes the place
/// of untouched memory among the process's pages again, so it merges with similar mappings on
/// both sides.)
#[derive(Debug)]
pub struct Untouched {
    whole: Range,
    used: Range,
}

impl Untouched {
    /// Maps `len` bytes; the kernel accounts them as committed memory if `reserve` is set.
    ///
    /// # Errors
    /// The kernel's; `EOVERFLOW` if the length is impossible.
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
        // A guard on both sides keeps it from merging with memory that the process has touched.
        // If this fails, the kernel may have unmapped it, and other code may have mapped
        // something there. So the addresses are left alone.
        // SAFETY: reserved just now.
        unsafe { Over { range: used, reserve }.map_fresh() }?;
        Ok(Self { whole: Range { start, len: whole_len }, used })
    }

    /// Its addresses.
    #[must_use]
    pub fn range(&self) -> Range {
        self.used
    }

    /// Maps the first part of this memory over `range` and stays untouched itself. A thread that
    /// waits for a page of `range` must be woken, and then retries.
    ///
    /// # Safety
    /// No code relies on the old content, and no reference points to it. If this memory is
    /// registered with a userfaultfd, another thread reads that.
    /// # Errors
    /// The kernel's. `range` may be unmapped then: [`Over::map_fresh_into_hole`] tells.
    #[cfg_attr(feature = "faults", track_caller)]
    pub unsafe fn map_over(&self, range: Range) -> Result<(), Errno> {
        let bytes = length(range);
        // Moving to an address takes `MAYMOVE | FIXED`; `DONTUNMAP` keeps the mapping here.
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
        // SAFETY: the mapping is ours and no references into it are left.
        let _ = unsafe { unmap(self.whole) };
    }
}

const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Whether all bytes are zero.
#[must_use]
pub fn is_zeros(bytes: &[u8]) -> bool {
    // Without a branch for each byte the compiler vectorizes the loop.
    bytes.chunks(64).all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
}

pub(crate) fn pointer(range: Range) -> *mut rustix::ffi::c_void {
    std::ptr::with_exposed_provenance_mut(length_of(range.start))
}

pub(crate) fn length(range: Range) -> usize {
    length_of(range.len)
}

/// Addresses of this process fit into `usize`; a larger one names memory that cannot exist.
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
