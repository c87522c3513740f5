//! A RAM block, made as QEMU makes one: it reserves addresses, maps memory over them, and gives
//! advice about the whole block.

use std::ffi::c_void;

pub(crate) const PAGE: usize = 4096;
const HUGE: usize = 2 << 20;

/// Mapped memory from which traps may take pages at any time: accessed by raw pointers only.
#[derive(Clone, Copy)]
pub(crate) struct RawBlock {
    start: usize,
    pages: usize,
}

impl RawBlock {
    pub(crate) fn plug(mib: usize, kind: &str) -> Result<Self, String> {
        let bytes = mib << 20;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let (flags, fd) = match kind {
            "private" => (anonymous, -1),
            "shared" => (libc::MAP_SHARED, memfd(bytes, 0)?),
            "file" => (libc::MAP_PRIVATE, memfd(bytes, 0)?),
            "hugetlb" => (anonymous | libc::MAP_HUGETLB, -1),
            _ => return Err(format!("no such kind {kind}")),
        };
        let readable = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: addresses that are not in use; the second call maps over a part of the first.
        let start = unsafe {
            let reserve = anonymous | libc::MAP_NORESERVE;
            let whole =
                libc::mmap(std::ptr::null_mut(), bytes + HUGE, libc::PROT_NONE, reserve, -1, 0);
            let start = whole.addr().next_multiple_of(HUGE);
            let flags = flags | libc::MAP_FIXED;
            if libc::mmap(at(start), bytes, readable, flags, fd, 0) == libc::MAP_FAILED {
                return Err(format!("mmap: {}", std::io::Error::last_os_error()));
            }
            let lead = start - whole.addr();
            if lead > 0 {
                libc::munmap(whole, lead);
            }
            libc::munmap(at(start + bytes), HUGE - lead);
            libc::madvise(at(start), bytes, libc::MADV_HUGEPAGE);
            libc::madvise(at(start), bytes, libc::MADV_DONTFORK);
            start
        };
        Ok(Self { start, pages: bytes / PAGE })
    }

    pub(crate) fn unplug(self) -> Result<String, String> {
        // SAFETY: the block is no longer in use.
        outcome(unsafe { libc::munmap(self.page(0).cast(), self.pages * PAGE) })
    }

    /// Maps a page afresh, as QEMU does after a hardware memory error.
    pub(crate) fn remap(&self, page: usize) -> Result<String, String> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
        let readable = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: over a page of the block.
        let mapped = unsafe { libc::mmap(self.page(page).cast(), PAGE, readable, flags, -1, 0) };
        outcome(if mapped == libc::MAP_FAILED { -1 } else { 0 })
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    pub(crate) fn page(&self, page: usize) -> *mut u8 {
        at(self.start + page * PAGE).cast()
    }

    /// Writes to every page a pattern that only this page has.
    pub(crate) fn fill(&self, seed: usize) -> Result<String, String> {
        for page in 0..self.pages {
            self.write(page, stamp(page, seed));
        }
        Ok(self.pages.to_string())
    }

    pub(crate) fn check(&self, seed: usize) -> Result<String, String> {
        let bad = (0..self.pages).filter(|&page| !self.reads(page, stamp(page, seed))).count();
        if bad == 0 { Ok(self.pages.to_string()) } else { Err(format!("{bad} pages")) }
    }

    /// Writes the pattern to some of the pages.
    pub(crate) fn stamp(&self, first: usize, pages: usize, seed: usize) -> Result<String, String> {
        (first..first + pages).for_each(|page| self.write(page, stamp(page, seed)));
        Ok(pages.to_string())
    }

    /// Whether each of these pages holds what `fill` or `stamp` wrote there; with `or_zeros`,
    /// zeros will do.
    pub(crate) fn holds(
        &self,
        first: usize,
        pages: usize,
        seed: usize,
        or_zeros: bool,
    ) -> Result<String, String> {
        let is_good =
            |page: usize| self.reads(page, stamp(page, seed)) || or_zeros && self.reads(page, 0);
        let bad = |page: &usize| !is_good(*page);
        let bad: Vec<String> = (first..first + pages)
            .filter(bad)
            .map(|page| format!("{page}{}", if self.reads(page, 0) { " (zeros)" } else { "" }))
            .collect();
        if bad.is_empty() { Ok(pages.to_string()) } else { Err(bad.join(", ")) }
    }

