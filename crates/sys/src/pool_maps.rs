//! The pages that share a pool, by the kernel's view (`/proc/<pid>/maps` and page tables).
//!
//! **Problem.** A worker that takes over from another one has no other record of shared pages:
//! the other's memory is gone. **Idea.** Each mapping of a pool gives the slots of its pages. The
//! page tables give the pages that the process has written since, and of which it thus has its
//! own copy.
//!
//! **Limits.** A copy that the host has swapped out still looks shared, so its slot is kept
//! unnecessarily.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::memory_map::{PAGE_BYTES, Pagemap, Range};
use crate::pool_file::NAME_PREFIX;

/// The identity of a file, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    major: u32,
    minor: u32,
    inode: u64,
}

impl FileId {
    pub(crate) fn of(stat: &rustix::fs::Stat) -> Self {
        let (major, minor) = (rustix::fs::major(stat.st_dev), rustix::fs::minor(stat.st_dev));
        Self { major, minor, inode: stat.st_ino }
    }
}

/// A mapping of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// The name that its maker has given it.
    pub name: String,
    /// The identity of the file.
    pub file: FileId,
    /// The addresses of the mapping.
    pub range: Range,
    /// The slot of the first page.
    pub first_slot: u32,
}

/// A page that shares a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sharer {
    /// The page's address.
    pub address: u64,
    /// Its slot.
    pub slot: u32,
}

/// The pools' mappings in a process, in the order of their addresses.
///
/// # Errors
/// When the process is gone, or may not be inspected.
pub fn mappings(pid: u32) -> io::Result<Vec<Mapping>> {
    let mut mappings = Vec::new();
    each_mapping(pid, |mapping| {
        mappings.push(mapping);
        true
    })?;
    Ok(mappings)
}

/// Passes the pools' mappings in a process to `goes_on` one by one, because there may be any
/// number, until it returns `false`.
///
/// # Errors
/// As for [`mappings`].
pub fn each_mapping(pid: u32, mut goes_on: impl FnMut(Mapping) -> bool) -> io::Result<()> {
    let maps = BufReader::new(File::open(format!("/proc/{pid}/maps"))?);
    for line in maps.split(b'\n') {
        // Paths may be any bytes; those of pools are text.
        if let Some(mapping) = std::str::from_utf8(&line?).ok().and_then(parse)
            && !goes_on(mapping)
        {
            break;
        }
    }
    Ok(())
}

/// The most pools of one process that are examined: its group's, and those of groups that it has
/// left.
pub const MOST_POOLS: usize = 4;

/// The names of the pools that a process maps, at most [`MOST_POOLS`]. A file with such a name
/// that belongs to another user than this process's is not a pool: any user can make one.
///
/// # Errors
/// As for [`mappings`].
pub fn pools_of(pid: u32) -> io::Result<Vec<String>> {
    let mut seen: Vec<(FileId, String, bool)> = Vec::new();
    each_mapping(pid, |mapping| {
        if seen.iter().all(|(file, ..)| *file != mapping.file) {
            let is_ours = may_be_ours(pid, &mapping);
            seen.push((mapping.file, mapping.name, is_ours));
        }
        let pools = seen.iter().filter(|(.., is_ours)| *is_ours).count();
        pools < MOST_POOLS && seen.len() < MOST_FILES
    })?;
    Ok(seen.into_iter().filter(|(.., is_ours)| *is_ours).map(|(_, name, _)| name).collect())
}

/// The most files with names of pools that are distinguished in one process; a hostile process
/// may map any number.
const MOST_FILES: usize = 256;

/// Whether this user has made the file; a file that cannot be examined counts as made by this
/// user.
fn may_be_ours(pid: u32, mapping: &Mapping) -> bool {
    let Range { start, len } = mapping.range;
    let path = PathBuf::from(format!("/proc/{pid}/map_files/{start:x}-{:x}", start + len));
    let ours = rustix::process::geteuid().as_raw();
    rustix::fs::stat(&path).map_or(true, |stat| stat.st_uid == ours && stat.st_mode & 0o077 == 0)
}

