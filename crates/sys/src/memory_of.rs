//! The physical memory that a guest occupies, without QEMU's own.
//!
//! **Problem.** The kernel counts per process, and a QEMU process has more than its guest: heap,
//! thread stacks, and under TCG tens of megabytes of translation buffer. `smaps` is exact but
//! walks every page table: 1.7 ms for a guest of 256 MB here, 17 ms and more once its memory is
//! in thousands of mappings. `status` is cheap (17 µs at any size) but does not separate the two.
//!
//! **Idea.** used = `RssAnon` + `HugetlbPages` + `VmPTE` − overhead, and + `RssShmem` where guest
//! RAM is shared memory. The sum is read in every tick ([`Counters`]). The overhead moves slowly
//! and is measured from `smaps` now and then ([`Overhead`]): all memory of those kinds outside
//! guest RAM. Guest RAM is found by the sizes that QEMU reports: the run of adjacent mappings of
//! one kind (a partial `madvise` splits mappings) whose length fits best. The owner spaces the
//! measurements so that they stay under a fixed share of CPU time ([`Overhead::rest`]), also for
//! a guest of a terabyte.
//!
//! **A pool's pages.** Where identical pages were merged, mappings of a pool
//! ([`crate::pool_file`]) interrupt guest RAM. They belong to its run, but only the pages that
//! the guest has written there since are its own. The kernel counts such copies in `RssAnon`, and
//! the pool's pages in the `RssShmem` of every process that maps them. Mergeable guest RAM is
//! anonymous. So `RssShmem` is left out if all guest RAM is anonymous, and the sum stays right
//! however much is merged between two measurements. The caller adds the VM's part of the pool.
//!
//! **Staging.** While a VM is tracked, some of its pages are elsewhere in QEMU until their next
//! touch. That staging area is as long as guest RAM and looks like it, so it has a mark
//! ([`STAGING_MARK`]). Its pages belong to the guest.
//!
//! **Why not PAGEMAP_SCAN** over guest RAM in every tick: it is exact and takes 15 µs while the
//! guest's memory is in huge pages. But it takes ~2 ms per 256 MB once balloon and reporting have
//! split them, and it needs Linux 6.7. The sum above costs the same at any size on any kernel.
//!
//! **Limits.** The kernel keeps `Rss*` per CPU and, before 6.17, adds them up lazily: the error
//! is up to 64 pages per CPU on small machines. Memory that several processes map, other than a
//! pool, counts for each of them: sums over VMs are right for private RAM only. If one guest has
//! RAM of both kinds, the pool's pages are subtracted as last measured. Memory that the host has
//! swapped out is not counted, because it is not resident.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::Bytes;

use crate::memory_map::Advice;
use crate::pool_file;
use crate::procfs::{ProcError, parse_kib, read, required_kib_field};

/// The advice that marks staging (`rr` among the flags in `smaps`). QEMU never gives it. For
/// anonymous memory it only makes reclaim ignore accesses: when the kernel must swap, it takes
/// staging first, whose pages are untouched.
pub const STAGING_MARK: Advice = Advice::Random;

/// The longest line of `smaps` (a path has at most 4096 bytes, escapes quadruple them).
const MAX_LINE: u64 = 20_000;

/// A process's memory, from `/proc/<pid>/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Resident private memory, including copies of a pool's pages.
    pub anonymous: Bytes,
    /// Resident shared memory: a guest on `memory-backend-memfd`, and a pool's pages.
    pub shared: Bytes,
    /// Huge pages from hugetlbfs.
    pub hugetlb: Bytes,
    /// Page tables.
    pub page_tables: Bytes,
    /// Private memory that the host has swapped out.
    pub swapped: Bytes,
    /// All mapped memory, resident or not.
    pub mapped: Bytes,
}