    pub(crate) fn touch(&self, page: usize) -> Result<String, String> {
        // SAFETY: memory of the block.
        Ok(unsafe { self.page(page).read_volatile() }.to_string())
    }

    pub(crate) fn discard(&self, first: usize, pages: usize) -> Result<String, String> {
        // SAFETY: the content is not needed.
        outcome(unsafe {
            libc::madvise(self.page(first).cast(), pages * PAGE, libc::MADV_DONTNEED)
        })
    }

    /// Discards as QEMU does for free-page reports: in blocks of 2 MiB.
    pub(crate) fn report(&self, first: usize, pages: usize) -> Result<String, String> {
        for at in (first..first + pages).step_by(HUGE / PAGE) {
            self.discard(at, (HUGE / PAGE).min(first + pages - at))?;
        }
        Ok(String::new())
    }

    /// Writes `bytes` bytes to each of these pages, as a program does with fresh memory; returns
    /// the time in microseconds.
    pub(crate) fn use_anew(
        &self,
        first: usize,
        pages: usize,
        bytes: usize,
    ) -> Result<String, String> {
        let began = std::time::Instant::now();
        for page in first..first + pages {
            // SAFETY: a page of the block.
            unsafe { self.page(page).write_bytes(0x5a, bytes.min(PAGE)) };
        }
        Ok(began.elapsed().as_micros().to_string())
    }

    /// Has the kernel drop freed pages, as it does when memory is short.
    pub(crate) fn drop_freed(&self, first: usize, pages: usize) -> Result<String, String> {
        // SAFETY: this discards freed memory, and nothing else.
        outcome(unsafe { libc::madvise(self.page(first).cast(), pages * PAGE, libc::MADV_PAGEOUT) })
    }

    /// Writes zeros.
    pub(crate) fn clear(&self, first: usize, pages: usize) -> Result<String, String> {
        (first..first + pages).for_each(|page| self.write(page, 0));
        Ok(pages.to_string())
    }

    pub(crate) fn zeros(&self, first: usize, pages: usize) -> Result<String, String> {
        let bad = (first..first + pages).filter(|&page| !self.reads(page, 0)).count();
        if bad == 0 { Ok(pages.to_string()) } else { Err(format!("{bad} pages are not zero")) }
    }

    /// Fills a page with words that are derived from `stamp`; 0 means zeros.
    pub(crate) fn write(&self, page: usize, stamp: u64) {
        // SAFETY: a page of the block.
        unsafe { self.page(page).cast::<Words>().write_volatile(words(stamp)) };
    }

    pub(crate) fn reads(&self, page: usize, stamp: u64) -> bool {
        // SAFETY: a page of the block.
        unsafe { self.page(page).cast::<Words>().read_volatile() == words(stamp) }
    }
}

type Words = [u64; PAGE / 8];

fn words(stamp: u64) -> Words {
    let mut words = [0; PAGE / 8];
    if stamp != 0 {
        let mut last = 0_u64;
        for word in &mut words {
            last = last.wrapping_add(stamp);
            *word = last;
        }
    }
    words
}

fn stamp(page: usize, seed: usize) -> u64 {
    (page as u64 + 1) << 20 | seed as u64
}

fn memfd(bytes: usize, flags: u32) -> Result<i32, String> {
    // SAFETY: a name that ends with a zero byte, and a local descriptor.
    unsafe {
        let fd = libc::memfd_create(c"ram".as_ptr(), flags);
        if fd < 0 || libc::ftruncate(fd, bytes as i64) != 0 {
            return Err(format!("memfd: {}", std::io::Error::last_os_error()));
        }
        Ok(fd)
    }
}

pub(crate) fn at(address: usize) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address)
}

pub(crate) fn outcome(result: i32) -> Result<String, String> {
    if result == 0 { Ok(String::new()) } else { Err(std::io::Error::last_os_error().to_string()) }
}
