//! Dedup's state of one VM: scanned pages, merged pages, and requests in flight.

use std::ops::Range;
use std::os::fd::OwnedFd;

use model::{Reading, Time, dedup::Dedup};
use pages::dedup::{Book, Pool};
use protocol::Region;
use protocol::layout::PageState;
use sys::clock::boot_now;
use sys::pool_maps::Sharer;
use sys::process::{self, Identity};

use super::super::granules::PAGE;
use super::super::link::{Link, LinkError};
use super::super::linked::Linked;
use super::counts::Counts;
use super::guest_memory::GuestMemory;
use super::requests::{DedupAnswer, MergeRequest, Requests, Target, slot_of};
use super::scan::Scan;
use super::sweep::Sweep;
use super::window::{Look, Window};

/// A VM.
#[derive(Debug)]
pub(super) struct Vm {
    /// Its first page's number in the group.
    pub(super) first: u32,
    pub(super) book: Book,
    /// Whether it can be scanned now.
    pub(super) is_here: bool,
    /// The time of the last contact with its shim.
    pub(super) met: Time,
    /// The connection of the last contact.
    pub(super) session: Option<u64>,
    /// The requests on that connection.
    pub(super) requests: Requests,
    process: OwnedFd,
    pub(super) memory: GuestMemory,
    scan: Scan,
    pub(super) sweep: Sweep,
    counts: Counts,
}

impl Vm {
    /// The VM of a live process that may be inspected.
    pub(super) fn open(process: Identity, regions: &[Region]) -> Option<Self> {
        let memory = GuestMemory::of(process.pid, regions)?;
        let requests = Requests::of(process.pid);
        // Last: if the process lives now, everything opened by its pid is its own.
        let process = process.hold().ok()??;
        Some(Self {
            first: 0,
            book: Book::new(memory.page_count()),
            is_here: false,
            met: boot_now(),
            session: None,
            requests,
            process,
            memory,
            scan: Scan::default(),
            sweep: Sweep::default(),
            counts: Counts::default(),
        })
    }

    pub(super) fn has_ended(&self) -> bool {
        process::has_ended(&self.process)
    }

    /// Records that these pages share these slots, which an earlier worker has merged, and adds a
    /// reference for each page of the VM.
    pub(super) fn adopt(&mut self, sharers: &[Sharer], slots: &mut Pool) {
        for Sharer { address, slot } in sharers {
            if let Some(page) = self.memory.page_at(*address)
                && slots.hash(*slot).is_some()
            {
                slots.share(*slot);
                self.book.merged(page, *slot);
            }
        }
    }

    /// Ends the work on it. Returns its process, and the slots that it shares or may share.
    pub(super) fn into_holder(self) -> (OwnedFd, Vec<u32>) {
        let slots = self.references();
        (self.process, slots)
    }

    /// The numbers of its pages in the group.
    pub(super) fn numbers(&self) -> Range<u32> {
        self.first..self.first + self.book.pages()
    }

    /// The slots that its pages share or may share.
    pub(super) fn references(&self) -> Vec<u32> {
        self.book.slots().map(|(_, slot)| slot).chain(self.requests.slots()).collect()
    }

    /// Handles a new connection: the page states give the outcome of requests in flight, and the
    /// regions may have changed. Returns the slots that are not shared after all.
    pub(super) fn meet_again(
        &mut self,
        session: u64,
        link: &mut Link,
    ) -> Result<Vec<u32>, LinkError> {
        let mut left = self.drop_queue();
        let mut sent = self.requests.restart();
        if let Some(old) = self.memory.renew(link.regions()) {
            left.extend(self.renumber(&old));
            self.sweep = Sweep::default();
            // The shim may have merged these before it reported the new regions.
            for (page, target) in std::mem::take(&mut sent) {
                match self.memory.page_now(&old, page) {
                    Some(page) => sent.push((page, target)),
                    None => left.extend(slot_of(&(page, target))),
                }
            }
        }
        left.extend(self.note(&sent, link)?);
        self.session = Some(session);
        self.scan.restart();
        Ok(left)
    }

