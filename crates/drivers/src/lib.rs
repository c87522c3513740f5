//! The daemon's sensors and actuators: QMP for the VMs, `/proc` for the host, and the journal of
//! the changes to undo.
//!
//! ```text
//!   discovery ──► one task per socket (vm, session) ──QMP──► QEMU
//!                     │ readings      ▲ targets, orders
//!                     ▼               │
//!                   slot ◄──────── Drivers (Sense, Act) ◄── the loop
//! ```
//!
//! The loop never waits: [`Drivers::view`] copies the readings that the tasks have left in their
//! slots, and [`Drivers::act`] leaves a target there. Only the tasks wait, each for its own QEMU.
//! Errors appear in the view: a link that is down and why, a mechanism that a VM lacks and why,
//! and QEMU's last refusal.
//!
//! KSM belongs to the whole host and has its own task ([`ksm`]).
//!
//! **Cost.** One batch of commands and some small files per VM and second; see `tests/` for the
//! bound.

pub mod discovery;
pub mod guest_stats;
pub mod hands;
pub mod host;
pub mod identity;
pub mod journal;
pub mod ksm;
mod libvirt;
pub mod lines;
mod memory;
pub mod migration;
pub mod move_turn;
pub mod own;
mod process_vm;
pub mod qmp;
mod questions;
mod ram;
mod records;
mod session;
mod shared;
mod slot;
mod tenant;
pub mod undo;
mod vm;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use model::ports::{Act, Clock, Sense};
use model::{
    Action, AttachSpec, Bytes, GroupName, GroupSpec, HostView, Link, Means, Spec, Time, VmName,
};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use discovery::{GlobError, Places};
use host::HostMeter;
use libvirt::Overlay;
use shared::DriverState;
use slot::{BalloonRequest, Restore, Slot, VmOrder};
use tenant::Rules;

use sys::log;

pub use own::own_processes;
pub use records::Records;
pub use tenant::managers;
pub use undo::{RestoreError, restore_at};

/// Longest time for an order: a stuck QEMU first misses the deadline of its previous command.
const ORDER_DEADLINE: Duration = Duration::from_secs(10);

/// Settings of the drivers.
pub struct Settings {
    /// Globs of QMP sockets.
    pub globs: Vec<String>,
    /// Whether VMs without a QMP socket are also found by their processes.
    pub processes: bool,
    /// The groups, whose VMs have to prove their identity.
    pub groups: BTreeMap<GroupName, GroupSpec>,
    /// How often each VM is queried.
    pub period: Duration,
    /// The socket of `overbook-libvirt`.
    pub libvirt: PathBuf,
    /// The changes to undo: those that an earlier daemon has left, and future ones.
    pub records: Records,
}

/// The host and its VMs. Dropping it ends all tasks and connections, and changes nothing.
#[derive(Debug)]
pub struct Drivers {
    shared: Arc<DriverState>,
    host: HostMeter,
    /// The RAM that each VM was last seen with, on which actions are based.
    rams: BTreeMap<VmName, Bytes>,
    places: watch::Sender<Places>,
    overlay: Overlay,
    tasks: [AbortHandle; 2],
}

impl Drivers {
    /// Starts to look for VMs. Needs a tokio runtime.
    ///
    /// # Errors
    /// A glob is invalid.
    pub fn new(settings: Settings) -> Result<Self, GlobError> {
        discovery::check(&settings.globs)?;
        let Settings { globs, processes, groups, period, libvirt, records } = settings;
        let shared = Arc::new(DriverState::new(period, records, libvirt));
        shared.set_rules(Rules::of(&groups));
        let (places, receiver) = watch::channel(Places { globs, processes });
        let task = tokio::spawn(discovery::run(Arc::clone(&shared), receiver));
        let domains = tokio::spawn(libvirt::run(Arc::clone(&shared)));
        let tasks = [task.abort_handle(), domains.abort_handle()];
        let (host, rams, overlay) = (HostMeter::default(), BTreeMap::new(), Overlay::default());
        Ok(Self { shared, host, rams, places, overlay, tasks })
    }

    /// The configuration with the groups and limits in the metadata of libvirt's domains. Also
    /// returns the one before, if it was another one.
    pub fn with_domains(&mut self, spec: &Arc<Spec>) -> (Arc<Spec>, Option<Arc<Spec>>) {
        let faults = self.overlay.faults.clone();
        let before = self.overlay.spec();
        let spec = self.overlay.over(spec, &self.shared.domains);
        if before.as_ref().is_some_and(|before| Arc::ptr_eq(before, &spec)) {
            return (spec, None);
        }
        self.shared.set_rules(Rules::of(&spec.groups));
        let news = self.overlay.faults.iter().filter(|(vm, why)| faults.get(*vm) != Some(*why));
        news.for_each(|(vm, why)| log::warn(&format!("{vm}: {why}")));
        (spec, before)
    }

    /// From now on searches these places, for VMs of these groups. VMs found before stay until
    /// their QEMU ends.
    ///
    /// # Errors
    /// A glob is invalid; the old ones then stay in force.
    pub fn configure(&self, spec: &Spec) -> Result<(), GlobError> {
        discovery::check(&spec.host.qmp)?;
        let (globs, processes) = (spec.host.qmp.clone(), spec.host.attach == AttachSpec::On);
        self.places.send_replace(Places { globs, processes });
        self.shared.set_rules(Rules::of(&spec.groups));
        Ok(())
    }

