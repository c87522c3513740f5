//! Errors that end the work. Bad options never get here: the command line refuses them first.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// A failure of the workload while it runs.
#[derive(Debug, Error)]
pub(crate) enum WorkError {
    /// The kernel refused memory (overcommit limit, no swap).
    #[error("cannot allocate {mb} MB of memory: {source}")]
    Memory { mb: usize, source: io::Error },
    /// Input or output on the data file or disk failed.
    #[error("cannot {action} {}: {source}", path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    /// The data disk is smaller than the part that the options ask for.
    #[error("{} holds {have_bytes} bytes, but --mb {mb} needs {need_bytes}", path.display())]
    TooShort { path: PathBuf, have_bytes: u64, need_bytes: u64, mb: usize },
    /// The same computation gave two results: memory or processor is at fault.
    #[error("wrong result: checksum {got:016x}, expected {expected:016x}")]
    WrongResult { expected: u64, got: u64 },
    /// A program of the system did not start, failed, or did not answer as it should.
    #[error("{name}: {source}")]
    Program { name: &'static str, source: io::Error },
    /// A thread or a signal handler could not be set up.
    #[error("cannot start the {what}: {source}")]
    Start { what: &'static str, source: io::Error },
    /// A fault in this program; its message is already on standard error.
    #[error("the worker thread panicked")]
    Panicked,
}

impl WorkError {
    /// For `map_err`: the action that failed, and the file.
    pub(crate) fn file(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File { action, path: path.to_owned(), source }
    }
}
