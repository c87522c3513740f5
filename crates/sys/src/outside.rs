//! Another process's memory, from outside: paged out by `process_madvise`, brought back by
//! `process_vm_readv`, looked at in its `pagemap`. Nothing is registered with the kernel: nothing
//! has to be undone.
//!
//! A page that is paged out comes back by itself when the process touches it: the kernel reads it
//! from swap on the toucher's own thread. To bring it back before ([`Outside::bring_back`]) it is
//! read from outside.
//!
//! Up to Linux 6.8 the kernel keeps a page that the process, or KVM for it, has touched since it
//! was last asked, and forgets that it was touched: asked again, it pages the page out
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

/// A page, as lengths are given.
const PAGE: usize = 4096;
/// Ranges that one call takes (`UIO_MAXIOV`).
const MOST_RANGES: usize = 1024;
/// By `linux/mman.h`, since Linux 6.1.
const MADV_COLLAPSE: libc::c_int = 25;
/// Bits of an entry of `pagemap`.
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
const OF_FILE: u64 = 1 << 61;
const EXCLUSIVE: u64 = 1 << 56;
/// Lines of `smaps` that are read, two dozen for each mapping, and bytes of each.
const MOST_LINES: usize = 2_000_000;
const LONGEST_LINE: u64 = 20_000;
/// Descriptors that are looked at.
const MOST_DESCRIPTORS: usize = 16_384;
/// QEMU may have joined this much memory to guest RAM.
const MOST_BESIDE: u64 = 64 << 20;
/// Guest RAM begins at a multiple of this: QEMU has it so that huge pages fit.
const ALIGNED: u64 = 2 << 20;

/// Where a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Nowhere: it was never touched, or was given up.
    Nowhere,
    /// In memory, and this process's alone.
    Here,
    /// In memory, and others have it too: it cannot be paged out for one of them.
    Shared,
    /// In swap.
    Out,
}

impl Place {
    /// By an entry of `pagemap`.
    const fn of(entry: u64) -> Self {
        match entry {
            _ if entry & SWAPPED != 0 => Self::Out,
            _ if entry & PRESENT == 0 => Self::Nowhere,
            _ if entry & OF_FILE == 0 && entry & EXCLUSIVE != 0 => Self::Here,
            _ => Self::Shared,
        }
    }
}

/// A process whose memory is looked at and paged out.
#[derive(Debug)]
pub struct Outside {
    pidfd: OwnedFd,
    pagemap: File,
    memory: RemoteMemory,
}

impl Outside {
    /// Of this very process.
    ///
    /// # Errors
    /// It has ended, or may not be looked into.
    pub fn of(process: Identity) -> io::Result<Self> {
        let pidfd = open_pidfd(process.pid)?;
        let pagemap = File::open(format!("/proc/{}/pagemap", process.pid))?;
        let memory = RemoteMemory::of(process.pid).map_err(io::Error::other)?;
        // All were opened by its number.
        process.still(Self { pidfd, pagemap, memory })
    }

    /// Where the page at `address` is.
    ///
    /// # Errors
    /// The process has ended.
    pub fn place(&self, address: u64) -> io::Result<Place> {
        let mut entry = [0; 8];
        self.pagemap.read_exact_at(&mut entry, address / PAGE_BYTES * 8)?;
        Ok(Place::of(u64::from_le_bytes(entry)))
    }

    /// Where each page of this range is: 8 bytes and some 50 ns a page.
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

    /// Asks the kernel to page out what is in these ranges. It leaves pages that are shared, pinned
    /// or busy; [`Self::place`] says which. Each call holds the process's map of its memory for as
    /// long as the kernel pages: small ranges, one call each, let others in between.
    ///
    /// # Errors
    /// `ESRCH`: the process has ended. `EPERM`: not permitted. `ENOSYS`: before Linux 5.10.
    pub fn page_out(&self, ranges: &[Range]) -> Result<(), Errno> {
        self.advise(ranges, libc::MADV_PAGEOUT)
    }

    /// Brings back the swapped pages of these ranges: the first word of each page is read, so the
    /// kernel reads the page and maps it, as at a touch of the process. A page that cannot be read
    /// stays in swap. (`MADV_WILLNEED` takes as long, and leaves it in the swap cache, still to be
    /// touched.)
    pub fn bring_back(&self, ranges: &[Range]) {
        for range in ranges {
            let mut pages: Vec<u64> =
                (0..range.len / PAGE_BYTES).map(|page| range.start + page * PAGE_BYTES).collect();
            while !pages.is_empty() {
                let read = self.memory.read_words(&pages).len();
                // One that cannot be read is passed over.
                pages.drain(..pages.len().min(read + 1));
            }
        }
    }