    /// Restores every VM, all at the same time, and changes nothing more until
    /// [`Drivers::take_up`]. Returns the result for each VM that was changed. If the future is
    /// dropped early, the rest stays on record.
    pub fn release(&self) -> impl Future<Output = Vec<Released>> + Send + use<> {
        self.keep_hands_off();
        let shared = Arc::clone(&self.shared);
        async move {
            let deadline = Instant::now() + ORDER_DEADLINE;
            // Every VM's task is asked, because one may just be about to make its first change.
            let slots: Vec<_> = shared.slots().values().cloned().collect();
            let asked = join_all(slots.iter().map(|slot| order_restore(&shared, slot, deadline)));
            let mut released: Vec<_> = asked.await.into_iter().flatten().collect();
            // VMs that the configuration no longer names have no slot, but may be on record.
            let left = shared.records.all().await;
            let is_asked = |vm: &VmName| released.iter().any(|(asked, _)| asked == vm);
            let left = left.iter().filter(|record| {
                slots.iter().all(|s| s.path != record.socket) && !is_asked(&record.vm)
            });
            let left: Vec<_> = left.cloned().collect();
            let restored = left.iter().map(|record| restore_at(&shared.records, record));
            released.extend(join_all(restored).await);
            released
        }
    }

    /// Restores the VMs that `leaves` names, and goes on watching them.
    pub fn let_go(
        &self,
        leaves: &dyn Fn(&VmName) -> bool,
    ) -> impl Future<Output = Vec<Released>> + Send + use<> {
        let shared = Arc::clone(&self.shared);
        let slots: Vec<_> =
            shared.slots().values().filter(|slot| leaves(&slot.name())).cloned().collect();
        async move {
            let deadline = Instant::now() + ORDER_DEADLINE;
            let asked = slots.iter().map(|slot| order_restore(&shared, slot, deadline));
            join_all(asked).await.into_iter().flatten().collect()
        }
    }

    /// Stops all changes and only watches, until [`Drivers::take_up`].
    pub fn keep_hands_off(&self) {
        self.shared.set_hands_off(true);
    }

    /// Allows changes again.
    pub fn take_up(&self) {
        self.shared.set_hands_off(false);
    }
}

/// A VM and the result of its release.
pub type Released = (VmName, Result<String, RestoreError>);

async fn order_restore(shared: &DriverState, slot: &Slot, deadline: Instant) -> Option<Released> {
    let (reply, answer) = oneshot::channel();
    let answer = match slot.order(VmOrder::Restore(Restore { reply })) {
        true => timeout_at(deadline, answer).await.ok().and_then(Result::ok),
        false => None,
    };
    match answer {
        Some(outcome) => outcome.map(|outcome| (slot.name(), outcome)),
        // A VM that was not changed need not answer.
        None => {
            let record = shared.records.at(&slot.path).await?;
            Some((record.vm, Err(RestoreError::Unreachable)))
        }
    }
}

impl Drivers {
    /// Access to the VMs' tasks for the code that moves VMs between hosts.
    #[must_use]
    pub fn hands(&self) -> hands::Hands {
        hands::Hands { shared: Arc::clone(&self.shared) }
    }
}

impl Drop for Drivers {
    fn drop(&mut self) {
        self.tasks.iter().for_each(AbortHandle::abort);
    }
}

impl Sense for Drivers {
    fn view(&mut self) -> HostView {
        let mut vms = self.shared.views();
        self.overlay.tell(&mut vms);
        self.rams = vms.iter().map(|(name, view)| (name.clone(), view.ram)).collect();
        HostView { host: self.host.read().ok(), vms, ..HostView::default() }
    }
}

impl Act for Drivers {
    fn act(&mut self, action: &Action) {
        let Action::Resize { vm, incarnation, target, by } = action;
        // A VM that is gone needs nothing.
        if let Some(slot) = self.shared.find(vm) {
            // The worker pages memory out; the balloon is empty then.
            let target = match by {
                Means::Balloon => Some(*target),
                Means::Paging => None,
            };
            let ram = self.rams.get(vm).copied().unwrap_or_else(|| slot.state().view.ram);
            slot.wish(BalloonRequest { incarnation: *incarnation, target, ram });
        }
    }
}

/// Whether a VM was found by its QMP socket, and not by its process alone.
#[must_use]
pub fn has_socket(view: &model::VmView) -> bool {
    view.limits.values().all(|why| why != process_vm::NO_SOCKET)
}

/// Whether a link is down only because the first answer is still missing.
#[must_use]
pub fn is_first_contact(link: &Link) -> bool {
    matches!(link, Link::Down { why, .. } if [slot::NOT_CONNECTED, slot::NOT_ASKED].contains(&&**why))
}

/// The host's boot clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> Time {
        sys::clock::boot_now()
    }
}

#[cfg(test)]
#[path = "../../overbook/src/test_process.rs"]
mod test_process;
