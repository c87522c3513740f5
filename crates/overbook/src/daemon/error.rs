//! Why the daemon does not start. Once it runs, only a signal ends it.

use std::io;

use drivers::discovery::GlobError;
use drivers::journal::JournalError;
use model::config::Faults;

use crate::{http::ListenError, lock::LockError};

/// Why the daemon does not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The configuration has faults: all of them, with file and line.
    #[error("{0}")]
    Config(#[from] Faults),
    /// The state directory is in use or cannot be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The journal of actions to undo cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A glob of QMP sockets is invalid.
    #[error(transparent)]
    Glob(#[from] GlobError),
    /// The API cannot be served.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The system refuses a thread, a signal handler or the runtime.
    #[error("the system refuses: {0}")]
    System(#[from] io::Error),
}