impl Counters {
    /// Reads the counters once, in about 20 µs at any size of the process.
    ///
    /// # Errors
    /// When the process is gone, or has no memory because it is a zombie or a kernel thread.
    pub fn of(pid: u32) -> Result<Self, ProcError> {
        let path = PathBuf::from(format!("/proc/{pid}/status"));
        Self::parse(&path, &read(&path)?)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ProcError> {
        let mut counters = Self::default();
        let wanted: [(&'static str, bool, &mut Bytes); 6] = [
            ("VmSize", true, &mut counters.mapped),
            ("RssAnon", true, &mut counters.anonymous),
            ("RssShmem", true, &mut counters.shared),
            ("VmPTE", true, &mut counters.page_tables),
            ("VmSwap", false, &mut counters.swapped),
            ("HugetlbPages", false, &mut counters.hugetlb),
        ];
        let mut found = [false; 6];
        for (field, value) in text.lines().filter_map(|line| line.split_once(':')) {
            let is_it = |wanted: &(&str, bool, &mut Bytes)| wanted.0 == field;
            let Some(at) = wanted.iter().position(is_it) else { continue };
            let malformed =
                || ProcError::malformed(path, wanted[at].0, value.trim(), "a number of kB");
            *wanted[at].2 = parse_kib(value).ok_or_else(malformed)?;
            found[at] = true;
        }
        let missing =
            wanted.iter().zip(found).find(|((_, required, _), found)| *required && !found);
        match missing {
            Some(((field, ..), _)) => Err(ProcError::Missing { path: path.to_owned(), field }),
            None => Ok(counters),
        }
    }
}

/// Reads the counters of one process time and again. The open files belong to this process, and
/// never to another one that gets its PID.
///
/// `statm` takes a fifth of the time of `status` (1.7 and 9 µs), and has mapped, private and shared
/// memory. While it stays the same, the counters are taken to stay the same, too. Page tables and
/// swapped memory may change alone, so `status` is read all the same after [`Self::MOST_KEPT`]
/// readings. Huge pages are not in `statm`: a process that has some is read anew each time.
#[derive(Debug)]
pub struct CounterFile {
    path: PathBuf,
    status: File,
    statm: File,
    text: Vec<u8>,
    /// `statm` at the last reading of `status`.
    sizes: Vec<u8>,
    last: Counters,
    kept: u32,
}

impl CounterFile {
    /// More than the file usually has, so that one read takes it as a whole.
    const CAPACITY: usize = 8192;
    /// The file names all groups of the process's user, which may be thousands.
    const MOST: usize = 1 << 20;
    /// Readings in a row that repeat the last counters.
    const MOST_KEPT: u32 = 9;
    /// Seven numbers of at most 20 digits.
    const SIZES: usize = 7 * 21;

    /// Opens the files of process `pid`.
    ///
    /// # Errors
    /// When the process is gone.
    pub fn open(pid: u32) -> Result<Self, ProcError> {
        let dir = PathBuf::from(format!("/proc/{pid}"));
        let open = |path: &Path| File::open(path).map_err(|error| ProcError::from_io(path, error));
        let (path, statm) = (dir.join("status"), open(&dir.join("statm"))?);
        let (status, text) = (open(&path)?, vec![0; Self::CAPACITY]);
        let (sizes, last, kept) = (Vec::new(), Counters::default(), 0);
        Ok(Self { path, status, statm, text, sizes, last, kept })
    }

    /// The counters now.
    ///
    /// # Errors
    /// When the process is gone, or has no memory because it is a zombie or a kernel thread.
    pub fn read(&mut self) -> Result<Counters, ProcError> {
        let failed = |error| ProcError::from_io(&self.path, error);
        let mut sizes = [0; Self::SIZES];
        let len = self.statm.read_at(&mut sizes, 0).map_err(failed)?;
        let is_same = self.sizes == sizes[..len] && self.last.hugetlb == Bytes::ZERO;
        if is_same && self.kept < Self::MOST_KEPT {
            self.kept += 1;
            return Ok(self.last);
        }
        self.last = self.read_status()?;
        (self.sizes, self.kept) = (sizes[..len].to_vec(), 0);
        Ok(self.last)
    }

    fn read_status(&mut self) -> Result<Counters, ProcError> {
        let len = loop {
            let len = self.status.read_at(&mut self.text, 0);
            let len = len.map_err(|error| ProcError::from_io(&self.path, error))?;
            if len < self.text.len() || len >= Self::MOST {
                break len;
            }
            self.text.resize(len * 2, 0);
        };
        Counters::parse(&self.path, &String::from_utf8_lossy(&self.text[..len]))
    }
}

/// The part of a QEMU process's memory that is not its guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overhead {
    /// Memory outside guest RAM, of the kinds that [`Self::guest_used`] adds up.
    pub own: Bytes,
    /// Memory inside guest RAM, for comparison, without page tables and a pool's pages.
    pub guest: Bytes,
    /// Whether guest RAM, or a piece of it, is shared memory. If not, no part of
    /// [`Counters::shared`] is the guest's.
    pub ram_is_shared: bool,
    /// The duration of the measurement.
    pub took: Duration,
}

/// The reason why the guest's share is unknown.
#[derive(Debug, thiserror::Error)]
pub enum OverheadError {
    /// `smaps` could not be read.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// No mapping qualifies as the guest's RAM.
    #[error("no memory of QEMU's process {pid} is large enough to be guest RAM of {size}")]
    NoSuchMapping {
        /// The process.
        pid: u32,
        /// The size that QEMU reports.
        size: Bytes,
    },
}

impl Overhead {
    /// Measures the overhead, with guest RAM in pieces of `ram_sizes`. It takes milliseconds,
    /// more for guests with much memory, and waits while QEMU changes its mappings. So a thread
    /// that others depend on should not call it.
    ///
    /// # Errors
    /// When the process is gone or may not be inspected, or no mapping qualifies as guest RAM.
    pub fn measure(pid: u32, ram_sizes: &[Bytes]) -> Result<Self, OverheadError> {
        let started = Instant::now();
        split(pid, runs_of(pid)?, ram_sizes, started)
    }

