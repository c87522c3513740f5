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

use api::wire::{ReleasePreview, ReleasedVm};
use drivers::journal::{Journal, JournalError};
use drivers::{
    Records, Released, Undo, Undone,
    ksm::Hand,
    own::{Own, UnknownSocket},
};
use model::{Bytes, KsmOrder, Spec, VmName, config::DEFAULT_STATE};
use sys::ksm::Ksm;
use sys::meminfo::MemInfo;
use sys::process::Identity;

use crate::{
    config_files,
    lock::{Holder, LockError, StateLock},
};
use worker::{Held, StillShares};

/// Result of a release, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// One line per VM, one more for each VM that shared pages, and one for the kernel's KSM.
    pub text: String,
    /// Whether everything was released.
    pub is_complete: bool,
}

impl Summary {
    /// Adds these lines.
    #[must_use]
    pub fn with(self, lines: Vec<String>) -> Self {
        let Self { text, is_complete } = self;
        let own = (text != NOTHING || lines.is_empty()).then_some(text);
        let text = own.into_iter().chain(lines).collect::<Vec<_>>().join("\n");
        Self { text, is_complete }
    }
}

const NOTHING: &str = "nothing to release";

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
/// sockets these globs name. VMs of another Overbook on this host are not touched. `is_meant`:
/// the VMs to release; `None`: all of them, and KSM.
///
/// # Errors
/// A daemon holds the state, or the journal cannot be read.
pub fn offline(
    state: &Path,
    qmp: &[String],
    is_meant: Option<&dyn Fn(&VmName) -> bool>,
) -> Result<Summary, ReleaseError> {
    if !state.exists() {
        return Ok(Summary { text: NOTHING.to_owned(), is_complete: true });
    }
    let _lock = StateLock::acquire(state, Holder::Release)?;
    let records = Records::new(Journal::open(state)?);
    let (outcomes, own) = restore_meant(&records, qmp, is_meant, Undo::Now)?;
    let mut unshared = unshare(&own.processes);
    unshared.extend(own.unknown.into_iter().map(|UnknownSocket { socket, why, .. }| {
        (socket.display().to_string(), Err(because(&why)))
    }));
    if is_meant.is_some() {
        return Ok(summary(outcomes, unshared, Ok(None)));
    }
    let ksm = Hand::new(Ksm::of_host(), records).obey(KsmOrder::PutBack);
    Ok(summary(outcomes, unshared, ksm.map_err(|error| error.to_string())))
}

/// Restores the VMs on record that are meant; those that get back the least are asked first.
fn restore_meant(
    records: &Records,
    qmp: &[String],
    is_meant: Option<&dyn Fn(&VmName) -> bool>,
    undo: Undo,
) -> io::Result<(Vec<Released>, Own)> {
    let is_meant = |vm: &VmName| is_meant.is_none_or(|is_meant| is_meant(vm));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    Ok(runtime.block_on(async {
        let mut all = records.all().await;
        let mut own = drivers::own_processes(&all, qmp).await;
        own.processes.retain(|_, name| is_meant(&VmName::from(name.as_str())));
        own.unknown.retain(|unknown| is_meant(&unknown.vm));
        all.retain(|record| is_meant(&record.vm));
        let asked = drivers::restore_all(records, &all, Undo::DryRun).await;
        if undo == Undo::DryRun {
            return (asked, own);
        }
        let gives: Vec<_> = asked.into_iter().map(|(_, outcome)| gives(&outcome)).collect();
        let mut all: Vec<_> = gives.into_iter().zip(all).collect();
        all.sort_by_key(|(gives, _)| *gives);
        let all: Vec<_> = all.into_iter().map(|(_, record)| record).collect();
        (drivers::restore_all(records, &all, undo).await, own)
    }))
}

/// Memory that a balloon gives its guest; unknown amounts come last.
fn gives(outcome: &Result<Undone, drivers::RestoreError>) -> Bytes {
    outcome.as_ref().map_or(Bytes(u64::MAX), |done| done.gives)
}

/// The effect that [`offline`] would have.
///
/// # Errors
/// As for [`offline`].
pub fn offline_preview(
    state: &Path,
    qmp: &[String],
    spec: Option<&Spec>,
) -> Result<ReleasePreview, ReleaseError> {
    if !state.exists() {
        return Ok(preview(Vec::new(), &BTreeMap::new(), spec, false));
    }
    let _lock = StateLock::acquire(state, Holder::Release)?;
    let journal = Journal::open(state)?;
    let drives_ksm = journal.ksm().is_some();
    let (outcomes, own) = restore_meant(&Records::new(journal), qmp, None, Undo::DryRun)?;
    Ok(preview(outcomes, &own.processes, spec, drives_ksm))
}

/// The effect of a release, from the outcomes of a dry run and the processes whose memory may be
/// shared or paged out.
#[must_use]
pub fn preview(
    outcomes: Vec<Released>,
    processes: &BTreeMap<Identity, String>,
    spec: Option<&Spec>,
    drives_ksm: bool,
) -> ReleasePreview {
    let mut vms: BTreeMap<String, ReleasedVm> = BTreeMap::new();
    let named = |name: &str| {
        let group = spec.and_then(|spec| spec.group_of(&VmName::from(name)));
        let group = group.map(|(group, _)| group.to_string());
        ReleasedVm { vm: name.to_owned(), group, ..ReleasedVm::default() }
    };
    for (name, outcome) in outcomes {
        let vm = vms.entry(name.to_string()).or_insert_with(|| named(name.as_str()));
        match outcome {
            Ok(Undone { words, gives }) => (vm.text, vm.balloon_bytes) = (words, gives.0),
            Err(error) => vm.error = Some(error.to_string()),
        }
    }
    for (process, name) in processes {
        let Held { shared, out } = worker::held(*process);
        if !shared.is_zero() || !out.is_zero() {
            let vm = vms.entry(name.clone()).or_insert_with(|| named(name));
            (vm.shared_bytes, vm.paged_out_bytes) = (shared.0, out.0);
        }
    }
    let host = MemInfo::read().ok();
    let reserve = |total| policy::host_reserve(spec.and_then(|spec| spec.host.reserve), total);
    let room = host.map_or(Bytes::ZERO, |host| host.available.minus(reserve(host.total)));
    ReleasePreview::in_order(vms.into_values(), room.0, drives_ksm)
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

/// The memory that workers go on giving back to these QEMU processes, one line per VM.
#[must_use]
pub fn coming(names: &BTreeMap<Identity, String>) -> Vec<String> {
    let line = |(process, name): (&Identity, &String)| {
        let Held { shared, out } = worker::held(*process);
        let all = shared.plus(out);
        let words = "shared or paged out comes back as the host has room";
        (!all.is_zero()).then(|| format!("{name}: up to {all} that is {words}"))
    };
    names.iter().filter_map(line).collect()
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
    let line = |(vm, outcome): Released| match outcome {
        Ok(done) => format!("{vm}: {}", done.words),
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
        lines.push(NOTHING.to_owned());
    }
    Summary { text: lines.join("\n"), is_complete }
}
