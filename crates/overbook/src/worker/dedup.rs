//! Identical pages of a group's VMs, kept once: looking, proposing, and knowing who shares what.
//!
//! ```text
//!   look at a window of a VM ──hash──► index ──equal──► slot of the pool ──merge──► shims ──page states──► book
//! ```
//!
//! **Problem.** Guests write while they are looked at, may end at any instant, and none may cost
//! another its content. **Idea.** What is seen here is only ever a guess: the pool's page is
//! written once, and each shim compares before it maps it. So nothing that goes wrong here loses a
//! byte, but one thing: a slot that is used again while somebody still maps it. Therefore every
//! page that shares a slot, *or that may by now*, holds a reference to it, and a slot is emptied
//! when the last one is known to be gone.
//!
//! **Invariants.** A merge that was asked for holds its reference until its outcome is known, from
//! the answer or, after a new connection, from the page states. A VM that is not worked on (paused,
//! no connection) keeps all of its references until its process has ended. A page that was merged
//! and written to has its own copy for good, so its reference ends when it is seen. A page that
//! shares a slot of another pool than the group's has a copy made: nothing is shared across groups,
//! and what a dead worker's pool held is let go if it cannot be taken over.
//!
//! **Bounded**: see [`BYTES_PER_PAGE`](pages::dedup::BYTES_PER_PAGE); merges under way,
//! [`MOST_QUEUED`] per VM.
//!
//! **Known pages first.** Where the operator has named shared-pages tables, each VM is swept for
//! the pages that these name before all is looked at in turn: a few sampled words tell. So a VM
//! that has just booted shares its programs' code within a moment, at a fraction of a pass's cost.
//!
//! Sources: Kim 2014 §4.1; Jia 2017 §3; `pages::dedup` for what is kept.

mod asked;
mod buffer;
mod mappings;
mod members;
mod pace;
mod propose;
mod regions;
mod store;
mod sweep;
mod vm;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use model::dedup::Dedup as Merging;
use model::{PagesPerMs, Reading};
use pages::dedup::{Index, Known, Place};
use sys::meminfo::MemInfo;
use sys::pool_file::{AdoptError, NAME_PREFIX};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128};

use super::tracked::Tracked;
use asked::Target;
use buffer::Buffer;
use pace::Pace;
use propose::{Ahead, KeptPages};
pub use store::SLOTS;
use store::Store;
use sweep::Sweep;
use vm::{Look, Vm};
use window::Window;

/// Merges that may wait for the shim: more would be out of date when their turn comes.
const MOST_QUEUED: usize = 4096;
/// What a window counts for at least, in pages.
const LEAST_CHARGED: u32 = 8;
/// What it counts for that something has to be recalled first: several moves in the shim.
const RECALL_CHARGED: u32 = 64;
/// So much more is looked at by sweeps than by passes, while there are sweeps.
const SWEEPS_TO_PASS: u32 = 3;
/// No more than this at a time, in pages.
const MOST_FOR_SWEEPS: u32 = 4096;
/// When a shim is worth being asked for its answer.
const ANSWER_IN: Duration = Duration::from_micros(200);
/// When there is credit for some windows again: each time costs something by itself.
const IDLE: Duration = Duration::from_millis(50);
/// When there may be something to do again, where there is nothing.
const NOTHING: Duration = Duration::from_millis(100);
/// When a pool that cannot be had is asked for again.
const POOL_AGAIN: Duration = Duration::from_secs(1);
/// Slots of a pool taken over that are read at a time.
const READ_AT_ONCE: u32 = 512;
/// How fast shared pages are copied at most: 4 GB/s, which no shim reaches.
const UNSHARE_RATE: PagesPerMs = PagesPerMs(1000);
/// Of the host's memory, this part stays available when shared pages are copied.
const LEFT_TO_HOST: u64 = 20;

/// What is to be done with what is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// It is looked for and merged, at this rate; without one, as fast as can be.
    Merge(Option<PagesPerMs>),
    /// What is shared becomes copies again, as far as the host has memory for them.
    Unshare,
}