/// The number of all mappings of a process. The kernel takes some 0.4 µs for each.
///
/// # Errors
/// When the process is gone, or may not be inspected.
pub fn count(pid: u32) -> io::Result<u32> {
    let mut maps = File::open(format!("/proc/{pid}/maps"))?;
    let (mut buffer, mut lines) = (vec![0; 64 << 10], 0);
    loop {
        let read = maps.read(&mut buffer)?;
        if read == 0 {
            return Ok(lines);
        }
        let ends = buffer[..read].iter().filter(|byte| **byte == b'\n').count();
        lines = lines.saturating_add(u32::try_from(ends).unwrap_or(u32::MAX));
    }
}

/// The processes that map this pool or have its file open and could map it. Processes that may
/// not be inspected are left out.
#[must_use]
pub fn holders(pool: FileId) -> Vec<u32> {
    let maps = |pid: u32| {
        let mut is_mapped = false;
        let looked = each_mapping(pid, |mapping| {
            is_mapped = mapping.file == pool;
            !is_mapped
        });
        looked.is_ok() && is_mapped
    };
    let holds = |pid: &u32| maps(*pid) || has_open(*pid, pool);
    let names = names_in(Path::new("/proc"));
    names.iter().filter_map(|name| name.parse().ok()).filter(holds).collect()
}

fn has_open(pid: u32, pool: FileId) -> bool {
    descriptor(pid, pool).is_some()
}

/// A path to the process's descriptor of this pool's file.
pub(crate) fn descriptor(pid: u32, pool: FileId) -> Option<PathBuf> {
    descriptors(pid, pool).into_iter().next()
}

/// Whether any process can write to this pool's file through a descriptor other than `ours`.
pub(crate) fn has_other_writer(pool: FileId, ours: BorrowedFd<'_>) -> bool {
    let ours = PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), ours.as_raw_fd()));
    let names = names_in(Path::new("/proc"));
    let pids = names.iter().filter_map(|name| name.parse().ok());
    let mut all = pids.flat_map(|pid| descriptors(pid, pool));
    all.any(|path| path != ours && is_for_writing(&path).unwrap_or(false))
}

/// Reads the kernel's line `flags:\t0100002`, in octal digits; the last digit is the access mode.
fn is_for_writing(descriptor: &Path) -> Option<bool> {
    let (process, name) = (descriptor.parent()?.parent()?, descriptor.file_name()?);
    let info = std::fs::read_to_string(process.join("fdinfo").join(name)).ok()?;
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
    Some(u32::from_str_radix(flags.trim(), 8).ok()? & 0o3 != 0)
}

