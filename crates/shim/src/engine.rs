//! The engine's lock and the state that it guards: guest RAM, the tracker, and the reasons why
//! there is none.
//!
//! A thread that moves a page holds this lock: the fault thread, the thread that serves requests,
//! or QEMU's thread that discards memory. No thread holds it for longer than a turn, and none
//! waits for it for long ([`Turns`]).
//!
//! Reasons against tracking are kept apart by when they end. An objection never ends. A hold ends
//! when QEMU has finished an operation. A pause ends with the next [`protocol::Request::Track`].

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use protocol::layout::{GiveBack, PageState};
use protocol::{Refusal, Region, State, Tracking};
use rustix::io::Errno;
use sys::memory_map::{HUGE_PAGE_BYTES, PAGE_BYTES, Range};
use sys::userfaultfd::{OpenError, PageFault, Userfaultfd};

use crate::channel::Channel;
use crate::cuts::Cuts;
use crate::holds::Holds;
use crate::merge::AttachedPool;
use crate::ram::{GuestRam, end};
use crate::time::{Nanos, now};
use crate::tracker::{Served, Tracker, fill_stray, page_of};
use crate::transitions::{self, HostKernel, PageRun};
use crate::turns::{Turn, Turns, turn};
use crate::{cuts, hot_set, merge, tracker, unshare, watchdog};

/// The state that the lock guards.
pub(crate) struct Engine {
    pub(crate) ram: GuestRam,
    pub(crate) channel: Option<Channel>,
    pub(crate) tracker: Option<Tracker>,
    pub(crate) pool: Option<AttachedPool>,
    pub(crate) holds: Holds,
    pub(crate) cuts: Cuts,
    /// Memory that the guest frees is handed over to the kernel instead of being discarded.
    pub(crate) is_lazy: bool,
    /// The moves of the current turn, until they are settled.
    pub(crate) moving: Option<Moving>,
    paused: Option<GiveBack>,
}

/// A turn that moves pages through the buffer. It outlives the function that began it, so that a
/// page that cannot be moved back stays recorded. The next thread that takes the lock moves it
/// back.
pub(crate) struct Moving {
    /// The range that was registered for the turn; unregistered when all pages are back.
    window: Option<Range>,
    /// The part of guest RAM that may be in the buffer.
    pub(crate) run: Option<PageRun>,
}

pub(crate) static ENGINE: Turns<Engine> = Turns::new(Engine {
    ram: GuestRam::new(),
    channel: None,
    tracker: None,
    pool: None,
    holds: Holds::new(),
    cuts: Cuts::new(),
    is_lazy: false,
    moving: None,
    paused: None,
});

/// Whether tracking is on, for threads that may not wait for the lock.
static IS_TRACKING: AtomicBool = AtomicBool::new(false);

/// Locks for work that can wait; see [`Turns::lock`].
pub(crate) fn lock() -> Turn<'static, Engine> {
    ENGINE.lock()
}

/// Locks for QEMU's threads; see [`Turns::lock_first`].
pub(crate) fn lock_first() -> Turn<'static, Engine> {
    ENGINE.lock_first()
}

/// The same, once every page is where its state says and the buffer is empty. It waits while a
/// page cannot be moved back, up to the limit of [`transitions`].
pub(crate) fn lock_settled() -> Turn<'static, Engine> {
    loop {
        let mut engine = lock_first();
        if engine.settle() {
            return engine;
        }
        drop(engine);
        rustix::thread::sched_yield();
    }
}

/// Whether a thread may have to wait for the fault thread. Takes no lock.
pub(crate) fn is_watched() -> bool {
    IS_TRACKING.load(Ordering::Acquire) || crate::channel::is_anything_merged()
}

/// The process's userfaultfd, opened at the first call and never closed.
pub(crate) fn userfaultfd() -> Result<&'static Userfaultfd, OpenError> {
    static UFFD: OnceLock<Userfaultfd> = OnceLock::new();
    if let Some(uffd) = UFFD.get() {
        return Ok(uffd);
    }
    let uffd = Userfaultfd::open()?;
    let uffd = UFFD.get_or_init(|| uffd);
    crate::descriptors::guard_for_ever(uffd);
    Ok(uffd)
}

