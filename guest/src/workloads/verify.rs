//! `verify`: memory whose every word is known, so that any damage to it is found and counted.
//!
//! Word `w` of page `p` is a function of (seed, p, generation of p, w): a zeroed page, a page of
//! older content, another guest's page, even a single flipped bit differs from the expected
//! content. Before each verified MB, random pages are checked and rewritten in a new generation,
//! an eighth as many as an MB has. So content keeps changing under merging, swapping and
//! migration, and each round over the memory rewrites an eighth of it.
//!
//! A bad byte is counted once: its page is corrected when it is found. The run goes on, the first
//! few are reported on standard error, and the exit status is 1. The generation table (one part
//! in a thousand) lies in the same memory: damage to it shows as a bad page.
//!
//! With `--breathe` half of the memory is freed and taken anew again and again. Pages that the
//! kernel then hands out must be zeros.
//!
//! With `--disk` a second thread does the same to a disk ([`disk`]).

mod disk;

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;

use crate::args::{megabytes, seconds};
use crate::error::WorkError;
use crate::memory::{PAGE, PAGES_PER_MB, WorkMemory};
use crate::rng::{Rng, STEP, mix};
use crate::run::Worker;

const REWRITES_PER_MB: usize = PAGES_PER_MB / 8;
const TOLD: usize = 8;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How much memory to fill and verify; --rate is the pace in MB/s
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Free half of it, and take it again, each after this many seconds
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    breathe: Option<f64>,
    /// Also write this much to --disk, read it back past the page cache and verify it
    #[arg(long, value_name = "N", value_parser = megabytes, requires = "disk")]
    disk_mb: Option<usize>,
    /// The block device or file for --disk-mb; its content is overwritten
    #[arg(long, value_name = "PATH", requires = "disk_mb")]
    disk: Option<PathBuf>,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let bad_on_disk = AtomicUsize::new(0);
    let (shared, seed) = (std::sync::Arc::clone(&worker.shared), worker.seed);
    thread::scope(|scope| {
        let disk = options.disk.as_ref().zip(options.disk_mb).map(|(path, mb)| {
            let (shared, bad) = (&shared, &bad_on_disk);
            scope.spawn(move || {
                disk::verify(path, mb, seed, shared, bad).inspect_err(|_| shared.stop())
            })
        });
        let result = verify(options, worker, &bad_on_disk);
        shared.stop();
        let of_disk = disk.map_or(Ok(()), |disk| disk.join().unwrap_or(Err(WorkError::Panicked)));
        result.and(of_disk)
    })
}

fn verify(
    options: &Options,
    worker: &mut Worker,
    bad_on_disk: &AtomicUsize,
) -> Result<(), WorkError> {
    worker.shared.bad_bytes.set(0);
    let mut pattern = Pattern::new(worker.seed);
    grow_to(options.mb, &mut pattern, worker)?;
    let mut breathes = Breath::of(options, worker);
    let mut rng = Rng::new(!worker.seed);
    let mut mb = 0;
    while worker.proceed(1) {
        for _ in 0..REWRITES_PER_MB {
            pattern.rewrite(rng.below(pattern.memory.pages()));
            worker.beat();
        }
        for page in mb * PAGES_PER_MB..(mb + 1) * PAGES_PER_MB {
            pattern.check(page);
            worker.beat();
        }
        if let Some(size) = breathes.as_mut().and_then(|breath| breath.look(worker)) {
            pattern.memory.shrink(size);
            grow_to(size, &mut pattern, worker)?;
        }
        mb = (mb + 1) % pattern.memory.len_mb();
        worker.shared.bad_bytes.set(pattern.bad_bytes + bad_on_disk.load(Ordering::Relaxed));
        worker.done(1);
    }
    Ok(())
}

