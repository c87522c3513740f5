//! Tracking while it is on: which granules are out of reach, and what happens at a touch.
//!
//! Guest RAM and a staging region of the same shape are registered with one userfaultfd. A granule is
//! *revoked* by moving its pages to staging; the next touch traps, and [`Tracker::serve`] moves all of it
//! back, wakes who waits, and logs it. A touch of a hole traps as well and gets its zeros here.
//!
//! **Invariants** (the rules' numbers are those of the crate's head). Everything here runs under the
//! engine's lock (3). A granule's pages are marked staged before the first moves out, and plain after the
//! last is back, all together (3). Serving allocates nothing and reads no guest RAM (4). Zeros are put
//! only where no page came back (7).
//!
//! **Holes.** A hole that was never revoked would trap once per 4 KiB where the kernel alone would have
//! put a huge page: so an empty block of 2 MiB gets a huge page in one move, prepared in a place of our
//! own ([`Nursery`]). Any other hole gets the page of zeros for its whole granule, which costs no memory
//! and never brings back what a balloon took beside it.

use std::sync::OnceLock;
use std::time::Duration;

use protocol::layout::{Counter, PageState, Shared, is_sampled};
use protocol::{Region, Tracking, Trap};
use rustix::io::Errno;
use sys::memory_map::{PAGE_BYTES, Pagemap, Range};
use sys::userfaultfd::Userfaultfd;

use crate::bench::Bench;
use crate::channel::Channel;
use crate::descriptors::kept;
use crate::granules::{Granule, Granules};
use crate::hot_set::HotSet;
use crate::moves;
use crate::nursery::Nursery;
use crate::ram::Block;
use crate::time::{AsNanos, Nanos, now};

/// What serving one fault came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// Done.
    Yes,
    /// Done, and there were more traps in this second than the fuse allows.
    FuseBlown,
}

/// Where a touch found its page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Another touch had brought it back.
    InPlace,
    /// Nowhere: it was never there, or discarded.
    Hole,
    /// In staging.
    OutOfReach,
}

/// Everything that exists only while tracking is on.
pub(crate) struct Tracker {
    uffd: &'static Userfaultfd,
    tracking: Tracking,
    granules: Granules,
    hot: HotSet,
    nursery: Option<Nursery>,
    bench: &'static Bench,
    pagemap: &'static Pagemap,
    /// Set once everything is to go back: nothing is revoked any more.
    releasing: bool,
    /// The kernel has refused to register a part: what is taken from there is not waited for.
    is_incomplete: bool,
    /// The next granule that arming or giving back looks at.
    cursor: u32,
    second: Second,
}

/// Traps since a second began.
struct Second {
    began: Nanos,
    traps: u32,
}

impl Tracker {
    /// Makes staging and registers everything. Nothing is revoked yet.
    ///
    /// # Errors
    /// The call that failed; nothing is left registered.
    pub(crate) fn start(
        uffd: &'static Userfaultfd,
        regions: &[(Block, Region)],
        channel: &Channel,
        tracking: Tracking,
    ) -> Result<Self, (&'static str, Errno)> {
        let granules =
            Granules::new(regions, tracking.granule_pages).map_err(|errno| ("mmap", errno))?;
        let pagemap = pagemap().ok_or(("open(/proc/self/pagemap)", Errno::NOENT))?;
        let bench = Bench::get().ok_or(("mmap", Errno::NOMEM))?;
        bench.populate(tracking.granule_pages);
        let tracker = Self {
            uffd,
            hot: HotSet::new(granules.count()),
            tracking,
            granules,
            nursery: Nursery::new().ok(),
            bench,
            pagemap,
            releasing: false,
            is_incomplete: false,
            cursor: 0,
            second: Second { began: now(), traps: 0 },
        };
        for range in tracker.registered(channel) {
            // SAFETY: the fault thread runs since before the engine makes a tracker, and serves.
            if let Err(errno) = unsafe { uffd.register(range) } {
                tracker.unregister(channel);
                return Err(("UFFDIO_REGISTER", errno));
            }
        }
        Ok(tracker)
    }

    pub(crate) fn tracking(&self) -> Tracking {
        self.tracking
    }

    /// Goes on with other values; the granule's size is the same.
    pub(crate) fn change(&mut self, tracking: Tracking) {
        self.tracking = tracking;
    }

