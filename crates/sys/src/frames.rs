//! The physical frames behind a process's memory: the proof of which processes share which pages.
//!
//! **Idea.** Two processes share a page if the same frame is behind both, independent of the
//! cause and of any bookkeeping. `/proc/<pid>/pagemap` gives the frame of each page (entries of
//! 64 bits, `pagemap.rst`).
//!
//! **Limits.** The kernel shows frames to `CAP_SYS_ADMIN` only. The answer is not a snapshot: a
//! frame that one process has just freed may belong to another by the time of the read. A look
//! takes some milliseconds for each 100 MiB.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::FileExt;

use crate::memory_map::{HUGE_PAGE_BYTES, PAGE_BYTES, Pagemap, Range};
use crate::pool_maps;
use crate::remote_memory::RemoteMemory;

const ENTRY_BYTES: u64 = 8;
const IS_PRESENT: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;
const IS_SWAPPED: u64 = 1 << 62;
/// `KPF_ZERO_PAGE`: the kernel's own page of zeros, small or huge.
const IS_ZEROS: u64 = 1 << 24;
/// `KPF_SWAPBACKED`: memory that the kernel must swap out to reclaim it. Lazily freed pages do
/// not have this flag.
const IS_SWAP_BACKED: u64 = 1 << 14;
/// `KPF_COMPOUND_HEAD`, `KPF_COMPOUND_TAIL`: parts of a larger page. Older kernels give its other
/// flags only for the head.
const IS_HEAD: u64 = 1 << 15;
const IS_TAIL: u64 = 1 << 16;
/// The most frames of a page; each page begins at a multiple of its size.
const MOST_FRAMES: u64 = 512;
const MOST_PAGES: usize = 512;

/// The frames behind a QEMU process's guest RAM: its anonymous memory (some of which is QEMU's
/// own) and its mappings of pools. Pages of pools are touched first, because they are mapped only
/// on access.
///
/// # Errors
/// When the process is gone or may not be inspected, or the kernel does not show frames.
pub fn of_guest(pid: u32) -> io::Result<BTreeSet<u64>> {
    Ok(pages_of_guest(pid)?.into_iter().map(|(_, frame)| frame).collect())
}

/// The same page by page: each page's address and its frame.
///
/// # Errors
/// As for [`of_guest`].
pub fn pages_of_guest(pid: u32) -> io::Result<Vec<(u64, u64)>> {
    let pools: Vec<Range> = pool_maps::mappings(pid)?.into_iter().map(|m| m.range).collect();
    let memory = RemoteMemory::of(pid).map_err(io::Error::other)?;
    for pool in &pools {
        (0..pool.len / PAGE_BYTES).for_each(|page| {
            memory.read(pool.start + page * PAGE_BYTES, &mut [0]);
        });
    }
    let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
    let mut pages = Vec::new();
    for range in anonymous(pid)?.into_iter().chain(pools) {
        add(&pagemap, range, &mut pages)?;
    }
    if pages.iter().any(|(_, frame)| *frame == 0) {
        return Err(not_shown());
    }
    Ok(pages)
}

/// The frames that hold zeros only and that the kernel shares among all processes.
///
/// # Errors
/// When `/proc/kpageflags` cannot be read.
pub fn zeros(frames: impl IntoIterator<Item = u64>) -> io::Result<BTreeSet<u64>> {
    let flags = File::open("/proc/kpageflags")?;
    let mut zeros = BTreeSet::new();
    for frame in frames {
        let mut entry = [0; 8];
        flags.read_exact_at(&mut entry, frame * ENTRY_BYTES)?;
        if u64::from_ne_bytes(entry) & IS_ZEROS != 0 {
            zeros.insert(frame);
        }
    }
    Ok(zeros)
}

/// A process's pages, and the kernel's flags of the frames behind them.
#[derive(Debug)]
pub struct Frames {
    pagemap: File,
    scan: Pagemap,
    /// Opened at the first use: the kernel shows the file to root only.
    flags: Option<File>,
}

