//! Another process's memory, handled from outside: paged out by `process_madvise`, brought back
//! by `process_vm_readv`, inspected through its `pagemap`. Nothing is registered with the kernel,
//! so nothing must be undone.
//!
//! A paged-out page comes back when the process touches it: the kernel reads it from swap on the
//! thread that touches it. [`Outside::bring_back`] brings it back earlier, by a read from
//! outside.
//!
//! Up to Linux 6.8 the kernel keeps a page that the process, or KVM for it, has touched since the
//! last request, and clears its accessed bit. The next request pages the page out
//! ([`KernelVersion::has_second_chance`](crate::kernel_version::KernelVersion::has_second_chance)).
//!
//! Needs `CAP_SYS_PTRACE`, and `CAP_SYS_NICE` to page out (Linux 5.10).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use model::Bytes;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::time::{ClockId, clock_gettime};

use crate::kernel_version::KernelVersion;
use crate::memory_map::PAGE_BYTES;
use crate::process::{Identity, open_pidfd};
use crate::procfs::ProcError;
use crate::remote_memory::RemoteMemory;
use crate::swap::Swap;
use crate::userfaultfd::Range;

/// The size of a page, as `usize`.
const PAGE: usize = 4096;
/// The most ranges in one call (`UIO_MAXIOV`).
const MOST_RANGES: usize = 1024;
/// By `linux/mman.h`, since Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;
/// Bits of an entry of `pagemap`.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;
/// The most lines of `smaps` that are read, two dozen for each mapping, and the most bytes of
/// each.
const MOST_LINES: usize = 2_000_000;
const LONGEST_LINE: u64 = 20_000;
/// The most descriptors that are checked.
const MOST_DESCRIPTORS: usize = 16_384;
/// The most memory that may be joined to guest RAM in one mapping of QEMU.
const MOST_BESIDE: u64 = 64 << 20;
/// Guest RAM begins at a multiple of this: QEMU aligns it for huge pages.
const ALIGNED: u64 = 2 << 20;

/// The location of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It does not exist: it was never touched, or was given up.
    Nowhere,
    /// In memory, and only in this process.
    Here,
    /// In memory, and shared with other processes: it cannot be paged out for one of them.
    Shared,
    /// In swap.
    Out,
}

impl Place {
    /// Decodes an entry of `pagemap`.
    const fn of(entry: u64) -> Self {
        match entry {
            _ if entry & SWAPPED != 0 => Self::Out,
            _ if entry & PRESENT == 0 => Self::Nowhere,
            _ if entry & OF_FILE == 0 && entry & EXCLUSIVE != 0 => Self::Here,
            _ => Self::Shared,
        }
    }
}

/// A process whose memory is inspected and paged out.
#[derive(Debug)]
pub struct Outside {
    pidfd: OwnedFd,
    pagemap: File,
    memory: RemoteMemory,
}

impl Outside {
    /// Opens this process; one that has reused its pid is refused.
    ///
    /// # Errors
    /// The process has ended, or may not be inspected.
    pub fn of(process: Identity) -> io::Result<Self> {
        let pidfd = open_pidfd(process.pid)?;
        let pagemap = File::open(format!("/proc/{}/pagemap", process.pid))?;
        let memory = RemoteMemory::of(process.pid).map_err(io::Error::other)?;
        // All three were opened by pid, so the process must still be the same.
        process.still(Self { pidfd, pagemap, memory })
    }

    /// The location of the page at `address`.
    ///
    /// # Errors
    /// The process has ended.
    pub fn place(&self, address: u64) -> io::Result<Place> {
        let mut entry = [0; 8];
        self.pagemap.read_exact_at(&mut entry, address / PAGE_BYTES * 8)?;
        Ok(Place::of(u64::from_le_bytes(entry)))
    }

