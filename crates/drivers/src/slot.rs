//! The slot in which a VM's task leaves its readings and finds its orders.
//!
//! There is one slot per QMP socket. The task writes and the loop reads; neither waits for the
//! other, because the lock is only held for copying. Requests for the balloon are not queued: a
//! newer one replaces the older. So a QEMU that was stuck for an hour is asked only for the size
//! that is wanted now.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use model::view::{Mechanism, MemoryLimit};
use model::{Bytes, Link, Migration, Millis, Reading, Time, VmName, VmView};
use sys::clock::boot_now;
use tokio::sync::{Notify, mpsc, oneshot};

use super::move_turn::MoveTurn;
use super::undo::{RestoreError, Undo, Undone};

/// How long a VM is still shown after its QEMU has ended.
pub(super) const SHOWN_AFTER_END: Millis = Millis::secs(5);

/// The CPU time of QEMU's cgroup is read once in this number of periods.
pub(super) const CPU_EVERY: u64 = 10;
/// A VM without a limit in its cgroups is looked at again after this time: on a host of 200 VMs,
/// their cgroups have thousands of files.
const LIMITS_EVERY: Millis = Millis::secs(30);

/// Reason for the missing data of a VM whose socket has just been found.
pub(super) const NOT_CONNECTED: &str = "not connected yet";
/// Reason for the missing data of a VM whose QEMU has only reported its name.
pub(super) const NOT_ASKED: &str = "connected, not asked yet";

/// The order to restore the original settings; the sender waits for the reply.
#[derive(Debug)]
pub(super) struct Restore {
    /// Whether it is made.
    pub(super) undo: Undo,
    /// The result; `None`: there were no changes.
    pub(super) reply: oneshot::Sender<Option<Result<Undone, RestoreError>>>,
}

/// An order to a VM's task, which it answers.
#[derive(Debug)]
pub(super) enum VmOrder {
    /// Restore the original settings.
    Restore(Restore),
    /// Take a turn of a migration.
    Move(Box<MoveTurn>),
}

/// A requested size of the balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BalloonRequest {
    pub(super) incarnation: u64,
    /// Size of the VM when its RAM is `ram`; `None`: the balloon is to be empty.
    pub(super) target: Option<Bytes>,
    /// The RAM for which the target was chosen.
    pub(super) ram: Bytes,
}

/// The VM of one QMP socket.
#[derive(Debug)]
pub(super) struct Slot {
    /// Path of the socket.
    pub(super) path: PathBuf,
    /// Notified when there is a request for the balloon.
    pub(super) wished: Notify,
    orders: mpsc::Sender<VmOrder>,
    state: Mutex<SlotState>,
}

/// State of the VM.
#[derive(Debug)]
pub(super) struct SlotState {
    /// `None` until QEMU has reported it, or if another socket's VM has it already.
    pub(super) name: Option<VmName>,
    /// The view of the VM that is shown.
    pub(super) view: VmView,
    /// Time since which no QEMU is behind the socket.
    pub(super) ended: Option<Time>,
    wish: Option<BalloonRequest>,
}

impl SlotState {
    /// Notes that QEMU answers, under the lock of the readings that it has answered with.
    pub(super) fn up(&mut self) {
        self.view.link = Link::Up;
        self.ended = None;
    }
}

impl Slot {
    /// An empty slot, and the receiver of its orders.
    pub(super) fn new(path: PathBuf) -> (Self, mpsc::Receiver<VmOrder>) {
        let (orders, inbox) = mpsc::channel(4);
        let state = SlotState {
            name: None,
            view: unknown_vm(NOT_CONNECTED.to_owned()),
            ended: None,
            wish: None,
        };
        (Self { path, wished: Notify::new(), orders, state: Mutex::new(state) }, inbox)
    }

