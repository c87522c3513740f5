//! Identical pages of a group's VMs, kept once: looking, proposing, and knowing who shares what.
//!
//! ```text
//!   look at a window of a VM ──hash──► index ──equal──► slot of the pool ──merge──► shims ──page states──► book
//! ```
//!
//! **Problem.** Guests write while they are looked at, may end at any instant, and none may cost another
//! its content. **Idea.** What is seen here is only ever a guess: the pool's page is written once, and each
//! shim compares before it maps it. So nothing that goes wrong here loses a byte, but one thing: a slot that
//! is used again while somebody still maps it. Therefore every page that shares a slot, *or that may by now*,
//! holds a reference to it, and a slot is emptied when the last one is known to be gone.
//!
//! **Invariants.** A merge that was asked for holds its reference until its outcome is known, from the answer
//! or, after a new connection, from the page states. A VM that is not worked on (paused, no connection) keeps
//! all of its references until its process has ended. A page that was merged and written to has its own copy
//! for good, so its reference ends when it is seen.
//!
//! **Bounded**: see [`BYTES_PER_PAGE`](pages::dedup::BYTES_PER_PAGE); merges under way, [`MOST_QUEUED`] per VM.
//!
//! Sources: Kim 2014 §4.1; `pages::dedup` for what is kept.

mod vm;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use model::dedup::Dedup as Reading;
use pages::dedup::{Index, Place, Pool, Verdict};
use rustix::io::Errno;
use sys::memory_map::{PAGE_LEN, is_zeros};
use sys::pool_file::{Page, PoolFile};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::tracked::Tracked;
use vm::{Target, Vm, Window};

/// Room of a pool: 64 GiB of content. It takes addresses, no memory.
const SLOTS: u32 = 1 << 24;
/// Merges that may wait for the shim: more would be out of date when their turn comes.
const MOST_QUEUED: usize = 4096;
/// A huge page is split for so many pages saved: 1 of 64.
const LEAST_IN_HUGE_PAGE: usize = 8;
/// How long credit is kept.
const LONGEST_CREDIT: Duration = Duration::from_millis(200);
/// What a window counts for at least, in pages.
const LEAST_CHARGED: u32 = 8;
/// When a shim is worth being asked for its answer.
const ANSWER_IN: Duration = Duration::from_micros(200);
/// When there is credit for a window again, or an answer.
const IDLE: Duration = Duration::from_millis(10);

/// The dedup of one group.
#[derive(Debug)]
pub struct Dedup {
    file: PoolFile,
    slots: Pool,
    index: Index,
    /// Pages that the index was made for.
    capacity: u32,
    /// By QEMU's process.
    vms: BTreeMap<u32, Vm>,
    /// Whose turn it is.
    turn: u32,
    seed: u64,
    buffer: Vec<u8>,
    pace: Pace,
}

/// How many pages may be looked at.
#[derive(Debug)]
struct Pace {
    /// In a millisecond.
    rate: Option<u32>,
    credit: f64,
    last: Instant,
}

impl Pace {
    /// What was not used for longer than [`LONGEST_CREDIT`] is lost.
    fn refill(&mut self) {
        let now = Instant::now();
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.last, now));
        let of = |time: Duration, rate| time.as_secs_f64() * 1000.0 * f64::from(rate);
        self.credit = match self.rate {
            None => f64::INFINITY,
            // A window is looked at whole, so there may be a debt.
            Some(rate) if self.credit.is_finite() => {
                (self.credit + of(passed, rate)).min(of(LONGEST_CREDIT, rate))
            }
            Some(_) => 0.0,
        };
    }
}

/// A page that could be merged.
struct Candidate {
    page: u32,
    /// Its content's; `None`: zeros.
    hash: Option<u64>,
    /// Where it lies in the buffer.
    at: usize,
}

impl Dedup {
    /// With an empty pool.
    ///
    /// # Errors
    /// The kernel's, when there is no memory for it.
    pub fn new() -> Result<Self, Errno> {
        Ok(Self {
            file: PoolFile::create("overbook-pool", SLOTS)?,
            slots: Pool::new(SLOTS),
            index: Index::new(0),
            capacity: 0,
            vms: BTreeMap::new(),
            turn: 0,
            // Not to be guessed: no guest can make pages that fall together.
            seed: fastrand::u64(..),
            buffer: vec![0; Window::PAGES as usize * PAGE_LEN],
            pace: Pace { rate: None, credit: 0.0, last: Instant::now() },
        })
    }