/// A number of the kernel's making (`RandomState` takes its keys from there). With a seed that can
/// be guessed, by the time of day for example, a guest could make pages whose hashes are all the
/// same.
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
    /// VMs that leave the group: whatever the task, theirs is to be unshared.
    leaving: BTreeSet<u32>,
    store: Option<Store>,
    /// Why there is no pool, and when it is tried again.
    no_store: Option<(Instant, String)>,
    /// What is known of the guests' pages before they run.
    known: Option<Known>,
    /// What sweeps may count for until a pass has had its part, in pages.
    for_sweeps: u32,
    /// Whose turn it is to be swept.
    sweep_turn: u32,
    index: Index,
    /// Pages that the index was made for.
    capacity: u32,
    /// By QEMU's process.
    vms: BTreeMap<u32, Vm>,
    /// Whose turn it is.
    turn: u32,
    seed: u64,
    hash: Hash,
    /// Pages that were read.
    buffer: Buffer<{ Window::RUN as usize }>,
    /// Those of them that were found elsewhere.
    kept: KeptPages,
    ahead: Ahead,
    pace: Pace,
    /// Pages, again and again.
    looked: u64,
}

impl Dedup {
    /// For the group of this name. Its pool is made, or taken over from a worker that has ended,
    /// when it is needed.
    #[must_use]
    pub fn new(group: &str) -> Self {
        // Of a fixed length, whatever the operator calls his groups.
        Self::of_pool(format!("{NAME_PREFIX}-{:032x}", xxh3_128(group.as_bytes())))
    }

    /// With another hash. It proposes what to compare and decides nothing: with a bad one less is
    /// found.
    #[must_use]
    pub fn hashing_with(self, hash: Hash) -> Self {
        Self { hash, ..self }
    }

    /// For those who share the pool of this name.
    pub(super) fn of_pool(name: String) -> Self {
        Self {
            name,
            task: Task::Merge(None),
            leaving: BTreeSet::new(),
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

    /// What is to be done from now on.
    pub fn set_task(&mut self, task: Task) {
        self.task = task;
        self.pace.rate = match task {
            Task::Merge(rate) => rate,
            Task::Unshare => Some(UNSHARE_RATE),
        };
    }

    /// Pages that are known are looked for first from now on.
    pub fn set_known(&mut self, known: Option<Known>) {
        self.known = known;
        self.vms.values_mut().for_each(|vm| vm.sweep = Sweep::default());
    }

    /// What these QEMU processes share is copied from now on, and that of no others unless it is
    /// the task.
    pub fn set_leaving(&mut self, pids: BTreeSet<u32>) {
        self.leaving = pids;
    }

    fn is_to_unshare(&self, pid: u32) -> bool {
        self.task == Task::Unshare || self.leaving.contains(&pid)
    }

    /// Looks at these VMs, which are all of the group's that can be worked on, until `until`, as
    /// far as the rate allows, and has merged what is equal, or copied what is shared. Never waits.
    /// Answers how long there is nothing to do.
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
        if self.vms.values().any(Vm::awaits_answer) {
            ANSWER_IN
        } else if is_idle || self.pace.credit <= 0.0 {
            IDLE
        } else {
            Duration::ZERO
        }
    }

    /// What is known of a VM, as of when its shim was last there.
    #[must_use]
    pub fn reading(&self, pid: u32) -> Option<Reading<Merging>> {
        let vm = self.vms.get(&pid)?;
        Some(vm.reading(self.store.as_ref().map(|store| &store.slots)))
    }

    /// Why nothing is merged, or copied, of this VM just now, although its shim can be reached.
    #[must_use]
    pub fn why_not(&self, pid: u32) -> Option<String> {
        let no_store = self.no_store.as_ref().map(|(_, why)| why.clone());
        let no_room = || {
            let is_short = self.is_to_unshare(pid) && !self.is_unshared(pid) && !has_room();
            is_short.then(|| "the host has no memory for copies of shared pages".to_owned())
        };
        no_store.or_else(|| self.vms.get(&pid)?.why_not()).or_else(no_room)
    }

    /// Whether the pool cannot be had.
    pub(super) fn is_without_pool(&self) -> bool {
        self.no_store.is_some()
    }

    /// Whether this VM shares nothing, as of the last look at all of it.
    #[must_use]
    pub fn is_unshared(&self, pid: u32) -> bool {
        self.vms.get(&pid).is_some_and(Vm::is_unshared)
    }

    /// How many pages were looked at so far, again and again.
    pub(super) fn looked(&self) -> u64 {
        self.looked
    }

    /// The VMs' pages.
    pub(super) fn pages(&self) -> u64 {
        self.vms.values().map(|vm| u64::from(vm.pages())).sum()
    }

    /// What the pool takes.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.store.as_ref().and_then(|store| store.file.bytes().ok()).unwrap_or(0)
    }