fn grow_to(mb: usize, pattern: &mut Pattern, worker: &Worker) -> Result<(), WorkError> {
    while pattern.memory.len_mb() < mb && !(worker.shared.stopping() && pattern.memory.len_mb() > 0)
    {
        pattern.grow()?;
    }
    worker.shared.mb.set(pattern.memory.len_mb());
    Ok(())
}

/// The schedule for freeing half of the memory and taking it again.
struct Breath {
    sizes: [usize; 2],
    every: Duration,
    next: Duration,
}

impl Breath {
    fn of(options: &Options, worker: &Worker) -> Option<Self> {
        let every = Duration::from_secs_f64(options.breathe?);
        let sizes = [options.mb.div_ceil(2), options.mb];
        Some(Self { sizes, every, next: worker.shared.now().saturating_add(every) })
    }

    /// The size that is due, if one is.
    fn look(&mut self, worker: &Worker) -> Option<usize> {
        let now = worker.shared.now();
        (now >= self.next).then(|| {
            self.next = now.saturating_add(self.every);
            self.sizes.rotate_left(1);
            self.sizes[1]
        })
    }
}

struct Pattern {
    memory: WorkMemory,
    seed: u64,
    generations: Vec<u32>,
    bad_bytes: usize,
    told: usize,
}

impl Pattern {
    fn new(seed: u64) -> Self {
        Self { memory: WorkMemory::default(), seed, generations: Vec::new(), bad_bytes: 0, told: 0 }
    }

    /// Adds one MB of a generation that these pages have not had. Pages that were freed before
    /// must be zeros until they are written.
    fn grow(&mut self) -> Result<(), WorkError> {
        let first = self.memory.pages();
        let last = first + PAGES_PER_MB;
        let fresh = self.memory.grow()?;
        if last <= self.generations.len() {
            let bad = fresh.iter().filter(|byte| **byte != 0).count();
            if bad > 0 {
                eprintln!("overbook-guest: verify: {bad} bytes of fresh memory are not zero");
            }
            self.bad_bytes += bad;
        } else {
            self.generations.resize(last, 0);
        }
        for page in first..last {
            self.generations[page] = self.generations[page].wrapping_add(1);
            self.write(page);
        }
        Ok(())
    }

    /// Checks a page, then gives it new content.
    fn rewrite(&mut self, page: usize) {
        self.check(page);
        self.generations[page] = self.generations[page].wrapping_add(1);
        self.write(page);
    }

    fn write(&mut self, page: usize) {
        let stream = self.stream(page);
        let words = self.memory.page(page).as_chunks_mut::<8>().0;
        words.iter_mut().zip(stream).for_each(|(word, expected)| *word = expected);
    }

    /// Compares a page with its expected content; counts and corrects wrong bytes.
    fn check(&mut self, page: usize) {
        let stream = self.stream(page);
        let words = self.memory.page(page).as_chunks_mut::<8>().0;
        let mut bad = 0;
        for (index, (word, expected)) in words.iter_mut().zip(stream).enumerate() {
            if *word != expected {
                bad += word.iter().zip(&expected).filter(|(got, want)| got != want).count();
                if self.told < TOLD {
                    self.told += 1;
                    let offset = page * PAGE + index * 8;
                    eprintln!(
                        "overbook-guest: verify: offset {offset:#x} (page {page}): \
                         expected {expected:02x?}, got {word:02x?}"
                    );
                }
                *word = expected;
            }
        }
        self.bad_bytes += bad;
    }

