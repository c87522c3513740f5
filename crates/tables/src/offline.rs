//! Makes tables of shared pages (`pages::offline`) from images, packages and binaries.
//!
//! A guest's page cache holds a file in pages cut at the file's own offsets. So each file is cut
//! at multiples of 4096 from its beginning, and the last page is filled up with zeros, as the
//! kernel does. Of an executable, only pages with some byte of an executable segment are taken;
//! on request, all pages of all files.
//!
//! | part | what it does |
//! |-|-|
//! | `sources.rs` | tells the kind of a source by its first bytes |
//! | `tree.rs` | finds the files of a directory tree |
//! | `containers.rs` | finds the files in packages, kernels and disks' images (feature `images`) |
//! | `elf.rs` | tells which pages of a file are code |
//! | `cut.rs` | cuts a file into pages and collects them |
//! | `trial.rs` | reads the tables that the configuration names |
//! | `tally.rs` | counts the files of a source, and says what was found if there were none |
//! | `limit.rs` | counts the bytes read of a source, and stops at the limit |
//!
//! One thread finds files, the others cut them. Memory: the table's own ([`MOST_PAGES`]), some 8
//! MiB for each thread, and up to 256 MiB for the window of a decompressor.
//!
//! The input is not trusted. A symbolic link is followed only if it was named itself. No other
//! filesystem is entered, and nothing is unpacked inside of an unpacked file. The depth of a
//! tree, its files and the bytes read of one source are limited.

mod capture;
#[cfg(feature = "images")]
mod containers;
mod cut;
mod elf;
mod limit;
mod sources;
mod tally;
mod tree;
pub mod trial;

use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Write},
    num::NonZero,
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use pages::offline::{
    Builder, FormatError, HEADER_LEN, MOST_PAGES, RECORD_LEN, Sampling, Table, TableRef,
    TooManyPages,
};

pub use capture::capture;
use cut::Cutter;
use sources::SourceKind;
use tally::Tally;

/// Memory for the window of xz. `dpkg-deb` and Linux use at most 64 MiB and 128 MiB. Zstd itself
/// takes at most 128 MiB.
pub const MOST_XZ_KIB: u32 = 256 << 10;
/// Maximum depth of nested directories.
const MOST_DEPTH: usize = 128;
/// Maximum number of files and directories in one source.
const MOST_FILES: u64 = 1 << 22;
/// Maximum number of bytes read of one file, or of all files of one image or package.
const MOST_BYTES: u64 = 128 << 30;
/// Length of the queue of files to cut.
const WAITING: usize = 256;
/// Maximum number of left-out files that are reported by name.
const TOLD: usize = 8;

/// Input of [`build`].
#[derive(Clone, Debug)]
pub struct BuildRequest {
    /// Directories, images, packages, executables.
    pub sources: Vec<PathBuf>,
    /// Takes all pages of all files, instead of executables' code.
    pub all_pages: bool,
    /// The offsets at which pages are sampled.
    pub sampling: Sampling,
    /// The directory in which backing files of qcow2 images may be opened; without it, none may.
    pub backing_dir: Option<PathBuf>,
}

/// Why there is no table.
#[derive(Debug, thiserror::Error)]
pub enum OfflineError {
    /// A source cannot be read, or the table cannot be written.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// The error of the kernel or of the decompressor.
        error: io::Error,
    },
    /// The file cannot be a source.
    #[error("{path}: {what}")]
    Source {
        /// The file.
        path: PathBuf,
        /// Its kind, and what would be valid.
        what: String,
    },
    /// A source exceeds a limit: there is no table of a part of a source.
    #[error("{path}: {what}")]
    Limit {
        /// The source.
        path: PathBuf,
        /// The limit.
        what: String,
    },
    /// Too many pages for a table.
    #[error(transparent)]
    TooManyPages(#[from] TooManyPages),
    /// The table cannot have this name.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// All pages are zeros.
    #[error("all pages of the sources are zeros: of these no table can be made")]
    Zeros,
    /// The parser of a foreign format has panicked.
    #[error("reading ended by a fault of this program; what it says stands above")]
    Panic,
}

impl OfflineError {
    /// The error without the path.
    fn what(&self) -> String {
        match self {
            Self::File { error, .. } => error.to_string(),
            Self::Source { what, .. } | Self::Limit { what, .. } => what.clone(),
            other => other.to_string(),
        }
    }
}

/// The result of a build, in figures.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Files from which pages were taken.
    pub files: u64,
    /// Bytes that were classified.
    pub bytes: u64,
    /// Files and directories that could not be read.
    pub left_out: u64,
    /// The first of these, each with the reason, fit for a terminal.
    pub told: Vec<String>,
}

