//! `scan`: sweeps over memory again and again; a backup, a batch report, a garbage collector.
//!
//! The enemy of every LRU: each page is touched once per sweep and then not for a whole sweep, so a
//! memory that is a little too small misses always. With `--period` a sweep begins every so many
//! seconds and the guest idles in between; the gauge `step_us` says how long the last one took; `--rate` is the pace in pages per second.

use std::hint::black_box;
use std::time::Duration;

use clap::Args;

use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::{Memory, PAGE};
use crate::rng::Rng;
use crate::run::Worker;

const WORDS_PER_PAGE: usize = PAGE / 8;
const PAGES_PER_STEP: usize = 16;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the memory
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Begin a sweep every so many seconds [default: one after the other]
    #[arg(long, value_name = "SECS", value_parser = period)]
    period: Option<f64>,
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
    let mut memory = Memory::filled(options.mb, &mut Rng::new(worker.seed), &worker.shared)?;
    loop {
        let begun = worker.shared.now();
        for first in (0..memory.pages()).step_by(PAGES_PER_STEP) {
            if !worker.proceed(PAGES_PER_STEP) {
                return Ok(());
            }
            (first..first + PAGES_PER_STEP)
                .for_each(|page| read(&mut memory, page, options.stride));
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

fn read(memory: &mut Memory, page: usize, stride: usize) {
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
        run(&Options { mb: 1, period: Some(0.5), stride: 64 }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() >= 2 * 256);
        assert!(worker.shared.now() >= Duration::from_millis(500), "{:?}", worker.shared.now());
    }

    #[test]
    fn every_page_is_written() {
        let worker = Worker::for_test();
        let mut memory = Memory::filled(1, &mut Rng::new(1), &worker.shared).unwrap();
        let before: Vec<u64> = (0..256).map(|page| memory.get(page * WORDS_PER_PAGE)).collect();
        (0..256).for_each(|page| read(&mut memory, page, 8));
        assert!((0..256).all(|page| memory.get(page * WORDS_PER_PAGE) != before[page]));
    }
}
