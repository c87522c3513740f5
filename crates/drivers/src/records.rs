//! The journal as the VMs' tasks use it: only the task that needs the disk waits for it.
//!
//! Writing syncs the disk, which may be slow or hang. So it happens on a blocking thread. The VM
//! whose original is written waits; the loop and the other VMs' connections do not.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::Mutex;

use super::identity;
use crate::journal::{Journal, JournalError, KsmRecord, UndoRecord};

/// The journal, shared.
#[derive(Clone, Debug)]
pub struct Records(Arc<Mutex<Journal>>);

impl Records {
    /// Shares `journal`.
    #[must_use]
    pub fn new(journal: Journal) -> Self {
        Self(Arc::new(Mutex::new(journal)))
    }

    /// All VMs' records.
    pub async fn all(&self) -> Vec<UndoRecord> {
        self.0.lock().await.records().cloned().collect()
    }

    /// The record for `socket`, of any incarnation.
    pub(super) async fn at(&self, socket: &Path) -> Option<UndoRecord> {
        self.0.lock().await.records().find(|record| record.socket == socket).cloned()
    }

    /// The record of an incarnation. The VM may have had another socket or name when it was
    /// written.
    pub(super) async fn of_life(&self, incarnation: u64) -> Option<UndoRecord> {
        self.0.lock().await.records().find(|record| record.incarnation == incarnation).cloned()
    }

    /// The record for `socket`, or of an incarnation that was changed by another way.
    pub(super) async fn of(&self, socket: &Path, incarnation: u64) -> Option<UndoRecord> {
        match self.at(socket).await {
            None => self.of_life(incarnation).await,
            found => found,
        }
    }

    /// The record of the incarnation in `fresh`, under the socket and name in `fresh`. An earlier
    /// record of that incarnation is moved there, because it has the originals.
    pub(super) async fn adopt(&self, fresh: UndoRecord) -> UndoRecord {
        let Some(old) = self.of_life(fresh.incarnation).await else { return fresh };
        let undo = UndoRecord { vm: fresh.vm, socket: fresh.socket, ..old.clone() };
        if undo != old && self.keep(undo.clone()).await.is_ok() && undo.socket != old.socket {
            // If this fails, the next release restores the VM twice, to the same originals.
            let _ = self.strike(old).await;
        }
        undo
    }

    /// Makes a record durable.
    pub(super) async fn keep(&self, record: UndoRecord) -> Result<(), String> {
        self.write(move |journal| journal.record(&[record])).await
    }

    /// Removes a record.
    pub(super) async fn strike(&self, record: UndoRecord) -> Result<(), String> {
        self.write(move |journal| journal.forget(&record.socket, record.incarnation)).await
    }

    /// Removes the records of incarnations that are over, so that the journal does not grow with
    /// every VM that ever ran.
    pub(super) async fn strike_the_dead(&self) {
        let all = self.all().await;
        for record in all.into_iter().filter(|r| identity::is_over(r.incarnation, &r.socket)) {
            // A record that stays is harmless; the next daemon tries again.
            let _ = self.strike(record).await;
        }
    }

    /// The record of KSM. For blocking threads.
    pub(super) fn ksm(&self) -> Option<KsmRecord> {
        self.0.blocking_lock().ksm().cloned()
    }

    /// Makes KSM's record durable; `None` removes it. For blocking threads.
    pub(super) fn set_ksm(&self, record: Option<KsmRecord>) -> Result<(), JournalError> {
        self.0.blocking_lock().set_ksm(record)
    }

    async fn write(
        &self,
        write: impl FnOnce(&mut Journal) -> Result<(), JournalError> + Send + 'static,
    ) -> Result<(), String> {
        let journal = Arc::clone(&self.0);
        let written =
            tokio::task::spawn_blocking(move || write(&mut journal.blocking_lock())).await;
        written.map_err(|error| error.to_string())?.map_err(|error| error.to_string())
    }
}