    /// The location of each page of this range: 8 bytes and some 50 ns a page.
    ///
    /// # Errors
    /// As for [`Self::place`].
    pub fn places(&self, range: Range) -> io::Result<Vec<Place>> {
        let pages = usize::try_from(range.len / PAGE_BYTES).map_err(io::Error::other)?;
        let mut entries = vec![0; pages * 8];
        self.pagemap.read_exact_at(&mut entries, range.start / PAGE_BYTES * 8)?;
        let entries = entries.chunks_exact(8).filter_map(|entry| entry.first_chunk().copied());
        Ok(entries.map(|entry| Place::of(u64::from_le_bytes(entry))).collect())
    }

    /// Asks the kernel to page out these ranges. It leaves pages that are shared, pinned or busy;
    /// [`Self::place`] tells which. Each call holds the process's mmap lock while the kernel
    /// pages out. Small ranges, one call each, let other threads take it in between.
    ///
    /// # Errors
    /// `ESRCH`: the process has ended. `EPERM`: not permitted. `ENOSYS`: before Linux 5.10.
    pub fn page_out(&self, ranges: &[Range]) -> Result<(), Errno> {
        self.advise(ranges, libc::MADV_PAGEOUT)
    }

    /// Brings back the swapped pages of these ranges. The first word of each page is read, so the
    /// kernel reads the page and maps it, as at a touch by the process. An unreadable page stays
    /// where it is. (`MADV_WILLNEED` takes as long, and leaves the page in the swap cache, to be
    /// mapped at a touch.)
    pub fn bring_back(&self, ranges: &[Range]) {
        for range in ranges {
            let mut pages: Vec<u64> =
                (0..range.len / PAGE_BYTES).map(|page| range.start + page * PAGE_BYTES).collect();
            while !pages.is_empty() {
                let read = self.memory.read_words(&pages).len();
                // An unreadable page is skipped.
                pages.drain(..pages.len().min(read + 1));
            }
        }
    }

    /// Makes the kernel collapse these ranges, each of the size of a huge page, into huge pages.
    /// It reads their swapped pages from swap.
    ///
    /// # Errors
    /// As for [`Self::page_out`]; `EINVAL`: before Linux 6.1, or without huge pages; `EAGAIN`,
    /// `EBUSY`, `ENOMEM`: not now.
    pub fn make_huge(&self, ranges: &[Range]) -> Result<(), Errno> {
        self.advise(ranges, MADV_COLLAPSE)
    }

    fn advise(&self, ranges: &[Range], advice: libc::c_int) -> Result<(), Errno> {
        for some in ranges.chunks(MOST_RANGES) {
            let ranges: Vec<libc::iovec> = some.iter().map(vector).collect();
            // SAFETY: the ranges belong to another process, and these advices change no byte of
            // it; the array has the given length.
            let done = unsafe {
                libc::syscall(
                    libc::SYS_process_madvise,
                    self.pidfd.as_raw_fd(),
                    ranges.as_ptr(),
                    ranges.len(),
                    advice,
                    0,
                )
            };
            if done < 0 {
                let error = io::Error::last_os_error();
                return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
            }
        }
        Ok(())
    }
}

fn vector(range: &Range) -> libc::iovec {
    let iov_len = usize::try_from(range.len).unwrap_or(0);
    libc::iovec { iov_base: range.start as *mut libc::c_void, iov_len }
}

/// The page at this address.
#[must_use]
pub const fn page_at(address: u64) -> Range {
    Range { start: address, len: PAGE_BYTES }
}

/// A piece of a process's private memory that may be guest RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Its addresses.
    pub range: Range,
    /// Its memory that is resident.
    pub resident: Bytes,
    /// The part of that in huge pages.
    pub huge: Bytes,
    /// Whether pages of it are locked in memory.
    pub is_locked: bool,
}

