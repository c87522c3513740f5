//! `suite`: one pattern of access after the other, each a fixed amount of work in memory of its own size; it stands for a suite of
//! benchmarks as DaCapo.
//!
//! A part is the same number of accesses in every program, so that parts take much the same time where memory suffices, and what is
//! done can be compared wherever the suite stands. A program's memory is gone when it ends.

use clap::Args;

use crate::args::megabytes;
use crate::error::WorkError;
use crate::memory::Memory;
use crate::rng::Rng;
use crate::run::Worker;

/// Parts of each program.
const PARTS: usize = 64;
const ACCESSES_PER_PART: usize = 1 << 21;
const ACCESSES_PER_STEP: usize = 1 << 12;
/// Words from one access of a sweep to the next.
const STRIDE: usize = 8;
/// Of eight accesses that prefer popular words, so many go to the first eighth of the memory.
const POPULAR: usize = 7;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Memory of the largest program
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// The last program first
    #[arg(long)]
    reversed: bool,
}

/// In which order a program goes through its memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// From its beginning to its end, again and again.
    Sweep,
    /// By chance.
    Random,
    /// By chance, an eighth of it mostly.
    Popular,
}

/// A program, and how much of the largest one's memory it needs, in percent.
const PROGRAMS: [(Order, usize); 5] = [
    (Order::Random, 25),
    (Order::Popular, 60),
    (Order::Random, 100),
    (Order::Sweep, 10),
    (Order::Sweep, 80),
];

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    loop {
        for (order, percent) in in_order(options.reversed) {
            if !program(order, (options.mb * percent / 100).max(1), PARTS, &mut rng, worker)? {
                return Ok(());
            }
        }
    }
}

fn in_order(reversed: bool) -> impl Iterator<Item = (Order, usize)> {
    let last = PROGRAMS.len() - 1;
    (0..PROGRAMS.len()).map(move |at| PROGRAMS[if reversed { last - at } else { at }])
}

/// Fills `mb` and counts in them for so many parts; false if it was stopped.
fn program(
    order: Order,
    mb: usize,
    parts: usize,
    rng: &mut Rng,
    worker: &mut Worker,
) -> Result<bool, WorkError> {
    let mut memory = Memory::filled(mb, rng, &worker.shared)?;
    let words = memory.words();
    let mut at = 0;
    for _ in 0..parts {
        if !worker.proceed(1) {
            return Ok(false);
        }
        for _ in 0..ACCESSES_PER_PART / ACCESSES_PER_STEP {
            if worker.shared.stopping() {
                return Ok(false);
            }
            for _ in 0..ACCESSES_PER_STEP {
                at = match order {
                    Order::Sweep => (at + STRIDE) % words,
                    Order::Random => rng.below(words),
                    Order::Popular if rng.below(8) < POPULAR => rng.below(words / 8),
                    Order::Popular => rng.below(words),
                };
                memory.set(at, memory.get(at).wrapping_add(1));
            }
        }
        worker.done(1);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_can_be_reversed() {
        let mut reversed: Vec<_> = in_order(true).collect();
        reversed.reverse();
        assert_eq!(in_order(false).collect::<Vec<_>>(), reversed);
        assert_ne!(in_order(false).next(), in_order(true).next());
    }

    #[test]
    fn a_program_does_all_its_parts() {
        let mut worker = Worker::for_test();
        assert!(program(Order::Popular, 1, 2, &mut Rng::new(1), &mut worker).unwrap());
        assert_eq!(worker.shared.ops(), 2);
    }
}
