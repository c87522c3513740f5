//! `overbook release`: restores every VM, and the kernel's KSM, to the state from before Overbook
//! changed them, and nothing else.
//!
//! A running daemon does this itself (its connections are the only ones that QEMU serves).
//! Without a daemon, [`offline`] works from the journal and the QMP sockets alone. It needs no
//! history, no loop and no guest's cooperation, and works with a broken configuration. A daemon
//! that holds the state and does not answer is ended first ([`eviction`]). A release is
//! idempotent: changes that could not be undone stay on record, and the next release tries again.

pub mod eviction;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use drivers::journal::{Journal, JournalError};
use drivers::{Records, Released, ksm::Hand, restore_at};
use futures_util::future::join_all;
use model::{Bytes, KsmOrder, config::DEFAULT_STATE};
use sys::ksm::Ksm;
use sys::process::Identity;

use crate::{
    config_files,
    lock::{Holder, LockError, StateLock},
};
use worker::StillShares;

/// Result of a release, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// One line per VM, one more for each VM that shared pages, and one for the kernel's KSM.
    pub text: String,
    /// Whether everything was released.
    pub is_complete: bool,
}

/// Why nothing could be released.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// A daemon runs, or the state directory cannot be used.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The record of the changes cannot be read.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The async runtime cannot be started.
    #[error("the system refuses: {0}")]
    System(#[from] io::Error),
}

/// An Overbook's state directory, and the globs of its VMs' sockets, by a configuration that may
/// have faults.
#[must_use]
pub fn own_places(config: &Path) -> (PathBuf, Vec<String>) {
    let salvaged = config_files::salvage(config);
    (salvaged.state.unwrap_or_else(|| DEFAULT_STATE.into()), salvaged.qmp)
}

/// Releases without a daemon: uses the journal in this state directory, and the VMs whose QMP
/// sockets these globs name. VMs of another Overbook on this host are not touched.
///
/// # Errors
/// A daemon holds the state, or the journal cannot be read.
pub fn offline(state: &Path, qmp: &[String]) -> Result<Summary, ReleaseError> {
    if !state.exists() {
        return Ok(Summary { text: "nothing to release".to_owned(), is_complete: true });
    }
    let _lock = StateLock::acquire(state, Holder::Release)?;
    let records = Records::new(Journal::open(state)?);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (outcomes, own) = runtime.block_on(async {
        let all = records.all().await;
        let outcomes = join_all(all.iter().map(|record| restore_at(&records, record))).await;
        (outcomes, drivers::own_processes(&all, qmp).await)
    });
    let mut unshared = unshare(&own.processes);
    unshared.extend(own.unknown.into_iter().map(|(what, why)| (what, Err(because(&why)))));
    let ksm = Hand::new(Ksm::of_host(), records).obey(KsmOrder::PutBack);
    Ok(summary(outcomes, unshared, ksm.map_err(|error| error.to_string())))
}

fn because(why: &impl ToString) -> StillShares {
    StillShares::Because(why.to_string())
}

/// A VM, and how much of its shared memory has been copied, or why it was not.
pub type Unshared = (String, Result<Bytes, StillShares>);

/// Gives these QEMU processes private copies of their shared pages. Waits as long as it makes
/// progress.
#[must_use]
pub fn unshare(names: &BTreeMap<Identity, String>) -> Vec<Unshared> {
    let processes: Vec<Identity> = names.keys().copied().collect();
    let outcomes = worker::unshare(&processes);
    worker::read_back(&processes);
    let named = |(process, name): (&Identity, &String)| {
        Some((name.clone(), outcomes.get(&process.pid)?.clone()))
    };
    names.iter().filter_map(named).collect()
}

/// The actions on KSM in words, or why some could not be taken.
pub type KsmReleased = Result<Option<String>, String>;

/// Describes the result.
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