    /// The words that a page must hold.
    fn stream(&self, page: usize) -> impl Iterator<Item = [u8; 8]> + use<> {
        let id = (page as u64) << 32 | u64::from(self.generations[page]);
        let mut state = mix(self.seed ^ mix(id));
        std::iter::repeat_with(move || {
            state = state.wrapping_add(STEP);
            mix(state).to_le_bytes()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> Pattern {
        let mut pattern = Pattern::new(7);
        pattern.grow().unwrap();
        pattern
    }

    /// The number of bytes in which the two pages differ, which a checker must count.
    fn difference(a: &[u8], b: &[u8]) -> usize {
        a.iter().zip(b).filter(|(a, b)| a != b).count()
    }

    fn bad_bytes(pattern: &mut Pattern) -> usize {
        let before = pattern.bad_bytes;
        (0..pattern.memory.pages()).for_each(|page| pattern.check(page));
        pattern.bad_bytes - before
    }

    #[test]
    fn unharmed_memory_has_no_bad_byte_in_any_generation() {
        let mut pattern = filled();
        (0..1000).for_each(|i| pattern.rewrite(i % PAGES_PER_MB));
        assert_eq!(bad_bytes(&mut pattern), 0);
    }

    #[test]
    fn a_flipped_bit_is_one_bad_byte_counted_once() {
        let mut pattern = filled();
        pattern.memory.page(3)[77] ^= 0x10;
        assert_eq!(bad_bytes(&mut pattern), 1);
        assert_eq!(bad_bytes(&mut pattern), 0);
    }

    #[test]
    fn a_zeroed_page_is_found_and_its_bytes_counted_exactly() {
        let mut pattern = filled();
        let expected = difference(pattern.memory.page(9), &[0; PAGE]);
        pattern.memory.page(9).fill(0);
        assert!(expected > 4000);
        assert_eq!(bad_bytes(&mut pattern), expected);
    }

    #[test]
    fn a_stale_generation_is_found() {
        let mut pattern = filled();
        let stale = pattern.memory.page(5).to_vec();
        pattern.rewrite(5);
        let expected = difference(pattern.memory.page(5), &stale);
        pattern.memory.page(5).copy_from_slice(&stale);
        assert!(expected > 4000);
        assert_eq!(bad_bytes(&mut pattern), expected);
    }

    #[test]
    fn two_swapped_pages_are_both_found() {
        let mut pattern = filled();
        let (a, b) = (pattern.memory.page(1).to_vec(), pattern.memory.page(2).to_vec());
        pattern.memory.page(1).copy_from_slice(&b);
        pattern.memory.page(2).copy_from_slice(&a);
        assert_eq!(bad_bytes(&mut pattern), 2 * difference(&a, &b));
    }

    #[test]
    fn harm_is_found_before_a_rewrite_can_hide_it() {
        let mut pattern = filled();
        pattern.memory.page(4)[0] ^= 1;
        pattern.rewrite(4);
        assert_eq!((pattern.bad_bytes, bad_bytes(&mut pattern)), (1, 0));
    }

    #[test]
    fn pages_of_guests_with_other_seeds_are_foreign() {
        let mut pattern = filled();
        let foreign = Pattern { seed: 8, ..filled() }.stream(6).take(512).flatten();
        let foreign: Vec<u8> = foreign.collect();
        pattern.memory.page(6).copy_from_slice(&foreign);
        assert!(bad_bytes(&mut pattern) > 4000);
    }

    #[test]
    fn a_run_reports_zero_bad_bytes() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.ops() < 4 {
                std::thread::yield_now();
            }
            shared.stop();
        });
        run(&Options { mb: 2, breathe: None, disk_mb: None, disk: None }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert_eq!(worker.shared.bad_bytes.get(), Some(0));
    }

    #[test]
    fn memory_that_comes_and_goes_is_verified_like_other() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.ops() < 40 {
                std::thread::yield_now();
            }
            shared.stop();
        });
        let options = Options { mb: 4, breathe: Some(0.001), disk_mb: None, disk: None };
        run(&options, &mut worker).unwrap();
        stopper.join().unwrap();
        assert_eq!(worker.shared.bad_bytes.get(), Some(0));
        let mut pattern = filled();
        pattern.memory.shrink(0);
        let before = pattern.generations[5];
        pattern.grow().unwrap();
        assert_eq!((pattern.generations[5], bad_bytes(&mut pattern)), (before + 1, 0));
    }
}
