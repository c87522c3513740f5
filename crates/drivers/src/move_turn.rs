//! A turn of a migration that a VM's own task takes, and its result.

use policy::handover::{IntentView, SourceStep, TargetStep};
use tokio::sync::oneshot;

use super::migration::{Limits, Secured, Turn, source_turn, target_turn};
use super::qmp::{QmpClient, QmpError};

/// A host's knowledge about an intent when it takes a turn: [`IntentView`], owned by the task.
#[derive(Clone, Debug, Default)]
pub struct IntentSnapshot {
    /// The incarnation of the VM for which the host's own step was written.
    pub life: Option<u64>,
    /// The source's last step.
    pub source: Option<SourceStep>,
    /// The target's last step.
    pub target: Option<TargetStep>,
    /// Whether the intent was withdrawn.
    pub is_late: bool,
    /// Whether the other host has been silent for a while.
    pub is_alone: bool,
    /// Why this host's own configuration forbids the move.
    pub bar: Option<String>,
}

impl IntentSnapshot {
    /// The same, borrowed.
    #[must_use]
    pub fn seen(&self) -> IntentView<'_> {
        let (source, target) = (self.source.as_ref(), self.target.as_ref());
        let (is_late, is_alone) = (self.is_late, self.is_alone);
        IntentView { source, target, is_late, is_alone, bar: self.bar.as_deref() }
    }
}

/// Result of a turn, and the incarnation of the VM that took it.
pub type Taken<Step> = (Result<Turn<Step>, String>, u64);

/// Parameters of a migration on one host.
#[derive(Clone, Debug)]
pub struct Terms<T> {
    /// The source's limits, or the target's address.
    pub own: T,
    /// TLS parameters; `None`: the migration is not encrypted.
    pub secured: Option<Secured>,
}

/// A turn that a VM's task is to take.
#[derive(Debug)]
pub(super) enum MoveTurn {
    Source(u64, IntentSnapshot, Terms<Limits>, oneshot::Sender<Taken<SourceStep>>),
    Target(IntentSnapshot, Terms<String>, oneshot::Sender<Taken<TargetStep>>),
}

/// Why no turn was taken.
const ANOTHER_LIFE: &str = "another QEMU has this VM's name now";

impl MoveTurn {
    /// Takes the turn; the caller may be gone. A turn is never applied to an incarnation other
    /// than the one for which its step was written.
    pub(super) async fn take(
        self,
        client: &mut QmpClient,
        incarnation: u64,
    ) -> Result<(), QmpError> {
        let is_other = |known: &IntentSnapshot| known.life.is_some_and(|life| life != incarnation);
        let failed = match self {
            Self::Source(_, known, _, reply) if is_other(&known) => {
                let _ = reply.send((Err(ANOTHER_LIFE.to_owned()), incarnation));
                None
            }
            Self::Target(known, _, reply) if is_other(&known) => {
                let _ = reply.send((Err(ANOTHER_LIFE.to_owned()), incarnation));
                None
            }
            Self::Source(generation, known, terms, reply) => {
                let (limits, secured) = (terms.own, terms.secured.as_ref());
                let done = source_turn(client, generation, known.seen(), limits, secured).await;
                let (done, failed) = apart(done);
                let _ = reply.send((done, incarnation));
                failed
            }
            Self::Target(known, terms, reply) => {
                let (is_ours, secured) = (known.life.is_some(), terms.secured.as_ref());
                let done = target_turn(client, is_ours, known.seen(), &terms.own, secured).await;
                let (done, failed) = apart(done);
                let _ = reply.send((done, incarnation));
                failed
            }
        };
        failed.map_or(Ok(()), Err)
    }
}

/// Splits a result: the caller gets the error, and so does the task if the connection has failed.
fn apart<T>(done: Result<T, QmpError>) -> (Result<T, String>, Option<QmpError>) {
    match done {
        Ok(done) => (Ok(done), None),
        Err(error) => (Err(error.to_string()), Some(error).filter(QmpError::is_fatal)),
    }
}