    /// Guest RAM was plugged or unplugged: pages have new numbers. Returns slots that are no
    /// longer shared.
    fn renumber(&mut self, old: &[Region]) -> Vec<u32> {
        let book = std::mem::replace(&mut self.book, Book::new(self.memory.page_count()));
        let mut left = Vec::new();
        for (page, slot) in book.slots() {
            match self.memory.page_now(old, page) {
                Some(page) => self.book.merged(page, slot),
                None => left.push(slot),
            }
        }
        left
    }

    /// Processes the answers received. Returns the slots that are not shared after all.
    pub(super) fn settle(&mut self, linked: &mut Linked) -> Result<Vec<u32>, LinkError> {
        let mut left = Vec::new();
        while let Some((id, outcome)) = linked.take_merged() {
            match self.requests.answered(id, outcome) {
                DedupAnswer::Merged { merges, dropped } => {
                    self.counts.dropped += dropped;
                    left.extend(self.note(&merges, linked.link())?);
                }
                DedupAnswer::Refused(merges) => left.extend(self.refuse(&merges)),
                // Without the pool nothing can be requested, so it is offered again.
                DedupAnswer::NoPool => self.session = None,
                DedupAnswer::HasPool | DedupAnswer::Other => {}
            }
        }
        Ok(left)
    }

    /// Checks which of these pages share their slot now. Returns the slots of the others.
    fn note(&mut self, merges: &[MergeRequest], link: &Link) -> Result<Vec<u32>, LinkError> {
        let mut left = Vec::new();
        for &(page, target) in merges {
            match target {
                Target::Slot(slot) if link.page_state(page)? == PageState::Merged => {
                    self.book.merged(page, slot);
                    self.counts.merged += 1;
                }
                _ => {
                    self.book.refused(page);
                    self.sweep.forget(page);
                    left.extend(slot_of(&(page, target)));
                }
            }
        }
        Ok(left)
    }

    /// Records that these are not merged. Returns their slots.
    fn refuse(&mut self, merges: &[MergeRequest]) -> Vec<u32> {
        merges.iter().for_each(|(page, _)| self.book.refused(*page));
        merges.iter().filter_map(slot_of).collect()
    }

    /// The next window to scan; `None`: the pass is complete, and a new one begins.
    pub(super) fn next_window(&mut self) -> Option<Window> {
        let window = self.memory.window_at(self.scan.cursor());
        if self.scan.goes_to(window.as_ref()) {
            self.counts.pass_ends();
        }
        window
    }

    /// The next window to sweep; `None`: the sweep is complete.
    pub(super) fn next_swept(&mut self) -> Option<Window> {
        let window = self.memory.window_at(self.sweep.cursor());
        self.sweep.goes_to(window.as_ref().map(|window| window.first + window.count));
        window
    }

    /// Recalls due pages of a window that tracking has revoked; `true`: there are some. Untouched
    /// pages stay revoked for ever, and most identical pages are among them.
    pub(super) fn recalls(&self, window: &Window, linked: &mut Linked) -> Result<bool, LinkError> {
        let mut recalls = false;
        if linked.link().staged_pages()? == 0 {
            return Ok(false);
        }
        for page in
            window.pages().filter(|page| self.book.is_due_for_recall(*page, self.scan.pass()))
        {
            recalls |= linked.recall_if_revoked(page)?;
        }
        linked.recall()?;
        Ok(recalls)
    }

    /// Schedules another scan of a window whose pages are being recalled; `false`: the timeout in
    /// this pass has expired.
    pub(super) fn look_again(&mut self, window: &Window) -> bool {
        self.scan.again(window.first)
    }

