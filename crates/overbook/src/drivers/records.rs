//! The journal as the VMs' tasks use it: whoever needs the disk waits for it, and nobody else.
//!
//! Writing syncs, and a disk may take its time for that, or hang. So it happens on a thread that
//! may wait; the VM whose original is being written waits, the loop and the other VMs' connections
//! do not.

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

    /// What is on record for `socket`, of whichever life.
    pub(super) async fn at(&self, socket: &Path) -> Option<UndoRecord> {
        self.0.lock().await.records().find(|record| record.socket == socket).cloned()
    }

    /// What is on record of a life. It may have been reached through another socket then, or under
    /// another name.
    pub(super) async fn of_life(&self, incarnation: u64) -> Option<UndoRecord> {
        self.0.lock().await.records().find(|record| record.incarnation == incarnation).cloned()
    }

    /// Makes a record durable.
    pub(super) async fn keep(&self, record: UndoRecord) -> Result<(), String> {
        self.write(move |journal| journal.record(&[record])).await
    }

    /// Strikes a record out.
    pub(super) async fn strike(&self, record: UndoRecord) -> Result<(), String> {
        self.write(move |journal| journal.forget(&record.socket, record.incarnation)).await
    }

    /// Strikes out the lives that are over and cannot be reached any more, so that the journal does
    /// not grow with every VM that there ever was.
    pub(super) async fn strike_the_dead(&self) {
        let all = self.all().await;
        for record in all.into_iter().filter(|r| identity::is_over(r.incarnation, &r.socket)) {
            // One that stays is harmless, and is tried again by the next daemon.
            let _ = self.strike(record).await;
        }
    }

    /// What is on record of KSM. For threads that may wait.
    pub(super) fn ksm(&self) -> Option<KsmRecord> {
        self.0.blocking_lock().ksm().cloned()
    }

    /// Makes KSM's record durable; `None` strikes it out. For threads that may wait.
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
