//! The physical memory that a guest occupies, told apart from QEMU's own.
//!
//! **Problem.** The kernel counts per process, and a QEMU process is more than its guest: heap,
//! thread stacks, and under TCG tens of megabytes of translation buffer. What is exact (`smaps`)
//! walks every page table: 1.7 ms for a guest of 256 MB here, 17 ms and more once its memory is in
//! thousands of mappings. What is cheap (`status`: 17 µs, whatever the size) does not tell the two
//! apart.
//!
//! **Idea.** used = `RssAnon` + `HugetlbPages` + `VmPTE` − overhead, and + `RssShmem` where guest
//! RAM is shared memory. The sum is read in every tick ([`Counters`]). The overhead, which moves
//! slowly, is measured from `smaps` now and then ([`Overhead`]): all memory of those kinds outside
//! guest RAM. Guest RAM is found by the sizes that QEMU reports: the run of adjacent mappings of
//! one kind (a partial `madvise` splits mappings) whose length fits best. The owner spaces the
//! measurements so that they stay under a fixed share of CPU time ([`Overhead::rest`]), also for a
//! guest of a terabyte.
//!
//! **A pool's pages.** Where identical pages were merged, mappings of a pool ([`crate::pool_file`])
//! interrupt guest RAM. They belong to its run, but only what the guest has written there since is
//! its own. The kernel counts such copies in `RssAnon`, and the pool's pages in the `RssShmem` of
//! everyone who maps them. Guest RAM that can be merged is anonymous, so `RssShmem` is left out
//! where all of it is, and the sum stays right however much is merged between two measurements. The
//! VM's part of the pool is for somebody else to add.
//!
//! **Staging.** While a VM is tracked, some of its pages stand elsewhere in QEMU until their next
//! touch. That place is as long as guest RAM and looks like it, so it bears a mark
//! ([`STAGING_MARK`]): what is there is the guest's.
//!
//! **Why not PAGEMAP_SCAN** over guest RAM in every tick: it is exact and takes 15 µs while the
//! guest's memory is in huge pages, but ~2 ms per 256 MB once balloon and reporting have broken
//! them up, and it needs Linux 6.7. The sum above costs the same at any size on any kernel.
//!
//! **Limits.** The kernel keeps `Rss*` per CPU and, before 6.17, adds them up lazily: off by up to
//! 64 pages per CPU on small machines. Memory that several processes map, other than a pool, counts
//! for each of them: sums over VMs are right for private RAM only. Where one guest has RAM of both
//! kinds, the pool's pages are subtracted as they were when measured. What the host has swapped out
//! is not counted: it is not occupied.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::Bytes;

use crate::memory_map::Advice;
use crate::pool_file;
use crate::procfs::{ProcError, kib_field, parse_kib, read, required_kib_field};

/// The advice that marks staging (`rr` among the flags in `smaps`). QEMU never gives it; of
/// anonymous memory it only says that its use tells nothing: when the kernel has to swap, staging
/// goes first, which nobody has touched.
pub const STAGING_MARK: Advice = Advice::Random;

/// No line of `smaps` is longer (a path has at most 4096 bytes, escapes quadruple them).
const MAX_LINE: u64 = 20_000;

/// A process's memory, from `/proc/<pid>/status`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Resident private memory, copies of a pool's pages among it.
    pub anonymous: Bytes,
    /// Resident shared memory: a guest on `memory-backend-memfd`, and a pool's pages.
    pub shared: Bytes,
    /// Huge pages from hugetlbfs.
    pub hugetlb: Bytes,
    /// Page tables.
    pub page_tables: Bytes,
    /// Private memory that the host has swapped out.
    pub swapped: Bytes,
    /// All that it has mapped, resident or not.
    pub mapped: Bytes,
}

