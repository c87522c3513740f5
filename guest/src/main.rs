//! `overbook-guest`: the load inside a lab guest.
//!
//! The lab needs guests that do real work whose speed can be measured from outside while their
//! memory is taken and given. This is one static program with one subcommand per workload. The
//! guest's init starts it. Its standard output (the serial console) carries the measurement: one
//! JSON line per second and a final one.
//!
//! * The worker thread does the work and counts it in atomics; the main thread only reports. So a
//!   line comes out every second even while the worker waits in a page fault for a slow swap
//!   disk.
//! * Work is deterministic from `--seed`; time only decides how much of it gets done.
//! * The program itself stays small, since its file lies in the guest's memory: no async runtime,
//!   few dependencies.
//!
//! Exit status: 0 done or told to stop, 1 the work failed (`verify`: bad bytes were found), 2 bad
//! command line.

mod args;
mod census;
mod checksum;
mod content;
mod disk;
mod error;
mod files;
mod gap;
mod histogram;
mod intact;
mod memory;
mod oom;
mod pace;
mod program;
mod report;
mod rng;
mod run;
mod swap;
mod text;
mod workloads;
mod zipf;

use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;

use clap::Parser;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::GuestCli;
use crate::error::WorkError;
use crate::report::{Event, Reporter, WorkResult};
use crate::run::{RunState, Worker};

/// Enough for every workload: none recurses, and large data is never on the stack.
const STACK_BYTES: usize = 256 * 1024;

fn main() -> ExitCode {
    let cli = GuestCli::parse();
    match start(cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("overbook-guest: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Starts the signal and worker threads, then reports until the work ends.
fn start(cli: GuestCli) -> Result<ExitCode, WorkError> {
    let shared = Arc::new(RunState::new());
    let (events, inbox) = mpsc::channel();
    watch_signals(events.clone())?;

    let name = cli.workload.name();
    let time_limit = cli.common.time_limit();
    if let Some(every) = cli.common.census() {
        census::watch(every, &shared)?;
    }
    spawn_worker(cli, Arc::clone(&shared), events)?;

    let mut reporter = Reporter::new(name, Arc::clone(&shared), std::io::stdout());
    Ok(match reporter.run(&inbox, time_limit) {
        WorkResult::Ended if shared.bad_bytes.get().unwrap_or(0) == 0 => ExitCode::SUCCESS,
        WorkResult::Ended | WorkResult::ReaderGone => ExitCode::FAILURE,
        WorkResult::Failed(error) => {
            eprintln!("overbook-guest: {name}: {error}");
            ExitCode::FAILURE
        }
    })
}

fn spawn_worker(
    cli: GuestCli,
    shared: Arc<RunState>,
    done: Sender<Event>,
) -> Result<(), WorkError> {
    let work = move || {
        let common_mb = cli.common.common_mb.unwrap_or(0);
        let read_mb = cli.common.read_mb.unwrap_or(0);
        let mut worker = Worker::new(shared, cli.common.seed, cli.common.rate);
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
            if !worker.shared.wait_until(cli.common.beginning()) {
                return Ok(());
            }
            let _held = content::held(common_mb, &worker.shared)?;
            files::read(Path::new(files::SYSTEM), read_mb, &worker.shared)?;
            cli.workload.run(&mut worker)
        }));
        // A failed send means that the reporter has ended, and with it the process.
        let _ = done.send(Event::Finished(outcome.unwrap_or(Err(WorkError::Panicked))));
    };
    let builder = thread::Builder::new().name("worker".into()).stack_size(STACK_BYTES);
    builder.spawn(work).map(drop).map_err(|source| WorkError::Start { what: "worker", source })
}

fn watch_signals(events: Sender<Event>) -> Result<(), WorkError> {
    let failed = |source| WorkError::Start { what: "signal handler", source };
    let mut signals = Signals::new([SIGTERM, SIGINT]).map_err(failed)?;
    let watch = move || {
        for _ in signals.forever() {
            if events.send(Event::Stop).is_err() {
                return;
            }
        }
    };
    let builder = thread::Builder::new().name("signals".into()).stack_size(STACK_BYTES);
    builder.spawn(watch).map(drop).map_err(failed)
}
