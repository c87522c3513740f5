//! Dedup's state of one VM: scanned pages, merged pages, and requests in flight.

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use model::dedup::Dedup;
use model::{Bytes, Reading, Time};
use pages::dedup::{Book, Pool, Run, runs};
use protocol::layout::PageState;
use protocol::{Content, MAX_MERGE, Merge, Region};
use sys::clock::boot_now;
use sys::memory_map::{Pagemap, Range as Addresses};
use sys::pool_maps::Sharer;
use sys::process::{self, Identity};
use sys::remote_memory::RemoteMemory;

use super::super::granules::PAGE;
use super::super::link::{Link, LinkError};
use super::super::linked::Linked;
use super::asked::{DedupRequest, Target, Wish, slot_of, zeros};
use super::mappings::Mappings;
use super::regions::{address_of, page_at, page_count, rest_of_region};
use super::sweep::Sweep;
use super::window::Window;

/// Requests in flight: while one is processed, the next is queued there. Each has at most
/// `MAX_MERGE` pages, so no more runs, and takes a millisecond or two of the shim's control
/// thread.
const MOST_SENT: usize = 2;
/// The timeout for recalled pages.
const RECALL_PATIENCE: Duration = Duration::from_millis(100);
/// A window without due or changed pages is scanned in one of this number of passes.
const LOOKED_AT_EVERY: u32 = 8;
/// The pause after the shim has refused.
const REST: Duration = Duration::from_secs(2);

/// The purpose of scanning a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Read the pages that are due.
    Pass,
    /// Sample the pages that exist.
    Sweep,
    /// Copy shared pages.
    Unshare,
}

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
    /// Whether the shim of that connection has accepted the pool.
    has_pool: bool,
    process: OwnedFd,
    memory: RemoteMemory,
    pagemap: Pagemap,
    pub(super) regions: Vec<Region>,
    /// The next page to scan.
    cursor: u32,
    pub(super) sweep: Sweep,
    /// The window that is scanned again until its recalled pages are back, and since when.
    again: Option<(u32, Instant)>,
    queued: Vec<Wish>,
    /// Requests in flight, by their numbers on the connection of the last contact.
    sent: BTreeMap<u32, DedupRequest>,
    /// The end of the pause after a refusal, and the reason.
    rests: Option<(Instant, String)>,
    mappings: Mappings,
    counts: Counts,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    merged: u64,
    broken: u64,
    dropped: u64,
    passes: u64,
    /// Pages that share slots of another pool: in this pass so far, and in the last one.
    foreign: (u64, u64),
}

impl Vm {
    /// The VM of a live process that may be inspected.
    pub(super) fn open(process: Identity, regions: &[Region]) -> Option<Self> {
        let regions = regions.to_vec();
        let pid = process.pid;
        let (memory, pagemap) = (RemoteMemory::of(pid).ok()?, Pagemap::of(pid).ok()?);
        let mappings = Mappings::of(pid);
        // Last: if the process lives now, everything opened by its pid is its own.
        let process = process.hold().ok()??;
        Some(Self {
            first: 0,
            book: Book::new(page_count(&regions)),
            is_here: false,
            met: boot_now(),
            session: None,
            has_pool: false,
            process,
            memory,
            pagemap,
            regions,
            cursor: 0,
            sweep: Sweep::default(),
            again: None,
            queued: Vec::new(),
            sent: BTreeMap::new(),
            rests: None,
            mappings,
            counts: Counts::default(),
        })
    }

    /// Sets the VM's first page number in the group.
    pub(super) fn numbered_from(self, first: u32) -> Self {
        Self { first, ..self }
    }

    pub(super) fn has_ended(&self) -> bool {
        process::has_ended(&self.process)
    }

