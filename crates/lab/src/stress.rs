//! Stress for the shim: memory whose every byte is known, and a worker that behaves as badly as it
//! can.
//!
//! **Problem.** The shim moves guest memory about under running threads, a working kernel and a
//! worker that may be broken. A mistake loses a page in a billion, or stops a thread for ever, and
//! no test of a single mechanism finds it.
//!
//! **Idea.** Two sides that know nothing of each other. On one side memory is written, read and
//! compared as fast as it goes: by [`stand_in()`], a program that uses memory as QEMU does, only
//! worse, or by real guests. On the other side [`torment()`] asks the shim for everything that the
//! protocol has and much that it has not, and [`tormentors`] kills it at random moments. All of it
//! comes from one seed.
//!
//! **What must hold.** No byte is ever wrong. No operation hangs. Every question is answered. When
//! a worker releases, or is gone, nothing stays out of reach.
//!
//! **Leaves out.** What tracking measures, and what it costs.

mod deeds;
pub(crate) mod link;
mod sharing;
mod stand_in;
pub(crate) mod torment;
mod tormentors;

use std::path::Path;
use std::time::{Duration, Instant};

use model::Bytes;
use sys::memory_of::staged;

pub use deeds::{Counters, Deeds};
pub use stand_in::{Operation, Report};
pub use tormentors::Toll;
pub(crate) use tormentors::torment;

use crate::interrupt;
use crate::lab::LabError;
use link::Link;
use stand_in::StandIn;

/// How long one operation may take before it counts as a hang.
const HANG: Duration = Duration::from_secs(20);
/// How long a process may take until its shim listens.
const LISTEN_LIMIT: Duration = Duration::from_secs(10);

/// Why the stress came to no result.
#[derive(Debug, thiserror::Error)]
pub enum StressError {
    /// The program that stands in for QEMU.
    #[error("overbook-stand-in {what}; it said:\n{words}")]
    StandIn {
        /// What is wrong with it.
        what: String,
        /// Its standard error.
        words: String,
    },
    /// The shim cannot be reached.
    #[error("the shim in process {pid} does not answer: {why}")]
    NoShim {
        /// Where it should be.
        pid: u32,
        /// What went wrong last.
        why: String,
    },
    /// A thread waits and waits.
    #[error("{what} hangs for {} s", time.as_secs())]
    Hang {
        /// The operation.
        what: String,
        /// So far.
        time: Duration,
    },
}

/// What came of the stand-in.
#[derive(Debug)]
pub struct Outcome {
    /// Its last report.
    pub report: Report,
    /// What it said about wrong bytes.
    pub words: String,
    /// What its shim went through.
    pub toll: Toll,
    /// What is in staging at the end: nothing may be.
    pub left: Bytes,
}

/// Torments a stand-in with `mib` of RAM for `duration`.
///
/// # Errors
/// When something is not built, hangs, or ends before its time.
pub fn stand_in(dir: &Path, seed: u64, mib: u64, duration: Duration) -> Result<Outcome, LabError> {
    let stand_in = StandIn::start(dir, seed, mib)?;
    let process = stand_in.process();
    wait_for_shim(process.pid)?;
    let until = Instant::now() + duration;
    let toll = torment(process, seed, until, || {
        let report = stand_in.report()?;
        let time = Duration::from_micros(report.stuck_us);
        if time > HANG {
            return Err(StressError::Hang { what: report.stuck_in, time }.into());
        }
        Ok(())
    })?;
    let left = staged(process.pid).map_err(std::io::Error::other)?;
    let words = stand_in.errors();
    let report = stand_in.finish()?;
    Ok(Outcome { report, words, toll, left })
}

/// Waits until the shim of this process tells of guest RAM.
pub(crate) fn wait_for_shim(pid: u32) -> Result<(), LabError> {
    let begun = Instant::now();
    loop {
        let why = match Link::greet(pid) {
            Ok(link) if !link.regions.is_empty() => return Ok(()),
            Ok(_) => "it has found no guest RAM".to_owned(),
            Err(error) => error.to_string(),
        };
        if begun.elapsed() > LISTEN_LIMIT {
            return Err(StressError::NoShim { pid, why }.into());
        }
        interrupt::sleep(Duration::from_millis(20))?;
    }
}