    /// Selects the pages of a window to read, and finds merges that have ended. Returns their
    /// slots. Pages that share a slot of an unknown pool are counted as foreign.
    pub(super) fn look(
        &mut self,
        window: &mut Window,
        states: &[PageState],
        look: Look,
    ) -> Vec<u32> {
        let pass = self.scan.pass();
        if look == Look::Pass && window.is_still(states, &self.book, pass) {
            window.there = window.count;
            return Vec::new();
        }
        for part in self.memory.private(window) {
            window.is_huge |= part.huge;
            let first = usize::try_from((part.range.start - window.address) / PAGE).unwrap_or(0);
            let pages = usize::try_from(part.range.len / PAGE).unwrap_or(0);
            window.wanted.iter_mut().skip(first).take(pages).for_each(|wanted| *wanted = true);
        }
        let mut left = Vec::new();
        for ((page, state), wanted) in window.pages().zip(states).zip(&mut window.wanted) {
            window.there += u32::from(*wanted || *state == PageState::Merged);
            match state {
                // The guest has written it, or its neighbour, and it has its own copy. If the
                // shim cannot replace it, its state stays `Merged`.
                PageState::Merged if *wanted => {
                    left.extend(self.broke(page));
                    *wanted = false;
                }
                PageState::Merged => {
                    let is_ours = self.book.slot(page).is_some();
                    window.ours += u32::from(is_ours);
                    window.foreign += u32::from(!is_ours);
                }
                PageState::Plain
                    if self.book.slot(page).is_some() && *wanted && look != Look::Unshare =>
                {
                    left.extend(self.broke(page));
                    *wanted = false;
                }
                // Discarded, or unshared.
                PageState::Plain if self.book.slot(page).is_some() => {
                    left.extend(self.book.gone(page));
                }
                PageState::Plain if *wanted => {
                    *wanted = look == Look::Sweep || self.book.is_due(page, pass);
                }
                PageState::Plain => {
                    self.book.absent(page);
                    self.sweep.forget(page);
                }
                // A staged page was plain before, so it was copied or discarded.
                PageState::Staged if self.book.slot(page).is_some() => {
                    left.extend(self.book.gone(page));
                    *wanted = false;
                }
                // The guest has given it up, and may use it again; that is unknown until it is
                // taken.
                PageState::Freed => {
                    if self.book.slot(page).is_some() {
                        left.extend(self.book.gone(page));
                    }
                    self.book.absent(page);
                    *wanted = false;
                }
                PageState::Staged | PageState::Aside | PageState::Unknown => {
                    *wanted = false;
                }
            }
        }
        left
    }

    /// A merged page has a copy of its own. Returns the slot that it shared.
    fn broke(&mut self, page: u32) -> Option<u32> {
        let slot = self.book.broke(page);
        self.counts.broken += u64::from(slot.is_some());
        self.sweep.forget(page);
        slot
    }

    /// Requests copies of pages that must not be shared: all, or only those of another pool.
    pub(super) fn unshare(
        &mut self,
        window: &Window,
        everything: bool,
        link: &mut Link,
    ) -> Result<(), LinkError> {
        // While a merge is in flight, its pages look like pages of another pool.
        let foreign = if self.requests.is_merging() { 0 } else { window.foreign };
        self.counts.foreign.0 += u64::from(foreign);
        let ours = if everything { window.ours } else { 0 };
        if foreign + ours == 0 || !super::has_room() {
            return Ok(());
        }
        self.requests.unshare(window, link)
    }

    /// Whether it shares no page, as of the last pass.
    pub(super) fn is_unshared(&self) -> bool {
        let is_seen = self.scan.passes() > 1 && self.requests.is_idle();
        is_seen && self.book.merged_pages() == 0 && self.counts.foreign == (0, 0)
    }

    /// Drops the queued merges. Returns their slots.
    pub(super) fn drop_queue(&mut self) -> Vec<u32> {
        let queued = self.requests.drop_queue();
        self.refuse(&queued)
    }

    pub(super) fn queue(&mut self, page: u32, target: Target) {
        self.book.asked(page);
        self.requests.push((page, target));
    }

    /// Sends the queued merges, if the shim is not busy. Adds the slots of merges that are not sent
    /// to `left`.
    pub(super) fn send(&mut self, link: &mut Link, left: &mut Vec<u32>) -> Result<(), LinkError> {
        let mut not_sent = Vec::new();
        let sent = self.requests.send(self.book.merged_pages(), link, &mut not_sent);
        left.extend(self.refuse(&not_sent));
        sent
    }

    /// The present reading.
    pub(super) fn reading(&self, slots: Option<&Pool>) -> Reading<Dedup> {
        Reading::new(self.counts.value(&self.book, slots, self.scan.passes()), self.met)
    }
}
