//! `kinds`: one kind of work after the other, each for a few seconds, to find a small cost that
//! affects everything.
//!
//! Memory is written, read and copied in turn, and changed at random places. Then the kernel is
//! called, and a disk is read past the page cache. The gauge `phase` counts the kinds, over
//! repetitions; operations of different kinds are not comparable.

use std::fs::{File, OpenOptions};
use std::hint::black_box;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;

use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::{MB, PAGE, WorkMemory};
use crate::rng::Rng;
use crate::run::Worker;

/// Linux's `O_DIRECT` on x86.
const DIRECT: i32 = 0o40000;
/// Some hundred microseconds of work.
const PAGES_PER_STEP: usize = 64;
const CALLS_PER_STEP: usize = 256;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Memory to work on, a half of it at a time
    #[arg(long, value_name = "N", value_parser = half_megabytes)]
    mb: usize,
    /// Duration of each kind
    #[arg(long, value_name = "SECS", default_value = "3", value_parser = length)]
    each: f64,
    /// Disk or file to read
    #[arg(long, value_name = "PATH")]
    path: PathBuf,
    /// How much of it to read
    #[arg(long, value_name = "N", value_parser = megabytes)]
    disk_mb: usize,
}

fn half_megabytes(text: &str) -> Result<usize, String> {
    ranged(text, 2, 65_536)
}

fn length(text: &str) -> Result<f64, String> {
    ranged(text, 0.01, 86_400.0)
}

#[derive(Debug, Clone, Copy)]
enum PageKind {
    Write,
    Read,
    Copy,
    Random,
    SystemCall,
    Disk,
}

/// In the order in which they are done.
const KINDS: [PageKind; 6] = [
    PageKind::Write,
    PageKind::Read,
    PageKind::Copy,
    PageKind::Random,
    PageKind::SystemCall,
    PageKind::Disk,
];

struct Work {
    memory: WorkMemory,
    other: WorkMemory,
    rng: Rng,
    disk: File,
    disk_mb: usize,
    path: PathBuf,
    /// Position of writing, reading and copying.
    page: usize,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    let disk = open(&options.path).map_err(WorkError::file("open", &options.path))?;
    let mut filled = || WorkMemory::filled(options.mb / 2, &mut rng, &worker.shared);
    let (memory, other) = (filled()?, filled()?);
    let (disk_mb, path) = (options.disk_mb, options.path.clone());
    let mut work = Work { memory, other, rng, disk, disk_mb, path, page: 0 };
    for (number, kind) in KINDS.iter().cycle().enumerate() {
        worker.shared.phase.set(number);
        let end = worker.shared.now() + Duration::from_secs_f64(options.each);
        while worker.shared.now() < end {
            if !worker.proceed(1) {
                return Ok(());
            }
            let done = work.step(*kind)?;
            worker.done(done);
        }
    }
    Ok(())
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).custom_flags(DIRECT).open(path)
}

impl Work {
    /// Returns the number of pages or calls that it did.
    fn step(&mut self, kind: PageKind) -> Result<usize, WorkError> {
        match kind {
            PageKind::Write => {
                let value = self.rng.next_u64().to_le_bytes();
                self.each_page(|memory, _, page| memory.page(page).as_chunks_mut().0.fill(value));
            }
            PageKind::Read => self.each_page(|memory, _, page| {
                let (words, _) = memory.page(page).as_chunks();
                let sum = words.iter().fold(0, |sum, word| u64::from_le_bytes(*word) ^ sum);
                black_box(sum);
            }),
            PageKind::Copy => self.each_page(|memory, other, page| {
                memory.page(page).copy_from_slice(other.page(page));
            }),
            PageKind::Random => {
                for _ in 0..CALLS_PER_STEP {
                    let at = self.rng.below(self.memory.words());
                    self.memory.set(at, self.memory.get(at) ^ 1);
                }
                return Ok(CALLS_PER_STEP);
            }
            PageKind::SystemCall => {
                for _ in 0..CALLS_PER_STEP {
                    black_box(std::os::unix::process::parent_id());
                }
                return Ok(CALLS_PER_STEP);
            }
            PageKind::Disk => {
                let at = self.rng.below(self.disk_mb * MB / PAGE) * PAGE;
                let buffer = self.memory.page(0);
                let failed = WorkError::file("read", &self.path);
                self.disk.read_exact_at(buffer, at as u64).map_err(failed)?;
                return Ok(1);
            }
        }
        Ok(PAGES_PER_STEP)
    }

    fn each_page(&mut self, mut work: impl FnMut(&mut WorkMemory, &mut WorkMemory, usize)) {
        for _ in 0..PAGES_PER_STEP {
            self.page = (self.page + 1) % self.memory.pages();
            work(&mut self.memory, &mut self.other, self.page);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_done_and_then_the_first_again() {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        file.as_file().set_len(MB as u64).unwrap();
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let limit = std::time::Instant::now() + Duration::from_secs(60);
        let stopper = std::thread::spawn(move || {
            while shared.phase.get() < Some(KINDS.len() as u64) && std::time::Instant::now() < limit
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            shared.stop();
        });
        let options = Options { mb: 2, each: 0.01, path: file.path().to_owned(), disk_mb: 1 };
        run(&options, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.phase.get() >= Some(KINDS.len() as u64));
    }

    #[test]
    fn every_kind_counts_what_it_does() {
        let file = tempfile::NamedTempFile::new_in(".").unwrap();
        file.as_file().set_len(MB as u64).unwrap();
        let worker = Worker::for_test();
        let mut rng = Rng::new(1);
        let memory = WorkMemory::filled(1, &mut rng, &worker.shared).unwrap();
        let other = WorkMemory::filled(1, &mut rng, &worker.shared).unwrap();
        let disk = open(file.path()).unwrap();
        let path = file.path().to_owned();
        let mut work = Work { memory, other, rng, disk, disk_mb: 1, path, page: 0 };
        for kind in KINDS {
            assert!(work.step(kind).unwrap() > 0, "{kind:?}");
        }
    }
}