    /// The state. The lock is for copying in and out, and never held over an await.
    pub(super) fn state(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The VM's name, or the one that its socket suggests.
    pub(super) fn name(&self) -> VmName {
        let name = self.state().name.clone();
        name.unwrap_or_else(|| super::shared::name_of_socket(&self.path))
    }

    /// Leaves a request that replaces any older one.
    pub(super) fn wish(&self, wish: BalloonRequest) {
        self.state().wish = Some(wish);
        self.wished.notify_one();
    }

    /// Takes the request.
    pub(super) fn take_wish(&self) -> Option<BalloonRequest> {
        self.state().wish.take()
    }

    /// Sends an order. `false`: the task is gone, or its queue is full.
    pub(super) fn order(&self, order: VmOrder) -> bool {
        self.orders.try_send(order).is_ok()
    }

    /// Notes that QEMU does not answer; `ended`: that QEMU has ended.
    pub(super) fn down(&self, why: String, ended: bool) {
        let now = boot_now();
        let mut state = self.state();
        let since = match state.view.link {
            Link::Down { since, .. } => since,
            Link::Up => now,
        };
        state.view.link = Link::Down { since, why };
        state.view.migration = Migration::Unknown;
        state.ended = ended.then(|| state.ended.unwrap_or(now));
    }

    /// Forgets the process behind the socket: it is not touched any more.
    pub(super) fn disown(&self) {
        self.state().view.pid = None;
    }

    /// Notes that QEMU answers.
    pub(super) fn up(&self) {
        self.state().up();
    }

    /// Notes that QEMU refused an action, or that the action was not tried.
    pub(super) fn failed(&self, what: String) {
        self.state().view.last_error = Some(Reading::new(what, boot_now()));
    }

    /// Sets or clears the reason why `mechanism` cannot be used.
    pub(super) fn limit(&self, mechanism: Mechanism, why: Option<String>) {
        let limits = &mut self.state().view.limits;
        match why {
            Some(why) => limits.insert(mechanism, why),
            None => limits.remove(&mechanism),
        };
    }

    /// Reads the limits of QEMU's cgroups, with their use. A limit may appear, change or disappear
    /// at any time.
    pub(super) fn read_limits(&self, pid: u32) {
        let now = boot_now();
        let is_free = |known: &Reading<Vec<MemoryLimit>>| {
            known.value.is_empty() && known.age(now) < LIMITS_EVERY
        };
        if self.state().view.memory_limits.as_ref().is_some_and(is_free) {
            return;
        }
        if let Ok(limits) = sys::memory_limits::of_process(pid) {
            self.state().view.memory_limits = Some(Reading::new(limits, now));
        }
    }

    /// Looks for a limit that has appeared since the last reading, before the balloon changes.
    ///
    /// # Errors
    /// There is one; the size was chosen without it.
    pub(super) fn check_limits(&self, pid: u32) -> Result<(), String> {
        // A process whose limits cannot be read has ended.
        self.meet_limits(sys::memory_limits::of_process(pid).unwrap_or_default())
    }

    fn meet_limits(&self, found: Vec<MemoryLimit>) -> Result<(), String> {
        let known = &mut self.state().view.memory_limits;
        let had_any = known.as_ref().is_some_and(|known| !known.value.is_empty());
        let Some(first) = found.first().filter(|_| !had_any) else { return Ok(()) };
        let MemoryLimit { cgroup, file, limit, .. } = first;
        let why = format!("its cgroup {cgroup} has got a limit of {limit} ({file})");
        *known = Some(Reading::new(found, boot_now()));
        Err(why)
    }

    /// Reads the CPU time of QEMU's cgroup. A host without cgroup v2 has no such counter, and no
    /// function depends on it.
    pub(super) fn count_cpu(&self, pid: u32) {
        let Ok(Some(cgroup)) = sys::cgroup::of_process(pid) else { return };
        let spent = sys::cgroup::cpu_usage_us(&cgroup).ok();
        self.state().view.cgroup_cpu_us = spent.map(|spent| Reading::new(spent, boot_now()));
    }

    /// Whether the VM ended long enough ago to be forgotten.
    pub(super) fn is_over(&self) -> bool {
        let ended = self.state().ended;
        ended.is_some_and(|ended| boot_now().since(ended) >= SHOWN_AFTER_END)
    }
}

/// A VM about which nothing is known.
pub(super) fn unknown_vm(why: String) -> VmView {
    VmView::unknown(Link::Down { since: boot_now(), why })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_has_appeared_keeps_a_balloon_from_changing_once() {
        let (slot, _inbox) = Slot::new("/s".into());
        let limit = MemoryLimit {
            cgroup: "/machine.slice".into(),
            file: "memory.max".into(),
            limit: Bytes::mib(512),
            used: Bytes::mib(200),
        };
        assert_eq!(slot.meet_limits(Vec::new()), Ok(()));
        let why = slot.meet_limits(vec![limit.clone()]).unwrap_err();
        assert_eq!(why, "its cgroup /machine.slice has got a limit of 512 MiB (memory.max)");
        let known = slot.state().view.memory_limits.clone().unwrap();
        assert_eq!(known.value, std::slice::from_ref(&limit), "the next size is chosen with it");
        assert_eq!(slot.meet_limits(vec![limit]), Ok(()));
    }

    #[test]
    fn a_newer_wish_replaces_the_older() {
        let (slot, _inbox) = Slot::new("/s".into());
        for target in [1, 2] {
            let target = Some(Bytes(target));
            slot.wish(BalloonRequest { incarnation: 1, target, ram: Bytes(9) });
        }
        assert_eq!(slot.take_wish().and_then(|w| w.target), Some(Bytes(2)));
        assert_eq!(slot.take_wish(), None);
    }

    #[test]
    fn being_down_dates_from_the_first_failure() {
        let (slot, _inbox) = Slot::new("/s".into());
        slot.up();
        slot.down("a".into(), false);
        let first = slot.state().view.link.clone();
        slot.down("b".into(), true);
        let (Link::Down { since: one, .. }, Link::Down { since: two, why }) =
            (first, slot.state().view.link.clone())
        else {
            panic!("down")
        };
        assert_eq!((one, why.as_str()), (two, "b"));
        assert!(slot.state().ended.is_some() && !slot.is_over());
    }
}
