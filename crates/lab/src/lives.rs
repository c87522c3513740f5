//! The lives of a group's workers: each receives random orders for a while, and is then killed.

use std::time::{Duration, Instant};

use worker::Report;

use crate::interrupt;
use crate::lab::{Lab, LabError, Machine};
use crate::random::Random;
use crate::worker_process::{Wanted, WorkerProcess};

/// Lifetime of a worker.
const LIFE_MS: (u64, u64) = (500, 20_000);
/// Pause between two orders.
const REST_MS: (u64, u64) = (200, 1_500);

/// Starts and kills workers for `length`, and returns the last report of each. `beside` is called
/// for each guest after each order.
pub fn run(
    lab: &Lab,
    length: Duration,
    random: &mut Random,
    start: impl Fn() -> Result<WorkerProcess, LabError>,
    mut order: impl FnMut(&mut Random) -> Wanted,
    mut beside: impl FnMut(&Machine, &mut Random) -> Result<(), LabError>,
) -> Result<Vec<Report>, LabError> {
    let mut last_words = Vec::new();
    let until = Instant::now() + length;
    while Instant::now() < until {
        let mut worker = start()?;
        let end = (Instant::now() + random.millis(LIFE_MS)).min(until);
        while Instant::now() < end {
            worker.order(lab, order(random))?;
            for machine in lab.machines() {
                machine.ensure_alive()?;
                beside(machine, random)?;
            }
            interrupt::sleep(random.millis(REST_MS))?;
        }
        last_words.push(worker.report().unwrap_or_default());
        worker.kill()?;
    }
    Ok(last_words)
}