impl Frames {
    /// The pages of a process.
    ///
    /// # Errors
    /// When the process is gone or may not be inspected.
    pub fn of(pid: u32) -> io::Result<Self> {
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        Ok(Self { pagemap, scan: Pagemap::of(pid)?, flags: None })
    }

    /// For each page of `range`, at most 512: whether it exists, in memory or swapped out.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn present(&self, range: Range) -> io::Result<Vec<bool>> {
        let mut bytes = [0; MOST_PAGES * 8];
        let is_there = |entry: u64| entry & (IS_PRESENT | IS_SWAPPED) != 0;
        Ok(self.entries(range, &mut bytes)?.map(is_there).collect())
    }

    /// For each page of `range`, at most 512: whether the process uses it, so that paging it out
    /// would swap it. A page that is absent, or was lazily freed and not examined by reclaim
    /// since, is not in use.
    ///
    /// # Errors
    /// When the process is gone, or the kernel does not show frames, or their flags.
    pub fn in_use(&mut self, range: Range) -> io::Result<Vec<bool>> {
        let mut bytes = [0; MOST_PAGES * 8];
        let is_block = range.len == HUGE_PAGE_BYTES && range.start.is_multiple_of(HUGE_PAGE_BYTES);
        if is_block && self.scan.huge(range) == Ok(MOST_FRAMES) {
            // A huge page has one answer; reading it for each part takes long. The entry is
            // checked again, because the page may just have changed.
            let first = Range { len: PAGE_BYTES, ..range };
            let entry = self.entries(first, &mut bytes)?.next().unwrap_or(0);
            if entry & (IS_PRESENT | IS_SWAPPED) == IS_PRESENT && entry & FRAME != 0 {
                let is_used = self.flags_of(entry & FRAME)? & IS_SWAP_BACKED != 0;
                return Ok(vec![is_used; MOST_PAGES]);
            }
        }
        let mut larger = Larger::default();
        self.entries(range, &mut bytes)?
            .map(|entry| match entry & FRAME {
                _ if entry & IS_SWAPPED != 0 => Ok(true),
                _ if entry & IS_PRESENT == 0 => Ok(false),
                0 => Err(not_shown()),
                frame => Ok(self.flags(frame, &mut larger)? & IS_SWAP_BACKED != 0),
            })
            .collect()
    }

    fn entries<'a>(
        &self,
        range: Range,
        bytes: &'a mut [u8; MOST_PAGES * 8],
    ) -> io::Result<impl Iterator<Item = u64> + use<'a>> {
        let pages = usize::try_from(range.len / PAGE_BYTES).unwrap_or(MOST_PAGES).min(MOST_PAGES);
        let bytes = &mut bytes[..pages * 8];
        self.pagemap.read_exact_at(bytes, range.start / PAGE_BYTES * ENTRY_BYTES)?;
        Ok(bytes.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry)))
    }

    /// A frame's flags, or those of the larger page to which it belongs.
    fn flags(&mut self, frame: u64, larger: &mut Larger) -> io::Result<u64> {
        if larger.frames.contains(&frame) {
            return Ok(larger.of(frame));
        }
        let flags = self.flags_of(frame)?;
        if flags & IS_TAIL == 0 && flags & IS_HEAD == 0 {
            return Ok(flags);
        }
        let first = frame / MOST_FRAMES * MOST_FRAMES;
        let mut bytes = [0; MOST_PAGES * 8];
        self.flags_file()?.read_exact_at(&mut bytes, first * ENTRY_BYTES)?;
        larger.flags = bytes.as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry)).collect();
        larger.frames = first..first + MOST_FRAMES;
        Ok(larger.of(frame))
    }

    fn flags_of(&mut self, frame: u64) -> io::Result<u64> {
        let mut entry = [0; 8];
        self.flags_file()?.read_exact_at(&mut entry, frame * ENTRY_BYTES)?;
        Ok(u64::from_ne_bytes(entry))
    }

    fn flags_file(&mut self) -> io::Result<&File> {
        let file = match self.flags.take() {
            Some(file) => file,
            None => File::open("/proc/kpageflags")?,
        };
        Ok(self.flags.insert(file))
    }
}

