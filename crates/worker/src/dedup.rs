//! Identical pages of a group's VMs, kept once: finding them, proposing merges, and recording
//! sharers.
//!
//! ```text
//!   window of a VM ─hash─► index ─equal─► slot of the pool ─merge─► shims ─page states─► book
//! ```
//!
//! **Problem.** Guests write while they are scanned, may end at any instant, and none may lose
//! content because of another. **Idea.** A finding here is only a guess: the pool's page is
//! written once, and each shim compares before it maps it. So no error here loses a byte, with
//! one exception: a slot that is reused while a process still maps it. Therefore every page that
//! shares a slot, *or may share it by now*, holds a reference to it, and a slot is emptied only
//! when its last reference is known to be gone.
//!
//! **Invariants.** A requested merge holds its reference until its outcome is known, from the
//! answer or, after a reconnection, from the page states. A VM without a connection, or a paused
//! one, keeps all of its references until its process has ended. A page that was merged and then
//! written has its own copy permanently, so its reference ends when that is seen. A page that
//! shares a slot of another pool than the group's gets a copy: nothing is shared across groups,
//! and if a dead worker's pool cannot be taken over, its content is given up.
//!
//! **Bounded**: see [`BYTES_PER_PAGE`](pages::dedup::BYTES_PER_PAGE); merges in flight,
//! [`MOST_QUEUED`] per VM.
//!
//! **Known pages first.** If the operator has named shared-pages tables, each VM is swept for
//! their pages before all its pages are scanned in turn; a few sampled words identify them. So a
//! VM that has just booted shares its programs' code quickly, at a fraction of a pass's cost.
//!
//! Sources: Kim 2014 §4.1; Jia 2017 §3; `pages::dedup` for the data structures.

mod buffer;
mod counts;
mod guest_memory;
mod mappings;
mod members;
mod pace;
mod propose;
mod requests;
mod scan;
mod store;
mod sweep;
mod vm;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use model::dedup::Dedup as Merging;
use model::{PagesPerMs, Reading};
use pages::dedup::{ContentLocation, Index, KnownPages};
use sys::meminfo::MemInfo;
use sys::pool_file::{AdoptError, NAME_PREFIX};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

use super::tracked::Tracked;
use buffer::Buffer;
use pace::Pace;
use propose::{Ahead, KeptPages};
use requests::Target;
pub use store::SLOTS;
use store::Store;
use sweep::Sweep;
use vm::Vm;
use window::Look;
use window::Window;

/// The most merges that wait for the shim: with more, the last ones would be outdated.
const MOST_QUEUED: usize = 4096;
/// The least charge for a window, in pages.
const LEAST_CHARGED: u32 = 8;
/// The charge for a window that needs a recall first: several moves in the shim.
const RECALL_CHARGED: u32 = 64;
/// The pages scanned by sweeps for each page of a pass, while there are sweeps.
const SWEEPS_TO_PASS: u32 = 3;
/// The most pages for sweeps at a time.
const MOST_FOR_SWEEPS: u32 = 4096;
/// The time until a shim should be polled for its answer.
const ANSWER_IN: Duration = Duration::from_micros(200);
/// The pause until there is credit for some windows; each wake-up has a cost.
const IDLE: Duration = Duration::from_millis(50);
/// The pause after which an idle worker checks again for work.
const NOTHING: Duration = Duration::from_millis(100);
/// The pause before another attempt to get a pool.
const POOL_AGAIN: Duration = Duration::from_secs(1);
/// Slots of an adopted pool that are read at a time.
const READ_AT_ONCE: u32 = 512;
/// The highest rate of copying shared pages: 4 GB/s, more than any shim can do.
const UNSHARE_RATE: PagesPerMs = PagesPerMs(1000);
/// The reciprocal of the part of the host's memory that stays available when shared pages are
/// copied.
const LEFT_TO_HOST: u64 = 20;

/// The treatment of equal pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// They are found and merged at this rate; `None`: without a limit.
    Merge(Option<PagesPerMs>),
    /// Shared pages become copies again, while the host has memory for them.
    Unshare,
}

/// A random number from the kernel (`RandomState` takes its keys from there). With a predictable
/// seed, such as the time of day, a guest could make pages whose hashes are all equal.
pub(super) fn unguessable() -> u64 {
    RandomState::new().hash_one(())
}