impl Engine {
    /// Ends the turn that moves pages: moves back the pages in the buffer, and unregisters the
    /// range that was registered for the turn. Returns whether all pages are back; if not, a
    /// later call tries again.
    pub(crate) fn settle(&mut self) -> bool {
        let Some(moving) = &self.moving else { return true };
        let (Ok(uffd), Some(pagemap), Some(channel)) =
            (userfaultfd(), tracker::pagemap(), &self.channel)
        else {
            return false;
        };
        if let Some(run) = moving.run {
            // SAFETY: the pages came from there, and the range is still registered.
            let is_home =
                unsafe { transitions::put_back(&HostKernel { uffd, pagemap }, channel, run) };
            watchdog::wake(uffd, run.home);
            if !is_home {
                return false;
            }
        }
        // SAFETY: every page is in its place.
        unsafe { close_window(uffd, channel, moving.window) };
        self.moving = None;
        true
    }

    /// Tries again to move back late pages, without being asked.
    pub(crate) fn bring_home_late_pages(&mut self) {
        if !self.settle() {
            return;
        }
        let is_staged = match (&mut self.tracker, &self.channel) {
            (Some(tracker), Some(channel)) => tracker.give_late_pages(channel),
            _ => false,
        };
        if !is_staged {
            transitions::forget_late();
        }
    }

    /// Wakes all threads that wait for a page of guest RAM; they retry the access.
    pub(crate) fn wake_all(&self) {
        for region in self.regions() {
            if let Ok(uffd) = userfaultfd() {
                let len = u64::from(region.pages) * PAGE_BYTES;
                watchdog::wake(uffd, Range { start: region.address, len });
            }
        }
    }

    /// Begins a turn that moves these parts of one block through the buffer. Registers them, and
    /// `more` bytes on both sides, where needed. Does not allocate.
    pub(crate) fn begin_moving(
        &mut self,
        uffd: &'static Userfaultfd,
        parts: &[Range],
        more: u64,
    ) -> Result<(), Errno> {
        let buffer = merge::buffer(uffd).ok_or(Errno::NOMEM)?;
        let pagemap = tracker::pagemap().ok_or(Errno::NOENT)?;
        // SAFETY: the pages in the buffer have been moved back.
        if !self.settle() || !unsafe { transitions::clear(&HostKernel { uffd, pagemap }, buffer) } {
            return Err(Errno::BUSY);
        }
        let channel = self.channel.as_ref().ok_or(Errno::NOENT)?;
        let window = self.open_window(uffd, channel, parts, more)?;
        self.moving = Some(Moving { window, run: None });
        Ok(())
    }

    /// The state that the worker is told.
    pub(crate) fn state(&self) -> State {
        if let Some(why) = self.objection() {
            return State::Unsupported { why: why.into_owned() };
        }
        match &self.tracker {
            Some(tracker) if !tracker.is_releasing() => State::On(tracker.tracking()),
            _ => self.suspension().map_or(State::Off, |why| State::Suspended { why }),
        }
    }

    fn suspension(&self) -> Option<String> {
        // Tracking that ended by itself or with the worker is no reason to wait.
        let pause = || match self.paused? {
            reason @ (GiveBack::Fuse | GiveBack::SlowFault | GiveBack::KernelRefused) => {
                Some(reason.words())
            }
            _ => None,
        };
        self.hold().or_else(pause).map(str::to_owned)
    }

    /// The shared memory of the regions as they are now.
    pub(crate) fn current_channel(&mut self) -> Option<&Channel> {
        let generation = self.ram.generation();
        let is_current = |channel: &Channel| channel.generation() == generation;
        // While tracking is on, only the page states in the channel record where its pages are.
        if self.tracker.is_none() && !self.channel.as_ref().is_some_and(is_current) {
            let new = Channel::new(self.regions(), generation, self.channel.as_ref());
            // Without memory for a new channel the old one still records which pages are merged.
            self.channel = new.or(self.channel.take());
        }
        self.channel.as_ref().filter(|channel| is_current(channel))
    }

    pub(crate) fn regions(&self) -> Vec<Region> {
        self.ram.regions().into_iter().map(|(_, region)| region).collect()
    }

    /// QEMU has mapped something else over `range`.
    pub(crate) fn forget_merged(&mut self, range: Range) {
        let Some(channel) = &self.channel else { return };
        for merged in channel.merged(range) {
            channel.set(merged, PageState::Plain);
        }
    }

