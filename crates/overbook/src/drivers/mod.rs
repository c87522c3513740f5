//! The daemon's senses and hands: QMP for the VMs, `/proc` for the host.
//!
//! ```text
//!   discovery ──► one task per socket (vm, session) ──QMP──► QEMU
//!                     │ readings      ▲ wishes, orders
//!                     ▼               │
//!                   slot ◄──────── Drivers (Sense, Act) ◄── the loop
//! ```
//!
//! The loop never waits: [`Drivers::view`] copies what the tasks have left in their slots, and
//! [`Drivers::act`] leaves a wish there. All waiting is in the tasks, each for its own QEMU. What
//! goes wrong shows in the view: a link that is down and why, a mechanism that a VM lacks and why,
//! the last thing that QEMU refused.
//!
//! KSM is the host's and has a task of its own ([`ksm`]).
//!
//! **Cost.** Per VM and second one batch of commands and some small files; see `tests/` for the
//! bound.

pub mod discovery;
pub mod guest_stats;
pub mod hands;
pub mod host;
pub(crate) mod identity;
pub mod ksm;
mod memory;
pub mod migration;
pub mod own;
mod process_vm;
pub mod qmp;
mod questions;
mod ram;
mod records;
mod session;
mod shared;
mod slot;
pub(crate) mod tenant;
pub mod undo;
mod vm;

use std::collections::BTreeMap;
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
use shared::Shared;
use slot::{Order, Restore, Slot, Wish};
use tenant::Rules;

pub use own::own_processes;
pub use records::Records;
pub use undo::{RestoreError, restore_at};

/// How long an order may take: a stuck QEMU first misses the deadline of what was asked before.
const ORDER_DEADLINE: Duration = Duration::from_secs(10);

/// What the drivers need to know.
pub struct Settings {
    /// Globs of QMP sockets.
    pub globs: Vec<String>,
    /// Whether VMs without one are found by their processes, too.
    pub processes: bool,
    /// The groups, whose VMs are to be known by more than their word.
    pub groups: BTreeMap<GroupName, GroupSpec>,
    /// How often each VM is asked.
    pub period: Duration,
    /// What is to be undone: what an earlier daemon has left, and what will be added.
    pub records: Records,
}

/// The host and its VMs. Dropping it ends all tasks and connections, and changes nothing.
#[derive(Debug)]
pub struct Drivers {
    shared: Arc<Shared>,
    host: HostMeter,
    /// The RAM that each VM was last seen with: of which actions are decided.
    rams: BTreeMap<VmName, Bytes>,
    places: watch::Sender<Places>,
    discovery: AbortHandle,
}

impl Drivers {
    /// Starts to look for VMs. Needs a tokio runtime.
    ///
    /// # Errors
    /// When a glob is none.
    pub fn new(settings: Settings) -> Result<Self, GlobError> {
        discovery::check(&settings.globs)?;
        let shared = Arc::new(Shared::new(settings.period, settings.records));
        shared.set_rules(Rules::of(&settings.groups));
        let Settings { globs, processes, .. } = settings;
        let (places, receiver) = watch::channel(Places { globs, processes });
        let task = tokio::spawn(discovery::run(Arc::clone(&shared), receiver));
        let (host, rams) = (HostMeter::default(), BTreeMap::new());
        Ok(Self { shared, host, rams, places, discovery: task.abort_handle() })
    }

    /// Looks in other places from now on, and for VMs of other groups. VMs found before stay until
    /// their QEMU ends.
    ///
    /// # Errors
    /// When a glob is none; then the old ones stay in force.
    pub fn configure(&self, spec: &Spec) -> Result<(), GlobError> {
        discovery::check(&spec.host.qmp)?;
        let (globs, processes) = (spec.host.qmp.clone(), spec.host.attach == AttachSpec::On);
        self.places.send_replace(Places { globs, processes });
        self.shared.set_rules(Rules::of(&spec.groups));
        Ok(())
    }

    /// Puts every VM back, all at the same time, and changes nothing more until
    /// [`Drivers::take_up`]. Says how it went for each that was changed. Dropped before its end it
    /// leaves the rest on record.
    pub fn release(&self) -> impl Future<Output = Vec<Released>> + Send + use<> {
        self.keep_hands_off();
        let shared = Arc::clone(&self.shared);
        async move {
            let deadline = Instant::now() + ORDER_DEADLINE;
            // Every VM's task is asked: one may just be about to make its first change.
            let slots: Vec<_> = shared.slots().values().cloned().collect();
            let asked = join_all(slots.iter().map(|slot| order_restore(&shared, slot, deadline)));
            let mut released: Vec<_> = asked.await.into_iter().flatten().collect();
            // What the configuration does not name any more is nobody's, but on record.
            let left = shared.records.all().await;
            let left = left.iter().filter(|record| slots.iter().all(|s| s.path != record.socket));
            released.extend(join_all(left.map(|record| restore_at(&shared.records, record))).await);
            released
        }
    }

    /// Puts back the VMs that `leaves` names, and goes on watching them.
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

    /// Watch only, until [`Drivers::take_up`].
    pub fn keep_hands_off(&self) {
        self.shared.set_hands_off(true);
    }

    /// Changes are allowed again.
    pub fn take_up(&self) {
        self.shared.set_hands_off(false);
    }
}

/// A VM and what became of its release.
pub type Released = (VmName, Result<String, RestoreError>);

async fn order_restore(shared: &Shared, slot: &Slot, deadline: Instant) -> Option<Released> {
    let (reply, answer) = oneshot::channel();
    let answer = match slot.order(Order::Restore(Restore { reply })) {
        true => timeout_at(deadline, answer).await.ok().and_then(Result::ok),
        false => None,
    };
    match answer {
        Some(outcome) => outcome.map(|outcome| (slot.name(), outcome)),
        // A VM that nothing was done to need not answer.
        None => {
            let record = shared.records.at(&slot.path).await?;
            Some((record.vm, Err(RestoreError::Unreachable)))
        }
    }
}

impl Drivers {
    /// For whoever moves VMs between hosts.
    #[must_use]
    pub fn hands(&self) -> hands::Hands {
        hands::Hands { shared: Arc::clone(&self.shared) }
    }
}

impl Drop for Drivers {
    fn drop(&mut self) {
        self.discovery.abort();
    }
}

impl Sense for Drivers {
    fn view(&mut self) -> HostView {
        let vms = self.shared.views();
        self.rams = vms.iter().map(|(name, view)| (name.clone(), view.ram)).collect();
        HostView { host: self.host.read().ok(), vms, ..HostView::default() }
    }
}

impl Act for Drivers {
    fn act(&mut self, action: &Action) {
        let Action::Resize { vm, incarnation, target, by } = action;
        // A VM that is gone needs nothing.
        if let Some(slot) = self.shared.find(vm) {
            // What is paged out is the worker's business; the balloon then holds nothing.
            let target = match by {
                Means::Balloon => Some(*target),
                Means::Paging => None,
            };
            let ram = self.rams.get(vm).copied().unwrap_or_else(|| slot.state().view.ram);
            slot.wish(Wish { incarnation: *incarnation, target, ram });
        }
    }
}

/// Whether a link is down only because the first answer is not in yet.
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
