//! `scan`: sweeps over memory again and again; a backup, a batch report, a garbage collector.
//!
//! The worst case for LRU: each page is touched once per sweep and then not for a whole sweep, so
//! a memory that is a little too small always misses. With `--period` a sweep begins at fixed
//! intervals and the guest idles in between; the gauge `step_us` is the time of the last sweep;
//! `--rate` is the pace in pages per second.

use std::hint::black_box;
use std::time::Duration;

use clap::Args;

use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::{PAGE, WorkMemory};
use crate::rng::Rng;
use crate::run::Worker;

const WORDS_PER_PAGE: usize = PAGE / 8;
const PAGES_PER_STEP: usize = 16;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the memory
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Begin a sweep at this interval [default: one after the other]
    #[arg(long, value_name = "SECS", value_parser = period)]
    period: Option<f64>,
    /// Sweep in a fixed order in which no two consecutive pages are neighbours
    #[arg(long)]
    shuffled: bool,
    /// Read every N-th word of a page; the first is also written
    #[arg(long, value_name = "N", value_parser = stride, default_value_t = 8)]
    stride: usize,
}

fn period(text: &str) -> Result<f64, String> {
    ranged(text, 0.01, 86_400.0)
}

fn stride(text: &str) -> Result<usize, String> {
    ranged(text, 1, WORDS_PER_PAGE)
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut memory = WorkMemory::filled(options.mb, &mut Rng::new(worker.seed), &worker.shared)?;
    let pages = memory.pages();
    let apart = if options.shuffled { coprime_near(pages * 5 / 13, pages) } else { 1 };
    loop {
        let begun = worker.shared.now();
        for first in (0..pages).step_by(PAGES_PER_STEP) {
            if !worker.proceed(PAGES_PER_STEP) {
                return Ok(());
            }
            (first..first + PAGES_PER_STEP)
                .for_each(|step| read(&mut memory, step * apart % pages, options.stride));
            worker.done(PAGES_PER_STEP);
        }
        let took = worker.shared.now().saturating_sub(begun);
        worker.shared.step_us.set(usize::try_from(took.as_micros()).unwrap_or(usize::MAX));
        let rest = options.period.map_or(Duration::ZERO, Duration::from_secs_f64);
        if !worker.shared.sleep_until(begun + rest) {
            return Ok(());
        }
    }
}

/// The first number from this one on that has no divisor in common with `of`: its multiples visit
/// each number below `of` once.
fn coprime_near(number: usize, of: usize) -> usize {
    let common = |mut one: usize, mut other: usize| {
        while other > 0 {
            (one, other) = (other, one % other);
        }
        one
    };
    (number.max(1)..).find(|number| common(*number, of) == 1).unwrap_or(1)
}

fn read(memory: &mut WorkMemory, page: usize, stride: usize) {
    let first = page * WORDS_PER_PAGE;
    let words = (first..first + WORDS_PER_PAGE).step_by(stride);
    let sum = words.fold(0_u64, |sum, index| sum.wrapping_add(memory.get(index)));
    memory.set(first, black_box(sum));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_spaces_the_sweeps() {
        let mut worker = Worker::for_test();
        let stopper = worker.stop_after(2 * 256);
        let shuffled = false;
        run(&Options { mb: 1, period: Some(0.5), stride: 64, shuffled }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() >= 2 * 256);
        assert!(worker.shared.now() >= Duration::from_millis(500), "{:?}", worker.shared.now());
    }

    #[test]
    fn a_shuffled_sweep_comes_by_every_page_once() {
        for pages in [256_usize, 255, 12_345, 1] {
            let apart = coprime_near(pages * 5 / 13, pages);
            let mut seen: Vec<usize> = (0..pages).map(|step| step * apart % pages).collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..pages), "{pages}: {apart}");
        }
    }

    #[test]
    fn every_page_is_written() {
        let worker = Worker::for_test();
        let mut memory = WorkMemory::filled(1, &mut Rng::new(1), &worker.shared).unwrap();
        let before: Vec<u64> = (0..256).map(|page| memory.get(page * WORDS_PER_PAGE)).collect();
        (0..256).for_each(|page| read(&mut memory, page, 8));
        assert!((0..256).all(|page| memory.get(page * WORDS_PER_PAGE) != before[page]));
    }
}
