//! What Overbook has changed on a VM, and how it is put back.
//!
//! Two things: the interval at which QEMU asks the guest for statistics, and the balloon's size.
//! Before the first change of each the original goes into an [`UndoRecord`], which is handed out to be
//! kept on disk *before* the change is made; when it cannot be kept, the change is not made. A
//! daemon that starts again is given the records back, so that it never takes its own settings for
//! the originals.
//!
//! Putting back works through a running daemon (the socket serves one client at a time) and without
//! one ([`restore_at`], for `ExecStopPost`). It is idempotent, and never done to another life of
//! the VM.

use std::path::Path;

use model::Bytes;
use serde_json::json;

use super::identity;
use super::qmp::{Client, Command, QmpError};
use super::questions;
use crate::journal::UndoRecord;

/// Why nothing, or not everything, was put back.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// QEMU cannot be asked, or refuses.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// Another QEMU runs under the name.
    #[error("QEMU was restarted since: nothing of what was changed is left")]
    AnotherLife,
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
    /// The VM is not there.
    #[error("no such VM, or QEMU does not answer")]
    Unreachable,
}

/// Puts back what `undo` says on the VM behind its socket. Only while no daemon is connected to it.
///
/// # Errors
/// When QEMU cannot be reached, is another one now, or refuses.
pub async fn restore_at(undo: &UndoRecord) -> Result<String, RestoreError> {
    let mut client = Client::connect(&undo.socket).await?;
    restore(&mut client, &undo.socket, undo).await
}

/// Puts back what `undo` says; says in words what was done.
pub(super) async fn restore(
    client: &mut Client,
    socket: &Path,
    undo: &UndoRecord,
) -> Result<String, RestoreError> {
    if identity::of(client, socket).incarnation != undo.incarnation {
        return Err(RestoreError::AnotherLife);
    }
    let mut done = Vec::new();
    if let Some(seconds) = undo.stats_interval_s
        && let Some(device) = questions::find_balloon(client).await?
    {
        client.execute(questions::set_polling(&device, seconds)).await?;
        done.push(format!("statistics every {seconds} s again (0: never)"));
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