    /// Registers these parts of one block, and `more` bytes on both sides, so that pages can be
    /// moved. Returns the range to [close](close_window): `None` when a tracker has registered
    /// all of it. Does not allocate.
    pub(crate) fn open_window(
        &self,
        uffd: &Userfaultfd,
        channel: &Channel,
        parts: &[Range],
        more: u64,
    ) -> Result<Option<Range>, Errno> {
        let window = if self.tracker.is_none() { self.window(channel, parts, more) } else { None };
        for part in window.into_iter().flat_map(|window| channel.unmerged(window)) {
            // SAFETY: the fault thread serves as soon as this turn is over.
            if let Err(errno) = unsafe { uffd.register(part) } {
                // The part that could not be registered is left out: QEMU may have registered it
                // itself, and the kernel may let the shim end that registration.
                let begun = window.map(|window| Range { len: part.start - window.start, ..window });
                // SAFETY: nothing was moved.
                unsafe { close_window(uffd, channel, begun) };
                return Err(errno);
            }
        }
        Ok(window)
    }

    /// The range around these parts of one block with `more` bytes on both sides. Its ends split
    /// no huge page: a 2 MiB block with a merged page has none.
    fn window(&self, channel: &Channel, parts: &[Range], more: u64) -> Option<Range> {
        let first = parts.iter().map(|range| range.start).min()?;
        let block = self.ram.block(first)?.range;
        let (start, last) = (first - more, parts.iter().map(|range| end(*range)).max()? + more);
        let may_be_huge = |at: u64| {
            let whole =
                Range { start: at / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, len: HUGE_PAGE_BYTES };
            channel.merged(whole).next().is_none().then_some(whole)
        };
        let start = may_be_huge(start).map_or(start, |whole| whole.start).max(block.start);
        let stop = may_be_huge(last - 1).map_or(last, end).min(end(block));
        Some(Range { start, len: stop - start })
    }

    /// Resolves a fault; see [`Tracker::serve`].
    pub(crate) fn serve(
        &mut self,
        uffd: &'static Userfaultfd,
        fault: PageFault,
        received: Nanos,
    ) -> Served {
        let PageFault { address, is_protected } = fault;
        let page = page_of(address);
        let is_merged = |channel: &Channel| channel.merged(page).next().is_some();
        let is_merged = self.channel.as_ref().is_some_and(is_merged);
        // A page could not be moved back when its turn ended. A thread that waits for the
        // faulting page continues, or traps again.
        if !self.settle() {
            watchdog::wake(uffd, page);
            return Served::Yes;
        }
        if is_merged && is_protected {
            let served = match (&mut self.tracker, &mut self.channel) {
                (Some(tracker), Some(channel)) => tracker.touched(channel, address, received),
                _ => Served::Yes,
            };
            self.break_sharing(uffd, address, received);
            return served;
        } else if is_merged || is_protected {
            // The page was touched while it was in the buffer, and is the pool's page now; or the
            // reverse. A protected page that is not recorded as merged is unprotected here:
            // nothing else would let the write through.
            if is_protected && !self.holds.are_qemus(page) {
                // SAFETY: no code relies on the protection.
                let _ = unsafe { uffd.unprotect(page) };
            }
            watchdog::wake(uffd, page);
        } else if let (Some(tracker), Some(channel)) = (&mut self.tracker, &mut self.channel) {
            return tracker.serve(channel, address, received);
        } else if self.holds.are_qemus(page) {
            watchdog::wake(uffd, page);
        } else {
            fill_stray(uffd, address);
        }
        Served::Yes
    }

    fn begin_tracking(&mut self, tracking: Tracking) -> Result<(), Refusal> {
        let not_tracking = |why: String| Refusal::NotTracking { why };
        if let Some(why) = self.obstacle() {
            return Err(not_tracking(why.into_owned()));
        }
        let uffd = userfaultfd().map_err(|error| not_tracking(error.to_string()))?;
        // A range registered for a turn must not be unregistered while the tracker uses it.
        if !self.settle() {
            return Err(not_tracking("a page that was compared is not back yet".to_owned()));
        }
        let channel =
            self.channel.as_ref().ok_or_else(|| not_tracking("say Hello first".to_owned()))?;
        let tracker = Tracker::start(uffd, &self.ram.regions(), channel, tracking).map_err(
            |(call, errno)| Refusal::Kernel { call: call.to_owned(), errno: errno.raw_os_error() },
        )?;
        self.paused = None;
        self.tracker = Some(tracker);
        IS_TRACKING.store(true, Ordering::Release);
        // Not before: the watchdog would check, see nothing to watch, and sleep on.
        watchdog::ring();
        Ok(())
    }
}

