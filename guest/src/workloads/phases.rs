//! `phases`: works in one part of its memory at a time and moves on; a program with phases.
//!
//! All parts stay allocated, so resident memory never shrinks while the working set is one part.
//! In this case counting resident memory is wrong, and an estimate must forget. Odd parts are
//! swept, even ones are accessed at random. The gauge `phase` counts the moves.

use std::time::Duration;

use clap::Args;

use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::{PAGE, WorkMemory};
use crate::rng::Rng;
use crate::run::Worker;

const WORDS_PER_PAGE: usize = PAGE / 8;
/// Accesses between two readings of the clock.
const BURST: usize = 256;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of all parts together
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Number of parts; each has the same size
    #[arg(long, value_name = "N", value_parser = parts, default_value_t = 4)]
    parts: usize,
    /// Time to work in one part
    #[arg(long, value_name = "SECS", value_parser = phase_length, default_value_t = 20.0)]
    length: f64,
}

fn parts(text: &str) -> Result<usize, String> {
    ranged(text, 1, 256)
}

fn phase_length(text: &str) -> Result<f64, String> {
    ranged(text, 0.1, 86_400.0)
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    let mut memory = WorkMemory::filled(options.mb, &mut rng, &worker.shared)?;
    let part_pages = (memory.pages() / options.parts).max(1);
    let mut end = worker.shared.now();
    for number in 0.. {
        worker.shared.phase.set(number);
        end += Duration::from_secs_f64(options.length);
        let first = number % options.parts * part_pages;
        let mut next = 0;
        while worker.shared.now() < end {
            if !worker.proceed(BURST) {
                return Ok(());
            }
            for _ in 0..BURST {
                let swept = number % 2 == 1;
                next = if swept { (next + 1) % part_pages } else { rng.below(part_pages) };
                change(&mut memory, first + next, &mut rng);
            }
            worker.done(BURST);
        }
    }
    Ok(())
}

fn change(memory: &mut WorkMemory, page: usize, rng: &mut Rng) {
    let word = page * WORDS_PER_PAGE + rng.below(WORDS_PER_PAGE);
    let value = memory.get(word);
    memory.set(word, value.rotate_left(5) ^ rng.next_u64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_follow_the_clock_and_work_on() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.phase.get().is_none_or(|phase| phase < 2) {
                std::thread::yield_now();
            }
            shared.stop();
        });
        run(&Options { mb: 1, parts: 2, length: 0.1 }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() > 0 && worker.shared.phase.get() >= Some(2));
    }
}