    /// Whether nothing is revoked any more.
    pub(crate) fn is_releasing(&self) -> bool {
        self.releasing || self.is_incomplete
    }

    /// Whether a part is not registered, and so nothing can be moved.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.is_incomplete
    }

    /// From here on everything only goes back. Answers whether it did not already.
    pub(crate) fn begin_release(&mut self) -> bool {
        let begins = !std::mem::replace(&mut self.releasing, true);
        if begins {
            self.cursor = 0;
        }
        begins
    }

    /// Begins a pass that revokes every sampled granule, and forgets what was hot.
    pub(crate) fn begin_arming(&mut self) {
        self.hot.clear();
        self.cursor = 0;
    }

    /// Revokes more sampled granules until `deadline`; answers how many, and whether all were seen.
    pub(crate) fn arm_some(&mut self, channel: &Channel, deadline: Nanos) -> (u32, bool) {
        let mut revoked = 0;
        while let Some(granule) = self.granules.from(self.cursor) {
            if now() > deadline {
                return (revoked, false);
            }
            self.cursor = granule.number + 1;
            revoked += u32::from(self.revoke_granule(channel, granule));
        }
        (revoked, true)
    }

    /// Revokes what has become too much for the hot set; answers how many, and whether that was all.
    pub(crate) fn shrink_hot_set(&mut self, channel: &Channel, deadline: Nanos) -> (u32, bool) {
        let mut revoked = 0;
        while let Some(limit) = self.tracking.hot_set {
            if now() > deadline {
                return (revoked, false);
            }
            let Some(oldest) = self.hot.evict_beyond(limit) else { break };
            revoked += u32::from(self.revoke(channel, oldest));
        }
        (revoked, true)
    }

    /// Takes a granule out of reach; `false` if it already was, is not sampled, or could not be.
    pub(crate) fn revoke(&mut self, channel: &Channel, number: u32) -> bool {
        self.granules.get(number).is_some_and(|granule| self.revoke_granule(channel, granule))
    }

    fn revoke_granule(&mut self, channel: &Channel, granule: Granule) -> bool {
        let shared = channel.shared();
        let sampled = is_sampled(granule.number, self.tracking.sample);
        if self.is_releasing() || !sampled || granule.is_staged(shared) {
            return false;
        }
        let mut taken = moves::Taken::default();
        let mut pages = 0;
        for part in granule.parts(shared, PageState::Plain) {
            part.mark(shared, PageState::Staged);
            // SAFETY: both ranges are registered, and the fault thread serves.
            let of_part = unsafe { moves::take(self.uffd, part.guest, part.staging) };
            taken.moved += of_part.moved;
            taken.kept += of_part.kept;
            pages += u64::from(part.pages);
        }
        if pages == 0 {
            // All of it is merged or freed: to see it again is not to be had, nor to be tried for ever.
            return false;
        }
        shared.add(Counter::MovedOut, taken.moved);
        shared.add(Counter::Pinned, taken.kept);
        // The page tables have the last word: what was thought to be at home and is not would be lost.
        let staging = Range { start: granule.staging, len: granule.guest.len };
        if taken.moved == 0 && self.pagemap.populated(staging) == Ok(0) {
            for part in granule.parts(shared, PageState::Staged) {
                part.mark(shared, PageState::Plain);
            }
            // A FIFO would never see it again.
            if self.tracking.hot_set.is_some() {
                self.hot.push(granule.number);
            }
            return false;
        }
        shared.set(Counter::StagedPages, shared.get(Counter::StagedPages) + pages);
        true
    }

    /// Brings a granule back; nobody has touched it. `false` if it was within reach.
    pub(crate) fn recall(&mut self, channel: &Channel, number: u32) -> bool {
        let shared = channel.shared();
        let Some(granule) = self.granules.get(number).filter(|it| it.is_staged(shared)) else {
            return false;
        };
        self.give_back(shared, granule);
        // It fails only for a range that is no longer mapped, where nobody waits.
        let _ = self.uffd.wake(granule.guest);
        // A FIFO would never see it again.
        if self.tracking.hot_set.is_some() {
            self.hot.push(number);
        }
        true
    }

    /// Resolves a fault at `address`, whose page is not merged, received at `received`.
    pub(crate) fn serve(&mut self, channel: &mut Channel, address: u64, received: Nanos) -> Served {
        let Some(granule) = self.granules.at(address) else {
            if self.bench.contains(address) {
                self.bench.serve(self.uffd, self.pagemap);
            } else {
                fill_stray(self.uffd, address);
            }
            return Served::Yes;
        };
        let shared = channel.shared();
        let was_staged = granule.is_staged(shared);
        if was_staged {
            self.give_back(shared, granule);
        }
        let block = if was_staged { None } else { self.fill_block(shared, granule) };
        let was_hole = block.is_some() || self.fill_granule(shared, granule, page_of(address));
        let found = match (was_staged, was_hole) {
            (true, _) => Found::OutOfReach,
            (false, true) => Found::Hole,
            (false, false) => Found::InPlace,
        };
        self.let_go_on(channel, granule, found, block.unwrap_or(granule.guest), received)
    }

    /// A merged page has been written, which is still in its place: what is out of reach beside it has been touched
    /// with it.
    pub(crate) fn touched(
        &mut self,
        channel: &mut Channel,
        address: u64,
        received: Nanos,
    ) -> Served {
        let shared = channel.shared();
        let granule = self.granules.at(address).filter(|granule| granule.is_staged(shared));
        let Some(granule) = granule else { return Served::Yes };
        self.give_back(shared, granule);
        self.let_go_on(channel, granule, Found::OutOfReach, granule.guest, received)
    }

    /// A granule is in its place: that is logged, and who waits for `woken` goes on.
    fn let_go_on(
        &mut self,
        channel: &mut Channel,
        granule: Granule,
        found: Found,
        woken: Range,
        received: Nanos,
    ) -> Served {
        let shared = channel.shared();
        // Logged before the guest goes on: who sees the touch's effect sees the trap. A second thread's
        // fault that the first one's handling has answered already is a cost, but no news.
        shared.add(Counter::Traps, 1);
        if found != Found::InPlace && is_sampled(granule.number, self.tracking.sample) {
            channel.push(Trap { granule: granule.number, at_us: received.micros_wrapping() });
        }
        // It fails only for a range that is no longer mapped, where nobody waits.
        let _ = self.uffd.wake(woken);
        let done = now();
        shared.add(Counter::TrapNs, done.since(received).as_nanos_u64());
        if let (Some(limit), Found::OutOfReach) = (self.tracking.hot_set, found) {
            self.hot.push(granule.number);
            if let Some(oldest) = self.hot.evict_beyond(limit) {
                self.revoke(channel, oldest);
            }
        }
        self.count_in_second(done)
    }

    /// The fault's cost to a thread, measured on a page of our own: what to touch, and the place.
    pub(crate) fn arm_bench(&mut self) -> Option<u64> {
        let granule_pages = self.tracking.granule_pages;
        (!self.is_releasing()).then(|| self.bench.arm(self.uffd, granule_pages)).flatten()
    }

    /// Gives back more granules until `deadline`; answers how many, and whether that was all.
    pub(crate) fn give_back_some(&mut self, channel: &Channel, deadline: Nanos) -> (u32, bool) {
        let shared = channel.shared();
        let mut given = 0;
        while let Some(granule) = self.granules.from(self.cursor) {
            if now() > deadline {
                return (given, false);
            }
            self.cursor = granule.number + 1;
            if granule.is_staged(shared) {
                self.give_back(shared, granule);
                let _ = self.uffd.wake(granule.guest);
                given += 1;
            }
        }
        (given, true)
    }

    fn give_back(&self, shared: Shared<'_>, granule: Granule) {
        for part in granule.parts(shared, PageState::Staged) {
            // SAFETY: it was taken to there by `take`, and both ranges are registered.
            let moved = unsafe { moves::give(self.uffd, self.pagemap, part.guest, part.staging) };
            part.mark(shared, PageState::Plain);
            shared.add(Counter::MovedIn, moved);
            let staged = shared.get(Counter::StagedPages).saturating_sub(part.pages.into());
            shared.set(Counter::StagedPages, staged);
        }
    }

    /// Fresh memory was mapped over a part of guest RAM: what is not registered could be taken, and not given
    /// back.
    pub(crate) fn register_fresh(&mut self, range: Range) {
        // SAFETY: the fault thread serves.
        if unsafe { self.uffd.register(range) }.is_err() {
            self.is_incomplete = true;
            crate::watchdog::give_up();
        }
    }

    /// The content of `range` at its home was discarded, under the same lock: has its staged copies
    /// discarded too. The granules stay revoked: the next touch is news.
    pub(crate) fn discarded(&self, channel: &Channel, range: Range, discard: impl Fn(Range)) {
        let shared = channel.shared();
        for piece in self.granules.pieces(range) {
            discard(piece.staging);
            let staged = piece.pages.filter(|&page| shared.state(page) == PageState::Staged);
            shared.add(Counter::Discarded, staged.count() as u64);
        }
    }

    /// Ends all registrations. Everything is back.
    pub(crate) fn unregister(&self, channel: &Channel) {
        self.bench.serve(self.uffd, self.pagemap);
        for range in self.registered(channel) {
            // SAFETY: `give_back_some` has seen every granule since `begin_release`, or none was taken.
            // What fails was never registered, or is no longer mapped.
            let _ = unsafe { self.uffd.unregister(range) };
        }
    }

    /// Everything but what is merged, where only writes trap.
    fn registered(&self, channel: &Channel) -> impl Iterator<Item = Range> {
        let all = self.granules.ranges().chain([self.bench.range()]);
        all.flat_map(|range| channel.unmerged(range))
    }

    fn count_in_second(&mut self, at: Nanos) -> Served {
        if at.since(self.second.began) >= Duration::from_secs(1) {
            self.second = Second { began: at, traps: 0 };
        }
        self.second.traps = self.second.traps.saturating_add(1);
        let blown = self.second.traps > self.tracking.max_traps_per_s;
        if blown { Served::FuseBlown } else { Served::Yes }
    }

    /// Maps zeros at `page`, if it is a hole, and then wherever else its granule has one. A page that is there
    /// (the rule) costs one call. Answers whether it was a hole.
    fn fill_granule(&self, shared: Shared<'_>, granule: Granule, page: Range) -> bool {
        // SAFETY: what belongs into the granule has just been moved back, or never left; the page is not merged.
        let was_hole = unsafe { moves::fill_hole(self.uffd, page) };
        for part in granule.parts(shared, PageState::Plain).filter(|_| was_hole) {
            // SAFETY: as above.
            unsafe { moves::fill_holes(self.uffd, part.guest) };
        }
        for part in granule.parts(shared, PageState::Freed).filter(|_| was_hole) {
            self.take_back_holes(shared, part, page);
        }
        was_hole
    }

    /// What the kernel has dropped of these freed pages is filled, and freed no more, like the one just `filled`.
    fn take_back_holes(&self, shared: Shared<'_>, freed: Granule, filled: Range) {
        for (i, number) in (0..).zip(freed.numbers()) {
            let page = Range { start: freed.guest.start + i * PAGE_BYTES, len: PAGE_BYTES };
            // SAFETY: what was there the guest has given up, or it is there still.
            if page == filled || unsafe { moves::fill_hole(self.uffd, page) } {
                shared.set_state(number, PageState::Plain);
            }
        }
    }

    /// Puts a huge page where a whole block is empty and nothing of it is revoked; answers the block.
    fn fill_block(&mut self, shared: Shared<'_>, granule: Granule) -> Option<Range> {
        let (block, pages) = self.granules.huge_block(granule)?;
        let is_home = |page| matches!(shared.state(page), PageState::Plain | PageState::Freed);
        if self.tracking.hot_set.is_some()
            || !pages.clone().all(is_home)
            || self.pagemap.populated(block) != Ok(0)
        {
            return None;
        }
        let nursery = self.nursery.as_mut()?;
        nursery.put(self.uffd, self.pagemap, block).then(|| {
            // What was freed of it the guest has in use again.
            pages.for_each(|page| shared.set_state(page, PageState::Plain));
            block
        })
    }
}

/// This process's page tables; opened once.
pub(crate) fn pagemap() -> Option<&'static Pagemap> {
    static PAGEMAP: OnceLock<Option<Pagemap>> = OnceLock::new();
    PAGEMAP.get_or_init(|| kept(Pagemap::open())).as_ref()
}

/// A fault outside of all granules, or when nothing is tracked any more: a range whose registration could
/// not be ended. Everything that was taken is back, so what is missing is zero.
pub(crate) fn fill_stray(uffd: &Userfaultfd, address: u64) {
    let page = page_of(address);
    // SAFETY: as said.
    unsafe { moves::fill_hole(uffd, page) };
    let _ = uffd.wake(page);
}

pub(crate) fn page_of(address: u64) -> Range {
    Range { start: address / PAGE_BYTES * PAGE_BYTES, len: PAGE_BYTES }
}