impl Counters {
    /// Reads them. About 20 µs, whatever the size of the process.
    ///
    /// # Errors
    /// When the process is gone, or is a zombie or a kernel thread: these have no memory.
    pub fn of(pid: u32) -> Result<Self, ProcError> {
        let path = PathBuf::from(format!("/proc/{pid}/status"));
        Self::parse(&path, &read(&path)?)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ProcError> {
        let required = |name| required_kib_field(path, text, name);
        Ok(Self {
            anonymous: required("RssAnon:")?,
            shared: required("RssShmem:")?,
            hugetlb: kib_field(path, text, "HugetlbPages:")?.unwrap_or_default(),
            page_tables: required("VmPTE:")?,
            swapped: kib_field(path, text, "VmSwap:")?.unwrap_or_default(),
            mapped: required("VmSize:")?,
        })
    }
}

/// What of a QEMU process's memory is not its guest's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overhead {
    /// Memory outside guest RAM, of the kinds that [`Self::guest_used`] adds up.
    pub own: Bytes,
    /// Memory inside guest RAM, for comparison; neither page tables nor a pool's pages are part of
    /// it.
    pub guest: Bytes,
    /// Whether guest RAM, or a piece of it, is shared memory. If not, none of
    /// [`Counters::shared`] is the guest's.
    pub ram_is_shared: bool,
    /// How long measuring took.
    pub took: Duration,
}

/// Why the guest's share is unknown.
#[derive(Debug, thiserror::Error)]
pub enum OverheadError {
    /// `smaps` could not be read.
    #[error(transparent)]
    Proc(#[from] ProcError),
    /// No mapping can be the guest's RAM.
    #[error("no memory of QEMU's process {pid} is large enough to be guest RAM of {size}")]
    NoSuchMapping {
        /// The process.
        pid: u32,
        /// What QEMU says.
        size: Bytes,
    },
}

impl Overhead {
    /// Measures it: guest RAM is made of pieces of `ram_sizes`. Costs milliseconds, more for guests
    /// with much memory, and waits while QEMU changes its mappings: not for a thread that others
    /// need.
    ///
    /// # Errors
    /// When the process is gone or may not be looked into, or nothing in it can be guest RAM.
    pub fn measure(pid: u32, ram_sizes: &[Bytes]) -> Result<Self, OverheadError> {
        let started = Instant::now();
        split(pid, runs_of(pid)?, ram_sizes, started)
    }

    /// What the guest occupies by itself when these are the counters: its RAM and the page tables,
    /// without a pool's pages.
    #[must_use]
    pub fn guest_used(&self, counters: &Counters) -> Bytes {
        let Counters { anonymous, shared, hugetlb, page_tables, .. } = *counters;
        let shared = if self.ram_is_shared { shared } else { Bytes::ZERO };
        anonymous.plus(shared).plus(hugetlb).plus(page_tables).minus(self.own)
    }

    /// How long to wait before measuring again, so that it takes less than 0.1 % of one CPU.
    #[must_use]
    pub fn rest(&self) -> Duration {
        self.took.saturating_mul(1000)
    }
}

/// What of a guest's memory is in staging.
///
/// # Errors
/// When the process is gone or may not be looked into.
pub fn staged(pid: u32) -> Result<Bytes, ProcError> {
    let runs = runs_of(pid)?;
    Ok(runs.iter().filter(|run| run.is_staging).map(|run| run.private).sum())
}

/// What of a process's memory the kernel can drop without I/O, for it was lazily freed
/// (`MADV_FREE`) and not written to since. Walks its page tables: milliseconds for each GiB in
/// small pages.
///
/// # Errors
/// When the process is gone or may not be looked into.
pub fn lazily_free(pid: u32) -> Result<Bytes, ProcError> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
    required_kib_field(&path, &read(&path)?, "LazyFree:")
}

/// What kind of memory a mapping holds: guest RAM is all of one kind.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Private, without a file; writable or not. A pool's mappings too, which take its place.
    Anonymous,
    /// Backed by this file.
    File(String),
    /// A guard, a reservation, or code such as TCG's translation buffer: never guest RAM.
    Unfit,
}

/// Adjacent mappings of one kind.
#[derive(Debug)]
struct Run {
    start: u64,
    end: u64,
    kind: Kind,
    /// Kept from children (`MADV_DONTFORK`), as QEMU keeps guest RAM: tells it from its neighbours.
    dont_fork: bool,
    /// Whether shared pages of it count (they are memory, not the cache of a file on disk).
    memory_backed: bool,
    /// Anonymous memory and huge pages. Of a file on disk only what the process has written is its
    /// own memory.
    private: Bytes,
    /// Other resident memory. In a run of anonymous memory: a pool's pages.
    shared: Bytes,
    /// Where a tracker has moved pages of the guest's to.
    is_staging: bool,
}