    /// The guest's own memory at these counters: its RAM and the page tables, without a pool's
    /// pages.
    #[must_use]
    pub fn guest_used(&self, counters: &Counters) -> Bytes {
        let Counters { anonymous, shared, hugetlb, page_tables, .. } = *counters;
        let shared = if self.ram_is_shared { shared } else { Bytes::ZERO };
        anonymous.plus(shared).plus(hugetlb).plus(page_tables).minus(self.own)
    }

    /// The pause before the next measurement, so that measuring takes less than 0.1 % of one CPU.
    #[must_use]
    pub fn rest(&self) -> Duration {
        self.took.saturating_mul(1000)
    }
}

/// The part of a guest's memory that is in staging.
///
/// # Errors
/// When the process is gone or may not be inspected.
pub fn staged(pid: u32) -> Result<Bytes, ProcError> {
    let runs = runs_of(pid)?;
    Ok(runs.iter().filter(|run| run.is_staging).map(|run| run.private).sum())
}

/// The memory of a process that the kernel can drop without I/O: it was lazily freed
/// (`MADV_FREE`) and not written since. Walks the page tables, which takes milliseconds for each
/// GiB in small pages.
///
/// # Errors
/// When the process is gone or may not be inspected.
pub fn lazily_free(pid: u32) -> Result<Bytes, ProcError> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
    required_kib_field(&path, &read(&path)?, "LazyFree:")
}

/// The kind of memory in a mapping: guest RAM is all of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
enum MappingKind {
    /// Private memory without a file, writable or not. A pool's mappings count too, because they
    /// replace it.
    Anonymous,
    /// Backed by this file.
    File(String),
    /// A guard, a reservation, or code such as TCG's translation buffer: never guest RAM.
    Unfit,
}

/// Adjacent mappings of one kind.
#[derive(Debug)]
struct MappingRun {
    start: u64,
    end: u64,
    kind: MappingKind,
    /// Not inherited by children (`MADV_DONTFORK`), which QEMU sets for guest RAM: a difference
    /// to its neighbours.
    dont_fork: bool,
    /// Whether its shared pages count: they are memory, not the cache of a file on disk.
    memory_backed: bool,
    /// Anonymous memory and huge pages. For a file on disk, only pages that the process has
    /// written are its own memory.
    private: Bytes,
    /// Other resident memory. In a run of anonymous memory these are a pool's pages.
    shared: Bytes,
    /// The area into which a tracker has moved pages of the guest.
    is_staging: bool,
}

impl MappingRun {
    fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Mappings that merge between two reads of `smaps` are shown again: the merged one overlaps
    /// the part already shown.
    fn goes_on_in(&self, next: &Self) -> bool {
        (self.start..=self.end).contains(&next.start)
            && self.kind == next.kind
            && self.dont_fork == next.dont_fork
            && self.is_staging == next.is_staging
    }

    /// Takes in one line below the header. `Rss:` comes before `Anonymous:`.
    fn add_field(&mut self, name: &str, value: &str) {
        let kib = || parse_kib(value).unwrap_or_default();
        match name {
            "Rss:" if self.memory_backed => self.shared = kib(),
            "Anonymous:" => {
                self.private = self.private.plus(kib());
                self.shared = self.shared.minus(kib());
            }
            "Shared_Hugetlb:" | "Private_Hugetlb:" => self.private = self.private.plus(kib()),
            // The flags come last.
            "VmFlags:" => {
                let has = |wanted: &str| value.split_whitespace().any(|flag| flag == wanted);
                self.dont_fork |= has("dc");
                self.is_staging |= has("rr");
            }
            _ => {}
        }
    }
}

fn runs_of(pid: u32) -> Result<Vec<MappingRun>, ProcError> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps"));
    let file = File::open(&path).map_err(|error| ProcError::from_io(&path, error))?;
    read_runs(&path, BufReader::with_capacity(1 << 16, file))
}

