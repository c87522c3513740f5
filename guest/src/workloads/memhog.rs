//! `memhog`: takes memory, holds it untouched, gives it back; a tenant whose demand comes and goes.
//!
//! While it holds memory, nothing is touched: this is the idle memory that Overbook looks for.
//! `mb` is the memory that it holds now.

use std::time::Duration;

use clap::Args;
use memmap2::MmapMut;

use crate::args::{megabytes, seconds};
use crate::error::WorkError;
use crate::memory::{PAGE, PAGES_PER_MB, WorkMemory, fill_random, page};
use crate::rng::Rng;
use crate::run::Worker;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// How much to take; --rate is the pace in MB/s
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// Free it after this many seconds [default: hold to the end]
    #[arg(long, value_name = "SECS", value_parser = seconds)]
    hold: Option<f64>,
    /// After freeing, wait this many seconds and start again [default: end]
    #[arg(long, value_name = "SECS", value_parser = seconds, requires = "hold")]
    rest: Option<f64>,
    /// Fill every MB with the same content
    #[arg(long)]
    same: bool,
    /// Take single pages; free every second one first, and the others after the rest
    #[arg(long, requires = "rest")]
    scatter: bool,
}

/// Memory that it holds.
#[derive(Default)]
struct HeldMemory {
    memory: WorkMemory,
    pages: Vec<MmapMut>,
}

impl HeldMemory {
    fn mb(&self) -> usize {
        self.memory.len_mb() + self.pages.len() / PAGES_PER_MB
    }

    /// Takes one MB more.
    fn grow(&mut self, scatter: bool, rng: &mut Rng) -> Result<(), WorkError> {
        if !scatter {
            fill_random(self.memory.grow()?, rng);
            return Ok(());
        }
        for _ in 0..PAGES_PER_MB {
            let mut page = page(self.mb())?;
            fill_random(&mut page[..PAGE], rng);
            self.pages.push(page);
        }
        Ok(())
    }

    /// Frees every second page of the single pages, and all other memory.
    fn scatter(&mut self) {
        self.memory.shrink(0);
        let pages = std::mem::take(&mut self.pages);
        self.pages = pages.into_iter().step_by(2).collect();
    }
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut held = HeldMemory::default();
    let mut rng = Rng::new(worker.seed);
    loop {
        while held.mb() < options.mb {
            if !worker.proceed(1) {
                return Ok(());
            }
            if options.same {
                rng = Rng::new(worker.seed);
            }
            held.grow(options.scatter, &mut rng)?;
            worker.shared.mb.set(held.mb());
            worker.done(1);
        }
        if !sleep(options.hold, worker) {
            return Ok(());
        }
        held.scatter();
        worker.shared.mb.set(held.mb());
        if options.rest.is_none() || !sleep(options.rest, worker) {
            return Ok(());
        }
        held = HeldMemory::default();
    }
}

/// `None` sleeps until the stop; false after one.
fn sleep(seconds: Option<f64>, worker: &Worker) -> bool {
    let length = seconds.map_or(Duration::MAX, Duration::from_secs_f64);
    worker.shared.sleep_until(worker.shared.now().saturating_add(length))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(mb: usize, hold: Option<f64>, rest: Option<f64>) -> Options {
        Options { mb, hold, rest, same: false, scatter: false }
    }

    #[test]
    fn of_single_pages_every_second_one_is_freed_first() {
        let (mut held, mut rng) = (HeldMemory::default(), Rng::new(1));
        held.grow(true, &mut rng).unwrap();
        held.grow(true, &mut rng).unwrap();
        assert_eq!((held.mb(), held.pages.len()), (2, 2 * PAGES_PER_MB));
        held.scatter();
        assert_eq!(held.mb(), 1);
    }

    #[test]
    fn it_takes_all_holds_and_frees() {
        let mut worker = Worker::for_test();
        run(&options(5, Some(0.1), None), &mut worker).unwrap();
        assert_eq!((worker.shared.ops(), worker.shared.mb.get()), (5, Some(0)));
        assert!(worker.shared.now() >= Duration::from_millis(100));
    }

    #[test]
    fn with_a_rest_it_starts_again() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let stopper = std::thread::spawn(move || {
            while shared.ops() < 7 {
                std::thread::yield_now();
            }
            shared.stop();
        });
        run(&options(3, Some(0.01), Some(0.01)), &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() >= 7);
    }
}
