//! Takes turns of migrations on behalf of the code that moves VMs between hosts. The VM's own
//! task executes each turn.
//!
//! A QEMU serves one connection at a time, and the VM's task holds it.

use std::sync::Arc;

use model::VmName;
use policy::handover::{SourceStep, TargetStep};
use tokio::sync::oneshot;

use super::identity;
use super::migration::Limits;
use super::move_turn::{IntentSnapshot, MoveTurn, Taken, Terms};
use super::shared::DriverState;
use super::slot::VmOrder;

/// Access to the VMs' tasks.
#[derive(Clone, Debug)]
pub struct Hands {
    pub(super) shared: Arc<DriverState>,
}

impl Hands {
    /// Incarnation of a VM that is, or was a moment ago, on this host, if its process is known.
    #[must_use]
    pub fn life(&self, vm: &VmName) -> Option<u64> {
        let slot = self.shared.find(vm)?;
        let view = &slot.state().view;
        view.pid.map(|_| view.incarnation)
    }

    /// Whether this incarnation of a VM has certainly ended.
    #[must_use]
    pub fn has_ended(&self, life: u64) -> bool {
        identity::has_ended(life)
    }

    /// Takes a turn of the source; `None`: its QEMU is not connected now.
    pub async fn source(
        &self,
        vm: &VmName,
        generation: u64,
        known: IntentSnapshot,
        terms: Terms<Limits>,
    ) -> Option<Taken<SourceStep>> {
        let (reply, answer) = oneshot::channel();
        self.order(vm, MoveTurn::Source(generation, known, terms, reply))?;
        answer.await.ok()
    }

    /// Takes a turn of the target; `None`: its QEMU is not connected now.
    pub async fn target(
        &self,
        vm: &VmName,
        known: IntentSnapshot,
        terms: Terms<String>,
    ) -> Option<Taken<TargetStep>> {
        let (reply, answer) = oneshot::channel();
        self.order(vm, MoveTurn::Target(known, terms, reply))?;
        answer.await.ok()
    }

    fn order(&self, vm: &VmName, turn: MoveTurn) -> Option<()> {
        let slot = self.shared.find(vm)?;
        slot.order(VmOrder::Move(Box::new(turn))).then_some(())
    }
}
