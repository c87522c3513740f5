//! `overbook release`: every VM gets back what it had before Overbook touched it, and nothing else.
//!
//! With a daemon running, it does this itself (its connections are the only ones that QEMU serves).
//! Without one, [`offline`] works from the journal alone: no history, no loop, no guest's cooperation,
//! and a broken configuration does not stop it. It is idempotent; what could not be put back stays on
//! record and is tried again by the next one.

use std::{io, path::Path};

use futures_util::future::join_all;
use model::config::DEFAULT_STATE;

use crate::{
    config_files,
    drivers::{Records, Released, restore_at},
    journal::{Journal, JournalError},
    lock::{LockError, StateLock},
};

/// What a release came to, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// One line per VM.
    pub text: String,
    /// Whether nothing is left on record.
    pub is_complete: bool,
}

/// Why nothing could be released.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// A daemon runs, or the state directory cannot be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// What is to be undone cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// No runtime.
    #[error("the system refuses: {0}")]
    System(#[from] io::Error),
}

/// Releases without a daemon, from the journal in the state directory that `config` names.
///
/// # Errors
/// When a daemon holds the state, or the journal cannot be read.
pub fn offline(config: &Path) -> Result<Summary, ReleaseError> {
    let state = config_files::salvage(config).state.unwrap_or_else(|| DEFAULT_STATE.into());
    if !state.exists() {
        return Ok(Summary { text: "nothing to release".to_owned(), is_complete: true });
    }
    let _lock = StateLock::acquire(&state)?;
    let records = Records::new(Journal::open(&state)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcomes = runtime.block_on(async {
        let all = records.all().await;
        join_all(all.iter().map(|record| restore_at(&records, record))).await
    });
    Ok(summary(outcomes))
}

/// Says how it went.
#[must_use]
pub fn summary(mut outcomes: Vec<Released>) -> Summary {
    outcomes.sort_by(|one, two| one.0.cmp(&two.0));
    let is_complete = outcomes.iter().all(|(_, outcome)| outcome.is_ok());
    let line = |(vm, outcome)| match outcome {
        Ok(done) => format!("{vm}: {done}"),
        Err(error) => format!("{vm}: not released: {error}"),
    };
    let mut lines: Vec<String> = outcomes.into_iter().map(line).collect();
    if lines.is_empty() {
        lines.push("nothing to release".to_owned());
    }
    Summary { text: lines.join("\n"), is_complete }
}