/// State that the threads share.
struct BuildState {
    all_pages: bool,
    #[cfg(feature = "images")]
    backing_dir: Option<PathBuf>,
    builder: Mutex<Builder>,
    failure: Mutex<Option<OfflineError>>,
    told: Mutex<Vec<String>>,
    sources: Mutex<Vec<Arc<Tally>>>,
    files: AtomicU64,
    bytes: AtomicU64,
    left_out: AtomicU64,
    has_failed: AtomicBool,
}

/// A job, and the source that it belongs to.
struct Task {
    job: CutJob,
    source: Arc<Tally>,
}

/// One unit of a thread's work.
enum CutJob {
    /// Cuts a file. A file that was named itself must be usable.
    File { path: PathBuf, is_named: bool },
    /// Cuts files in another file.
    #[cfg(feature = "images")]
    Container(containers::ContainerPart),
}

/// Reads all sources. `watch` gets the number of files and bytes done, from time to time.
pub fn build(
    request: &BuildRequest,
    mut watch: impl FnMut(u64, u64),
) -> Result<(Table, Work), OfflineError> {
    let shared = BuildState::new(request);
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    let (jobs, waiting) = sync_channel(WAITING);
    thread::scope(|scope| {
        let waiting = Arc::new(Mutex::new(waiting));
        let shared = &shared;
        let cutters: Vec<_> = (0..threads)
            .map(|_| (Arc::clone(&waiting), request.sampling))
            .map(|(waiting, sampling)| scope.spawn(move || work(shared, sampling, &waiting)))
            .collect();
        // Only the threads hold the receiver: when all have ended, `put` fails instead of blocking.
        drop(waiting);
        let source = Arc::default();
        let mut parts = Queue {
            shared,
            jobs,
            watch: &mut watch,
            #[cfg(feature = "images")]
            parts: threads as u64,
            source,
        };
        let found = request.sources.iter().try_for_each(|source| parts.put_source(source));
        if let Err(failure) = found {
            shared.fail(failure);
        }
        drop(parts);
        while cutters.iter().any(|cutter| !cutter.is_finished()) {
            thread::sleep(Duration::from_millis(20));
            shared.show(&mut watch);
        }
        if cutters.into_iter().any(|cutter| cutter.join().is_err()) {
            shared.fail(OfflineError::Panic);
        }
    });
    shared.finish()
}

/// One thread: takes jobs until there are no more.
fn work(shared: &BuildState, sampling: Sampling, waiting: &Mutex<Receiver<Task>>) {
    let mut cutter = Cutter::new(shared, sampling);
    loop {
        let task = lock(waiting).recv();
        let Ok(Task { job, source }) = task else { break };
        cutter.source = source;
        // After a failure jobs are still taken: `put` may block on the queue.
        if !shared.has_failed() {
            let done = match job {
                CutJob::File { path, is_named } => sources::cut_file(&mut cutter, &path, is_named),
                #[cfg(feature = "images")]
                CutJob::Container(part) => part.cut(&mut cutter),
            };
            done.unwrap_or_else(|failure| shared.fail(failure));
        }
    }
    cutter.hand_over().unwrap_or_else(|failure| shared.fail(failure));
}

/// The sending end of the job queue.
struct Queue<'a> {
    shared: &'a BuildState,
    jobs: SyncSender<Task>,
    watch: &'a mut dyn FnMut(u64, u64),
    #[cfg(feature = "images")]
    parts: u64,
    source: Arc<Tally>,
}

impl Queue<'_> {
    fn put_source(&mut self, path: &Path) -> Result<(), OfflineError> {
        self.source = Arc::new(Tally::new(path.into()));
        lock(&self.shared.sources).push(Arc::clone(&self.source));
        match sources::kind(path, self.shared.all_pages)? {
            SourceKind::Tree => tree::put(self, path)?,
            #[cfg(feature = "images")]
            SourceKind::Container(kind) => containers::put(self, path, kind),
            #[cfg(not(feature = "images"))]
            SourceKind::Container(_) => {
                let what = "this Overbook reads no packages, kernels and images, because it was built \
                            without the feature `images`; valid: ELF, a directory";
                return Err(OfflineError::Source { path: path.into(), what: what.to_owned() });
            }
            SourceKind::File => self.put(CutJob::File { path: path.into(), is_named: true }),
        }
        Ok(())
    }

    fn leave_out(&self, path: &Path, why: &dyn std::fmt::Display) {
        self.shared.leave_out(&self.source, path, why);
    }

    fn put(&mut self, job: CutJob) {
        self.shared.show(self.watch);
        // The send fails when all threads have ended; `build` reports why they ended.
        let _ = self.jobs.send(Task { job, source: Arc::clone(&self.source) });
    }
}