/// The ranges of the pieces that [`guest_ram`] finds, without counting their pages. Reads `maps`:
/// some microseconds.
///
/// # Errors
/// As for [`guest_ram`].
pub fn guest_ranges(pid: u32, ram: Bytes) -> Result<Vec<Range>, ProcError> {
    let pieces = best_fit(pieces_in(lines_of(pid, "maps")?), ram).unwrap_or_default();
    Ok(pieces.iter().map(|piece| piece.range).collect())
}

/// All private memory of a process that can be read and swapped: its heap and stacks, and the
/// written data of its libraries.
///
/// # Errors
/// The process has ended, or may not be inspected.
pub fn anonymous(pid: u32) -> Result<Vec<Range>, ProcError> {
    let private = |line: String| {
        let mut words = line.split_whitespace();
        let range = range_in(words.next()?)?;
        let mode = words.next()?;
        (mode.starts_with('r') && mode.ends_with('p')).then_some(range)
    };
    Ok(lines_of(pid, "maps")?.filter_map(private).collect())
}

/// All pieces of a process's private memory that may be guest RAM.
///
/// # Errors
/// The process has ended, or may not be inspected.
pub fn private_pieces(pid: u32) -> Result<Vec<Piece>, ProcError> {
    Ok(pieces_in(lines_of(pid, "smaps")?))
}

/// The lines of a file about a process, at most [`MOST_LINES`].
fn lines_of(pid: u32, name: &str) -> Result<impl Iterator<Item = String>, ProcError> {
    let path = PathBuf::from(format!("/proc/{pid}/{name}"));
    let file = File::open(&path).map_err(|error| ProcError::from_io(&path, error))?;
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut line = Vec::new();
    let lines = std::iter::from_fn(move || {
        line.clear();
        let read = reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).ok()?;
        (read > 0).then(|| String::from_utf8_lossy(&line).into_owned())
    });
    Ok(lines.take(MOST_LINES))
}

/// The largest pieces of a process's private memory that together are at least `ram`: QEMU maps
/// each piece of a guest's RAM separately, between guards. `None`: there are none. Then the
/// guest's RAM is shared with other processes, or in huge pages of hugetlbfs.
///
/// Reads `smaps`: milliseconds for each GiB in small pages.
///
/// # Errors
/// The process has ended, or may not be inspected.
pub fn guest_ram(pid: u32, ram: Bytes) -> Result<Option<Vec<Piece>>, ProcError> {
    Ok(best_fit(private_pieces(pid)?, ram))
}

impl Piece {
    /// Its last bytes: as much as `ram`, from a multiple of [`ALIGNED`] on. QEMU has a guard behind
    /// a piece of RAM, but a mapping below it may adjoin, and comes and goes.
    fn ram_at_end(self, ram: Bytes) -> Self {
        let Range { start, len } = self.range;
        let end = start + len;
        let start = (end.saturating_sub(ram.0) / ALIGNED * ALIGNED).max(start);
        Self { range: Range { start, len: end - start }, ..self }
    }
}

/// The smallest piece that holds all of the RAM and little more, or else the largest ones that
/// hold it together. Any program can reserve more than a host has, so larger pieces are ignored.
fn best_fit(mut pieces: Vec<Piece>, ram: Bytes) -> Option<Vec<Piece>> {
    let most = ram.0.saturating_add(ram.0 / 8).saturating_add(MOST_BESIDE);
    let fits = |piece: &&Piece| (ram.0..=most).contains(&piece.range.len);
    if ram.is_zero() {
        return None;
    }
    if let Some(piece) = pieces.iter().filter(fits).min_by_key(|piece| piece.range.len) {
        return Some(vec![piece.ram_at_end(ram)]);
    }
    pieces.retain(|piece| piece.range.len <= most);
    pieces.sort_unstable_by_key(|piece| std::cmp::Reverse(piece.range.len));
    let (mut sum, mut chosen) = (0, Vec::new());
    for piece in pieces {
        if sum >= ram.0 {
            break;
        }
        sum += piece.range.len;
        chosen.push(piece);
    }
    chosen.sort_unstable_by_key(|piece| piece.range.start);
    (ram.0..=most).contains(&sum).then_some(chosen)
}