/// A hash of a page's content, with a seed.
pub type Hash = fn(&[u8], u64) -> u64;

/// The dedup of one group.
#[derive(Debug)]
pub struct Dedup {
    /// The name of its pool.
    name: String,
    task: Task,
    /// VMs that leave the group: their pages are unshared under any task.
    leaving: BTreeSet<u32>,
    /// VMs in which nothing is merged or copied: their answers alone are processed.
    paused: BTreeSet<u32>,
    store: Option<Store>,
    /// The reason why there is no pool, and the time of the next attempt.
    no_store: Option<(Instant, String)>,
    /// The pages that are known before guests run.
    known: Option<KnownPages>,
    /// The pages that sweeps may scan until a pass has had its share.
    for_sweeps: u32,
    /// The pid at which the search for the next VM to sweep starts.
    sweep_turn: u32,
    index: Index,
    /// Pages that the index was made for.
    capacity: u32,
    /// VMs by QEMU's pid.
    vms: BTreeMap<u32, Vm>,
    /// The pid at which the search for the next VM to scan starts.
    turn: u32,
    seed: u64,
    hash: Hash,
    /// The pages read.
    buffer: Buffer<{ Window::RUN as usize }>,
    /// The pages read that have a twin.
    kept: KeptPages,
    ahead: Ahead,
    pace: Pace,
    /// Pages scanned so far, with repetitions.
    looked: u64,
}

impl Dedup {
    /// The dedup of the group of this name. Its pool is made, or taken over from a worker that
    /// has ended, when it is needed.
    #[must_use]
    pub fn new(group: &str) -> Self {
        // A fixed length, for group names of any length.
        Self::of_pool(format!("{NAME_PREFIX}-{:032x}", xxh3_128(group.as_bytes())))
    }

    /// Uses another hash. The hash only proposes comparisons: a bad one finds less.
    #[must_use]
    pub fn hashing_with(self, hash: Hash) -> Self {
        Self { hash, ..self }
    }

    /// The dedup of the VMs that share the pool of this name.
    pub(super) fn of_pool(name: String) -> Self {
        Self {
            name,
            task: Task::Merge(None),
            leaving: BTreeSet::new(),
            paused: BTreeSet::new(),
            store: None,
            no_store: None,
            known: None,
            for_sweeps: MOST_FOR_SWEEPS,
            sweep_turn: 0,
            index: Index::new(0),
            capacity: 0,
            vms: BTreeMap::new(),
            turn: 0,
            seed: unguessable(),
            hash: xxh3_64_with_seed,
            buffer: Buffer::default(),
            kept: KeptPages::default(),
            ahead: Ahead::default(),
            pace: Pace::new(),
            looked: 0,
        }
    }

    /// Sets the task.
    pub fn set_task(&mut self, task: Task) {
        self.task = task;
        self.pace.rate = match task {
            Task::Merge(rate) => rate,
            Task::Unshare => Some(UNSHARE_RATE),
        };
    }

    /// Sets the known pages, which are looked for first from now on.
    pub fn set_known(&mut self, known: Option<KnownPages>) {
        self.known = known;
        self.vms.values_mut().for_each(|vm| vm.sweep = Sweep::default());
    }

    /// Sets the QEMU processes whose shared pages are copied; those of others are copied only if
    /// that is the task.
    pub fn set_leaving(&mut self, pids: BTreeSet<u32>) {
        self.leaving = pids;
    }

    /// Sets the QEMU processes in which nothing is merged or copied. Merges that were requested of
    /// them before are still answered, so they stay members.
    pub fn set_paused(&mut self, pids: BTreeSet<u32>) {
        self.paused = pids;
    }

    fn is_to_unshare(&self, pid: u32) -> bool {
        self.task == Task::Unshare || self.leaving.contains(&pid)
    }

    /// Scans these VMs, which must be all workable ones of the group, until `until` or until the
    /// credit of the rate is used up, and requests merges of equal pages or copies of shared
    /// ones. Never waits. Returns the time until there is work again.
    pub fn work(&mut self, vms: &mut [&mut Tracked], until: Instant) -> Duration {
        if !self.has_store(vms) {
            return NOTHING;
        }
        self.read_some();
        self.meet(vms);
        self.pace.refill();
        let mut is_idle = false;
        while self.pace.credit > 0.0 && !is_idle && Instant::now() < until {
            match self.look_at_next(vms) {
                Some(looked) => self.pace.credit -= f64::from(looked),
                None => is_idle = true,
            }
        }
        self.send(vms);
        if self.vms.values().any(|vm| vm.requests.awaits_answer()) {
            ANSWER_IN
        } else if is_idle || self.pace.credit <= 0.0 {
            IDLE
        } else {
            Duration::ZERO
        }
    }

