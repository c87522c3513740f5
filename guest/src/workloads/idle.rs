//! `idle`: a service with nothing to do. It wakes ten times per second and touches 1 MB of its own.
//!
//! This is the guest that lends its memory, and must not suffer by it. Latency counts from the
//! time at which the wake-up was due until all pages of the working set were touched, so a
//! swapped-out page shows. A wake-up that was missed entirely is not made up for, but the late
//! one before it shows the delay.

use std::time::Duration;

use crate::error::WorkError;
use crate::memory::{PAGES_PER_MB, WorkMemory, fill_random};
use crate::rng::Rng;
use crate::run::Worker;

const WAKEUPS_PER_S: f64 = 10.0;

pub(crate) fn run(worker: &mut Worker) -> Result<(), WorkError> {
    let period = Duration::from_secs_f64(1.0 / worker.rate.unwrap_or(WAKEUPS_PER_S));
    let mut memory = WorkMemory::default();
    fill_random(memory.grow()?, &mut Rng::new(worker.seed));
    worker.shared.mb.set(memory.len_mb());

    let mut due = period;
    while worker.shared.sleep_until(due) {
        for page in 0..PAGES_PER_MB {
            let first = &mut memory.page(page)[0];
            *first = first.wrapping_add(1);
        }
        let now = worker.shared.now();
        worker.shared.latency.record(now.saturating_sub(due));
        worker.done(1);
        due = (due + period).max(now);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_wakes_at_most_ten_times_per_second() {
        let mut worker = Worker::for_test();
        let stopper = worker.stop_after(4);
        run(&mut worker).unwrap();
        stopper.join().unwrap();
        let (ops, ms) = (u128::from(worker.shared.ops()), worker.shared.now().as_millis());
        assert!(ops >= 4 && ops <= ms / 100 + 1, "{ops} in {ms} ms");
    }
}
