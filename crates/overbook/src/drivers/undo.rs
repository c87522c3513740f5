//! What Overbook has changed on a VM, and how it is put back.
//!
//! Two things: the interval at which QEMU asks the guest for statistics, and the balloon's size.
//! Before the first change of each the original goes into an [`UndoRecord`] that is on disk
//! *before* the change is made; when it cannot be kept, the change is not made. A daemon that
//! starts again finds the record by the VM's life, so that it never takes its own settings for the
//! originals. What was put back is struck out by whoever put it back, before anything else is done
//! to the VM.
//!
//! Putting back works through a running daemon (the socket serves one client at a time) and without
//! one ([`restore_at`], for `ExecStopPost`). It is idempotent, and never done to another life of
//! the VM.

use std::path::Path;

use model::{Bytes, VmName};
use serde_json::json;

use super::identity;
use super::qmp::{Client, Command, QmpError};
use super::questions;
use super::records::Records;
use crate::journal::UndoRecord;

/// Why nothing, or not everything, was put back.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// QEMU cannot be asked, or refuses.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The balloon must not move now.
    #[error(
        "it is being migrated: its balloon stays at {actual} instead of the original {original}"
    )]
    Migrating {
        /// Where it stands.
        actual: Bytes,
        /// Where it should be.
        original: Bytes,
    },
    /// Nobody answers.
    #[error("QEMU does not answer")]
    Unreachable,
    /// Put back, and the journal cannot be written.
    #[error("{done}; but it stays on record: {why}")]
    OnRecord {
        /// What was put back.
        done: String,
        /// Why the record cannot be struck out.
        why: String,
    },
}

/// Why there is nothing to be put back.
pub(super) const GONE: &str = "its QEMU has ended, nothing is left to undo";

/// Puts back what `undo` says on the VM behind its socket, and strikes it out. Only while no daemon
/// is connected to it.
pub async fn restore_at(
    records: &Records,
    undo: &UndoRecord,
) -> (VmName, Result<String, RestoreError>) {
    let outcome = match Client::connect(&undo.socket).await {
        Ok(mut client) => restore(&mut client, &undo.socket, undo).await,
        Err(error) if error.is_dead_socket() => Ok(GONE.to_owned()),
        Err(error) => Err(error.into()),
    };
    (undo.vm.clone(), strike_out(records, undo.clone(), outcome).await)
}

/// Strikes out what was put back.
pub(super) async fn strike_out(
    records: &Records,
    undo: UndoRecord,
    outcome: Result<String, RestoreError>,
) -> Result<String, RestoreError> {
    let done = outcome?;
    match records.strike(undo).await {
        Ok(()) => Ok(done),
        Err(why) => Err(RestoreError::OnRecord { done, why }),
    }
}

/// Puts back what `undo` says; says in words what was done.
pub(super) async fn restore(
    client: &mut Client,
    socket: &Path,
    undo: &UndoRecord,
) -> Result<String, RestoreError> {
    if identity::of(client, socket).incarnation != undo.incarnation {
        return Ok("its QEMU was restarted since, nothing is left to undo".to_owned());
    }
    let mut done = Vec::new();
    if let Some(seconds) = undo.stats_interval_s
        && let Some(device) = questions::find_balloon(client).await?
    {
        client.execute(questions::set_polling(&device, seconds)).await?;
        let off = if seconds == 0 { " (off)" } else { "" };
        done.push(format!("statistics every {seconds} s{off} again"));
    }
    if let Some(original) = undo.balloon {
        let migration = questions::migration(client).await?;
        if migration != model::Migration::None {
            let actual = questions::balloon(client).await?;
            return Err(RestoreError::Migrating { actual, original });
        }
        client.execute(Command::with("balloon", json!({"value": original.0}))).await?;
        done.push(format!("balloon back to {original}"));
    }
    Ok(if done.is_empty() { "nothing had been changed".to_owned() } else { done.join(", ") })
}
