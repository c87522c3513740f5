//! `overbook release`: every VM, and the kernel's KSM, gets back what it had before Overbook
//! touched it, and nothing else.
//!
//! With a daemon running, it does this itself (its connections are the only ones that QEMU serves).
//! Without one, [`offline`] works from the journal and the QMP sockets alone: no history, no loop,
//! no guest's cooperation, and a broken configuration does not stop it. A daemon that has the state
//! and cannot be asked is ended before that ([`eviction`]). It is idempotent; what could not be put
//! back stays on record and is tried again by the next one.

pub mod eviction;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use futures_util::future::join_all;
use model::{Bytes, KsmOrder, config::DEFAULT_STATE};
use sys::ksm::Ksm;
use sys::process::Identity;

use crate::{
    config_files,
    drivers::{self, Records, Released, ksm::Hand, restore_at},
    journal::{Journal, JournalError},
    lock::{Holder, LockError, StateLock},
    worker::{self, StillShares},
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

/// Where an Overbook keeps its state, and where its VMs' sockets are, by a configuration that may
/// be faulty.
#[must_use]
pub fn own_places(config: &Path) -> (PathBuf, Vec<String>) {
    let salvaged = config_files::salvage(config);
    (salvaged.state.unwrap_or_else(|| DEFAULT_STATE.into()), salvaged.qmp)
}

/// Releases without a daemon: from the journal in this state directory, and the VMs whose QMP
/// sockets these globs name. VMs of another Overbook on this host are not asked.
///
/// # Errors
/// When a daemon holds the state, or the journal cannot be read.
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

/// A VM, and how much of what it shared has been copied, or why it was not.
pub type Unshared = (String, Result<Bytes, StillShares>);

/// Gives these QEMU processes copies of what they share. Waits as long as it gets on.
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
