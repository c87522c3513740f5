//! Errors of the command line, and their exit codes.

use std::{io, path::PathBuf, process::ExitCode};

use pages::shards::ShardsError;

use tables::{offline::OfflineError, trace::TraceError};

use api::client::ClientError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// The daemon cannot be asked, or said no.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// Several sentences from a part that words its own report.
    #[error("{0}")]
    Said(String),
    /// A file cannot be used.
    #[error("{path}: {error}")]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
    /// The terminal cannot be used.
    #[error("the terminal cannot be used: {0}")]
    Terminal(io::Error),
    /// An exported case cannot be read.
    #[error("{path}: {field}: {error}")]
    Case {
        /// The file.
        path: PathBuf,
        /// The field with the error.
        field: String,
        /// The error.
        error: serde_json::Error,
    },
    /// A program of another package is not installed.
    #[error("`{name}` was found neither next to {beside} nor in {library} nor in PATH")]
    NoProgram {
        /// The program.
        name: &'static str,
        /// The directory of this program.
        beside: PathBuf,
        /// The directory that packages install it in.
        library: &'static str,
    },
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A table of shared pages cannot be made or read.
    #[error(transparent)]
    Offline(#[from] OfflineError),
    /// A sample cannot be taken.
    #[error(transparent)]
    Shards(#[from] ShardsError),
    /// An answer cannot be written as JSON.
    #[error("the answer cannot be written as JSON: {0}")]
    Json(serde_json::Error),
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Print(io::Error),
}

impl CliError {
    /// 3 when no daemon answers, so that scripts can tell; otherwise 1.
    pub(super) fn exit_code(&self) -> ExitCode {
        match self {
            Self::Client(ClientError::NoDaemon(_)) => ExitCode::from(3),
            _ => ExitCode::FAILURE,
        }
    }
}
