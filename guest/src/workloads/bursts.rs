//! `bursts`: programs that take memory at very different paces, use it for a moment and end;
//! nothing happens the rest of the time.
//!
//! Each burst is a process of its own (`memhog`), the first that the kernel kills when memory
//! runs out, so that the report goes on and counts the kill (`oom_kills`). Sizes, paces and
//! pauses come from the seed. `phase` counts the bursts that have begun.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::Args;

use crate::args::megabytes;
use crate::error::WorkError;
use crate::rng::Rng;
use crate::run::Worker;

/// MB per second, from a program that reads a disk to one that fills memory at full speed.
const PACE: (f64, f64) = (10.0, 300.0);
/// The time for which a burst holds its memory, in seconds.
const HOLD: (f64, f64) = (1.0, 8.0);
/// Time between bursts, in seconds.
const REST: (f64, f64) = (5.0, 60.0);
const POLL: Duration = Duration::from_millis(50);
const NAME: &str = "memhog";

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The most that one takes; the least is a quarter
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut rng = Rng::new(worker.seed);
    worker.shared.phase.set(0);
    for number in 1.. {
        let least = options.mb.div_ceil(4);
        let mb = least + rng.below(options.mb - least + 1);
        let pace = PACE.0 * (PACE.1 / PACE.0).powf(rng.between((0.0, 1.0)));
        worker.shared.phase.set(number);
        let mut child = begin(mb, pace, rng.between(HOLD))?;
        while child.try_wait().map_err(failed)?.is_none() {
            if !worker.shared.sleep_until(worker.shared.now() + POLL) {
                // The child may have ended by itself.
                let _ = child.kill();
                let _ = child.wait();
                return Ok(());
            }
        }
        worker.done(1);
        let rest = Duration::from_secs_f64(rng.between(REST));
        if !worker.shared.sleep_until(worker.shared.now() + rest) {
            return Ok(());
        }
    }
    Ok(())
}

fn failed(source: std::io::Error) -> WorkError {
    WorkError::Program { name: NAME, source }
}

fn begin(mb: usize, pace: f64, hold: f64) -> Result<Child, WorkError> {
    let mut command = Command::new("/proc/self/exe");
    command.arg(NAME).args(["--mb", &mb.to_string(), "--rate", &pace.to_string()]);
    command.args(["--hold", &hold.to_string()]).stdin(Stdio::null()).stdout(Stdio::null());
    let child = command.spawn().map_err(failed)?;
    // The child may have been killed already.
    let _ = std::fs::write(format!("/proc/{}/oom_score_adj", child.id()), "1000");
    Ok(child)
}
