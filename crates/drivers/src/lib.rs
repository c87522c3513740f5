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
pub mod proxmox;
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

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use model::ports::{Act, Clock, Sense};
use model::{
    Action, AttachSpec, Bytes, GroupName, GroupSpec, HostView, Link, Means, Pauses, Spec, Time,
    VmName, VmView,
};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};

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
pub use undo::{Released, RestoreError, Undo, Undone, restore_all};

/// Longest time for an order: a stuck QEMU first misses the deadline of its previous command.
const ORDER_DEADLINE: Duration = Duration::from_secs(10);
/// Interval at which [`Drivers::first_look`] asks whether all VMs are known.
const FIRST_LOOK_EVERY: Duration = Duration::from_millis(20);

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
    /// VMs whose managers move their balloons.
    balanced: BTreeSet<VmName>,
    taken_over: BTreeSet<VmName>,
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
        let of_domains = Arc::clone(&shared);
        let domains = tokio::spawn(async move { libvirt::run(&of_domains.domains).await });
        let tasks = [task.abort_handle(), domains.abort_handle()];
        let (host, rams, overlay) = (HostMeter::default(), BTreeMap::new(), Overlay::default());
        let (balanced, taken_over) = (BTreeSet::new(), BTreeSet::new());
        Ok(Self { shared, host, rams, places, overlay, balanced, taken_over, tasks })
    }

    /// The configuration with the groups and limits that libvirt's metadata and Proxmox's files
    /// tell. Also returns the one before, if it was another one.
    pub fn with_domains(&mut self, spec: &Arc<Spec>) -> (Arc<Spec>, Option<Arc<Spec>>) {
        let faults = self.overlay.faults.clone();
        let before = self.overlay.spec();
        let by_proxmox = self.shared.proxmox.settings(&self.shared.slots());
        let spec = self.overlay.over(spec, &self.shared.domains, by_proxmox);
        if before.as_ref().is_some_and(|before| Arc::ptr_eq(before, &spec)) {
            return (spec, None);
        }
        self.shared.set_rules(Rules::of(&spec.groups));
        let news = self.overlay.faults.iter().filter(|(vm, why)| faults.get(*vm) != Some(*why));
        news.for_each(|(vm, why)| log::warn(&format!("{vm}: {why}")));
        (spec, before)
    }

    /// The latest answer of [`Drivers::with_domains`].
    #[must_use]
    pub fn spec_in_force(&self) -> Option<Arc<Spec>> {
        self.overlay.spec()
    }

    /// From now on searches these places, for VMs of these groups. VMs found before stay until
    /// their QEMU ends.
    ///
    /// # Errors
    /// A glob is invalid; the old ones then stay in force.
    pub fn configure(&self, spec: &Spec) -> Result<(), GlobError> {
        discovery::check(&spec.host.qmp)?;
        let (globs, processes) = (spec.host.globs(), spec.host.attach == AttachSpec::On);
        self.places.send_replace(Places { globs, processes });
        self.shared.set_rules(Rules::of(&spec.groups));
        Ok(())
    }

    /// Restores the VMs that `is_meant` names, or finds out what that would do. Those that lack the
    /// least are asked first, and none waits for another. The caller has paused them. Returns the
    /// result for each VM that was changed. If the future is dropped early, the rest stays on
    /// record.
    pub fn release<M>(
        &self,
        is_meant: M,
        undo: Undo,
    ) -> impl Future<Output = Vec<Released>> + Send + use<M>
    where
        M: Fn(&VmName) -> bool + Send + Sync + 'static,
    {
        let shared = Arc::clone(&self.shared);
        async move {
            let deadline = Instant::now() + ORDER_DEADLINE;
            // Every VM's task is asked, because one may just be about to make its first change.
            let slots: Vec<_> = shared.slots().values().cloned().collect();
            // A VM that does not answer yet may be known by its record alone.
            let known = shared.records.all().await;
            let recorded = |slot: &Slot| {
                known.iter().any(|record| record.socket == slot.path && is_meant(&record.vm))
            };
            let meant = slots.iter().filter(|slot| is_meant(&slot.name()) || recorded(slot));
            let mut meant: Vec<_> = meant.collect();
            meant.sort_by_cached_key(|slot| lacks(slot));
            let asked = meant.iter().map(|slot| order_restore(&shared, slot, undo, deadline));
            let mut released: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
            // VMs that the configuration no longer names have no slot, but may be on record.
            let left = shared.records.all().await;
            let is_asked = |vm: &VmName| released.iter().any(|(asked, _)| asked == vm);
            let left = left.iter().filter(|record| {
                let has_task = meant.iter().any(|slot| slot.path == record.socket);
                is_meant(&record.vm) && !has_task && !is_asked(&record.vm)
            });
            let left: Vec<_> = left.cloned().collect();
            released.extend(restore_all(&shared.records, &left, undo).await);
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
            let asked = slots.iter().map(|slot| order_restore(&shared, slot, Undo::Now, deadline));
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

    /// From now on changes nothing on these VMs and groups, in addition to
    /// [`Drivers::keep_hands_off`].
    pub fn set_pauses(&self, pauses: Pauses) {
        self.shared.set_pauses(pauses);
    }
}

/// Memory in the VM's balloon.
fn lacks(slot: &Slot) -> Bytes {
    let view = &slot.state().view;
    view.balloon.map_or(Bytes::ZERO, |balloon| view.ram.minus(balloon.value))
}

async fn order_restore(
    shared: &DriverState,
    slot: &Slot,
    undo: Undo,
    deadline: Instant,
) -> Option<Released> {
    let (reply, answer) = oneshot::channel();
    let answer = match slot.order(VmOrder::Restore(Restore { undo, reply })) {
        true => timeout_at(deadline, answer).await.ok().and_then(Result::ok),
        false => None,
    };
    match answer {
        Some(outcome) => outcome.map(|outcome| (slot.name(), outcome)),
        // A VM that was not changed need not answer.
        None => {
            let life = slot.state().view.incarnation;
            let record = shared.records.of(&slot.path, life).await?;
            Some((record.vm, Err(RestoreError::Unreachable)))
        }
    }
}

impl Drivers {
    /// Where reports about Proxmox's VMs go.
    #[must_use]
    pub fn proxmox(&self) -> Arc<proxmox::Proxmox> {
        Arc::clone(&self.shared.proxmox)
    }

    /// The VMs whose managers have begun to move their balloons since the last call.
    pub fn taken_over(&mut self) -> BTreeSet<VmName> {
        std::mem::take(&mut self.taken_over)
    }

    fn note_balanced(&mut self, vms: &BTreeMap<VmName, VmView>) {
        let is_balanced =
            |view: &VmView| view.manager.as_ref().is_some_and(|it| it.balances.is_some());
        let now = vms.iter().filter(|(_, view)| is_balanced(view)).map(|(name, _)| name.clone());
        let now: BTreeSet<_> = now.collect();
        self.taken_over.extend(now.difference(&self.balanced).cloned());
        self.balanced = now;
    }

    /// Waits until all VMs that run now have been looked at, for at most `limit`.
    pub async fn first_look(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while !self.shared.knows_all() && Instant::now() < end {
            sleep(FIRST_LOOK_EVERY).await;
        }
    }

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
        self.shared.proxmox.tell(&mut vms);
        self.note_balanced(&vms);
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