    /// Sees to it that there is a pool, if one is needed; `false`: there cannot be one now.
    fn has_store(&mut self, vms: &mut [&mut Tracked]) -> bool {
        let is_due = self.no_store.as_ref().is_none_or(|(due, _)| Instant::now() >= *due);
        if self.store.is_some() || !is_due || !self.is_needed(vms) {
            return self.store.is_some();
        }
        let pids: Vec<u32> = vms.iter().map(|tracked| tracked.pid()).collect();
        let store = match Store::take_over(&self.name, &pids) {
            Ok(Some(store)) => Ok(store),
            Err(error @ AdoptError::InUse) => Err(error.to_string()),
            // What the guests share of one that cannot be had is copied.
            Ok(None) | Err(_) => {
                Store::create(&self.name).map_err(|error| format!("no pool: {error}"))
            }
        };
        let failed = |why: String| (Instant::now() + POOL_AGAIN, why);
        self.no_store = store.as_ref().err().cloned().map(failed);
        self.store = store.ok();
        self.store.is_some()
    }

    /// Whether there is anything to merge, or that was merged.
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

    /// Reads what a pool taken over holds, a piece at a time.
    fn read_some(&mut self) {
        let Some(store) = &mut self.store else { return };
        let Some(page) = self.buffer.bytes_mut().first_chunk_mut() else { return };
        let Some(slots) = store.next_unread(READ_AT_ONCE) else { return };
        for slot in slots {
            let Ok(()) = store.file.read(slot, page) else { continue };
            let hash = (self.hash)(page, self.seed);
            if store.slots.set_hash(slot, hash) {
                self.index.set(hash, Place::Pool(slot));
            }
        }
    }

    /// Looks at the next window; `None`: there is nobody to look at now.
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
        // Where a pass has nothing to do it has had its part.
        let earned = looked.map_or(MOST_FOR_SWEEPS, |looked| looked * SWEEPS_TO_PASS);
        self.for_sweeps = (self.for_sweeps + earned).min(MOST_FOR_SWEEPS);
        looked
    }

    /// Looks at the next window of a pass; `None`: there is nobody to look at now.
    fn look_in_turn(&mut self, vms: &mut [&mut Tracked]) -> Option<u32> {
        let ready = |(pid, vm): &(&u32, &Vm)| {
            let is_done = self.is_to_unshare(**pid) && vm.is_unshared();
            vm.is_here && vm.queued() < MOST_QUEUED && !is_done
        };
        let after = self.vms.range(self.turn..).find(ready);
        let (&pid, _) = after.or_else(|| self.vms.iter().find(ready))?;
        let everything = self.is_to_unshare(pid);
        let tracked = vms.iter_mut().find(|tracked| tracked.pid() == pid)?;
        let vm = self.vms.get_mut(&pid)?;
        // Window by window: of two VMs that hold the same, much is found before all of one was
        // seen.
        self.turn = pid + 1;
        let Some(mut window) = vm.next_window() else { return Some(1) };
        let recalls =
            !everything && tracked.with_shim(|linked, _| vm.recalls(&window, linked)) == Some(true);
        if recalls {
            if vm.look_again(&window) {
                // Before it is out of reach again.
                self.turn = pid;
                return Some(RECALL_CHARGED);
            }
            // The others of the group do not wait for it.
            vm.rest(&"QEMU has not returned revoked pages in time");
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
        // What is there and not due was looked at, too: so a pass takes its time however calm the
        // pages are.
        Some(window.there.max(LEAST_CHARGED))
    }

    fn queue(&mut self, pid: u32, page: u32, target: Target) {
        if let Some(vm) = self.vms.get_mut(&pid) {
            vm.queue(page, target);
        }
    }

    /// Passes on what is queued.
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

    /// One reference less to a slot; without any it is emptied.
    fn leave(&mut self, slot: u32) {
        let Some(store) = &mut self.store else { return };
        if let Some(hash) = store.slots.leave(slot) {
            self.index.remove(hash, Place::Pool(slot));
            // Should this fail, a page of memory is lost until the slot is used again.
            let _ = store.file.empty(slot);
        }
    }
}

/// Whether the host has memory for copies.
fn has_room() -> bool {
    let host = MemInfo::read();
    host.is_ok_and(|host| host.available > host.total.share(1, LEFT_TO_HOST))
}