    /// Looks at up to `pages_per_ms` pages in a millisecond from now on; `None`: as many as it can.
    pub fn set_rate(&mut self, pages_per_ms: Option<u32>) {
        self.pace.rate = pages_per_ms;
    }

    /// Looks at these VMs until `until`, as far as the rate allows, and has merged what is equal. Never
    /// waits. Answers how long there is nothing to do.
    pub fn work(&mut self, vms: &mut [&mut Tracked], until: Instant) -> Duration {
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

    /// What is known of a VM.
    #[must_use]
    pub fn reading(&self, pid: u32) -> Option<Reading> {
        let vm = self.vms.get(&pid)?;
        Some(vm.reading(&self.slots))
    }

    /// What the pool takes.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.file.bytes().unwrap_or(0)
    }

    /// Lets go of VMs that have ended, takes outcomes, and greets new connections.
    fn meet(&mut self, vms: &mut [&mut Tracked]) {
        let ended: Vec<u32> =
            self.vms.iter().filter(|(_, vm)| vm.has_ended()).map(|(pid, _)| *pid).collect();
        for pid in ended {
            if let Some(vm) = self.vms.remove(&pid) {
                self.index.forget(vm.numbers());
                for slot in vm.references() {
                    self.leave(slot);
                }
            }
        }
        for vm in self.vms.values_mut() {
            vm.is_here = false;
        }
        for tracked in vms {
            self.meet_one(tracked);
        }
    }

    fn meet_one(&mut self, tracked: &mut Tracked) {
        let pid = tracked.pid();
        if !self.vms.contains_key(&pid) {
            let new = tracked.with_shim(|linked, _| Ok(Vm::open(pid, linked.link().regions())));
            let Some(Some(new)) = new else { return };
            let first = self.free_numbers(new.pages());
            self.grow(new.pages());
            self.vms.insert(pid, new.numbered_from(first));
        }
        let Some(vm) = self.vms.get_mut(&pid) else { return };
        let known = vm.numbers();
        let file = &self.file;
        let mut left = Vec::new();
        let met = tracked.with_shim(|linked, session| {
            if vm.session != Some(session) && vm.is_awake() {
                left.extend(vm.meet_again(session, linked.link())?);
                if let Ok(reader) = file.reader() {
                    vm.use_pool(linked.link(), reader.as_fd(), SLOTS)?;
                }
            }
            left.extend(vm.settle(linked)?);
            Ok(())
        });
        vm.is_here = met.is_some() && vm.is_ready();
        let is_other = vm.numbers() != known;
        for slot in left {
            self.leave(slot);
        }
        if is_other {
            self.renumber(pid, known);
        }
    }

    /// Guest RAM was plugged or unplugged: the VM's pages get other numbers in the group.
    fn renumber(&mut self, pid: u32, known: Range<u32>) {
        self.index.forget(known);
        if let Some(vm) = self.vms.remove(&pid) {
            let first = self.free_numbers(vm.pages());
            self.grow(vm.pages());
            self.vms.insert(pid, vm.numbered_from(first));
        }
    }

    /// Looks at the next window; `None`: there is nobody to look at now.
    fn look_at_next(&mut self, vms: &mut [&mut Tracked]) -> Option<u32> {
        let ready = |vm: &Vm| vm.is_here && vm.queued() < MOST_QUEUED;
        let after = self.vms.range(self.turn..).find(|(_, vm)| ready(vm));
        let (&pid, _) = after.or_else(|| self.vms.iter().find(|(_, vm)| ready(vm)))?;
        let tracked = vms.iter_mut().find(|tracked| tracked.pid() == pid)?;
        let vm = self.vms.get_mut(&pid)?;
        let Some(mut window) = vm.next_window() else {
            // All of it was seen: the next VM's turn.
            self.turn = pid + 1;
            return Some(1);
        };
        let states = tracked.with_shim(|linked, _| {
            let link = linked.link();
            window.pages().map(|page| link.page_state(page)).collect::<Result<Vec<_>, _>>()
        });
        vm.is_here = states.is_some();
        let left = vm.look(&mut window, &states?);
        for slot in left {
            self.leave(slot);
        }
        self.propose(pid, &window);
        // What is there and not due was looked at, too: so a pass takes its time however calm the pages are.
        Some(window.there.max(LEAST_CHARGED))
    }

