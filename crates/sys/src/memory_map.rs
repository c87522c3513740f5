//! Anonymous memory by address: reserving, advising, and seeing which pages are there.
//!
//! **Problem.** Who moves pages about must speak of memory that is not his (a guest's RAM, mapped by
//! QEMU), which no reference may ever point into: it changes, and touching it may trap.
//!
//! **Idea.** Addresses are numbers ([`Range`]). What could break somebody's memory is `unsafe`; what only
//! looks (`PAGEMAP_SCAN`, Linux 6.7) or concerns a mapping of ours ([`Reserved`]) is not.
//!
//! **Invariants.** The calls go to the kernel directly, not through the C library: a library that
//! interposes `mmap` or `madvise` does not meet itself here.
//!
//! **Leaves out.** File mappings; see `shared_memory`.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, ioctl, opcode};
use rustix::mm::{MapFlags, MremapFlags, ProtFlags};

use crate::faults::{self, Call, NOWHERE};
pub use crate::userfaultfd::Range;
pub use rustix::mm::Advice;

/// What a page table's lowest level holds, as the length of an array.
pub const PAGE_LEN: usize = 4096;
/// The same among addresses.
pub const PAGE_BYTES: u64 = PAGE_LEN as u64;
/// What one huge page holds on x86-64 and on arm64 with small pages.
pub const HUGE_PAGE_BYTES: u64 = 2 << 20;

const SCAN: Opcode = opcode::read_write::<ScanArg>(b'f', 16);
const PAGE_IS_FILE: u64 = 1 << 2;
const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_SWAPPED: u64 = 1 << 4;
const PAGE_IS_PFNZERO: u64 = 1 << 5;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// `struct pm_scan_arg`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

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
        // SAFETY: the mapping is ours and nobody keeps references into it. It cannot fail for a whole
        // mapping.
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
    /// The kernel's: nothing has changed then. `ENOMEM` also when the process has too many mappings.
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

/// Memory that nobody has touched, to be mapped over other memory in one step: what is registered or advised of it, or
/// mapped in its place, holds there from the first moment. (The kernel gives memory that was never touched its place among the
/// process's pages anew, so that it becomes one mapping with what is like it on both sides.)
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
        let new = Self { whole: Range { start, len: whole_len }, used };
        // A border on both sides: it must not become one mapping with what the process has touched.
        // SAFETY: reserved just now.
        unsafe { Over { range: used, reserve }.map_fresh() }?;
        Ok(new)
    }

    /// Where it is.
    #[must_use]
    pub fn range(&self) -> Range {
        self.used
    }

    /// Maps as much as `range` has over it, and stays untouched itself. Who waits for a page of `range` has to be
    /// woken, and looks again.
    ///
    /// # Safety
    /// Nobody relies on what is there, and no reference points to it. If this is registered with a userfaultfd,
    /// another thread reads that.
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

/// Pages that a process has to itself, in memory, side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    /// Where.
    pub range: Range,
    /// Whether they are parts of huge pages.
    pub huge: bool,
}

/// Some of the first [`PageSet::MOST`] pages of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSet([u64; Self::MOST / 64]);

impl PageSet {
    /// A huge page has so many pages.
    pub const MOST: usize = 512;

    /// Adds the pages of `part`, which lies in `whole`.
    pub fn add(&mut self, whole: Range, part: Range) {
        let first = (part.start.saturating_sub(whole.start) / PAGE_BYTES) as usize;
        let pages = (part.len / PAGE_BYTES) as usize;
        for page in first..(first + pages).min(Self::MOST) {
            self.0[page / 64] |= 1 << (page % 64);
        }
    }

    /// Whether a page is in it.
    #[must_use]
    pub fn has(&self, page: usize) -> bool {
        self.0.get(page / 64).is_some_and(|word| word & (1 << (page % 64)) != 0)
    }

    /// How many pages are in it.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// The first page that is in it.
    #[must_use]
    pub fn first(&self) -> Option<usize> {
        (0..Self::MOST).find(|&page| self.has(page))
    }

    /// Whether no page is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// Whether a page is in both.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).any(|(one, other)| one & other != 0)
    }
}

