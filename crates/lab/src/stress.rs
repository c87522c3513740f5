//! Stress for the shim: memory whose every byte is known, and a worker that behaves as badly as
//! possible.
//!
//! **Problem.** The shim moves guest memory under running threads, a working kernel and a worker
//! that may be broken. A fault loses a page in a billion, or stops a thread for ever, and no test
//! of a single mechanism finds it.
//!
//! **Idea.** Two sides without knowledge of each other. On one side, memory is written, read and
//! compared at full speed: by [`stand_in()`], a program that uses memory as QEMU does, only
//! worse, or by real guests. On the other side, [`torment()`] sends the shim every request of the
//! protocol and much that the protocol forbids, and [`tormentors`] kills it at random moments.
//! All of it comes from one seed.
//!
//! **Invariants.** No byte is ever wrong. No operation hangs. Every request is answered. When a
//! worker releases, or has ended, every page becomes accessible again.
//!
//! **Leaves out.** The results of tracking, and its cost.

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

pub use deeds::{DeedCounters, Deeds};
pub use stand_in::{Operation, Report};
pub use tormentors::FuzzerCounts;
pub(crate) use tormentors::torment;

use crate::interrupt;
use crate::lab::LabError;
use link::StressLink;
use stand_in::StandIn;

/// Time after which an operation counts as a hang.
const HANG: Duration = Duration::from_secs(20);
/// Timeout for a process until its shim listens.
const LISTEN_LIMIT: Duration = Duration::from_secs(10);

/// Why the stress gave no result.
#[derive(Debug, thiserror::Error)]
pub enum StressError {
    /// The program that stands in for QEMU failed.
    #[error("overbook-stand-in {what}; it said:\n{words}")]
    StandIn {
        /// Its fault.
        what: String,
        /// Its standard error.
        words: String,
    },
    /// The shim does not answer.
    #[error("the shim in process {pid} does not answer: {why}")]
    NoShim {
        /// The process that should have it.
        pid: u32,
        /// The last error.
        why: String,
    },
    /// A thread waits too long.
    #[error("{what} hangs for {} s", time.as_secs())]
    Hang {
        /// The operation.
        what: String,
        /// Its duration so far.
        time: Duration,
    },
}

/// The result for a stand-in.
#[derive(Debug)]
pub struct StressResult {
    /// Its last report.
    pub report: Report,
    /// Its messages about wrong bytes.
    pub words: String,
    /// The counts of its tormentors.
    pub toll: FuzzerCounts,
    /// Memory that is still in staging at the end, which must be none.
    pub left: Bytes,
}

/// Torments a stand-in with `mib` of RAM for `duration`.
pub fn stand_in(
    dir: &Path,
    seed: u64,
    mib: u64,
    duration: Duration,
) -> Result<StressResult, LabError> {
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
    let left = staged(process.pid)?;
    let words = stand_in.errors();
    let report = stand_in.finish()?;
    Ok(StressResult { report, words, toll, left })
}

/// Waits until the shim of this process reports guest RAM.
pub(crate) fn wait_for_shim(pid: u32) -> Result<(), LabError> {
    let begun = Instant::now();
    loop {
        let why = match StressLink::greet(pid) {
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
