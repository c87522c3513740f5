//! `overbook release`: every VM, and the kernel's KSM, gets back what it had before Overbook
//! touched it, and nothing else.
//!
//! With a daemon running, it does this itself (its connections are the only ones that QEMU serves).
//! Without one, [`offline`] works from the journal alone: no history, no loop, no guest's
//! cooperation, and a broken configuration does not stop it. A daemon that has the state and cannot
//! be asked is ended before that ([`eviction`]). It is idempotent; what could not be put back stays
//! on record and is tried again by the next one.

pub mod eviction;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use futures_util::future::join_all;
use model::{Bytes, KsmOrder, config::DEFAULT_STATE};
use sys::ksm::Ksm;

use crate::{
    config_files,
    drivers::{Records, Released, ksm::Hand, restore_at},
    journal::{Journal, JournalError},
    lock::{Holder, LockError, StateLock},
    worker::{self, StillShares, with_shim},
};

/// What a release came to, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// One line per VM, one more for each that shared pages, and one for the kernel's KSM.
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

/// The state directory that `config` names, faulty or not.
#[must_use]
pub fn state_of(config: &Path) -> PathBuf {
    config_files::salvage(config).state.unwrap_or_else(|| DEFAULT_STATE.into())
}

/// Releases without a daemon, from the journal in this state directory.
///
/// # Errors
/// When a daemon holds the state, or the journal cannot be read.
pub fn offline(state: &Path) -> Result<Summary, ReleaseError> {
    if !state.exists() {
        return Ok(Summary { text: "nothing to release".to_owned(), is_complete: true });
    }
    let _lock = StateLock::acquire(state, Holder::Release)?;
    let records = Records::new(Journal::open(state)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcomes = runtime.block_on(async {
        let all = records.all().await;
        join_all(all.iter().map(|record| restore_at(&records, record))).await
    });
    let process = |pid: u32| (pid, format!("process {pid}"));
    let mut unshared = unshare(&with_shim().into_iter().map(process).collect());
    // What a worker has that runs without our daemon is another daemon's.
    unshared.retain(|(_, outcome)| *outcome != Err(StillShares::InUse));
    let ksm = Hand::new(Ksm::of_host(), records).obey(KsmOrder::PutBack);
    Ok(summary(outcomes, unshared, ksm.map_err(|error| error.to_string())))
}

/// A VM, and how much of what it shared has been copied, or why it was not.
pub type Unshared = (String, Result<Bytes, StillShares>);

/// Gives these QEMU processes copies of what they share. Waits as long as it gets on.
#[must_use]
pub fn unshare(names: &BTreeMap<u32, String>) -> Vec<Unshared> {
    let pids: Vec<u32> = names.keys().copied().collect();
    let outcomes = worker::unshare(&pids).into_iter();
    worker::read_back(&pids);
    outcomes.filter_map(|(pid, outcome)| Some((names.get(&pid)?.clone(), outcome))).collect()
}

/// What was done to KSM, or why not all of it was.
pub type KsmReleased = Result<Option<String>, String>;

/// Says how it went.
#[must_use]
pub fn summary(mut outcomes: Vec<Released>, unshared: Vec<Unshared>, ksm: KsmReleased) -> Summary {
    outcomes.sort_by(|one, two| one.0.cmp(&two.0));
    let is_complete = outcomes.iter().all(|(_, outcome)| outcome.is_ok())
        && unshared.iter().all(|(_, outcome)| outcome.is_ok())
        && ksm.is_ok();
    let line = |(vm, outcome)| match outcome {
        Ok(done) => format!("{vm}: {done}"),
        Err(error) => format!("{vm}: not released: {error}"),
    };
    let mut lines: Vec<String> = outcomes.into_iter().map(line).collect();
    lines.extend(unshared.into_iter().filter_map(|(vm, outcome)| match outcome {
        Ok(Bytes::ZERO) => None,
        Ok(copied) => Some(format!("{vm}: {copied} that it shared are its own")),
        Err(why) => Some(format!("{vm}: still shares pages: {why}")),
    }));
    lines.extend(match ksm {
        Ok(done) => done.map(|done| format!("KSM: {done}")),
        Err(why) => Some(format!("KSM: not released: {why}")),
    });
    if lines.is_empty() {
        lines.push("nothing to release".to_owned());
    }
    Summary { text: lines.join("\n"), is_complete }
}