/// A process's page tables, to look at.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens that of this process.
    ///
    /// # Errors
    /// When `/proc` is not there.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn open() -> std::io::Result<Self> {
        let open = || {
            File::open("/proc/self/pagemap")
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
        };
        Ok(Self(faults::call(Call::OpenProc, NOWHERE, open)?))
    }

    /// Opens another process's, which may be looked into by whoever may trace it.
    ///
    /// # Errors
    /// When it is gone, or not permitted.
    pub fn of(pid: u32) -> std::io::Result<Self> {
        File::open(format!("/proc/{pid}/pagemap")).map(Self)
    }

    /// The pages of `range` that are in memory and that the process has to itself, in ascending order:
    /// not holes, not the page of zeros, not what is mapped from a file, not what is swapped out.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn private(&self, range: Range) -> Result<Vec<Private>, Errno> {
        self.present(range, PAGE_IS_FILE | PAGE_IS_PFNZERO)
    }

    /// The same with the page of zeros: what can be read without changing anything.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn readable(&self, range: Range) -> Result<Vec<Private>, Errno> {
        self.present(range, PAGE_IS_FILE)
    }

    /// The pages of `range` that are in memory and shared with a file: not holes, not private copies.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn of_file(&self, range: Range) -> Result<Vec<Range>, Errno> {
        let mut pages = Vec::new();
        self.each_of_file(range, |found| pages.push(found))?;
        Ok(pages)
    }

    /// Those of them that are side by side around `address`. Does not allocate.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn of_file_around(&self, range: Range, address: u64) -> Result<Option<Range>, Errno> {
        let mut around = None;
        self.each_of_file(range, |found| {
            let holds = (found.start..found.start + found.len).contains(&address);
            around = around.or_else(|| holds.then_some(found));
        })?;
        Ok(around)
    }

    #[cfg_attr(feature = "faults", track_caller)]
    fn each_of_file(&self, range: Range, mut each: impl FnMut(Range)) -> Result<(), Errno> {
        let wanted = ScanArg {
            category_mask: PAGE_IS_PRESENT | PAGE_IS_FILE,
            return_mask: PAGE_IS_FILE,
            ..ScanArg::default()
        };
        self.scan(range, wanted, |found| each(found.range()))
    }

    #[cfg_attr(feature = "faults", track_caller)]
    fn present(&self, range: Range, but_not: u64) -> Result<Vec<Private>, Errno> {
        let mut pages = Vec::new();
        let wanted = ScanArg {
            category_inverted: but_not,
            category_mask: PAGE_IS_PRESENT | but_not,
            return_mask: PAGE_IS_HUGE,
            ..ScanArg::default()
        };
        self.scan(range, wanted, |found| {
            let huge = found.categories & PAGE_IS_HUGE != 0;
            pages.push(Private { range: found.range(), huge });
        })?;
        Ok(pages)
    }

    /// How many pages of `range` have content, in memory or swapped out.
    ///
    /// # Errors
    /// The kernel's; `ENOTTY` before Linux 6.7.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn populated(&self, range: Range) -> Result<u64, Errno> {
        self.count(range, PAGE_IS_PRESENT | PAGE_IS_SWAPPED)
    }

    /// Where the first page of `range` with content is, in memory or swapped out. Does not allocate.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn first_populated(&self, range: Range) -> Result<Option<u64>, Errno> {
        let any = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let end = range.start + range.len;
        let (mut start, mut found) = (range.start, [Found::default(); 1]);
        while start < end {
            let mut arg = ScanArg {
                start,
                end,
                category_anyof_mask: any,
                return_mask: any,
                ..ScanArg::default()
            };
            if self.ask(&mut arg, &mut found)? > 0 {
                return Ok(Some(found[0].start));
            }
            if arg.walk_end <= start {
                break;
            }
            start = arg.walk_end;
        }
        Ok(None)
    }

    /// Which pages of `range`, at most [`PageSet::MOST`] of them, have content, in memory or swapped out. Does not allocate.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn populated_set(&self, range: Range) -> Result<PageSet, Errno> {
        self.set(range, PAGE_IS_PRESENT | PAGE_IS_SWAPPED, 0)
    }

    /// Which of them are in memory and shared with a file: not holes, not private copies. Does not allocate.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn of_file_set(&self, range: Range) -> Result<PageSet, Errno> {
        self.set(range, PAGE_IS_PRESENT, PAGE_IS_FILE)
    }

    #[cfg_attr(feature = "faults", track_caller)]
    fn set(&self, range: Range, any_of: u64, all_of: u64) -> Result<PageSet, Errno> {
        let wanted = ScanArg {
            category_mask: all_of,
            category_anyof_mask: any_of,
            return_mask: any_of | all_of,
            ..ScanArg::default()
        };
        let mut set = PageSet::default();
        self.scan(range, wanted, |found| set.add(range, found.range()))?;
        Ok(set)
    }

    /// How many pages of `range` are parts of huge pages.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn huge(&self, range: Range) -> Result<u64, Errno> {
        self.count(range, PAGE_IS_HUGE)
    }

    #[cfg_attr(feature = "faults", track_caller)]
    fn count(&self, range: Range, categories: u64) -> Result<u64, Errno> {
        let wanted = ScanArg {
            category_anyof_mask: categories,
            return_mask: categories,
            ..ScanArg::default()
        };
        let mut pages = 0;
        self.scan(range, wanted, |found| pages += found.pages())?;
        Ok(pages)
    }

    /// Hands over every run of pages of `range` that fits `wanted`.
    #[cfg_attr(feature = "faults", track_caller)]
    fn scan(
        &self,
        range: Range,
        wanted: ScanArg,
        mut hand_over: impl FnMut(&Found),
    ) -> Result<(), Errno> {
        let end = range.start + range.len;
        let mut found = [Found::default(); 64];
        let mut start = range.start;
        while start < end {
            let mut arg = ScanArg { start, end, ..wanted };
            let filled = self.ask(&mut arg, &mut found)?;
            found[..filled].iter().for_each(&mut hand_over);
            if arg.walk_end <= start {
                break;
            }
            start = arg.walk_end;
        }
        Ok(())
    }
}

