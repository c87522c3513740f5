//! Reads a process's page tables: which pages exist, and of which kind.
//!
//! `PAGEMAP_SCAN` (Linux 6.7) walks a range under the kernel's lock and returns runs: half a
//! microsecond for a few dozen pages. Nothing here changes the pages.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::ioctl::{Opcode, ioctl, opcode};

use crate::faults::{self, Call, NOWHERE};
use crate::memory_map::PAGE_BYTES;
use crate::userfaultfd::Range;

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

/// Consecutive pages in memory that only this process has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Private {
    /// Their addresses.
    pub range: Range,
    /// Whether they are parts of huge pages.
    pub huge: bool,
}

/// Some of the first [`PageSet::MOST`] pages of a range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageSet([u64; Self::MOST / 64]);

impl PageSet {
    /// The pages of a huge page.
    pub const MOST: usize = 512;

    /// Adds the pages of `part`, which is inside `whole`.
    pub fn add(&mut self, whole: Range, part: Range) {
        let mut page = (part.start.saturating_sub(whole.start) / PAGE_BYTES) as usize;
        let end = (page + (part.len / PAGE_BYTES) as usize).min(Self::MOST);
        while page < end {
            let bits = (64 - page % 64).min(end - page);
            self.0[page / 64] |= u64::MAX >> (64 - bits) << (page % 64);
            page += bits;
        }
    }

    /// Whether a page is in the set.
    #[must_use]
    pub fn has(&self, page: usize) -> bool {
        self.0.get(page / 64).is_some_and(|word| word & (1 << (page % 64)) != 0)
    }

    /// The number of pages in the set.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.0.iter().map(|word| word.count_ones()).sum()
    }

    /// The first page in the set.
    #[must_use]
    pub fn first(&self) -> Option<usize> {
        let word = self.0.iter().position(|&word| word != 0)?;
        Some(word * 64 + self.0[word].trailing_zeros() as usize)
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// The parts of `whole` whose pages are in the set, each of maximal length.
    pub fn parts(&self, whole: Range) -> impl Iterator<Item = Range> {
        let mut page = 0;
        std::iter::from_fn(move || {
            let first = (page..Self::MOST).find(|&page| self.has(page))?;
            page = (first..Self::MOST).find(|&page| !self.has(page)).unwrap_or(Self::MOST);
            let start = whole.start + first as u64 * PAGE_BYTES;
            Some(Range { start, len: (page - first) as u64 * PAGE_BYTES })
        })
    }

    /// Whether the sets have a common page.
    #[must_use]
    pub fn meets(&self, other: &Self) -> bool {
        self.0.iter().zip(other.0).any(|(one, other)| one & other != 0)
    }
}

/// A process's page tables, read-only.
#[derive(Debug)]
pub struct Pagemap(File);

impl Pagemap {
    /// Opens the page tables of this process.
    ///
    /// # Errors
    /// When `/proc` is not mounted.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn open() -> std::io::Result<Self> {
        let open = || {
            File::open("/proc/self/pagemap")
                .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
        };
        Ok(Self(faults::call(Call::OpenProc, NOWHERE, open)?))
    }

    /// Opens those of another process; the caller needs the right to trace it.
    ///
    /// # Errors
    /// When the process is gone, or this is not permitted.
    pub fn of(pid: u32) -> std::io::Result<Self> {
        File::open(format!("/proc/{pid}/pagemap")).map(Self)
    }

    /// The pages of `range` that are in memory and belong to this process only, in ascending
    /// order: no holes, no page of zeros, no file mappings, no swapped pages.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn private(&self, range: Range) -> Result<Vec<Private>, Errno> {
        self.present(range, PAGE_IS_FILE | PAGE_IS_PFNZERO)
    }

    /// The same including the page of zeros: pages that can be read without changing anything.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn readable(&self, range: Range) -> Result<Vec<Private>, Errno> {
        self.present(range, PAGE_IS_FILE)
    }

    /// The pages of `range` that are in memory and shared with a file: no holes, no private
    /// copies.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn of_file(&self, range: Range) -> Result<Vec<Range>, Errno> {
        let mut pages = Vec::new();
        self.each_of_file(range, |found| pages.push(found))?;
        Ok(pages)
    }

    /// The run of such pages around `address`. Does not allocate.
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

    /// The number of pages of `range` with content, in memory or swapped out.
    ///
    /// # Errors
    /// The kernel's; `ENOTTY` before Linux 6.7.
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn populated(&self, range: Range) -> Result<u64, Errno> {
        self.count(range, PAGE_IS_PRESENT | PAGE_IS_SWAPPED)
    }

    /// The address of the first page of `range` with content, in memory or swapped out. Does not
    /// allocate.
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

    /// The pages of `range`, at most [`PageSet::MOST`], that have content, in memory or swapped
    /// out. Does not allocate.
    ///
    /// # Errors
    /// As for [`Self::populated`].
    #[cfg_attr(feature = "faults", track_caller)]
    pub fn populated_set(&self, range: Range) -> Result<PageSet, Errno> {
        let any = PAGE_IS_PRESENT | PAGE_IS_SWAPPED;
        let wanted = ScanArg { category_anyof_mask: any, return_mask: any, ..ScanArg::default() };
        let mut set = PageSet::default();
        self.scan(range, wanted, |found| set.add(range, found.range()))?;
        Ok(set)
    }

    /// The number of pages of `range` that are parts of huge pages.
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

    /// Passes every run of pages of `range` that matches `wanted` to `hand_over`.
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
    /// Fills `found` with the runs that match `arg`; returns the number of entries.
    #[cfg_attr(feature = "faults", track_caller)]
    fn ask(&self, arg: &mut ScanArg, found: &mut [Found]) -> Result<usize, Errno> {
        arg.size = size_of::<ScanArg>() as u64;
        arg.vec = found.as_mut_ptr().addr() as u64;
        arg.vec_len = found.len() as u64;
        let part = Range { start: arg.start, len: arg.end - arg.start };
        // SAFETY: the structure is the one of this request, and `found` has the length in it.
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

/// [`SCAN`]; returns the number of entries that the kernel filled in.
struct ScanRequest<'a>(&'a mut ScanArg);

// SAFETY: the kernel reads and writes a `ScanArg`; the maker ensures that its `vec` is valid.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_map::{Advice, HUGE_PAGE_BYTES, Reserved, pointer};

    #[test]
    fn a_set_holds_what_was_added_and_nothing_else() {
        let range = |first: usize, pages: usize| Range {
            start: 4096 + first as u64 * PAGE_BYTES,
            len: pages as u64 * PAGE_BYTES,
        };
        let whole = range(0, PageSet::MOST);
        for (first, pages) in [(0, 1), (63, 2), (5, 59), (64, 64), (1, 510), (0, 512), (500, 40)] {
            let mut set = PageSet::default();
            assert_eq!((set.first(), set.is_empty()), (None, true));
            set.add(whole, range(first, pages));
            let end = (first + pages).min(PageSet::MOST);
            assert!((0..PageSet::MOST).all(|page| set.has(page) == (first..end).contains(&page)));
            assert_eq!((set.first(), set.count() as usize), (Some(first), end - first));
        }
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