fn pieces_in(lines: impl Iterator<Item = String>) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut is_in_one = false;
    for line in lines {
        if let Some(found) = heading(&line) {
            is_in_one = found.is_some();
            let Some(range) = found else { continue };
            match pieces.last_mut() {
                // The kernel splits a mapping where the advice differs.
                Some(last) if last.range.start + last.range.len == range.start => {
                    last.range.len += range.len;
                }
                _ => {
                    let none = Bytes::ZERO;
                    pieces.push(Piece { range, resident: none, huge: none, is_locked: false });
                }
            }
        } else if let Some(piece) = pieces.last_mut().filter(|_| is_in_one) {
            let kib = |rest: &str| {
                rest.trim().strip_suffix(" kB").and_then(|kib| kib.parse().ok()).map(Bytes::kib)
            };
            match line.split_once(':') {
                Some(("Rss", rest)) => {
                    piece.resident = piece.resident.plus(kib(rest).unwrap_or_default());
                }
                Some(("AnonHugePages", rest)) => {
                    piece.huge = piece.huge.plus(kib(rest).unwrap_or_default());
                }
                Some(("VmFlags", rest)) => {
                    piece.is_locked |= rest.split_whitespace().any(|flag| flag == "lo");
                }
                _ => {}
            }
        }
    }
    // The kernel merges similar neighbours into one mapping, so guest RAM may begin inside it.
    for Piece { range, .. } in &mut pieces {
        let start = range.start.next_multiple_of(ALIGNED);
        range.len = range.len.saturating_sub(start - range.start);
        range.start = start;
    }
    pieces.retain(|piece| piece.range.len >= ALIGNED);
    pieces
}

/// The range of a mapping, if this is the first line about it. The inner `None`: it cannot be
/// guest RAM.
fn heading(line: &str) -> Option<Option<Range>> {
    let mut words = line.split_whitespace();
    let range = range_in(words.next()?)?;
    let (mode, inode) = (words.next()?, words.nth(2)?);
    let is_private = mode == "rw-p" && inode == "0" && words.next().is_none();
    Some(is_private.then_some(range))
}

/// `7f63dbe00000-7f63ebe00000`
fn range_in(text: &str) -> Option<Range> {
    let (start, end) = text.split_once('-')?;
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let start = hex(start)?;
    Some(Range { start, len: hex(end)?.saturating_sub(start) })
}

/// With less free swap than this, the host's swap counts as full.
pub const LEAST_SWAP: Bytes = Bytes::mib(64);

/// The time of a touch of a paged-out page, in nanoseconds, if memory of VMs can be paged out on
/// this host.
///
/// # Errors
/// It cannot: there is no swap in compressed memory, the swap is full, or the kernel loses writes
/// there.
pub fn refault_ns_of_host() -> Result<u64, String> {
    let swap = Swap::read().map_err(|error| error.to_string())?;
    if swap.devices.is_empty() {
        return Err("the host has no swap: one zram device would do".to_owned());
    }
    let has_zram = swap.first().all(|device| device.memory.is_some());
    let free = swap.free_first();
    if !has_zram && !is_zswap_on() {
        let why = "the host swaps to a disk first, which guests would wait for: a zram device of the \
                   highest priority, or zswap, would do";
        return Err(why.to_owned());
    }
    let version = KernelVersion::of_host();
    if has_zram && version.loses_writes_in_zram() {
        return Err(format!(
            "Linux {version} can lose a write when two vCPUs touch a page at once that is in zram \
             (fixed in 6.8, 6.6.19 and 6.1.80)"
        ));
    }
    if free < LEAST_SWAP {
        return Err("the host's swap is full".to_owned());
    }
    own_refault_ns().map_err(|error| error.to_string())
}

