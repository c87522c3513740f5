//! Why the daemon does not start: once it runs, nothing ends it but a signal.

use std::io;

use model::config::Faults;

use crate::{
    drivers::discovery::GlobError, http::ListenError, journal::JournalError, lock::LockError,
};

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The configuration has faults: every one of them, with file and line.
    #[error("{0}")]
    Config(#[from] Faults),
    /// The state directory is in use or cannot be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// What is to be undone cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A glob of QMP sockets is none.
    #[error(transparent)]
    Glob(#[from] GlobError),
    /// The API cannot be served.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The system refuses a thread, a signal handler or the runtime.
    #[error("the system refuses: {0}")]
    System(#[from] io::Error),
}
