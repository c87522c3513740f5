//! `copies`: memory of which a part is the same in every guest that runs it, a part is only this guest's, and a
//! part is zero: what a host that keeps identical pages once can save is known in advance.
//!
//! Then it reads a word here and there, and writes to its own part only; each operation is timed, so what
//! an access waits for shows in the percentiles. `mb` is what is filled.

use clap::Args;

use crate::args::megabytes;
use crate::error::WorkError;
use crate::memory::{Memory, WORDS_PER_MB, fill_random};
use crate::rng::Rng;
use crate::run::Worker;

/// What the content that all have begins with.
const COMMON_SEED: u64 = 0x0c09_1e50;
/// One of so many operations writes.
const READS_PER_WRITE: usize = 8;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How much is the same in all guests
    #[arg(long, value_name = "N", value_parser = megabytes)]
    same_mb: usize,
    /// How much no other guest has, if --seed is its own
    #[arg(long, value_name = "N", value_parser = megabytes)]
    own_mb: usize,
    /// How much is written and zero
    #[arg(long, value_name = "N", value_parser = megabytes)]
    zero_mb: Option<usize>,
    /// Touch nothing any more when all is filled
    #[arg(long)]
    rest: bool,
}

/// What all have.
pub(super) fn common() -> Rng {
    Rng::new(COMMON_SEED)
}

/// What only the guest of this seed has; other workloads of the same seed have other words.
pub(super) fn own(seed: u64) -> Rng {
    Rng::new(!seed ^ COMMON_SEED)
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut memory = Memory::default();
    let (mut common, mut own) = (common(), own(worker.seed));
    let zero_mb = options.zero_mb.unwrap_or(0);
    let all_mb = options.same_mb + options.own_mb + zero_mb;
    for mb in 0..all_mb {
        if worker.shared.stopping() {
            return Ok(());
        }
        let chunk = memory.grow()?;
        if mb < options.same_mb {
            fill_random(chunk, &mut common);
        } else if mb < options.same_mb + options.own_mb {
            fill_random(chunk, &mut own);
        } else {
            // First something else: a kernel may put its page of zeros under what is only zeroed.
            chunk.fill(1);
            chunk.fill(0);
        }
        worker.shared.mb.set(memory.len_mb());
    }
    while worker.proceed(1) {
        if options.rest {
            worker.shared.sleep_until(std::time::Duration::MAX);
            continue;
        }
        let began = worker.shared.now();
        if own.below(READS_PER_WRITE) == 0 {
            let first = options.same_mb * WORDS_PER_MB;
            let word = first + own.below(options.own_mb * WORDS_PER_MB);
            let value = own.next_u64();
            memory.set(word, value);
        } else {
            std::hint::black_box(memory.get(own.below(memory.words())));
        }
        worker.shared.latency.record(worker.shared.now().saturating_sub(began));
        worker.done(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_fills_and_then_reads_and_writes() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.ops() < 1000 {
                std::thread::yield_now();
            }
            shared.stop();
        });
        let options = Options { same_mb: 2, own_mb: 1, zero_mb: Some(1), rest: false };
        run(&options, &mut worker).unwrap();
        stopper.join().unwrap();
        assert_eq!(worker.shared.mb.get(), Some(4));
        assert!(worker.shared.latency.snapshot().percentile_us(9_999).is_some());
    }
}