/// Whether swapped memory is kept compressed in memory before it goes to a disk.
fn is_zswap_on() -> bool {
    let on = std::fs::read_to_string("/sys/module/zswap/parameters/enabled");
    on.is_ok_and(|text| text.trim() == "Y")
}

/// The number of pages in a measurement.
const MEASURED: usize = 9;

/// The time of a touch of a swapped page, in nanoseconds: the median over some pages of this
/// process. So a preempted touch does not matter.
///
/// # Errors
/// No swap takes a page, or the kernel's.
pub fn own_refault_ns() -> io::Result<u64> {
    let flags = ProtFlags::READ | ProtFlags::WRITE;
    let len = MEASURED * PAGE;
    // SAFETY: a new mapping, which nothing else uses.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), len, flags, MapFlags::PRIVATE) }?;
    let measured = touch_paged_out(at.cast(), len);
    // SAFETY: it is that mapping, and no reference into it is left.
    unsafe { munmap(at, len) }?;
    let mut all = measured?;
    all.sort_unstable();
    all.get(all.len() / 2).copied().ok_or_else(|| io::Error::other("no swap takes a page"))
}

/// The time of each touch of those pages of this memory that could be paged out.
fn touch_paged_out(at: *mut u8, len: usize) -> io::Result<Vec<u64>> {
    let own = Identity::own().ok_or(io::ErrorKind::NotFound)?;
    let pagemap = Outside::of(own)?;
    // Each page has its own content: the swap may store equal pages only once.
    let pages: Vec<*mut u8> =
        (0..len).step_by(PAGE).map(|offset| at.wrapping_add(offset)).collect();
    for (number, page) in (1..).zip(&pages) {
        // SAFETY: it points to a writable page of our own.
        unsafe { page.write_volatile(number) };
    }
    for _ in 0..2 {
        // SAFETY: the pages are ours, and their content stays.
        unsafe { madvise(at.cast(), len, Advice::LinuxPageOut) }?;
    }
    let mut took = Vec::new();
    for page in pages {
        if pagemap.place(page as u64)? != Place::Out {
            continue;
        }
        let before = clock_gettime(ClockId::Monotonic);
        // SAFETY: as above.
        unsafe { page.read_volatile() };
        let after = clock_gettime(ClockId::Monotonic);
        let ns = |time: rustix::time::Timespec| time.tv_sec * 1_000_000_000 + time.tv_nsec;
        took.push(u64::try_from(ns(after) - ns(before)).unwrap_or(0));
    }
    Ok(took)
}

