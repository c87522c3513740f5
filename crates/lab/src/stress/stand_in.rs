//! The program that stands in for QEMU (`overbook-stand-in`), as a child with the shim inside.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::PipeWriter;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use sys::process::{Child, Identity, Spawn};

use super::StressError;
use crate::command::last_lines;
use crate::inside::{SHIM, built};
use crate::lab::LabError;

const PROGRAM: &str = "overbook-stand-in";
/// Timeout for its end; it checks all its memory once more before it ends.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Its report.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct Report {
    /// Whether this is its last report.
    #[serde(rename = "final")]
    pub is_final: bool,
    /// Wrong bytes.
    pub bad_bytes: u64,
    /// The longest present wait of a thread, in microseconds.
    pub stuck_us: u64,
    /// The operation that the thread waits for.
    pub stuck_in: String,
    /// The reason why KVM runs none of its vCPUs; `None` where it does.
    pub kvm_obstacle: Option<String>,
    /// Finished operations, by kind.
    pub operations: BTreeMap<String, Operation>,
}

/// One kind of operation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Operation {
    /// Their number.
    pub done: u64,
    /// The longest one, in microseconds.
    pub longest_us: u64,
}

impl Report {
    /// All operations together.
    pub fn operations_done(&self) -> u64 {
        self.operations.values().map(|operation| operation.done).sum()
    }

    /// Number of operations of one kind.
    pub fn done(&self, kind: &str) -> u64 {
        self.operations.get(kind).map_or(0, |operation| operation.done)
    }

    /// The kind of the longest operation, and its time.
    pub fn longest(&self) -> (&str, Duration) {
        let longest = self.operations.iter().max_by_key(|(_, operation)| operation.longest_us);
        longest.map_or(("nothing", Duration::ZERO), |(name, operation)| {
            (name, Duration::from_micros(operation.longest_us))
        })
    }
}

/// The running program; dropping this ends it.
#[derive(Debug)]
pub(crate) struct StandIn {
    child: Child,
    /// The program works until this is closed.
    input: Option<PipeWriter>,
    output: PathBuf,
    errors: PathBuf,
}

impl StandIn {
    /// Starts it with `mib` MiB of RAM, and its files in `dir`.
    pub(crate) fn start(dir: &Path, seed: u64, mib: u64) -> Result<Self, LabError> {
        let (output, errors) = (dir.join("stand-in.out"), dir.join("stand-in.err"));
        let (reader, input) = std::io::pipe()?;
        let child = Spawn::new(built(PROGRAM)?)
            .arg(dir)
            .args([seed.to_string(), mib.to_string()])
            .env("LD_PRELOAD", built(SHIM)?)
            .stdin(OwnedFd::from(reader))
            .stdout(File::create(&output)?)
            .stderr(File::create(&errors)?)
            .die_with_parent()
            .spawn()?;
        Ok(Self { child, input: Some(input), output, errors })
    }

    pub(crate) fn process(&self) -> Identity {
        self.child.identity()
    }

    /// Its newest report; an error when it has ended.
    pub(crate) fn report(&self) -> Result<Report, LabError> {
        if !self.process().is_alive() {
            return Err(self.failure("ended before its time").into());
        }
        self.last_line().ok_or_else(|| self.failure("has said nothing").into())
    }

    /// Ends it; returns its last report.
    pub(crate) fn finish(mut self) -> Result<Report, LabError> {
        self.input = None;
        let Some(status) = self.child.wait_for(END_LIMIT)? else {
            return Err(self.failure("does not end").into());
        };
        match self.last_line() {
            Some(report) if report.is_final => Ok(report),
            _ => Err(self.failure(&format!("ended with {status}")).into()),
        }
    }

    /// Its messages about wrong bytes.
    pub(crate) fn errors(&self) -> String {
        last_lines(&std::fs::read_to_string(&self.errors).unwrap_or_default(), 12)
    }

    fn last_line(&self) -> Option<Report> {
        let text = std::fs::read_to_string(&self.output).ok()?;
        // The last line may be half written.
        text.lines().rev().take(2).find_map(|line| serde_json::from_str(line).ok())
    }

    fn failure(&self, what: &str) -> StressError {
        StressError::StandIn { what: what.to_owned(), words: self.errors() }
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.input = None;
        // It may be unable to end by itself.
        let _ = self.child.signal(sys::process::Signal::KILL);
        let _ = self.child.end(Duration::from_secs(5));
    }
}