    /// Reads a window and has merged what is found elsewhere.
    fn propose(&mut self, pid: u32, window: &Window) {
        let mut buffer = std::mem::take(&mut self.buffer);
        let candidates = self.candidates(pid, window, &mut buffer);
        if !window.is_huge || candidates.len() >= LEAST_IN_HUGE_PAGE {
            for candidate in candidates {
                let at = candidate.at * PAGE_LEN;
                if let Ok(content) = buffer[at..at + PAGE_LEN].try_into() {
                    self.merge(pid, &candidate, content);
                }
            }
        }
        self.buffer = buffer;
    }

    fn candidates(&mut self, pid: u32, window: &Window, buffer: &mut [u8]) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let Some(vm) = self.vms.get_mut(&pid) else { return candidates };
        for run in window.runs() {
            let first = (run.start - window.first) as usize;
            let bytes = &mut buffer[first * PAGE_LEN..][..run.len() * PAGE_LEN];
            let read = vm.read(run.start, bytes);
            for (page, content) in run.clone().zip(bytes[..read].chunks_exact(PAGE_LEN)) {
                let hash = (!is_zeros(content)).then(|| xxh3_64_with_seed(content, self.seed));
                if vm.book.look(page, hash.unwrap_or(0)) != Verdict::Offer {
                    continue;
                }
                let number = vm.first + page;
                if hash.is_none_or(|hash| self.index.meet(hash, number).is_some()) {
                    let at = (page - window.first) as usize;
                    candidates.push(Candidate { page, hash, at });
                }
            }
        }
        candidates
    }

    /// Has a page merged, if the same is really to be found where the index says.
    fn merge(&mut self, pid: u32, candidate: &Candidate, content: &Page) {
        let Candidate { page, hash, .. } = *candidate;
        let Some(hash) = hash else {
            self.queue(pid, page, Target::Zeros);
            return;
        };
        let Some(number) = self.vms.get(&pid).map(|vm| vm.first + page) else { return };
        match self.index.find(hash) {
            Some(Place::Pool(slot)) if self.slots.hash(slot) == Some(hash) => {
                self.slots.share(slot);
                self.queue(pid, page, Target::Slot(slot));
            }
            Some(Place::Guest(twin)) if twin != number => {
                if let Some((twin_pid, twin_page)) = self.twin(twin, content) {
                    self.pair(hash, content, [(twin_pid, twin_page), (pid, page)]);
                } else {
                    self.index.set(hash, Place::Guest(number));
                }
            }
            _ => {}
        }
    }

    /// Two pages with this content get a slot.
    fn pair(&mut self, hash: u64, content: &Page, pages: [(u32, u32); 2]) {
        let Some(slot) = self.slots.take(hash) else { return };
        if self.file.write(slot, content).is_err() || !self.index.set(hash, Place::Pool(slot)) {
            self.leave(slot);
            return;
        }
        self.slots.share(slot);
        for (pid, page) in pages {
            self.queue(pid, page, Target::Slot(slot));
        }
    }

    /// The page of this number, if it still holds that.
    fn twin(&self, number: u32, content: &Page) -> Option<(u32, u32)> {
        let (&pid, vm) = self.vms.iter().find(|(_, vm)| vm.numbers().contains(&number))?;
        let page = number - vm.first;
        (vm.is_here && vm.holds(page, content)).then_some((pid, page))
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
            if let Some(vm) = self.vms.get_mut(&tracked.pid()).filter(|vm| vm.is_here) {
                tracked.with_shim(|linked, _| vm.send(linked.link(), &mut left));
            }
        }
        for slot in left {
            self.leave(slot);
        }
    }

    /// One reference less to a slot; without any it is emptied.
    fn leave(&mut self, slot: u32) {
        if let Some(hash) = self.slots.leave(slot) {
            self.index.remove(hash, Place::Pool(slot));
            // Should this fail, a page of memory is lost until the slot is used again.
            let _ = self.file.empty(slot);
        }
    }

    /// The lowest numbers that are free for so many pages.
    fn free_numbers(&self, pages: u32) -> u32 {
        let mut taken: Vec<_> = self.vms.values().map(Vm::numbers).collect();
        taken.sort_by_key(|numbers| numbers.start);
        let mut first = 0;
        for numbers in taken {
            if numbers.start - first >= pages {
                break;
            }
            first = numbers.end;
        }
        first
    }

    /// Makes the index larger for a VM more: what is in the pool stays known, the rest is met again.
    fn grow(&mut self, more: u32) {
        let pages = self.vms.values().fold(more, |pages, vm| pages.saturating_add(vm.pages()));
        if pages > self.capacity {
            self.capacity = pages;
            self.index = Index::new(pages);
            for (slot, hash) in self.slots.hashes() {
                self.index.set(hash, Place::Pool(slot));
            }
        }
    }
}