/// Whether devices are passed through to a VM of this process: their DMA pins all of its memory.
#[must_use]
pub fn passes_devices_through(pid: u32) -> bool {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let links =
        descriptors.take(MOST_DESCRIPTORS).filter_map(|it| std::fs::read_link(it.path()).ok());
    let is_device = |link: PathBuf| {
        let link = link.to_string_lossy().into_owned();
        ["/dev/vfio/", "/dev/iommu", "/dev/vhost-vdpa"]
            .iter()
            .any(|device| link.starts_with(device))
            || link.starts_with("anon_inode:[vfio")
    };
    links.into_iter().any(is_device)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_map::Reserved;

    #[test]
    fn the_largest_private_pieces_are_guest_ram() {
        let smaps = "\
7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n\
Rss:               65536 kB\nAnonHugePages:     32768 kB\nVmFlags: rd wr mr mw me ac sd \n\
7f0008000000-7f0010000000 rw-p 00000000 00:00 0 \n\
Rss:                   4 kB\nAnonHugePages:         0 kB\nVmFlags: rd wr lo \n\
7f0010000000-7f0010001000 ---p 00000000 00:00 0 \n\
Rss:                   0 kB\n\
7f0020000000-7f0022000000 rwxp 00000000 00:00 0 \n\
Rss:                9999 kB\n\
7f0030000000-7f0040000000 rw-s 00000000 00:01 77 /memfd:ram (deleted)\n\
Rss:                9999 kB\n\
7f0050001000-7f0060200000 rw-p 00000000 00:00 0 \n\
Rss:                9999 kB\n\
7f0060400000-7f0060401000 rw-p 00000000 00:00 0 \n\
Rss:                   4 kB\n\
7f0070000000-7f0070400000 rw-p 00000000 00:00 0 \n\
Rss:                   8 kB\nVmFlags: rd wr \n";
        let found = pieces_in(smaps.lines().map(str::to_owned));
        let range = |start, len| Range { start, len };
        let large = Piece {
            range: range(0x7f00_0000_0000, 256 << 20),
            resident: Bytes::kib(65540),
            huge: Bytes::mib(32),
            is_locked: true,
        };
        assert_eq!(found[0], large);
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[1].range, range(0x7f00_5020_0000, 256 << 20));
        assert_eq!(best_fit(found[..1].to_vec(), Bytes::mib(256)), Some(vec![large]));
        assert_eq!(best_fit(found.clone(), Bytes::mib(512)).unwrap().len(), 2);
        assert_eq!(best_fit(found.clone(), Bytes::mib(514)).unwrap().len(), 3);
        assert_eq!(best_fit(found.clone(), Bytes::mib(600)), None);
        assert_eq!(best_fit(found.clone(), Bytes::mib(3)).unwrap()[0].range.len, 4 << 20);
        let reserved = Piece { range: range(1 << 40, 100 << 40), ..large };
        let with_reserved = [found, vec![reserved]].concat();
        assert_eq!(best_fit(with_reserved, Bytes::mib(512)).unwrap().len(), 2);
        assert_eq!(best_fit(Vec::new(), Bytes::ZERO), None);
    }

    #[test]
    fn a_mapping_that_adjoins_guest_ram_is_no_part_of_it() {
        let maps = "\
7f0000003000-7f0000200000 rw-p 00000000 00:00 0 \n\
7f0000200000-7f0004000000 rw-p 00000000 00:00 0 \n\
7f0004000000-7f0014000000 rw-p 00000000 00:00 0 \n\
7f0014000000-7f0014001000 ---p 00000000 00:00 0 \n";
        let ram = |maps: &str| {
            let found = pieces_in(maps.lines().map(str::to_owned));
            best_fit(found, Bytes::mib(256)).unwrap()[0].range
        };
        assert_eq!(ram(maps), Range { start: 0x7f00_0400_0000, len: 256 << 20 });
    }

    #[test]
    fn a_page_is_nowhere_until_it_is_touched_and_stays_where_there_is_no_swap() {
        let map = Reserved::new(4 * PAGE_BYTES).unwrap();
        let at = map.range().start;
        let own = Outside::of(Identity::own().unwrap()).unwrap();
        assert_eq!(own.place(at).unwrap(), Place::Nowhere);
        let all = anonymous(std::process::id()).unwrap();
        assert!(all.iter().any(|range| range.start <= at && at < range.start + range.len));
        // SAFETY: it is a writable page of the mapping.
        unsafe { (at as *mut u8).write_volatile(7) };
        assert_eq!(own.place(at).unwrap(), Place::Here);
        own.page_out(&[page_at(at)]).unwrap();
        own.page_out(&[page_at(at)]).unwrap();
        if Swap::read().unwrap().devices.is_empty() {
            assert_eq!(own.place(at).unwrap(), Place::Here);
            assert!(own_refault_ns().is_err());
        }
        own.bring_back(&[page_at(at)]);
        // SAFETY: as above.
        assert_eq!(unsafe { (at as *const u8).read_volatile() }, 7);
    }

    #[test]
    fn a_process_that_has_ended_is_not_looked_at() {
        let gone = Identity { start_ticks: 1, ..Identity::own().unwrap() };
        assert!(Outside::of(gone).is_err());
    }
}
