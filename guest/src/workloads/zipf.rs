//! `zipf`: reads and changes records of Zipf popularity; a database whose hot records lie together.
//!
//! Popularity falls along the memory, so there is no working set with an edge: the miss-ratio curve
//! is a smooth slope, where `random-array` has a cliff.

use clap::Args;

use super::kv::skew;
use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::WorkMemory;
use crate::rng::Rng;
use crate::run::Worker;
use crate::zipf::Zipf;

const WORDS_PER_KB: usize = 128;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of all records
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// How unequal their popularity is: 0 = all alike
    #[arg(long, value_name = "S", value_parser = skew, default_value_t = 0.8)]
    skew: f64,
    /// Size of a record
    #[arg(long, value_name = "KB", value_parser = record_kb, default_value_t = 4)]
    record_kb: usize,
}

fn record_kb(text: &str) -> Result<usize, String> {
    ranged(text, 1, 1024)
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    let mut memory = WorkMemory::filled(options.mb, &mut rng, &worker.shared)?;
    let record_words = options.record_kb * WORDS_PER_KB;
    let popularity = Zipf::new(memory.words() / record_words, options.skew);
    while worker.proceed(1) {
        change(&mut memory, popularity.choose(&mut rng) * record_words, record_words);
        worker.done(1);
    }
    Ok(())
}

/// Reads one word of each kilobyte, and changes the first.
fn change(memory: &mut WorkMemory, first: usize, words: usize) {
    let read = (first..first + words).step_by(WORDS_PER_KB);
    let sum = read.fold(0_u64, |sum, index| sum.rotate_left(5) ^ memory.get(index));
    memory.set(first, sum.wrapping_add(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn popular_records_lie_at_the_beginning() {
        let shared = crate::run::RunState::new();
        let mut rng = Rng::new(1);
        let mut memory = WorkMemory::filled(4, &mut rng, &shared).unwrap();
        let popularity = Zipf::new(memory.words() / 512, 1.0);
        let before: Vec<u64> = (0..1024).map(|record| memory.get(record * 512)).collect();
        (0..2000).for_each(|_| change(&mut memory, popularity.choose(&mut rng) * 512, 512));
        let changed = |range: std::ops::Range<usize>| {
            range.filter(|&record| memory.get(record * 512) != before[record]).count()
        };
        assert_eq!(changed(0..10), 10);
        assert!(changed(924..1024) < 50);
    }
}