    /// Has the kernel make huge pages of these ranges, each of which is one; it reads from swap
    /// what of them is there.
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
            // SAFETY: the ranges are of another process, and by these advices no byte of it
            // changes; the array is as long as is said.
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

/// A piece of private memory of a process that may be a guest's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Where.
    pub range: Range,
    /// In memory.
    pub resident: Bytes,
    /// Of that, in huge pages.
    pub huge: Bytes,
    /// Pages of it are locked in memory.
    pub is_locked: bool,
}

/// Where the pieces are that [`guest_ram`] finds, without looking at what is in them. Reads `maps`:
/// some microseconds.
///
/// # Errors
/// As for [`guest_ram`].
pub fn guest_ranges(pid: u32, ram: Bytes) -> Result<Vec<Range>, ProcError> {
    let pieces = best_fit(pieces_in(lines_of(pid, "maps")?), ram).unwrap_or_default();
    Ok(pieces.iter().map(|piece| piece.range).collect())
}

/// All private memory of a process that can be read and be in swap: its heap and stacks, and the
/// data of its libraries that it has written.
///
/// # Errors
/// The process has ended, or may not be looked into.
pub fn anonymous(pid: u32) -> Result<Vec<Range>, ProcError> {
    let private = |line: String| {
        let mut words = line.split_whitespace();
        let range = range_in(words.next()?)?;
        let mode = words.next()?;
        (mode.starts_with('r') && mode.ends_with('p')).then_some(range)
    };
    Ok(lines_of(pid, "maps")?.filter_map(private).collect())
}

/// All pieces of a process's private memory that may be a guest's RAM.
///
/// # Errors
/// The process has ended, or may not be looked into.
pub fn private_pieces(pid: u32) -> Result<Vec<Piece>, ProcError> {
    Ok(pieces_in(lines_of(pid, "smaps")?))
}

/// The lines of a file about a process, as long as they are and there are; at most [`MOST_LINES`].
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

/// The largest pieces of a process's private memory, which together are at least `ram`: QEMU maps
/// each piece of a guest's RAM for itself, between guards. `None`: there are none; the guest's RAM
/// is shared with other processes, or in huge pages of hugetlbfs.
///
/// Reads `smaps`: milliseconds for each GiB in small pages.
///
/// # Errors
/// The process has ended, or may not be looked into.
pub fn guest_ram(pid: u32, ram: Bytes) -> Result<Option<Vec<Piece>>, ProcError> {
    Ok(best_fit(private_pieces(pid)?, ram))
}

/// The smallest piece that has all of the RAM and little more, or else the largest ones that have
/// it together: any program can reserve more than a host has.
fn best_fit(mut pieces: Vec<Piece>, ram: Bytes) -> Option<Vec<Piece>> {
    let most = ram.0.saturating_add(ram.0 / 8).saturating_add(MOST_BESIDE);
    let fits = |piece: &&Piece| (ram.0..=most).contains(&piece.range.len);
    if ram.is_zero() {
        return None;
    }
    if let Some(piece) = pieces.iter().filter(fits).min_by_key(|piece| piece.range.len) {
        return Some(vec![*piece]);
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
                // The kernel keeps what was advised differently apart.
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
    // The kernel joins neighbours that are alike to one mapping: guest RAM begins inside it.
    for Piece { range, .. } in &mut pieces {
        let start = range.start.next_multiple_of(ALIGNED);
        range.len = range.len.saturating_sub(start - range.start);
        range.start = start;
    }
    pieces.retain(|piece| piece.range.len >= ALIGNED);
    pieces
}

/// The range of a mapping, if the line is the first one about it; `None` inside: it cannot be guest
/// RAM.
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

/// With less of it free the host's swap is full.
pub const LEAST_SWAP: Bytes = Bytes::mib(64);

/// How long a touch takes of what is paged out, in nanoseconds, if memory of VMs can be paged out
/// on this host.
///
/// # Errors
/// It cannot: there is no swap in compressed memory, it is full, or the kernel loses writes there.
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

/// Whether what is swapped out is kept in compressed memory before it goes to a disk.
fn is_zswap_on() -> bool {
    let on = std::fs::read_to_string("/sys/module/zswap/parameters/enabled");
    on.is_ok_and(|text| text.trim() == "Y")
}

/// Pages that a touch is measured with.
const MEASURED: usize = 9;

/// How long a touch of a page takes that is in swap, in nanoseconds: the median of some of this
/// process's own. One that was preempted says nothing.
///
/// # Errors
/// There is no swap that takes any, or the kernel's.
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

/// How long each touch took of those pages of this memory that could be paged out.
fn touch_paged_out(at: *mut u8, len: usize) -> io::Result<Vec<u64>> {
    let own = Identity::own().ok_or(io::ErrorKind::NotFound)?;
    let pagemap = Outside::of(own)?;
    // A page of its own content each: one that is the same as another needs no swap.
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
