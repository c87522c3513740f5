//! Guest RAM, where each of its pages is, and the turns that move them.
//!
//! A turn begins with [`PageOps::begin_moving`] and ends with [`PageOps::settle`]. In between
//! pages are in the [buffer](crate::buffer): [`merge`](crate::merge) compares them there, and
//! [`cuts`](crate::cuts) has them replaced. The steps are those of [`transitions`]. Everything
//! here runs under the engine's lock. QEMU's operations that forbid moves are in [`Inhibitors`].

use std::borrow::Cow;

use protocol::Region;
use protocol::layout::{GiveBack, PageState};
use rustix::io::Errno;
use sys::memory_map::{HUGE_PAGE_BYTES, PAGE_BYTES, Range};
use sys::userfaultfd::Userfaultfd;

use crate::buffer::buffer;
use crate::channel::Channel;
use crate::inhibitors::Inhibitors;
use crate::process::userfaultfd;
use crate::qemu;
use crate::ram::{GuestRam, end};

use crate::tracker::Tracker;
use crate::transitions::{self, HostKernel, PageRun};
use crate::waiters::wake;

/// Guest RAM, and where its pages are.
pub(crate) struct PageOps {
    pub(crate) ram: GuestRam,
    pub(crate) channel: Option<Channel>,
    pub(crate) tracker: Option<Tracker>,
    /// The moves of the current turn, until they are settled.
    moving: Option<Moving>,
}

/// A turn that moves pages through the buffer. It outlives the function that began it, so that a
/// page that cannot be moved back stays recorded. The next thread that takes the lock moves it
/// back.
struct Moving {
    /// The range that was registered for the turn; unregistered when all pages are back.
    window: Option<Range>,
    /// The part of guest RAM that may be in the buffer.
    run: Option<PageRun>,
}

/// The use of a turn, until it is [settled](PageOps::settle).
pub(crate) struct BegunTurn<'a> {
    pub(crate) host: HostKernel,
    pub(crate) ram: &'a GuestRam,
    pub(crate) channel: &'a Channel,
    /// The part of guest RAM that may be in the buffer: to be set before a page is moved there. The
    /// buffer is empty when the turn begins.
    pub(crate) run: &'a mut Option<PageRun>,
}

impl PageOps {
    pub(crate) const fn new() -> Self {
        Self { ram: GuestRam::new(), channel: None, tracker: None, moving: None }
    }

