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
//! **Cost.** Per VM and second one batch of commands and one small file; see `tests/` for the
//! bound.

pub mod discovery;
pub mod guest_stats;
pub mod host;
mod identity;
mod memory;
pub mod qmp;
mod questions;
mod session;
mod shared;
mod slot;
pub mod undo;
mod vm;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use model::ports::{Act, Clock, Sense};
use model::{Action, HostView, Time, VmName};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::{Instant, timeout_at};

use crate::journal::UndoRecord;
use discovery::GlobError;
use shared::Shared;
use slot::{Restore, Wish};

pub use shared::Record;
pub use undo::{RestoreError, restore_at};

/// How long an order may take: a stuck QEMU first misses the deadline of what was asked before.
const ORDER_DEADLINE: Duration = Duration::from_secs(10);

/// What the drivers need to know.
pub struct Settings {
    /// Globs of QMP sockets.
    pub globs: Vec<String>,
    /// How often each VM is asked.
    pub period: Duration,
    /// UndoRecord records that an earlier daemon has left.
    pub known: BTreeMap<VmName, UndoRecord>,
    /// Keeps an undo record; called before each first change, and with the whole record.
    pub record: Record,
}

/// The host and its VMs. Dropping it ends all tasks and connections, and changes nothing.
#[derive(Debug)]
pub struct Drivers {
    shared: Arc<Shared>,
    globs: watch::Sender<Vec<String>>,
    discovery: AbortHandle,
    host_error: Option<String>,
}

impl Drivers {
    /// Starts to look for VMs. Needs a tokio runtime.
    ///
    /// # Errors
    /// When a glob is none.
    pub fn new(settings: Settings) -> Result<Self, GlobError> {
        discovery::check(&settings.globs)?;
        let shared = Shared::new(settings.period, settings.record, settings.known);
        let shared = Arc::new(shared);
        let (globs, receiver) = watch::channel(settings.globs);
        let task = tokio::spawn(discovery::run(Arc::clone(&shared), receiver));
        Ok(Self { shared, globs, discovery: task.abort_handle(), host_error: None })
    }

    /// Looks in other places from now on. VMs found before stay until their QEMU ends.
    ///
    /// # Errors
    /// When a glob is none; then the old ones stay in force.
    pub fn set_globs(&self, globs: Vec<String>) -> Result<(), GlobError> {
        discovery::check(&globs)?;
        self.globs.send_replace(globs);
        Ok(())
    }

    /// Why the host's memory could not be read the last time.
    #[must_use]
    pub fn host_error(&self) -> Option<&str> {
        self.host_error.as_deref()
    }

    /// What was changed on each VM, and how it was before.
    #[must_use]
    pub fn undo_records(&self) -> BTreeMap<VmName, UndoRecord> {
        let slots = self.shared.slots();
        let records = slots.values().filter_map(|slot| {
            let state = slot.state();
            (!state.undo.is_empty()).then(|| Some((state.name.clone()?, state.undo.clone())))?
        });
        records.collect()
    }

    fn order_restore(&self, vm: &VmName, undo: UndoRecord) -> Option<RestoreAnswer> {
        let (reply, answer) = oneshot::channel();
        let slot = self.shared.find(vm)?;
        slot.order(Restore { undo, reply }).then_some(answer)
    }

    /// Puts every VM back, all at the same time, and changes nothing more until
    /// [`Drivers::take_up`].
    pub async fn release(&self) -> BTreeMap<VmName, Result<String, RestoreError>> {
        self.shared.set_hands_off(true);
        let deadline = Instant::now() + ORDER_DEADLINE;
        let order = |(vm, undo)| {
            let answer = self.order_restore(&vm, undo);
            (vm, answer)
        };
        let ordered: Vec<_> = self.undo_records().into_iter().map(order).collect();
        let mut outcomes = BTreeMap::new();
        for (vm, answer) in ordered {
            outcomes.insert(vm, await_restore(answer, deadline).await);
        }
        outcomes
    }

    /// Changes are allowed again.
    pub fn take_up(&self) {
        self.shared.set_hands_off(false);
    }
}

type RestoreAnswer = oneshot::Receiver<Result<String, RestoreError>>;

async fn await_restore(
    answer: Option<RestoreAnswer>,
    deadline: Instant,
) -> Result<String, RestoreError> {
    let answer = answer.ok_or(RestoreError::Unreachable)?;
    match timeout_at(deadline, answer).await {
        Ok(Ok(outcome)) => outcome,
        _ => Err(RestoreError::Unreachable),
    }
}

impl Drop for Drivers {
    fn drop(&mut self) {
        self.discovery.abort();
    }
}

impl Sense for Drivers {
    fn view(&mut self) -> HostView {
        let host = host::read();
        self.host_error = host.as_ref().err().map(ToString::to_string);
        HostView { host: host.ok(), vms: self.shared.views() }
    }
}

impl Act for Drivers {
    fn act(&mut self, action: &Action) {
        let Action::SetBalloon { vm, incarnation, target } = action;
        // A VM that is gone needs nothing.
        if let Some(slot) = self.shared.find(vm) {
            slot.wish(Wish { incarnation: *incarnation, target: *target });
        }
    }
}

/// The host's boot clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

impl Clock for BootClock {
    fn now(&self) -> Time {
        sys::clock::boot_now()
    }
}