fn descriptors(pid: u32, pool: FileId) -> Vec<PathBuf> {
    let fds = PathBuf::from(format!("/proc/{pid}/fd"));
    let is_pool = |path: &PathBuf| {
        // Other files are not examined: some file systems would be slow to answer.
        let target = std::fs::read_link(path).unwrap_or_default();
        target.to_str().is_some_and(|target| target.starts_with(&format!("/memfd:{NAME_PREFIX}")))
            && rustix::fs::stat(path).is_ok_and(|stat| FileId::of(&stat) == pool)
    };
    names_in(&fds).iter().map(|name| fds.join(name)).filter(is_pool).collect()
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// The range of all addresses.
pub const EVERYWHERE: Range = Range { start: 0, len: u64::MAX };

/// The pages of a process within these ranges that share slots of this pool. The result has at
/// most one entry for each page of the ranges, independent of the process's other mappings of the
/// pool.
///
/// # Errors
/// As for [`mappings`].
pub fn sharers(pid: u32, pool: FileId, within: &[Range]) -> io::Result<Vec<Sharer>> {
    let pagemap = Pagemap::of(pid)?;
    let (mut sharers, mut failed) = (Vec::new(), None);
    each_mapping(pid, |mapping| {
        let found = match mapping.file == pool {
            true => within
                .iter()
                .filter_map(|range| mapping.part_in(*range))
                .try_for_each(|part| part.sharers(&pagemap, &mut sharers)),
            false => Ok(()),
        };
        failed = found.err();
        failed.is_none()
    })?;
    failed.map_or(Ok(sharers), |errno| Err(errno.into()))
}

impl Mapping {
    /// The part of the mapping inside `range`.
    fn part_in(&self, range: Range) -> Option<Self> {
        let start = self.range.start.max(range.start);
        let end = |range: Range| range.start.saturating_add(range.len);
        let len = end(self.range).min(end(range)).checked_sub(start).filter(|len| *len > 0)?;
        let ahead = u32::try_from((start - self.range.start) / PAGE_BYTES).ok()?;
        let first_slot = self.first_slot.checked_add(ahead)?;
        Some(Self { range: Range { start, len }, first_slot, ..self.clone() })
    }

    fn sharers(&self, pagemap: &Pagemap, sharers: &mut Vec<Sharer>) -> Result<(), Errno> {
        let copies = pagemap.private(self.range)?;
        let mut copies = copies.iter().map(|copy| copy.range).peekable();
        let addresses =
            (0..self.range.len / PAGE_BYTES).map(|page| self.range.start + page * PAGE_BYTES);
        for (address, slot) in addresses.zip(self.first_slot..) {
            while copies.next_if(|copy| copy.start + copy.len <= address).is_some() {}
            if copies.peek().is_none_or(|copy| address < copy.start) {
                sharers.push(Sharer { address, slot });
            }
        }
        Ok(())
    }
}

/// `7f00-7f10 rw-p 00003000 00:01 1234   /memfd:overbook-pool-… (deleted)`.
fn parse(line: &str) -> Option<Mapping> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (_, offset, device, inode) = (words.next()?, words.next()?, words.next()?, words.next()?);
    let name =
        words.next()?.strip_prefix("/memfd:").filter(|name| name.starts_with(NAME_PREFIX))?;
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (major, minor) = device.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let start = hex(start)?;
    Some(Mapping {
        name: name.to_owned(),
        file: FileId { major: number(major)?, minor: number(minor)?, inode: inode.parse().ok()? },
        range: Range { start, len: hex(end)?.checked_sub(start)? },
        first_slot: u32::try_from(hex(offset)? / PAGE_BYTES).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::memory_map::{Over, PAGE_LEN, Reserved};
    use crate::pool_file::{PoolFile, PoolView};

    #[test]
    fn a_line_of_maps_is_read_and_another_files_is_not() {
        let line = |name: &str| {
            parse(&format!(
                "7f0000002000-7f0000005000 rw-p 00007000 00:01 1234      {name} (deleted)"
            ))
        };
        let mapping = line("/memfd:overbook-pool-a").unwrap();
        let range = Range { start: 0x7f00_0000_2000, len: 0x3000 };
        assert_eq!((mapping.name.as_str(), mapping.range), ("overbook-pool-a", range));
        assert_eq!(mapping.file, FileId { major: 0, minor: 1, inode: 1234 });
        assert_eq!(mapping.first_slot, 7);
        assert_eq!((line("/memfd:other"), line("/tmp/memfd:overbook-pool-a")), (None, None));
        assert_eq!((parse(""), parse("7f00-7f01 rw-p 0 0:0 0")), (None, None));
    }

    /// 128 GiB of one pool: examining the mapping must be as cheap as making it.
    #[test]
    fn a_pool_that_is_mapped_over_more_than_the_guests_memory_is_not_listed() {
        let pool = PoolFile::create("overbook-pool-wide", 1 << 25).unwrap();
        let wide = Reserved::new(128 << 30).unwrap();
        let view = PoolView::open(pool.reader().unwrap(), 1 << 25).unwrap();
        // SAFETY: memory of ours.
        unsafe { view.map_over(0, Over { range: wide.range(), reserve: false }) }.unwrap();
        let guest = Range { start: wide.range().start + (1 << 30), len: 4 * PAGE_BYTES };
        let found = sharers(std::process::id(), pool.id().unwrap(), &[guest]).unwrap();
        let slots: Vec<u32> = found.iter().map(|sharer| sharer.slot).collect();
        assert_eq!(slots, [1 << 18, (1 << 18) + 1, (1 << 18) + 2, (1 << 18) + 3]);
    }

    /// Any user can choose a file's name, but not its owner.
    #[test]
    fn a_file_that_is_called_like_a_pool_and_open_to_others_is_none() {
        let pool = PoolFile::create("overbook-pool-named", 1).unwrap();
        let fake = rustix::fs::memfd_create("overbook-pool-fake", rustix::fs::MemfdFlags::CLOEXEC);
        let fake = fake.unwrap();
        rustix::fs::ftruncate(&fake, PAGE_BYTES).unwrap();
        let (read, kept) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::PRIVATE);
        let len = PAGE_LEN;
        let map = |file: BorrowedFd<'_>| {
            // SAFETY: the kernel chooses the place, so nothing that exists is mapped over.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, read, kept, file, 0) }.unwrap()
        };
        let reader = pool.reader().unwrap();
        let mapped = [map(reader.as_fd()), map(fake.as_fd())];
        let found = pools_of(std::process::id()).unwrap();
        let has = |name: &str| found.iter().any(|found| found == name);
        assert!(has("overbook-pool-named"), "{found:?}");
        // Without the right to examine the file behind a mapping, it may be ours.
        let range = std::fs::read_dir("/proc/self/map_files").unwrap().next();
        let can_look = range.is_some_and(|entry| std::fs::metadata(entry.unwrap().path()).is_ok());
        assert!(!can_look || !has("overbook-pool-fake"), "{found:?}");
        for place in mapped {
            // SAFETY: mapped above, and nothing refers to it.
            unsafe { rustix::mm::munmap(place, len) }.unwrap();
        }
    }

    #[test]
    fn what_was_written_is_shared_no_more() {
        let pool = PoolFile::create("overbook-pool-test", 16).unwrap();
        let other = PoolFile::create("overbook-pool-test", 16).unwrap();
        (0..16).for_each(|slot| pool.write(slot, &[1; PAGE_LEN]).unwrap());
        let memory = Reserved::new(8 * PAGE_BYTES).unwrap();
        let start = memory.range().start;
        let at = |page: u64| start + page * PAGE_BYTES;
        let map = |page, pages, slot| {
            let view = PoolView::open(pool.reader().unwrap(), 16).unwrap();
            let range = Range { start: at(page), len: pages * PAGE_BYTES };
            // SAFETY: memory of ours.
            unsafe { view.map_over(slot, Over { range, reserve: false }) }.unwrap();
        };
        map(1, 4, 10);
        map(6, 1, 3);
        for page in [2, 3] {
            let byte: *mut u8 =
                std::ptr::with_exposed_provenance_mut(usize::try_from(at(page)).unwrap());
            // SAFETY: memory of ours.
            unsafe { byte.write_volatile(2) };
        }
        let expected =
            [(1, 10), (4, 13), (6, 3)].map(|(page, slot)| Sharer { address: at(page), slot });
        let pid = std::process::id();
        let all = [memory.range()];
        assert_eq!(sharers(pid, pool.id().unwrap(), &all).unwrap(), expected);
        assert_eq!(sharers(pid, other.id().unwrap(), &all).unwrap(), []);
        let some = [Range { start: at(4), len: 2 * PAGE_BYTES }];
        assert_eq!(sharers(pid, pool.id().unwrap(), &some).unwrap(), expected[1..2]);
        let holds = |pool: &PoolFile| holders(pool.id().unwrap()).contains(&pid);
        assert!(holds(&pool) && holds(&other), "mapped, or open");
        let id = other.id().unwrap();
        drop(other);
        assert!(!holders(id).contains(&pid));
        assert!(mappings(u32::MAX).is_err() && count(u32::MAX).is_err());
        let of_this = std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        // Other tests run at the same time.
        assert!((of_this / 2..of_this * 2).contains(&(count(pid).unwrap() as usize)));
    }
}