    /// Why no page can be moved now. Does not allocate if there is a userfaultfd.
    pub(crate) fn obstacle(&self, inhibitors: &Inhibitors) -> Option<Cow<'static, str>> {
        let generation = self.ram.generation();
        let is_outdated =
            self.channel.as_ref().is_none_or(|channel| channel.generation() != generation);
        let outdated = || is_outdated.then_some("guest RAM has changed: say Hello again");
        let for_now = || self.hold(inhibitors).or_else(outdated).map(Cow::Borrowed);
        self.objection(inhibitors).or_else(for_now)
    }

    /// Why no page can ever be moved.
    pub(crate) fn objection(&self, inhibitors: &Inhibitors) -> Option<Cow<'static, str>> {
        let words = self.ram.objection().or_else(|| inhibitors.objection()).map(Cow::Borrowed);
        words.or_else(|| userfaultfd().err().map(|error| Cow::Owned(error.to_string())))
    }

    /// Why no page can be moved until QEMU has finished an operation, or the shim has given
    /// everything back.
    pub(crate) fn hold(&self, inhibitors: &Inhibitors) -> Option<&'static str> {
        let is_incomplete = self.tracker.as_ref().is_some_and(Tracker::is_incomplete);
        let incomplete = || is_incomplete.then(|| GiveBack::KernelRefused.words());
        // A change by QEMU makes a tracker incomplete as well, and tells more.
        inhibitors.hold().or_else(incomplete).or_else(qemu::migration)
    }

    pub(crate) fn regions(&self) -> Vec<Region> {
        self.ram.regions().into_iter().map(|(_, region)| region).collect()
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

    /// QEMU has mapped something else over `range`.
    pub(crate) fn forget_merged(&mut self, range: Range) {
        let Some(channel) = &self.channel else { return };
        for merged in channel.merged(range) {
            channel.set(merged, PageState::Plain);
        }
    }

    /// Wakes all threads that wait for a page of guest RAM; they retry the access.
    pub(crate) fn wake_all(&self) {
        for region in self.regions() {
            if let Ok(uffd) = userfaultfd() {
                let len = u64::from(region.pages) * PAGE_BYTES;
                wake(uffd, Range { start: region.address, len });
            }
        }
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

    /// Begins a turn that moves these parts of one block through the buffer. Registers them, and
    /// `more` bytes on both sides, where needed. Does not allocate.
    ///
    /// # Errors
    /// The kernel's. `BUSY`: the pages of the last turn are not back yet.
    pub(crate) fn begin_moving(
        &mut self,
        parts: &[Range],
        more: u64,
    ) -> Result<BegunTurn<'_>, Errno> {
        let host = HostKernel::get().ok_or(Errno::NOENT)?;
        let buffer = buffer(host.uffd).ok_or(Errno::NOMEM)?;
        // SAFETY: the pages in the buffer have been moved back.
        if !self.settle() || !unsafe { transitions::clear(&host, buffer) } {
            return Err(Errno::BUSY);
        }
        let window = self.open_window(host.uffd, parts, more)?;
        let Self { ram, channel, moving, .. } = self;
        let channel = channel.as_ref().ok_or(Errno::NOENT)?;
        let run = &mut moving.insert(Moving { window, run: None }).run;
        Ok(BegunTurn { host, ram, channel, run })
    }

    /// Ends the turn that moves pages: moves back the pages in the buffer, and unregisters the
    /// range that was registered for the turn. Returns whether all pages are back; if not, a
    /// later call tries again.
    pub(crate) fn settle(&mut self) -> bool {
        let Some(moving) = &self.moving else { return true };
        let (Some(host), Some(channel)) = (HostKernel::get(), &self.channel) else {
            return false;
        };
        if let Some(run) = moving.run {
            // SAFETY: the pages came from there, and the range is still registered.
            let is_home = unsafe { transitions::put_back(&host, channel, run) };
            wake(host.uffd, run.home);
            if !is_home {
                return false;
            }
        }
        // SAFETY: every page is in its place.
        unsafe { self.close_window(host.uffd, moving.window) };
        self.moving = None;
        true
    }

    /// Registers these parts of one block, and `more` bytes on both sides, so that pages can be
    /// moved. Returns the range to [close](Self::close_window): `None` when a tracker has
    /// registered all of it. Does not allocate.
    ///
    /// # Errors
    /// The kernel's; nothing is left registered.
    pub(crate) fn open_window(
        &self,
        uffd: &Userfaultfd,
        parts: &[Range],
        more: u64,
    ) -> Result<Option<Range>, Errno> {
        let channel = self.channel.as_ref().ok_or(Errno::NOENT)?;
        let window = if self.tracker.is_none() { self.window(channel, parts, more) } else { None };
        for part in window.into_iter().flat_map(|window| channel.unmerged(window)) {
            // SAFETY: the fault thread serves as soon as this turn is over.
            if let Err(errno) = unsafe { uffd.register(part) } {
                // The part that could not be registered is left out: QEMU may have registered it
                // itself, and the kernel may let the shim end that registration.
                let begun = window.map(|window| Range { len: part.start - window.start, ..window });
                // SAFETY: nothing was moved.
                unsafe { self.close_window(uffd, begun) };
                return Err(errno);
            }
        }
        Ok(window)
    }

    /// Ends the registration that [`PageOps::open_window`] began. Pages merged since stay
    /// registered as they are; pages no longer merged are unregistered with the rest.
    ///
    /// # Safety
    /// Every page is in its place.
    pub(crate) unsafe fn close_window(&self, uffd: &Userfaultfd, window: Option<Range>) {
        let Some(channel) = &self.channel else { return };
        for part in window.into_iter().flat_map(|window| channel.unmerged(window)) {
            // SAFETY: as the caller promises. A range for which this fails was never registered,
            // or is no longer mapped.
            let _ = unsafe { uffd.unregister(part) };
        }
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
}