    /// Records that these pages share these slots, which an earlier worker has merged, and adds a
    /// reference for each page of the VM.
    pub(super) fn adopt(&mut self, sharers: &[Sharer], slots: &mut Pool) {
        for Sharer { address, slot } in sharers {
            if let Some(page) = page_at(&self.regions, *address)
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

    pub(super) fn pages(&self) -> u32 {
        self.book.pages()
    }

    /// The numbers of its pages in the group.
    pub(super) fn numbers(&self) -> Range<u32> {
        self.first..self.first + self.pages()
    }

    /// The slots that its pages share or may share.
    pub(super) fn references(&self) -> Vec<u32> {
        let under_way = self.queued.iter().chain(self.sent.values().flat_map(DedupRequest::wishes));
        self.book.slots().map(|(_, slot)| slot).chain(under_way.filter_map(slot_of)).collect()
    }

    pub(super) fn awaits_answer(&self) -> bool {
        !self.sent.is_empty() && self.is_awake()
    }

    pub(super) fn queued(&self) -> usize {
        self.queued.len() + self.sent.values().map(|asked| asked.wishes().len()).sum::<usize>()
    }

    /// Whether the shim has the pool and accepts merges.
    pub(super) fn is_ready(&self) -> bool {
        self.has_pool && self.is_awake()
    }

    /// Whether the shim accepts requests.
    pub(super) fn is_awake(&self) -> bool {
        self.rests.as_ref().is_none_or(|(until, _)| Instant::now() >= *until)
    }

    /// The reason why none of its pages is merged now, although its shim is connected.
    pub(super) fn why_not(&self) -> Option<String> {
        let rests = self.rests.as_ref().filter(|(until, _)| Instant::now() < *until);
        let rests = rests.map(|(_, why)| format!("resting: {why}"));
        rests.or_else(|| self.mappings.why_not())
    }

    pub(super) fn rest(&mut self, why: &impl ToString) {
        self.rests = Some((Instant::now() + REST, why.to_string()));
    }

    /// Handles a new connection: the page states give the outcome of requests in flight, and the
    /// regions may have changed. Returns the slots that are not shared after all.
    pub(super) fn meet_again(
        &mut self,
        session: u64,
        link: &mut Link,
    ) -> Result<Vec<u32>, LinkError> {
        let mut left = self.drop_queue();
        let sent = std::mem::take(&mut self.sent);
        let mut sent: Vec<_> = sent.into_values().flat_map(DedupRequest::into_wishes).collect();
        if self.regions != link.regions() {
            let old = std::mem::replace(&mut self.regions, link.regions().to_vec());
            left.extend(self.renumber(&old));
            self.sweep = Sweep::default();
            // The shim may have merged these before it reported the new regions.
            sent.retain_mut(|wish| {
                let page = self.page_now(&old, wish.0);
                left.extend(page.is_none().then(|| slot_of(wish)).flatten());
                wish.0 = page.unwrap_or_default();
                page.is_some()
            });
        }
        left.extend(self.note(&sent, link)?);
        self.session = Some(session);
        self.has_pool = false;
        self.rests = None;
        self.cursor = 0;
        Ok(left)
    }

    /// Gives the shim the pool.
    pub(super) fn use_pool(
        &mut self,
        link: &mut Link,
        file: BorrowedFd<'_>,
        slots: u32,
    ) -> Result<(), LinkError> {
        self.sent.insert(link.next_id(), DedupRequest::Pool);
        link.use_pool(file, slots)
    }

    /// Guest RAM was plugged or unplugged: pages have new numbers. Returns slots that are no
    /// longer shared.
    fn renumber(&mut self, old: &[Region]) -> Vec<u32> {
        let book = std::mem::replace(&mut self.book, Book::new(page_count(&self.regions)));
        let mut left = Vec::new();
        for (page, slot) in book.slots() {
            match self.page_now(old, page) {
                Some(page) => self.book.merged(page, slot),
                None => left.push(slot),
            }
        }
        left
    }

    /// The present number of a page that had this number in the old regions.
    fn page_now(&self, old: &[Region], page: u32) -> Option<u32> {
        page_at(&self.regions, address_of(old, page)?)
    }

    /// Processes the answers received. Returns the slots that are not shared after all.
    pub(super) fn settle(&mut self, linked: &mut Linked) -> Result<Vec<u32>, LinkError> {
        let mut left = Vec::new();
        while let Some((id, outcome)) = linked.take_merged() {
            match (self.sent.remove(&id), outcome) {
                (Some(DedupRequest::Merge(wishes)), Ok(merged)) => {
                    self.counts.dropped += u64::from(merged.dropped).min(zeros(&wishes));
                    left.extend(self.note(&wishes, linked.link())?);
                }
                (Some(DedupRequest::Merge(wishes)), Err(why)) => {
                    self.rest(&why);
                    left.extend(self.refuse(&wishes));
                }
                (Some(DedupRequest::Pool), Ok(_)) => self.has_pool = true,
                // Without the pool nothing can be requested, so it is offered again.
                (Some(DedupRequest::Pool), Err(why)) => {
                    self.rest(&why);
                    self.session = None;
                }
                // The next scan sees which pages have copies now.
                (Some(DedupRequest::Unshare), Ok(_)) => {}
                (Some(DedupRequest::Unshare), Err(why)) => self.rest(&why),
                // An answer to a request that is no longer tracked here.
                (None, _) => {}
            }
        }
        Ok(left)
    }

    /// Checks which of these pages share their slot now. Returns the slots of the others.
    fn note(&mut self, wishes: &[Wish], link: &Link) -> Result<Vec<u32>, LinkError> {
        let mut left = Vec::new();
        for &(page, target) in wishes {
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
    fn refuse(&mut self, wishes: &[Wish]) -> Vec<u32> {
        wishes.iter().for_each(|(page, _)| self.book.refused(*page));
        wishes.iter().filter_map(slot_of).collect()
    }

    /// The next window to scan; `None`: the pass is complete, and a new one begins.
    pub(super) fn next_window(&mut self) -> Option<Window> {
        let Some(window) = self.window_at(self.cursor) else {
            self.cursor = 0;
            self.again = None;
            self.counts.passes += 1;
            self.counts.foreign = (0, self.counts.foreign.0);
            return None;
        };
        self.cursor = window.first + window.count;
        Some(window)
    }

    /// The next window to sweep; `None`: the sweep is complete.
    pub(super) fn next_swept(&mut self) -> Option<Window> {
        let window = self.window_at(self.sweep.cursor());
        self.sweep.goes_to(window.as_ref().map(|window| window.first + window.count));
        window
    }

    /// The window that begins with this page; `None`: there is no such page.
    fn window_at(&self, cursor: u32) -> Option<Window> {
        let ends_later = |region: &&Region| region.first_page + region.pages > cursor;
        let region = self.regions.iter().find(ends_later)?;
        let first = cursor.max(region.first_page);
        let to_border = Window::PAGES - first % Window::PAGES;
        let count = to_border.min(region.first_page + region.pages - first);
        let address = region.address + u64::from(first - region.first_page) * PAGE;
        let wanted = vec![false; count as usize];
        let (is_huge, there, ours, foreign) = (false, 0, 0, 0);
        Some(Window { first, is_huge, there, ours, foreign, address, count, wanted })
    }

    #[expect(clippy::cast_possible_truncation, reason = "its low bits are meant")]
    fn pass(&self) -> u32 {
        self.counts.passes as u32
    }

    /// Recalls due pages of a window that tracking has revoked; `true`: there are some. Untouched
    /// pages stay revoked for ever, and most identical pages are among them.
    pub(super) fn recalls(&self, window: &Window, linked: &mut Linked) -> Result<bool, LinkError> {
        let mut recalls = false;
        if linked.link().staged_pages()? == 0 {
            return Ok(false);
        }
        for page in window.pages().filter(|page| self.book.is_due_for_recall(*page, self.pass())) {
            recalls |= linked.is_revoked(page)?;
        }
        linked.recall()?;
        Ok(recalls)
    }

    /// Schedules another scan of a window whose pages are being recalled; `false`: the timeout in
    /// this pass has expired.
    pub(super) fn look_again(&mut self, window: &Window) -> bool {
        let same = |(first, _): &(u32, Instant)| *first == window.first;
        let since = self.again.filter(same).map_or_else(Instant::now, |(_, since)| since);
        self.again = Some((window.first, since));
        let is_soon = since.elapsed() < RECALL_PATIENCE;
        if is_soon {
            self.cursor = window.first;
        }
        is_soon
    }

    /// Selects the pages of a window to read, and finds merges that have ended. Returns their
    /// slots. Pages that share a slot of an unknown pool are counted as foreign.
    pub(super) fn look(
        &mut self,
        window: &mut Window,
        states: &[PageState],
        look: Look,
    ) -> Vec<u32> {
        let pass = self.pass();
        if look == Look::Pass && self.is_still(window, states, pass) {
            window.there = window.count;
            return Vec::new();
        }
        let addresses = Addresses { start: window.address, len: u64::from(window.count) * PAGE };
        // A process that has ended has no pages.
        let private = self.pagemap.private(addresses).unwrap_or_default();
        for part in &private {
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

    /// Whether a window has no page to read and, by the page states, no change. It is scanned
    /// occasionally all the same: if the shim cannot replace a shared page, it does not report a
    /// guest's write to it.
    fn is_still(&self, window: &Window, states: &[PageState], pass: u32) -> bool {
        !pass.wrapping_add(window.first / Window::PAGES).is_multiple_of(LOOKED_AT_EVERY)
            && window.pages().zip(states).all(|(page, state)| match state {
                PageState::Merged => self.book.slot(page).is_some(),
                PageState::Plain => self.book.rests(page, pass),
                _ => false,
            })
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
        let is_merging = self.sent.values().any(|asked| !asked.wishes().is_empty());
        let foreign = if is_merging { 0 } else { window.foreign };
        self.counts.foreign.0 += u64::from(foreign);
        let ours = if everything { window.ours } else { 0 };
        if foreign + ours == 0 || self.sent.len() >= MOST_SENT || !super::has_room() {
            return Ok(());
        }
        self.sent.insert(link.next_id(), DedupRequest::Unshare);
        link.unshare(window.first, window.count)
    }

    /// Whether it shares no page, as of the last pass.
    pub(super) fn is_unshared(&self) -> bool {
        let is_seen = self.counts.passes > 1 && self.sent.is_empty();
        is_seen && self.book.merged_pages() == 0 && self.counts.foreign == (0, 0)
    }

    /// Drops the queued merges. Returns their slots.
    pub(super) fn drop_queue(&mut self) -> Vec<u32> {
        let queued: Vec<_> = self.queued.drain(..).collect();
        self.refuse(&queued)
    }

    /// Reads the word at each of these addresses, up to the first unreadable one.
    pub(super) fn read_words(&self, addresses: &[u64]) -> Vec<u64> {
        self.memory.read_words(addresses)
    }

    /// Reads pages; returns the number of bytes.
    pub(super) fn read(&self, page: u32, bytes: &mut [u8]) -> usize {
        address_of(&self.regions, page).map_or(0, |address| self.memory.read(address, bytes))
    }

    /// Reads this page and the existing ones after it; returns the number of bytes.
    pub(super) fn read_there(&self, page: u32, bytes: &mut [u8]) -> usize {
        let Some((start, pages)) = rest_of_region(&self.regions, page) else { return 0 };
        let most = bytes.len().min(usize::try_from(u64::from(pages) * PAGE).unwrap_or(usize::MAX));
        let bytes = &mut bytes[..most];
        // Reading a hole would fill it.
        let there = self.pagemap.private(Addresses { start, len: bytes.len() as u64 });
        let first = there.unwrap_or_default().first().map(|part| part.range);
        let len = first.filter(|first| first.start == start).map_or(0, |first| first.len);
        let len = usize::try_from(len).unwrap_or(0).min(bytes.len());
        // Content for the pool must equal the result, so it must not come from another program
        // that QEMU may have executed.
        self.memory.read_original(start, &mut bytes[..len])
    }

    pub(super) fn queue(&mut self, page: u32, target: Target) {
        self.book.asked(page);
        self.queued.push((page, target));
    }

    /// Sends the queued merges, if the shim is not busy. Adds slots that will not be shared to
    /// `left`: their runs are too short for the mappings that QEMU has left.
    pub(super) fn send(&mut self, link: &mut Link, left: &mut Vec<u32>) -> Result<(), LinkError> {
        if self.sent.len() >= MOST_SENT || self.queued.is_empty() {
            return Ok(());
        }
        // Sorted by page, so that neighbours become one mapping.
        self.queued.sort_by_key(|(page, _)| *page);
        let rest = self.queued.split_off(self.queued.len().min(MAX_MERGE));
        let queued = std::mem::replace(&mut self.queued, rest);
        // A page that is merged already and was written since would look as if it were merged
        // now.
        let (queued, other): (Vec<Wish>, Vec<Wish>) = queued
            .into_iter()
            .partition(|wish| matches!(link.page_state(wish.0), Ok(PageState::Plain)));
        left.extend(self.refuse(&other));
        let slots: Vec<_> =
            queued.iter().filter_map(|wish| Some((wish.0, slot_of(wish)?))).collect();
        let (mut asked, mut wishes) = (Vec::new(), Vec::new());
        let count = |length: usize| u32::try_from(length).unwrap_or(u32::MAX);
        let runs: Vec<Run> = runs(&slots).collect();
        let shared = self.book.merged_pages().saturating_add(count(slots.len()));
        let least = self.mappings.least_run(count(runs.len()), shared).unwrap_or(u32::MAX);
        for Run { page, slot, len } in runs {
            let of_run = (page..page + len).zip((slot..slot + len).map(Target::Slot));
            if len >= least {
                self.mappings.more(2);
                wishes.extend(of_run);
                asked.push(Merge { page, pages: len, content: Content::Slot(slot) });
            } else {
                left.extend(self.refuse(&of_run.collect::<Vec<_>>()));
            }
        }
        let zeros: Vec<_> = queued.into_iter().filter(|wish| wish.1 == Target::Zeros).collect();
        for run in zeros.chunk_by(|wish, next| wish.0 + 1 == next.0) {
            let pages = u32::try_from(run.len()).unwrap_or(0);
            asked.push(Merge { page: run[0].0, pages, content: Content::Zeros });
        }
        wishes.extend(zeros);
        if asked.is_empty() {
            return Ok(());
        }
        self.sent.insert(link.next_id(), DedupRequest::Merge(wishes));
        link.merge(asked)
    }

    /// The present reading.
    pub(super) fn reading(&self, slots: Option<&Pool>) -> Reading<Dedup> {
        let bytes = |pages: u64| Bytes(pages * PAGE);
        let saved: f64 = self
            .book
            .slots()
            .map(|(_, slot)| 1.0 - 1.0 / f64::from(slots.map_or(1, |all| all.sharers(slot)).max(1)))
            .sum();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a VM's pages")]
        let saved = saved as u64;
        let value = Dedup {
            shared: bytes(u64::from(self.book.merged_pages()) + self.counts.foreign.1),
            saved: bytes(saved),
            merged: bytes(self.counts.merged),
            broken: bytes(self.counts.broken),
            dropped: bytes(self.counts.dropped),
            passes: self.counts.passes,
        };
        Reading::new(value, self.met)
    }
}