impl BuildState {
    fn new(request: &BuildRequest) -> Self {
        Self {
            all_pages: request.all_pages,
            #[cfg(feature = "images")]
            backing_dir: request.backing_dir.clone(),
            builder: Mutex::new(Builder::new(request.sampling)),
            failure: Mutex::default(),
            told: Mutex::default(),
            sources: Mutex::default(),
            files: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
            has_failed: AtomicBool::new(false),
        }
    }

    fn has_failed(&self) -> bool {
        self.has_failed.load(Relaxed)
    }

    fn fail(&self, failure: OfflineError) {
        lock(&self.failure).get_or_insert(failure);
        self.has_failed.store(true, Relaxed);
    }

    fn leave_out(&self, source: &Tally, path: &Path, why: &dyn std::fmt::Display) {
        self.left_out.fetch_add(1, Relaxed);
        source.left_out.fetch_add(1, Relaxed);
        let mut told = lock(&self.told);
        if told.len() < TOLD {
            told.push(printable(&format!("{}: {why}", path.display())));
        }
    }

    fn show(&self, watch: &mut dyn FnMut(u64, u64)) {
        watch(self.files.load(Relaxed), self.bytes.load(Relaxed));
    }

    fn finish(self) -> Result<(Table, Work), OfflineError> {
        if let Some(failure) = into_inner(self.failure) {
            return Err(failure);
        }
        let mut told = into_inner(self.told);
        told.sort_unstable();
        into_inner(self.sources).iter().try_for_each(|source| source.check(&told))?;
        let table = into_inner(self.builder).finish();
        if table.records().is_empty() {
            return Err(OfflineError::Zeros);
        }
        let work = Work {
            files: self.files.into_inner(),
            bytes: self.bytes.into_inner(),
            left_out: self.left_out.into_inner(),
            told,
        };
        Ok((table, work))
    }
}

/// Writes a temporary file in the same directory and renames it. A reader sees the old table or
/// the new one, also after an interruption. The table's name is the file's, without the extension.
pub fn write(table: &Table, path: &Path) -> Result<(), OfflineError> {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let header = table.header(&name)?;
    let mut hidden = path.file_name().unwrap_or_default().to_owned();
    hidden.push(format!(".{}.new", std::process::id()));
    let hidden = path.with_file_name(hidden);
    let fail = |error| OfflineError::File { path: path.into(), error };
    let written = write_to(table, header.as_slice(), &hidden)
        .and_then(|()| fs::rename(&hidden, path))
        .map_err(fail);
    if written.is_err() {
        // A partial file is of no use. Its removal may fail because it was never created.
        let _ = fs::remove_file(&hidden);
    }
    written
}

/// A table's bytes, not checked yet.
pub fn read(path: &Path) -> Result<Vec<u8>, OfflineError> {
    const MOST_LEN: u64 = (HEADER_LEN + RECORD_LEN * MOST_PAGES) as u64;
    let fail = |error| OfflineError::File { path: path.into(), error };
    let mut bytes = Vec::new();
    let file = sources::open(path, rustix::fs::OFlags::empty()).map_err(fail)?;
    file.take(MOST_LEN + 1).read_to_end(&mut bytes).map_err(fail)?;
    if bytes.len() as u64 > MOST_LEN {
        let what = format!("longer than {MOST_LEN} bytes, the most that a table has");
        return Err(OfflineError::Source { path: path.into(), what });
    }
    Ok(bytes)
}

/// Parses these bytes as a table. A table without pages is rejected although it is valid, because
/// nothing can be concluded from it.
pub fn parse(bytes: &[u8]) -> Result<TableRef<'_>, String> {
    let table = TableRef::parse(bytes).map_err(|error| error.to_string())?;
    if table.is_empty() {
        return Err("it has no page: build it anew out of a source that has some".to_owned());
    }
    Ok(table)
}

fn write_to(table: &Table, header: &[u8], path: &Path) -> io::Result<()> {
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(header)?;
    table.records().iter().try_for_each(|record| file.write_all(&record.encode()))?;
    file.into_inner()?.sync_all()
}

/// Text from an image or a package, made fit for a terminal. Quotes stay as they are.
fn printable(text: &str) -> String {
    let escape = |c: char| match c {
        '\'' | '"' => c.to_string(),
        c => c.escape_debug().to_string(),
    };
    text.chars().map(escape).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn into_inner<T>(mutex: Mutex<T>) -> T {
    mutex.into_inner().unwrap_or_else(PoisonError::into_inner)
}