    /// The state of a VM, as of its last contact with its shim.
    #[must_use]
    pub fn reading(&self, pid: u32) -> Option<Reading<Merging>> {
        let vm = self.vms.get(&pid)?;
        Some(vm.reading(self.store.as_ref().map(|store| &store.slots)))
    }

    /// The reason why no page of this VM is merged or copied just now, although its shim is
    /// connected.
    #[must_use]
    pub fn why_not(&self, pid: u32) -> Option<String> {
        let no_store = self.no_store.as_ref().map(|(_, why)| why.clone());
        let no_room = || {
            let is_short = self.is_to_unshare(pid) && !self.is_unshared(pid) && !has_room();
            is_short.then(|| "the host has no memory for copies of shared pages".to_owned())
        };
        no_store.or_else(|| self.vms.get(&pid)?.requests.why_not()).or_else(no_room)
    }

    /// Whether there is no pool.
    pub(super) fn is_without_pool(&self) -> bool {
        self.no_store.is_some()
    }

    /// Whether this VM shares no page, as of the last complete scan.
    #[must_use]
    pub fn is_unshared(&self, pid: u32) -> bool {
        self.vms.get(&pid).is_some_and(Vm::is_unshared)
    }

    /// The number of pages scanned so far, with repetitions.
    pub(super) fn looked(&self) -> u64 {
        self.looked
    }

    /// The VMs' pages.
    pub(super) fn pages(&self) -> u64 {
        self.vms.values().map(|vm| u64::from(vm.book.pages())).sum()
    }