/// The flags of consecutive frames; if there is a larger page, it begins at the first.
#[derive(Default)]
struct Larger {
    frames: std::ops::Range<u64>,
    flags: Vec<u64>,
}

impl Larger {
    fn of(&self, frame: u64) -> u64 {
        let at = usize::try_from(frame - self.frames.start).unwrap_or(0);
        let to_head = self.flags[..=at].iter().rev().find(|flags| **flags & IS_TAIL == 0);
        to_head.copied().unwrap_or(0)
    }
}

fn not_shown() -> io::Error {
    let what = "the kernel shows physical frames to CAP_SYS_ADMIN only";
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

fn add(pagemap: &File, range: Range, pages: &mut Vec<(u64, u64)>) -> io::Result<()> {
    let mut bytes = [0; 1 << 15];
    let (mut at, end) = (
        range.start / PAGE_BYTES * ENTRY_BYTES,
        (range.start + range.len) / PAGE_BYTES * ENTRY_BYTES,
    );
    while at < end {
        let most = usize::try_from(end - at).map_or(bytes.len(), |left| left.min(bytes.len()));
        let read = pagemap.read_at(&mut bytes[..most], at)?;
        if read == 0 {
            break;
        }
        let entries = bytes[..read].as_chunks().0.iter().map(|entry| u64::from_ne_bytes(*entry));
        let addresses = (0..).map(|page| at / ENTRY_BYTES * PAGE_BYTES + page * PAGE_BYTES);
        let present = addresses.zip(entries).filter(|(_, entry)| entry & IS_PRESENT != 0);
        pages.extend(present.map(|(address, entry)| (address, entry & FRAME)));
        at += read as u64;
    }
    Ok(())
}

/// The process's anonymous mappings without a name, such as guest RAM.
fn anonymous(pid: u32) -> io::Result<Vec<Range>> {
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?);
    let mut ranges = Vec::new();
    for line in maps.split(b'\n') {
        ranges.extend(std::str::from_utf8(&line?).ok().and_then(parse));
    }
    Ok(ranges)
}