/// Ends the registration that [`Engine::open_window`] began. Pages merged since stay registered
/// as they are; pages no longer merged are unregistered with the rest.
///
/// # Safety
/// Every page is in its place.
pub(crate) unsafe fn close_window(uffd: &Userfaultfd, channel: &Channel, window: Option<Range>) {
    for part in window.into_iter().flat_map(|window| channel.unmerged(window)) {
        // SAFETY: as the caller promises. A range for which this fails was never registered, or
        // is no longer mapped.
        let _ = unsafe { uffd.unregister(part) };
    }
}

/// Starts or changes tracking; returns the number of granules that were revoked.
pub(crate) fn track(tracking: Tracking) -> Result<u32, Refusal> {
    if let (Some(granules), false) = (tracking.hot_set, hot_set::IS_HERE) {
        let why = format!("hot_set: {granules}: this shim was built without (feature hot-set)");
        return Err(Refusal::NotTracking { why });
    }
    let current = lock().tracker.as_ref().map(Tracker::tracking);
    if current.is_some_and(|current| current.granule_pages != tracking.granule_pages) {
        give_back(None);
    }
    let before = {
        let mut engine = lock();
        match &mut engine.tracker {
            Some(tracker) if tracker.is_releasing() => {
                let why = "everything is being given back".to_owned();
                return Err(Refusal::NotTracking { why });
            }
            Some(tracker) => {
                let before = tracker.tracking();
                tracker.change(tracking);
                Some(before)
            }
            None => {
                engine.begin_tracking(tracking)?;
                None
            }
        }
    };
    let same = |before: Tracking| before.hot_set.is_some() && before.sample == tracking.sample;
    if tracking.hot_set.is_none() || before.is_some_and(same) {
        return Ok(in_turns(Tracker::shrink_hot_set));
    }
    if let Some(tracker) = &mut lock().tracker {
        tracker.begin_arming();
    }
    Ok(in_turns(Tracker::arm_some) + in_turns(Tracker::shrink_hot_set))
}

