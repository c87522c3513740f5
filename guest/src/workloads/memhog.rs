//! `memhog`: takes memory, holds it untouched, gives it back; a tenant whose demand comes and goes.
//!
//! While it holds, nothing is touched: this is the idle memory that Overbook looks for. `mb` is
//! what it holds now.

use std::time::Duration;

use clap::Args;

use crate::args::{megabytes, seconds};
use crate::error::WorkError;
use crate::memory::{Memory, fill_random};
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
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut memory = Memory::default();
    let mut rng = Rng::new(worker.seed);
    loop {
        while memory.len_mb() < options.mb {
            if !worker.proceed(1) {
                return Ok(());
            }
            fill_random(memory.grow()?, &mut rng);
            worker.shared.mb.set(memory.len_mb());
            worker.done(1);
        }
        if !sleep(options.hold, worker) {
            return Ok(());
        }
        memory.shrink(0);
        worker.shared.mb.set(0);
        if options.rest.is_none() || !sleep(options.rest, worker) {
            return Ok(());
        }
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

    #[test]
    fn it_takes_all_holds_and_frees() {
        let mut worker = Worker::for_test();
        run(&Options { mb: 5, hold: Some(0.1), rest: None }, &mut worker).unwrap();
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
        run(&Options { mb: 3, hold: Some(0.01), rest: Some(0.01) }, &mut worker).unwrap();
        stopper.join().unwrap();
        assert!(worker.shared.ops() >= 7);
    }
}
