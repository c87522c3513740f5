//! For whoever moves VMs between hosts: a turn of a migration, taken by the VM's own task.
//!
//! A QEMU serves one connection at a time, and the VM's task has it.

use std::sync::Arc;

use model::VmName;
use policy::handover::{Seen, SourceStep, TargetStep};
use tokio::sync::oneshot;

use super::identity;
use super::migration::{Limits, Secured, Turn, source_turn, target_turn};
use super::qmp::{Client, QmpError};
use super::shared::Shared;
use super::slot::Order;

/// What a host knows of an intent when it takes a turn: [`Seen`], for a task of its own.
#[derive(Clone, Debug, Default)]
pub struct Known {
    /// The life of the VM that the host's own step was written of.
    pub life: Option<u64>,
    /// What the source has written.
    pub source: Option<SourceStep>,
    /// What the target has written.
    pub target: Option<TargetStep>,
    /// The intent was withdrawn.
    pub is_late: bool,
    /// The other host has not been heard of for a while.
    pub is_alone: bool,
    /// Why this host's own configuration forbids it.
    pub bar: Option<String>,
}

impl Known {
    /// The same, borrowed.
    #[must_use]
    pub fn seen(&self) -> Seen<'_> {
        let (source, target) = (self.source.as_ref(), self.target.as_ref());
        let (is_late, is_alone) = (self.is_late, self.is_alone);
        Seen { source, target, is_late, is_alone, bar: self.bar.as_deref() }
    }
}

/// What came of a turn, and of which life of the VM.
pub type Taken<Step> = (Result<Turn<Step>, String>, u64);

/// How a guest is to be sent, or where it is waited for.
#[derive(Clone, Debug)]
pub struct Terms<T> {
    /// The source's limits, or the target's address.
    pub own: T,
    /// By which TLS; `None`: it travels as it is.
    pub secured: Option<Secured>,
}

/// A turn that a VM's task is to take.
#[derive(Debug)]
pub(super) enum MoveTurn {
    Source(u64, Known, Terms<Limits>, oneshot::Sender<Taken<SourceStep>>),
    Target(Known, Terms<String>, oneshot::Sender<Taken<TargetStep>>),
}

/// Why nothing was done.
const ANOTHER_LIFE: &str = "another QEMU has this VM's name now";

impl MoveTurn {
    /// Takes it. Whoever asked may have gone.
    /// Nothing is ever done to another life than the one that the step was written of.
    pub(super) async fn take(self, client: &mut Client, incarnation: u64) -> Result<(), QmpError> {
        let is_other = |known: &Known| known.life.is_some_and(|life| life != incarnation);
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

/// A connection that has failed concerns the task, and whoever asked.
fn apart<T>(done: Result<T, QmpError>) -> (Result<T, String>, Option<QmpError>) {
    match done {
        Ok(done) => (Ok(done), None),
        Err(error) => (Err(error.to_string()), Some(error).filter(QmpError::is_fatal)),
    }
}

/// The way to the VMs' tasks.
#[derive(Clone, Debug)]
pub struct Hands {
    pub(super) shared: Arc<Shared>,
}

impl Hands {
    /// The life of a VM that is, or was a moment ago, on this host, if its process is known.
    #[must_use]
    pub fn life(&self, vm: &VmName) -> Option<u64> {
        let slot = self.shared.find(vm)?;
        let view = &slot.state().view;
        view.pid.map(|_| view.incarnation)
    }

    /// Whether this life of a VM is over for certain.
    #[must_use]
    pub fn has_ended(&self, life: u64) -> bool {
        identity::has_ended(life)
    }

    /// A turn of the source; `None`: its QEMU is not connected now.
    pub async fn source(
        &self,
        vm: &VmName,
        generation: u64,
        known: Known,
        terms: Terms<Limits>,
    ) -> Option<Taken<SourceStep>> {
        let (reply, answer) = oneshot::channel();
        self.order(vm, MoveTurn::Source(generation, known, terms, reply))?;
        answer.await.ok()
    }

    /// A turn of the target; `None`: its QEMU is not connected now.
    pub async fn target(
        &self,
        vm: &VmName,
        known: Known,
        terms: Terms<String>,
    ) -> Option<Taken<TargetStep>> {
        let (reply, answer) = oneshot::channel();
        self.order(vm, MoveTurn::Target(known, terms, reply))?;
        answer.await.ok()
    }

    fn order(&self, vm: &VmName, turn: MoveTurn) -> Option<()> {
        let slot = self.shared.find(vm)?;
        slot.order(Order::Move(turn)).then_some(())
    }
}