impl Run {
    fn len(&self) -> u64 {
        self.end - self.start
    }

    /// Mappings that become one between two reads of `smaps` are shown again: that one overlaps
    /// what was shown of it.
    fn goes_on_in(&self, next: &Self) -> bool {
        (self.start..=self.end).contains(&next.start)
            && self.kind == next.kind
            && self.dont_fork == next.dont_fork
            && self.is_staging == next.is_staging
    }

    /// Takes in one line below the header. `Rss:` comes first.
    fn add_field(&mut self, name: &str, value: &str) {
        let kib = || parse_kib(value).unwrap_or_default();
        match name {
            "Rss:" if self.memory_backed => self.shared = kib(),
            "Anonymous:" => {
                self.private = self.private.plus(kib());
                self.shared = self.shared.minus(kib());
            }
            "Shared_Hugetlb:" | "Private_Hugetlb:" => self.private = self.private.plus(kib()),
            // They come last.
            "VmFlags:" => {
                let has = |wanted: &str| value.split_whitespace().any(|flag| flag == wanted);
                self.dont_fork |= has("dc");
                self.is_staging |= has("rr");
            }
            _ => {}
        }
    }
}

fn runs_of(pid: u32) -> Result<Vec<Run>, ProcError> {
    let path = PathBuf::from(format!("/proc/{pid}/smaps"));
    let file = File::open(&path).map_err(|error| ProcError::from_io(&path, error))?;
    read_runs(&path, BufReader::with_capacity(1 << 16, file))
}

/// Reads `smaps`, one run at a time: never the whole text, which can be hundreds of megabytes.
fn read_runs(path: &Path, mut smaps: impl BufRead) -> Result<Vec<Run>, ProcError> {
    let mut runs: Vec<Run> = Vec::new();
    let mut current: Option<Run> = None;
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

/// Adds a mapping, to the last run where it continues that.
fn append(runs: &mut Vec<Run>, mapping: Run) {
    match runs.last_mut() {
        Some(last) if last.goes_on_in(&mapping) => {
            // Of one that overlaps as much is new as its length says.
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
fn parse_header(text: &str) -> Option<Run> {
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
        [b'-', b'-', b'-', ..] | [_, _, b'x', ..] => Kind::Unfit,
        _ if file.is_empty() || of_pool => Kind::Anonymous,
        _ => Kind::File(file),
    };
    // The flags stand below. A pool's mapping gets guest RAM's a moment after it is made.
    let dont_fork = of_pool;
    let (private, shared, is_staging) = (Bytes::ZERO, Bytes::ZERO, false);
    let run = Run { start, end, kind, dont_fork, memory_backed, private, shared, is_staging };
    (start < end).then_some(run)
}

/// Tells guest RAM's share from the rest.
fn split(
    pid: u32,
    runs: Vec<Run>,
    ram_sizes: &[Bytes],
    started: Instant,
) -> Result<Overhead, OverheadError> {
    let (staging, mut runs): (Vec<Run>, Vec<Run>) =
        runs.into_iter().partition(|run| run.is_staging);
    let mut guest: Bytes = staging.iter().map(|run| run.private).sum();
    let (mut pool, mut ram_is_shared) = (Bytes::ZERO, false);
    for &size in ram_sizes {
        let fits = |run: &&(usize, &Run)| run.1.len() >= size.0 && run.1.kind != Kind::Unfit;
        let best = runs.iter().enumerate().collect::<Vec<_>>();
        let best = best
            .iter()
            .filter(fits)
            .min_by_key(|(_, run)| (!run.dont_fork, run.len()))
            .map(|(i, _)| *i);
        let index = best.ok_or(OverheadError::NoSuchMapping { pid, size })?;
        let ram = runs.swap_remove(index);
        guest = guest.plus(ram.private);
        if ram.kind == Kind::Anonymous {
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