/// Replaces the merged pages of this run by copies; returns their number. The kernel copies in
/// place those that cannot be replaced, unless QEMU watches them.
pub(crate) fn unshare(page: u32, pages: u32) -> Result<u32, Refusal> {
    let merged = || {
        let of = |channel: &Channel| channel.parts(page, pages, PageState::Merged);
        lock().channel.as_ref().map(of).into_iter().flatten()
    };
    let count: u64 = merged().map(|part| part.range.len / PAGE_BYTES).sum();
    let is_possible = userfaultfd().is_ok_and(cuts::is_possible) && lock().obstacle().is_none();
    if count > 0 && is_possible {
        merged().for_each(|part| unshare::look_up(part.range));
        let last = page.saturating_add(pages);
        for turn in (page..last).step_by(merge::AT_ONCE as usize) {
            let replaced = lock().unshare_turn(turn, merge::AT_ONCE.min(last - turn));
            replaced.into_iter().for_each(|part| lock().join_at_ends(part, HUGE_PAGE_BYTES));
        }
    }
    let last = page.saturating_add(pages);
    for turn in (page..last).step_by(merge::AT_ONCE as usize) {
        lock_settled().copy_turn(turn, merge::AT_ONCE.min(last - turn))?;
    }
    Ok(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Revokes granules; returns how many were accessible before.
pub(crate) fn revoke(granules: &[u32]) -> Result<u32, Refusal> {
    each(granules, Tracker::revoke)
}

/// Brings granules back; returns how many were revoked.
pub(crate) fn recall(granules: &[u32]) -> Result<u32, Refusal> {
    each(granules, Tracker::recall)
}

/// Applies `act` to these granules, turn by turn; returns for how many it succeeded.
fn each(
    granules: &[u32],
    mut act: impl FnMut(&mut Tracker, &Channel, u32) -> bool,
) -> Result<u32, Refusal> {
    if let (state, false) = is_on() {
        return Err(Refusal::NotTracking { why: words(&state) });
    }
    let mut rest = granules.iter();
    Ok(in_turns(|tracker, channel, deadline| {
        let mut done = 0;
        while now() <= deadline {
            let Some(&granule) = rest.next() else { return (done, true) };
            done += u32::from(act(tracker, channel, granule));
        }
        (done, false)
    }))
}

pub(crate) fn is_on() -> (State, bool) {
    let engine = lock();
    let on = engine.tracker.as_ref().is_some_and(|tracker| !tracker.is_releasing());
    (engine.state(), on)
}

pub(crate) fn words(state: &State) -> String {
    match state {
        State::Suspended { why } | State::Unsupported { why } => why.clone(),
        State::Off | State::On(_) => "send Track first".to_owned(),
    }
}

/// Does work turn by turn until it reports that it is done, or everything is being given back.
fn in_turns(mut work: impl FnMut(&mut Tracker, &Channel, Nanos) -> (u32, bool)) -> u32 {
    let mut total = 0;
    loop {
        let mut engine = lock();
        let Engine { tracker: Some(tracker), channel: Some(channel), .. } = &mut *engine else {
            return total;
        };
        if tracker.is_releasing() {
            return total;
        }
        let (count, done) = work(tracker, channel, turn());
        total += count;
        if done {
            return total;
        }
    }
}

/// Gives everything back and ends tracking; returns the number of granules that came back.
/// `reason` is `None` when the worker asked for it. Any number of threads may call this at once:
/// each helps.
pub(crate) fn give_back(reason: Option<GiveBack>) -> u32 {
    let mut total = 0;
    loop {
        let before = total;
        if give_back_turn(reason, &mut total) {
            return total;
        }
        // A thread that serves faults goes first between two turns anyway. When a page cannot be
        // moved, this thread yields to others.
        if total == before {
            rustix::thread::sched_yield();
        }
    }
}

/// The same for one of QEMU's threads, which waits for it.
pub(crate) fn give_back_to_qemu(reason: GiveBack) {
    let began = now();
    give_back(Some(reason));
    ENGINE.waited(began);
}

/// Gives back until all is done or the turn is over; returns whether all is done.
fn give_back_turn(reason: Option<GiveBack>, total: &mut u32) -> bool {
    let mut engine = lock_first();
    if !engine.settle() {
        return false;
    }
    let Engine { tracker: Some(tracker), channel: Some(channel), paused, .. } = &mut *engine else {
        return true;
    };
    if tracker.begin_release() {
        *paused = reason;
        if let Some(reason) = reason {
            channel.shared().note_given_back(reason);
        }
    }
    let (count, done) = tracker.give_back_some(channel, turn());
    *total += count;
    if done {
        tracker.unregister(channel);
        let ended = engine.tracker.take();
        IS_TRACKING.store(false, Ordering::Release);
        drop(engine);
        drop(ended);
    }
    done
}

/// QEMU is changing mappings of guest RAM; nothing is tracked until this is dropped.
#[must_use]
pub(crate) struct Remapping(());

/// Gives back guest RAM in `range`, because QEMU is about to change its mappings.
pub(crate) fn before_remapping(range: Range) -> Option<Remapping> {
    before_change(|ram| ram.concerns(range))
}

/// The same because `range` is about to become guest RAM: this changes page numbers and the
/// memory that holds page states.
pub(crate) fn before_growing(range: Range) -> Option<Remapping> {
    before_change(|ram| ram.is_candidate(range))
}

fn before_change(concerns: impl FnOnce(&GuestRam) -> bool) -> Option<Remapping> {
    let remapping = {
        let mut engine = lock_first();
        if !concerns(&engine.ram) {
            return None;
        }
        engine.holds.remapping += 1;
        // From here on the hold ends in any case, even with a panic.
        Remapping(())
    };
    give_back_to_qemu(GiveBack::RegionsChanged);
    Some(remapping)
}

impl Remapping {
    /// The change is done.
    pub(crate) fn done(self, change: impl FnOnce(&mut Engine)) {
        change(&mut lock_first());
    }
}

impl Drop for Remapping {
    fn drop(&mut self) {
        let mut engine = lock_first();
        engine.holds.remapping = engine.holds.remapping.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_while_qemu_changes_its_mappings_does_not_forbid_tracking_for_ever() {
        let range = Range { start: 1 << 40, len: 64 << 20 };
        lock().ram.mapped(range, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        let panics = std::panic::catch_unwind(|| {
            let _remapping = before_growing(range).expect("it is a candidate");
            assert_eq!(lock().hold(), Some(GiveBack::RegionsChanged.words()));
            panic!("on purpose");
        });
        assert!(panics.is_err());
        assert_eq!(lock().holds.remapping, 0);
        lock().ram.unmapped(range);
    }
}