/// `7f00-7f10 rw-p 00000000 00:00 0`, and nothing after that.
fn parse(line: &str) -> Option<Range> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    if words.nth(3)? != "0" || words.next().is_some() {
        return None;
    }
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let start = hex(start)?;
    Some(Range { start, len: hex(end)?.checked_sub(start)? })
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;
    use crate::memory_map::{Advice, Over, PAGE_LEN, Reserved};
    use crate::pool_file::{PoolFile, PoolView};

    #[test]
    fn a_line_of_maps_is_read_and_what_has_a_file_or_a_name_is_not() {
        let range = Some(Range { start: 0x7f00_0000, len: 0x2000 });
        assert_eq!(parse("7f000000-7f002000 rw-p 00000000 00:00 0 "), range);
        assert_eq!(parse("7f000000-7f002000 r-xp 00000000 00:00 0          [vdso]"), None);
        assert_eq!(parse("7f000000-7f002000 r-xp 00000000 fe:00 77         /usr/bin/qemu"), None);
        assert_eq!(parse("7f000000-7f002000 r-xp 00000000 fe:00 77"), None);
        assert_eq!(parse(""), None);
    }

    fn frames_of(range: Range) -> BTreeSet<u64> {
        let mut pages = Vec::new();
        add(&File::open("/proc/self/pagemap").unwrap(), range, &mut pages).unwrap();
        pages.into_iter().map(|(_, frame)| frame).collect()
    }

    #[test]
    fn what_is_shared_has_one_frame_and_a_copy_another() {
        let guest = of_guest(std::process::id());
        let Some(_) = requires(Requirement::Frames, guest) else { return };
        let pool = PoolFile::create("overbook-pool-test", 1).unwrap();
        pool.write(0, &[1; PAGE_LEN]).unwrap();
        let view = PoolView::open(pool.reader().unwrap(), 1).unwrap();
        let memory = Reserved::new(3 * PAGE_BYTES).unwrap();
        let at = |page: u64| memory.range().start + page * PAGE_BYTES;
        let range = |page| Range { start: at(page), len: PAGE_BYTES };
        let byte = |page| -> *mut u8 {
            std::ptr::with_exposed_provenance_mut(usize::try_from(at(page)).unwrap())
        };
        for page in 0..3 {
            // SAFETY: memory of ours.
            unsafe { view.map_over(0, Over { range: range(page), reserve: false }) }.unwrap();
        }
        // SAFETY: memory of ours.
        unsafe { byte(2).write_volatile(2) };
        let all = of_guest(std::process::id()).unwrap();
        let [first, second, copy] = [0, 1, 2].map(|page| frames_of(range(page)));
        assert_eq!((first.len(), copy.len()), (1, 1), "those that nobody had touched, too");
        assert_eq!(first, second);
        assert_ne!(first, copy);
        assert!(all.is_superset(&first) && all.is_superset(&copy));
    }

    #[test]
    fn the_page_of_zeros_is_told_from_what_somebody_has_written() {
        let memory = Reserved::new(2 * PAGE_BYTES).unwrap();
        let start: *mut u8 =
            std::ptr::with_exposed_provenance_mut(usize::try_from(memory.range().start).unwrap());
        // SAFETY: memory of ours.
        unsafe {
            memory.advise(crate::memory_map::Advice::LinuxNoHugepage).unwrap();
            assert_eq!(start.read_volatile(), 0);
            start.add(PAGE_LEN).write_volatile(1);
        }
        let frames = frames_of(memory.range());
        let zeros = zeros(frames.iter().copied());
        let Some(zeros) = requires(Requirement::Frames, zeros) else { return };
        assert_eq!((frames.len(), zeros.len()), (2, 1));
    }

    #[test]
    fn what_is_lazily_free_or_not_there_is_not_in_use() {
        let memory = Reserved::new(2 * HUGE_PAGE_BYTES).unwrap();
        let start = memory.range().start.next_multiple_of(HUGE_PAGE_BYTES);
        let block = Range { start, len: HUGE_PAGE_BYTES };
        // SAFETY: memory of ours, which no code reads.
        let advise = |advice| unsafe { memory.advise(advice) }.unwrap();
        let mut frames = Frames::of(std::process::id()).unwrap();
        assert!(frames.in_use(block).unwrap().iter().all(|is_used| !is_used));
        for advice in [Advice::LinuxHugepage, Advice::LinuxNoHugepage] {
            advise(advice);
            for page in 0..MOST_FRAMES {
                let at = usize::try_from(start + page * PAGE_BYTES).unwrap();
                // SAFETY: memory of ours.
                unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at).write_volatile(1) };
            }
            let Some(in_use) = requires(Requirement::Frames, frames.in_use(block)) else { return };
            assert_eq!((in_use.len(), in_use.iter().filter(|used| **used).count()), (512, 512));
            assert!(frames.present(block).unwrap().iter().all(|there| *there));
            advise(Advice::LinuxFree);
            // Some small pages stay in the kernel's per-CPU batches between its LRU lists.
            let in_use = frames.in_use(block).unwrap();
            assert!(in_use.iter().filter(|used| **used).count() < 64, "{advice:?}");
            advise(Advice::LinuxDontNeed);
            assert!(frames.present(block).unwrap().iter().all(|there| !there));
        }
    }
}
