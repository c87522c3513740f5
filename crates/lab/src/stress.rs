//! Stress for the shim: memory whose every byte is known, and a worker that behaves as badly as it can.
//!
//! **Problem.** The shim moves guest memory about under running threads, a working kernel and a worker that
//! may be broken. A mistake loses a page in a billion, or stops a thread for ever, and no test of a single
//! mechanism finds it.
//!
//! **Idea.** Two sides that know nothing of each other. On one side memory is written, read and compared as
//! fast as it goes: by [`stand_in()`], a program that uses memory as QEMU does, only worse, or by real guests.
//! On the other side [`torment()`] asks the shim for everything that the protocol has and much that it has
//! not, and [`tormentors`] kills it at random moments. All of it comes from one seed.
//!
//! **What must hold.** No byte is ever wrong. No operation hangs. Every question is answered. When a worker
//! releases, or is gone, nothing stays out of reach.
//!
//! **Leaves out.** What tracking measures, and what it costs.

mod deeds;
mod link;
mod sharing;
mod stand_in;
pub(crate) mod torment;
mod tormentors;

use std::path::Path;
use std::time::{Duration, Instant};

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
/// A mapping of this size and more that is no RAM may be staging.
const LARGE_KIB: u64 = 16 << 10;

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
    /// Memory in large mappings that are no RAM, at the end: nothing may be left in staging.
    pub left_kib: u64,
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
    let ram = stand_in.report()?.ram;
    let left_kib = large_mappings_kib(process.pid, &ram)?;
    let words = stand_in.errors();
    let report = stand_in.finish()?;
    Ok(Outcome { report, words, toll, left_kib })
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

/// Resident memory of all large mappings that are none of `ram`, as the kernel counts it.
fn large_mappings_kib(pid: u32, ram: &[(u64, u64)]) -> Result<u64, LabError> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    Ok(resident_kib(&text, ram))
}

fn resident_kib(smaps: &str, ram: &[(u64, u64)]) -> u64 {
    let mut total = 0;
    let mut counts = false;
    for line in smaps.lines() {
        if let Some(mapping) = Mapping::parse(line) {
            let Mapping { start, end, is_anonymous } = mapping;
            let is_ram = ram.iter().any(|&(at, bytes)| start < at + bytes && at < end);
            counts = is_anonymous && !is_ram && (end - start) / 1024 >= LARGE_KIB;
        } else if let Some(rest) = line.strip_prefix("Rss:").filter(|_| counts) {
            let kib = rest.split_whitespace().next().and_then(|kib| kib.parse::<u64>().ok());
            total += kib.unwrap_or(0);
        }
    }
    total
}

/// The first line of a mapping.
struct Mapping {
    start: u64,
    end: u64,
    is_anonymous: bool,
}

impl Mapping {
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = (number(start)?, number(end)?);
        Some(Self { start, end, is_anonymous: words.nth(3)? == "0" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMAPS: &str = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n\
        Size:             131072 kB\nRss:               65536 kB\n\
        7f1000000000-7f1008000000 rw-p 00000000 00:00 0 \n\
        Size:             131072 kB\nRss:                  12 kB\n\
        7f2000000000-7f2008000000 r--p 00000000 fe:00 1234 /usr/lib/large.so\n\
        Size:             131072 kB\nRss:                1000 kB\n\
        7f3000000000-7f3000001000 rw-p 00000000 00:00 0 [stack]\n\
        Size:                  4 kB\nRss:                   4 kB\n";

    #[test]
    fn only_large_anonymous_mappings_that_are_no_ram_count() {
        let ram = [(0x7f00_0000_0000, 128 << 20)];
        assert_eq!(resident_kib(SMAPS, &ram), 12);
        assert_eq!(resident_kib(SMAPS, &[]), 65_548);
    }
}