    /// The memory that the pool uses.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.store.as_ref().and_then(|store| store.file.bytes().ok()).unwrap_or(0)
    }

    /// Ensures that there is a pool, if one is needed; `false`: there is none now.
    fn has_store(&mut self, vms: &mut [&mut Tracked]) -> bool {
        let is_due = self.no_store.as_ref().is_none_or(|(due, _)| Instant::now() >= *due);
        if self.store.is_some() || !is_due || !self.is_needed(vms) {
            return self.store.is_some();
        }
        let pids: Vec<u32> = vms.iter().map(|tracked| tracked.pid()).collect();
        let store = match Store::take_over(&self.name, &pids) {
            Ok(Some(store)) => Ok(store),
            Err(error @ AdoptError::InUse) => Err(error.to_string()),
            // The guests' pages in a pool that cannot be taken over are copied.
            Ok(None) | Err(_) => {
                Store::create(&self.name).map_err(|error| format!("no pool: {error}"))
            }
        };
        let failed = |why: String| (Instant::now() + POOL_AGAIN, why);
        self.no_store = store.as_ref().err().cloned().map(failed);
        self.store = store.ok();
        self.store.is_some()
    }

    /// Whether there are pages to merge, or merged ones.
    fn is_needed(&self, vms: &mut [&mut Tracked]) -> bool {
        let has_merged = |tracked: &mut &mut Tracked| {
            let merged = tracked.with_shim(|linked, _| linked.link().merged_pages());
            merged.is_some_and(|pages| pages > 0)
        };
        match self.task {
            Task::Merge(_) => !vms.is_empty(),
            Task::Unshare => vms.iter_mut().any(has_merged),
        }
    }

    /// Reads the content of an adopted pool, a piece at a time.
    fn read_some(&mut self) {
        let Some(store) = &mut self.store else { return };
        let Some(page) = self.buffer.bytes_mut().first_chunk_mut() else { return };
        let Some(slots) = store.next_unread(READ_AT_ONCE) else { return };
        for slot in slots {
            let Ok(()) = store.file.read(slot, page) else { continue };
            let hash = (self.hash)(page, self.seed);
            if store.slots.set_hash(slot, hash) {
                self.index.set(hash, ContentLocation::Pool(slot));
            }
        }
    }

    /// Scans the next window; `None`: no VM can be scanned now.
    fn look_at_next(&mut self, vms: &mut [&mut Tracked]) -> Option<u32> {
        if self.for_sweeps > 0
            && let Some(known) = self.known.take()
        {
            let swept = self.sweep_next(vms, &known);
            self.known = Some(known);
            if let Some(charged) = swept {
                self.for_sweeps = self.for_sweeps.saturating_sub(charged);
                return swept;
            }
        }
        let looked = self.look_in_turn(vms);
        // A pass without work has had its share.
        let earned = looked.map_or(MOST_FOR_SWEEPS, |looked| looked * SWEEPS_TO_PASS);
        self.for_sweeps = (self.for_sweeps + earned).min(MOST_FOR_SWEEPS);
        looked
    }

    /// Scans the next window of a pass; `None`: no VM can be scanned now.
    fn look_in_turn(&mut self, vms: &mut [&mut Tracked]) -> Option<u32> {
        let ready = |(pid, vm): &(&u32, &Vm)| {
            let is_done = self.is_to_unshare(**pid) && vm.is_unshared();
            vm.is_here && vm.requests.merges() < MOST_QUEUED && !is_done
        };
        let after = self.vms.range(self.turn..).find(ready);
        let (&pid, _) = after.or_else(|| self.vms.iter().find(ready))?;
        let everything = self.is_to_unshare(pid);
        let tracked = vms.iter_mut().find(|tracked| tracked.pid() == pid)?;
        let vm = self.vms.get_mut(&pid)?;
        // Alternating by window: much of two VMs with the same content is found before all of one
        // was scanned.
        self.turn = pid + 1;
        let Some(mut window) = vm.next_window() else { return Some(1) };
        let recalls =
            !everything && tracked.with_shim(|linked, _| vm.recalls(&window, linked)) == Some(true);
        if recalls {
            if vm.look_again(&window) {
                // Repeated at once, before tracking revokes the pages again.
                self.turn = pid;
                return Some(RECALL_CHARGED);
            }
            // The other VMs of the group do not wait for it.
            vm.requests.pause(&"QEMU has not returned revoked pages in time");
        }
        let states = tracked.with_shim(|linked, _| linked.link().page_states(window.pages()));
        vm.is_here = states.is_some();
        let look = if everything { Look::Unshare } else { Look::Pass };
        let left = vm.look(&mut window, &states?, look);
        self.looked += u64::from(window.count);
        tracked.with_shim(|linked, _| vm.unshare(&window, everything, linked.link()));
        self.leave_all(left);
        if !everything
            && self.propose(pid, &window, vms)
            && self.vms.get_mut(&pid)?.look_again(&window)
        {
            self.turn = pid;
        }
        // Pages that exist but are not due are charged too, so a pass takes its time even if the
        // pages are calm.
        Some(window.there.max(LEAST_CHARGED))
    }

    fn queue(&mut self, pid: u32, page: u32, target: Target) {
        if let Some(vm) = self.vms.get_mut(&pid) {
            vm.queue(page, target);
        }
    }

    /// Sends the queued requests.
    fn send(&mut self, vms: &mut [&mut Tracked]) {
        let mut left = Vec::new();
        for tracked in vms {
            let everything = self.is_to_unshare(tracked.pid());
            if let Some(vm) = self.vms.get_mut(&tracked.pid()).filter(|vm| vm.is_here) {
                if everything {
                    left.extend(vm.drop_queue());
                }
                tracked.with_shim(|linked, _| vm.send(linked.link(), &mut left));
            }
        }
        self.leave_all(left);
    }

    fn leave_all(&mut self, slots: Vec<u32>) {
        slots.into_iter().for_each(|slot| self.leave(slot));
    }

    /// Removes a reference to a slot; after the last one the slot is emptied.
    fn leave(&mut self, slot: u32) {
        let Some(store) = &mut self.store else { return };
        if let Some(hash) = store.slots.leave(slot) {
            self.index.remove(hash, ContentLocation::Pool(slot));
            // If this fails, a page of memory is wasted until the slot is used again.
            let _ = store.file.empty(slot);
        }
    }
}

#[cfg(test)]
mod tests;

/// Whether the host has memory for copies.
fn has_room() -> bool {
    let host = MemInfo::read();
    host.is_ok_and(|host| host.available > host.total.share(1, LEFT_TO_HOST))
}
