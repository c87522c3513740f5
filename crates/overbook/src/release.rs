//! `overbook release`: every VM gets back what it had before Overbook touched it, and nothing else.
//!
//! With a daemon running, it does this itself (its connections are the only ones that QEMU serves).
//! Without one, [`offline`] works from the journal alone: no history, no loop, no guest's cooperation,
//! and a broken configuration does not stop it. It is idempotent; what could not be put back stays on
//! record and is tried again by the next one.

use std::{collections::BTreeMap, io, path::Path};

use model::VmName;

use crate::{
    config_files,
    drivers::{RestoreError, restore_at},
    journal::{Journal, JournalError, UndoRecord},
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
    let state = config_files::state_directory(config);
    if !state.exists() {
        return Ok(Summary { text: "nothing to release".to_owned(), is_complete: true });
    }
    let _lock = StateLock::acquire(&state)?;
    let mut journal = Journal::open(&state)?;
    let records: Vec<UndoRecord> = journal.records().cloned().collect();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcomes = runtime.block_on(async {
        let all = records.iter().map(|r| async move { (r.vm.clone(), restore_at(r).await) });
        futures_util::future::join_all(all).await.into_iter().collect()
    });
    Ok(settle(&records, outcomes, |record| journal.forget(&record.socket, record.incarnation)))
}

/// Strikes what was put back off the record and says how it went.
pub fn settle(
    records: &[UndoRecord],
    mut outcomes: BTreeMap<VmName, Result<String, RestoreError>>,
    mut forget: impl FnMut(&UndoRecord) -> Result<(), JournalError>,
) -> Summary {
    let mut lines = Vec::new();
    let mut is_complete = true;
    for record in records {
        let outcome = outcomes.remove(&record.vm).unwrap_or(Err(RestoreError::Unreachable));
        let is_gone = !record.socket.exists();
        let line = match outcome {
            Ok(done) => done,
            Err(error @ RestoreError::AnotherLife) => error.to_string(),
            Err(_) if is_gone => "gone, nothing is left to undo".to_owned(),
            Err(error) => {
                is_complete = false;
                lines.push(format!("{}: not released: {error}", record.vm));
                continue;
            }
        };
        match forget(record) {
            Ok(()) => lines.push(format!("{}: {line}", record.vm)),
            Err(error) => {
                is_complete = false;
                lines.push(format!("{}: {line}; but it stays on record: {error}", record.vm));
            }
        }
    }
    if lines.is_empty() {
        lines.push("nothing to release".to_owned());
    }
    Summary { text: lines.join("\n"), is_complete }
}