/// Reads `smaps`, one run at a time, because the whole text can have hundreds of megabytes.
fn read_runs(path: &Path, mut smaps: impl BufRead) -> Result<Vec<MappingRun>, ProcError> {
    let mut runs: Vec<MappingRun> = Vec::new();
    let mut current: Option<MappingRun> = None;
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = smaps.by_ref().take(MAX_LINE).read_until(b'\n', &mut line);
        if read.map_err(|error| ProcError::from_io(path, error))? == 0 {
            if let Some(done) = current {
                append(&mut runs, done);
            }
            return Ok(runs);
        }
        let text = String::from_utf8_lossy(&line);
        // Fields are `Name:  value`; a header is `start-end perms ...`.
        let first = text.split_whitespace().next().unwrap_or_default();
        if first.ends_with(':') {
            if let Some(run) = &mut current {
                run.add_field(first, &text[first.len()..]);
            }
            continue;
        }
        let next = parse_header(&text)
            .ok_or_else(|| ProcError::malformed(path, "a mapping", &text, "`start-end …`"))?;
        if let Some(done) = current.replace(next) {
            append(&mut runs, done);
        }
    }
}

/// Adds a mapping, to the last run if it continues that.
fn append(runs: &mut Vec<MappingRun>, mapping: MappingRun) {
    match runs.last_mut() {
        Some(last) if last.goes_on_in(&mapping) => {
            // Only the part of an overlapping mapping that is beyond the run is new.
            let beyond = mapping.end.saturating_sub(last.end);
            let new = |bytes: Bytes| bytes.share(beyond, mapping.len());
            last.private = last.private.plus(new(mapping.private));
            last.shared = last.shared.plus(new(mapping.shared));
            last.end = last.end.max(mapping.end);
        }
        _ => runs.push(mapping),
    }
}

/// `7f63dbe00000-7f63ebe00000 rw-p 00000000 00:01 1042    /memfd:ram (deleted)`
fn parse_header(text: &str) -> Option<MappingRun> {
    let mut fields = text.split_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let (start, end) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?);
    let permissions = fields.next()?;
    let file = fields.skip(3).collect::<Vec<_>>().join(" ");
    let anonymous = file.is_empty() || file.starts_with('[');
    let memory_backed = anonymous
        || ["/memfd:", "/dev/shm/", "/dev/zero", "/SYSV"].iter().any(|p| file.starts_with(p));
    let memfd = file.strip_prefix("/memfd:");
    let of_pool = memfd.is_some_and(|name| name.starts_with(pool_file::NAME_PREFIX));
    let kind = match permissions.as_bytes() {
        [b'-', b'-', b'-', ..] | [_, _, b'x', ..] => MappingKind::Unfit,
        _ if file.is_empty() || of_pool => MappingKind::Anonymous,
        _ => MappingKind::File(file),
    };
    // The flags follow below. A pool's mapping gets the flags of guest RAM a moment after it is
    // made.
    let dont_fork = of_pool;
    let (private, shared, is_staging) = (Bytes::ZERO, Bytes::ZERO, false);
    let run =
        MappingRun { start, end, kind, dont_fork, memory_backed, private, shared, is_staging };
    (start < end).then_some(run)
}

/// Separates guest RAM from the rest.
fn split(
    pid: u32,
    runs: Vec<MappingRun>,
    ram_sizes: &[Bytes],
    started: Instant,
) -> Result<Overhead, OverheadError> {
    let (staging, mut runs): (Vec<MappingRun>, Vec<MappingRun>) =
        runs.into_iter().partition(|run| run.is_staging);
    let mut guest: Bytes = staging.iter().map(|run| run.private).sum();
    let (mut pool, mut ram_is_shared) = (Bytes::ZERO, false);
    for &size in ram_sizes {
        let fits =
            |run: &&(usize, &MappingRun)| run.1.len() >= size.0 && run.1.kind != MappingKind::Unfit;
        let best = runs.iter().enumerate().collect::<Vec<_>>();
        let best = best
            .iter()
            .filter(fits)
            .min_by_key(|(_, run)| (!run.dont_fork, run.len()))
            .map(|(i, _)| *i);
        let index = best.ok_or(OverheadError::NoSuchMapping { pid, size })?;
        let ram = runs.swap_remove(index);
        guest = guest.plus(ram.private);
        if ram.kind == MappingKind::Anonymous {
            pool = pool.plus(ram.shared);
        } else {
            guest = guest.plus(ram.shared);
            ram_is_shared = true;
        }
    }
    let private: Bytes = runs.iter().map(|run| run.private).sum();
    let shared = runs.iter().map(|run| run.shared).sum::<Bytes>().plus(pool);
    let own = if ram_is_shared { private.plus(shared) } else { private };
    Ok(Overhead { own, guest, ram_is_shared, took: started.elapsed() })
}

#[cfg(test)]
#[path = "memory_of/tests.rs"]
mod tests;
