//! Tracking while it is on: which granules are revoked, and what happens at a touch.
//!
//! Guest RAM and a staging region of the same shape are registered with one userfaultfd. A
//! granule is *revoked* by moving its pages to staging. The next touch traps, and
//! [`Tracker::serve`] moves all of the granule back, wakes the waiting threads, and logs the
//! trap. A touch of a hole traps as well, and the hole is filled with zeros ([`Holes`]).
//!
//! **Invariants** (rule numbers are those of the crate's head). Everything here runs under the
//! engine's lock; pages move only by the steps of [`transitions`] (3). Serving allocates nothing
//! and reads no guest RAM (4). Zeros are mapped only where staging holds nothing (7). At most
//! [`most_revoked`] granules are revoked at a time, so that they are back soon when QEMU needs
//! them.

use std::time::Duration;

use protocol::layout::{Counter, PageState, Shared, is_sampled};
use protocol::{Region, Tracking, Trap, most_revoked};
use rustix::io::Errno;
use sys::memory_map::{PageSet, Range};
use sys::userfaultfd::Userfaultfd;

use crate::alerts;
use crate::bench::Bench;
use crate::channel::Channel;
use crate::granules::{Granule, ShadowedGranules};
use crate::holes::{Holes, fill_stray};
use crate::hot_set::{self, AccessibleQueue};
use crate::process::pagemap;
use crate::ram::{Block, page_of};
use crate::time::{AsNanos, Nanos, now};
use crate::transitions::{self, HostKernel, Kernel as _};
use crate::waiters::wake;

/// The result of serving one fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Served {
    /// Done.
    Yes,
    /// Done, but there were more traps in this second than the fuse allows.
    FuseBlown,
}

/// The end of a turn that gives back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseTurn {
    /// Everything is back.
    Done,
    /// There is more to give back.
    TurnOver,
    /// A page cannot be moved back yet.
    Stuck,
}

/// Where a touch found its page.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TouchOutcome {
    /// In place: another touch had brought it back.
    InPlace,
    /// Nowhere: it was never there, or discarded.
    Hole,
    /// In staging.
    OutOfReach,
}