impl Pagemap {
    /// Fills in what fits `arg`; answers how many entries it filled in.
    #[cfg_attr(feature = "faults", track_caller)]
    fn ask(&self, arg: &mut ScanArg, found: &mut [Found]) -> Result<usize, Errno> {
        arg.size = size_of::<ScanArg>() as u64;
        arg.vec = found.as_mut_ptr().addr() as u64;
        arg.vec_len = found.len() as u64;
        let part = Range { start: arg.start, len: arg.end - arg.start };
        // SAFETY: the structure is the one of this request, and `found` has the length it says.
        let ask = || unsafe { ioctl(&self.0, ScanRequest(arg)) };
        Ok(faults::call(Call::Scan, part, ask)?.min(found.len()))
    }
}

impl AsFd for Pagemap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// `struct page_region`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Found {
    start: u64,
    end: u64,
    categories: u64,
}

impl Found {
    fn range(&self) -> Range {
        Range { start: self.start, len: self.end.saturating_sub(self.start) }
    }

    fn pages(&self) -> u64 {
        self.range().len / PAGE_BYTES
    }
}

/// [`SCAN`]: answers how many entries it filled in.
struct ScanRequest<'a>(&'a mut ScanArg);

// SAFETY: the kernel reads and writes a `ScanArg`; what its `vec` points to is the maker's care.
unsafe impl rustix::ioctl::Ioctl for ScanRequest<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        SCAN
    }

    fn as_ptr(&mut self) -> *mut rustix::ffi::c_void {
        std::ptr::from_mut(self.0).cast()
    }

    unsafe fn output_from_ptr(
        output: rustix::ioctl::IoctlOutput,
        _: *mut rustix::ffi::c_void,
    ) -> rustix::io::Result<usize> {
        Ok(usize::try_from(output).unwrap_or(0))
    }
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
        assert!(pagemap.of_file_set(memory.range()).unwrap().is_empty());
        assert_eq!(pagemap.huge(memory.range()), Ok(0));
    }

    #[test]
    fn private_pages_are_those_that_were_written_and_nothing_else() {
        let memory = Reserved::new(HUGE_PAGE_BYTES).unwrap();
        let pagemap = Pagemap::of(std::process::id()).unwrap();
        let page = |index: u64| memory.range().start + index * PAGE_BYTES;
        let pointer = |index| pointer(Range { start: page(index), len: 1 }).cast::<u8>();
        // SAFETY: fresh memory of ours.
        unsafe {
            memory.advise(Advice::LinuxNoHugepage).unwrap();
            [3, 4, 5, 9].into_iter().for_each(|index| pointer(index).write(1));
            // Reading a hole maps the page of zeros.
            assert_eq!(pointer(6).read_volatile(), 0);
        }
        let range = |first, count| Range { start: page(first), len: count * PAGE_BYTES };
        let runs = [(3, 3), (9, 1)].map(|(at, len)| Private { range: range(at, len), huge: false });
        assert_eq!(pagemap.private(memory.range()), Ok(runs.to_vec()));
        let readable = pagemap.readable(memory.range()).unwrap();
        assert_eq!(
            readable.iter().map(|part| part.range).collect::<Vec<_>>(),
            [range(3, 4), range(9, 1)]
        );
        assert_eq!(
            pagemap.private(range(4, 1)),
            Ok(vec![Private { range: range(4, 1), huge: false }])
        );
    }

    #[test]
    fn the_structures_are_the_kernels() {
        assert_eq!(size_of::<ScanArg>(), size_of::<linux_raw_sys::general::pm_scan_arg>());
        assert_eq!(size_of::<Found>(), size_of::<linux_raw_sys::general::page_region>());
        assert_eq!(PAGE_IS_FILE, linux_raw_sys::general::PAGE_IS_FILE.into());
        assert_eq!(PAGE_IS_PFNZERO, linux_raw_sys::general::PAGE_IS_PFNZERO.into());
        assert_eq!(PAGE_IS_HUGE, linux_raw_sys::general::PAGE_IS_HUGE.into());
        assert_eq!(PAGE_IS_SWAPPED, linux_raw_sys::general::PAGE_IS_SWAPPED.into());
        assert_eq!(PAGE_IS_PRESENT, linux_raw_sys::general::PAGE_IS_PRESENT.into());
    }
}