/// The state that exists only while tracking is on.
pub(crate) struct Tracker {
    host: HostKernel,
    tracking: Tracking,
    granules: ShadowedGranules,
    hot: AccessibleQueue,
    holes: Holes,
    bench: &'static Bench,
    /// Set once everything is to be given back: nothing is revoked any more.
    releasing: bool,
    /// The kernel has refused to register a part, so touches of pages taken from it would not
    /// trap.
    is_incomplete: bool,
    /// The next granule for arming or giving back.
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
        let granules = ShadowedGranules::new(regions, tracking.granule_pages)
            .map_err(|errno| ("mmap", errno))?;
        let pagemap = pagemap().ok_or(("open(/proc/self/pagemap)", Errno::NOENT))?;
        let bench = Bench::get().ok_or(("mmap", Errno::NOMEM))?;
        let host = HostKernel { uffd, pagemap };
        let tracker = Self {
            host,
            tracking,
            hot: AccessibleQueue::new(granules.count()),
            granules,
            holes: Holes::new(host),
            bench,
            releasing: false,
            is_incomplete: false,
            cursor: 0,
            second: Second { began: now(), traps: 0 },
        };
        for range in tracker.registered(channel) {
            // SAFETY: the fault thread has been running since before this call, and serves.
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

    /// Changes the parameters of tracking; the granule size stays the same.
    pub(crate) fn change(&mut self, tracking: Tracking) {
        self.tracking = tracking;
    }

    /// Whether nothing is revoked any more.
    pub(crate) fn is_releasing(&self) -> bool {
        self.releasing || self.is_incomplete
    }

    /// Whether a part is not registered, so that nothing can be moved.
    pub(crate) fn is_incomplete(&self) -> bool {
        self.is_incomplete
    }

    /// Starts giving everything back. Returns whether this call started it.
    pub(crate) fn begin_release(&mut self) -> bool {
        let begins = !std::mem::replace(&mut self.releasing, true);
        if begins {
            self.cursor = 0;
        }
        begins
    }

    /// The largest number of accessible granules, if a hot set is in use.
    fn limit(&self) -> Option<u32> {
        self.tracking.hot_set.filter(|_| hot_set::IS_HERE)
    }

    /// Begins a pass that revokes every sampled granule, and clears the hot set.
    pub(crate) fn begin_arming(&mut self) {
        self.hot.clear();
        self.cursor = 0;
    }

    /// Revokes more sampled granules until `deadline`; returns how many, and whether all were
    /// visited.
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

    /// Revokes the granules beyond the hot set's limit; returns how many, and whether none is
    /// left.
    pub(crate) fn shrink_hot_set(&mut self, channel: &Channel, deadline: Nanos) -> (u32, bool) {
        let mut revoked = 0;
        while let Some(limit) = self.limit() {
            if now() > deadline {
                return (revoked, false);
            }
            let Some(oldest) = self.hot.evict_beyond(limit) else { break };
            revoked += u32::from(self.revoke(channel, oldest));
        }
        (revoked, true)
    }

    /// Records in the hot set that a granule has become accessible.
    fn came_in_reach(&mut self, number: u32) {
        if self.limit().is_some() {
            self.hot.push(number);
        }
    }

    /// Revokes a granule; `false` if it already was revoked, is not sampled, or could not be
    /// moved.
    pub(crate) fn revoke(&mut self, channel: &Channel, number: u32) -> bool {
        self.granules.get(number).is_some_and(|granule| self.revoke_granule(channel, granule))
    }

    fn revoke_granule(&mut self, channel: &Channel, granule: Granule) -> bool {
        let shared = channel.shared();
        let sampled = is_sampled(granule.number, self.tracking.sample);
        let granule_pages = self.tracking.granule_pages;
        let most_pages = u64::from(most_revoked(granule_pages)) * u64::from(granule_pages);
        let is_full = shared.get(Counter::StagedPages) + u64::from(granule.pages) > most_pages;
        if self.is_releasing() || !sampled || is_full || granule.is_staged(shared) {
            return false;
        }
        // Merged or freed pages stay. A granule with no other pages cannot be tracked.
        let mut staged = 0;
        for part in granule.parts(shared, PageState::Plain) {
            // SAFETY: both ranges are registered, and the fault thread serves.
            let of_part = unsafe { transitions::stage(&self.host, shared, part.run()) };
            staged += u64::from(of_part.staged);
            shared.add(Counter::MovedOut, of_part.moved.into());
            shared.add(Counter::Pinned, of_part.kept.into());
        }
        shared.set(Counter::StagedPages, shared.get(Counter::StagedPages) + staged);
        if staged == 0 && granule.parts(shared, PageState::Plain).next().is_some() {
            self.came_in_reach(granule.number);
        }
        staged > 0
    }

    /// Brings a granule back that has not been touched. Returns `false` if it was accessible, or
    /// cannot be moved back.
    pub(crate) fn recall(&mut self, channel: &Channel, number: u32) -> bool {
        let shared = channel.shared();
        let Some(granule) = self.granules.get(number).filter(|it| it.is_staged(shared)) else {
            return false;
        };
        let is_back = self.give_back(shared, granule);
        self.wake(granule.guest);
        self.came_in_reach(number);
        is_back
    }

    /// For each block of guest RAM the address at which its first page is staged.
    pub(crate) fn staging(&self) -> Vec<u64> {
        self.granules.staging()
    }

    /// Wakes threads that wait for a page of `range`; each continues, or traps again.
    fn wake(&self, range: Range) {
        wake(self.host.uffd, range);
    }

    /// Resolves a fault at `address` that was read at `received`; the page is not merged.
    pub(crate) fn serve(&mut self, channel: &mut Channel, address: u64, received: Nanos) -> Served {
        let Some(granule) = self.granules.at(address) else {
            if self.bench.contains(address) {
                self.bench.serve(&self.host);
            } else {
                fill_stray(self.host.uffd, address);
            }
            return Served::Yes;
        };
        let shared = channel.shared();
        // If the page tables cannot be asked, the recorded states hold.
        let was_staged =
            granule.is_staged(shared) || self.finds_staged(shared, granule).unwrap_or(false);
        if was_staged && !self.give_back(shared, granule) {
            // Some pages cannot be moved yet. A thread that waits for one of them traps again,
            // and the move is retried.
            self.wake(granule.guest);
            return Served::Yes;
        }
        let may_be_huge = !was_staged && self.limit().is_none();
        let block = self.granules.huge_block(granule).filter(|_| may_be_huge);
        let block = block.and_then(|(block, pages)| self.holes.fill_block(shared, block, pages));
        let was_hole = block.is_some() || {
            // SAFETY: the granule's content is in place; the page is not merged.
            unsafe { self.holes.fill_granule(shared, granule, page_of(address)) }
        };
        let found = match (was_staged, was_hole) {
            (true, _) => TouchOutcome::OutOfReach,
            (false, true) => TouchOutcome::Hole,
            (false, false) => TouchOutcome::InPlace,
        };
        let woken = block.unwrap_or(granule.guest);
        self.let_go_on(channel, granule, found, woken, received)
    }

    /// A merged page, which is still in its place, has been written. This counts as a touch of
    /// the staged pages of its granule.
    pub(crate) fn touched(
        &mut self,
        channel: &mut Channel,
        address: u64,
        received: Nanos,
    ) -> Served {
        let shared = channel.shared();
        let granule = self.granules.at(address).filter(|granule| granule.is_staged(shared));
        let Some(granule) = granule else { return Served::Yes };
        if !self.give_back(shared, granule) {
            return Served::Yes;
        }
        self.let_go_on(channel, granule, TouchOutcome::OutOfReach, granule.guest, received)
    }

    /// A granule is in place: logs the trap, and wakes the threads that wait for `woken`.
    fn let_go_on(
        &mut self,
        channel: &mut Channel,
        granule: Granule,
        found: TouchOutcome,
        woken: Range,
        received: Nanos,
    ) -> Served {
        let shared = channel.shared();
        // Logged before the guest continues, so that the trap is visible before the touch's
        // effect. The fault of a second thread, already answered by the handling of the first, is
        // counted but not logged.
        shared.add(Counter::Traps, 1);
        if found != TouchOutcome::InPlace && is_sampled(granule.number, self.tracking.sample) {
            channel.push(Trap { granule: granule.number, at_us: received.micros_wrapping() });
        }
        self.wake(woken);
        let done = now();
        shared.add(Counter::TrapNs, done.since(received).as_nanos_u64());
        if found == TouchOutcome::OutOfReach {
            self.came_in_reach(granule.number);
            let oldest = self.limit().and_then(|limit| self.hot.evict_beyond(limit));
            oldest.map(|oldest| self.revoke(channel, oldest));
        }
        self.count_in_second(done)
    }

    /// Arms the measurement of a fault's cost on the shim's own memory; returns the address to
    /// touch.
    pub(crate) fn arm_bench(&mut self) -> Option<u64> {
        let granule_pages = self.tracking.granule_pages;
        (!self.is_releasing()).then(|| self.bench.arm(&self.host, granule_pages)).flatten()
    }

    /// Gives back more granules until `deadline`; returns how many, and how far that went.
    pub(crate) fn give_back_some(
        &mut self,
        channel: &Channel,
        deadline: Nanos,
    ) -> (u32, ReleaseTurn) {
        let shared = channel.shared();
        let mut given = 0;
        while let Some(granule) = self.granules.from(self.cursor) {
            if now() > deadline {
                return (given, ReleaseTurn::TurnOver);
            }
            if granule.is_staged(shared) {
                let is_back = self.give_back(shared, granule);
                self.wake(granule.guest);
                if !is_back {
                    // The move is retried later, while others have the lock in between.
                    return (given, ReleaseTurn::Stuck);
                }
                given += 1;
            }
            self.cursor = granule.number + 1;
        }
        (given, if self.is_staging_empty(shared) { ReleaseTurn::Done } else { ReleaseTurn::Stuck })
    }

    /// Tries again to move back pages that failed at a touch or recall, without being asked;
    /// returns whether there was such a granule.
    pub(crate) fn give_late_pages(&mut self, channel: &Channel) -> bool {
        let shared = channel.shared();
        if self.releasing {
            // `give_back` tries all granules.
            return true;
        }
        let late = transitions::late().and_then(|address| self.granules.at(address));
        let Some(granule) = late.filter(|granule| granule.is_staged(shared)) else { return false };
        self.give_back(shared, granule);
        self.wake(granule.guest);
        true
    }

    /// Asks the page tables whether staging may be unmapped. Pages found there against their
    /// recorded state count as staged again. If the page tables do not answer, every page may be
    /// late.
    fn is_staging_empty(&mut self, shared: Shared<'_>) -> bool {
        let Some(first) = self.granules.from(0) else { return true };
        match self.granules.left_in_staging(self.host.pagemap) {
            Ok(None) => return true,
            Ok(Some(left)) => {
                if let Some(granule) = self.granules.at(left) {
                    let _ = self.finds_staged(shared, granule);
                }
            }
            Err(_) => {
                let mut all = PageSet::default();
                all.add(first.guest, first.guest);
                self.host.tried(first.guest, &all);
            }
        }
        self.cursor = 0;
        false
    }

    /// Asks the page tables for pages of a granule that are in staging but recorded as plain,
    /// before zeros take their place. None are expected; any that are found count as staged
    /// again.
    fn finds_staged(&self, shared: Shared<'_>, granule: Granule) -> Result<bool, Errno> {
        let there = self.host.populated(Range { start: granule.staging, ..granule.guest })?;
        let mut found = false;
        for (at, page) in granule.numbers().enumerate() {
            if there.has(at) && shared.state(page) == PageState::Plain {
                shared.set_state(page, PageState::Staged);
                shared.add(Counter::StagedPages, 1);
                found = true;
            }
        }
        Ok(found)
    }

    /// Moves a granule back; returns whether all of it is in place.
    fn give_back(&self, shared: Shared<'_>, granule: Granule) -> bool {
        let mut is_back = true;
        for part in granule.staged_parts(shared) {
            // SAFETY: the part was staged from there, and both ranges are registered.
            let given = unsafe { transitions::unstage(&self.host, shared, part.run()) };
            shared.add(Counter::MovedIn, given.moved);
            let back = u64::from(part.pages).saturating_sub(given.away.count().into());
            let staged = shared.get(Counter::StagedPages).saturating_sub(back);
            shared.set(Counter::StagedPages, staged);
            is_back &= given.away.is_empty();
        }
        is_back
    }

    /// Registers fresh memory that was mapped over a part of guest RAM. Unregistered pages could
    /// be moved out, but their touches would not trap.
    pub(crate) fn register_fresh(&mut self, range: Range) {
        // SAFETY: the fault thread serves.
        if unsafe { self.host.uffd.register(range) }.is_err() {
            self.is_incomplete = true;
            alerts::give_up();
        }
    }

    /// The content of `range` in guest RAM was discarded, under the same lock: discards its
    /// staged copies too. Returns whether they are gone. The granules stay revoked: the next
    /// touch is logged.
    pub(crate) fn discarded(
        &self,
        channel: &Channel,
        range: Range,
        discard: impl Fn(Range),
    ) -> bool {
        let shared = channel.shared();
        let mut all_gone = true;
        for piece in self.granules.pieces(range) {
            let staged = piece.pages.filter(|&page| shared.state(page).is_staged());
            let staged = staged.count() as u64;
            if staged == 0 {
                continue;
            }
            discard(piece.staging);
            all_gone &= self.host.pagemap.populated(piece.staging) == Ok(0);
            shared.add(Counter::Discarded, staged);
        }
        all_gone
    }

    /// Ends all registrations. Everything is back.
    pub(crate) fn unregister(&self, channel: &Channel) {
        self.bench.serve(&self.host);
        for range in self.registered(channel) {
            // SAFETY: staging was found empty since `begin_release`, or nothing was taken. A
            // range for which this fails was never registered, or is no longer mapped.
            let _ = unsafe { self.host.uffd.unregister(range) };
        }
    }

    /// All ranges except merged pages, where only writes trap.
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
}
