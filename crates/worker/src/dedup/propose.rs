//! Proposes merges of pages with equal content.
//!
//! Reads the wanted pages of a window. A hash shows where the same content may be: in the pool,
//! or in another page, which is read again before both get a slot. The shims compare before
//! anything is shared.

use std::ops::Range;

use pages::dedup::{ContentLocation, Verdict};
use sys::memory_map::{PAGE_LEN, is_zeros};
use sys::pool_file::Page;

use super::super::tracked::Tracked;
use super::Dedup;
use super::buffer::{Buffer, Kept};
use super::requests::Target;
use super::vm::Vm;
use super::window::Window;

/// The least pages saved for which a huge page is split: 1 of 64.
const LEAST_IN_HUGE_PAGE: usize = 8;
/// Pages that are read together when one of them is needed.
const AHEAD: usize = 16;

/// Pages with a twin: at most all of a window.
pub(super) type KeptPages = Kept<{ Window::PAGES as usize }>;

/// A page that could be merged.
struct Candidate {
    page: u32,
    /// The hash of its content, which is kept; `None`: zeros.
    hash: Option<u64>,
}

impl Dedup {
    /// Reads a window and queues merges of pages with a twin; `true`: some twins are revoked, and
    /// are being recalled.
    pub(super) fn propose(&mut self, pid: u32, window: &Window, vms: &mut [&mut Tracked]) -> bool {
        let mut recalls = false;
        self.ahead.forget();
        let mut kept = std::mem::take(&mut self.kept);
        let candidates = self.candidates(pid, window, &mut kept);
        if !window.is_huge || candidates.len() >= LEAST_IN_HUGE_PAGE {
            let mut contents = kept.pages();
            for Candidate { page, hash } in candidates {
                match hash {
                    None => self.queue(pid, page, Target::Zeros),
                    Some(hash) => {
                        let Some(content) = contents.next() else { break };
                        recalls |= self.merge(pid, page, hash, content, vms);
                    }
                }
            }
        }
        kept.empty();
        self.kept = kept;
        recalls
    }

    /// Finds pages with a twin, and keeps their content. Usually few pages have one, and the
    /// others need not leave the CPU's cache.
    fn candidates(&mut self, pid: u32, window: &Window, kept: &mut KeptPages) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let Some(vm) = self.vms.get_mut(&pid) else { return candidates };
        let buffer = self.buffer.bytes_mut();
        for run in window.runs() {
            let Some(bytes) = buffer.get_mut(..run.len() * PAGE_LEN) else { break };
            let read = vm.memory.read(run.start, bytes);
            for (page, content) in run.zip(bytes[..read].chunks_exact(PAGE_LEN)) {
                let hash = (!is_zeros(content)).then(|| (self.hash)(content, self.seed));
                if vm.book.look(page, hash.unwrap_or(0)) != Verdict::Offer {
                    continue;
                }
                let number = vm.first + page;
                let is_found = hash.is_none_or(|hash| self.index.meet(hash, number).is_some());
                if is_found && (hash.is_none() || kept.push(content)) {
                    candidates.push(Candidate { page, hash });
                }
            }
        }
        candidates
    }

    /// Queues the merge of a page, if its twin really is where the index says; `true`: the twin
    /// is revoked, and is being recalled.
    fn merge(
        &mut self,
        pid: u32,
        page: u32,
        hash: u64,
        content: &Page,
        vms: &mut [&mut Tracked],
    ) -> bool {
        let Some(number) = self.vms.get(&pid).map(|vm| vm.first + page) else { return false };
        match self.index.find(hash) {
            Some(ContentLocation::Pool(slot)) => {
                if let Some(store) = &mut self.store
                    && store.slots.hash(slot) == Some(hash)
                {
                    store.slots.share(slot);
                    self.queue(pid, page, Target::Slot(slot));
                }
            }
            Some(ContentLocation::Guest(twin)) if twin != number => {
                match self.twin(twin, content, vms) {
                    Twin::Found(twin_pid, twin_page) => {
                        self.pair(hash, content, [(twin_pid, twin_page), (pid, page)]);
                    }
                    Twin::Recalled => return true,
                    Twin::None => {
                        self.index.set(hash, ContentLocation::Guest(number));
                    }
                }
            }
            _ => {}
        }
        false
    }

    /// Gives two pages with this content a slot.
    fn pair(&mut self, hash: u64, content: &Page, pages: [(u32, u32); 2]) {
        let Some(store) = &mut self.store else { return };
        let Some(slot) = store.slots.take(hash) else { return };
        if store.file.write(slot, content).is_err()
            || !self.index.set(hash, ContentLocation::Pool(slot))
        {
            self.leave(slot);
            return;
        }
        store.slots.share(slot);
        for (pid, page) in pages {
            self.queue(pid, page, Target::Slot(slot));
        }
    }

    /// Checks that the page of this number still has this content and can be merged. A page that
    /// is about to share another slot, or that was discarded and filled again since its scan,
    /// would lose the reference to that slot.
    fn twin(&mut self, number: u32, content: &Page, vms: &mut [&mut Tracked]) -> Twin {
        let Self { vms: members, leaving, ahead, .. } = self;
        let found = members.iter().find(|(_, vm)| vm.numbers().contains(&number));
        let Some((&pid, vm)) = found else { return Twin::None };
        let page = number - vm.first;
        if !vm.is_here || leaving.contains(&pid) || !vm.book.is_free(page) {
            return Twin::None;
        }
        if ahead.page(pid, page).is_none() && !ahead.read(pid, vm, page) {
            let tracked = vms.iter_mut().find(|tracked| tracked.pid() == pid);
            let recalls = tracked.and_then(|tracked| {
                tracked.with_shim(|linked, _| {
                    let is_out = linked.recall_if_revoked(page)?;
                    linked.recall()?;
                    Ok(is_out)
                })
            });
            return if recalls == Some(true) { Twin::Recalled } else { Twin::None };
        }
        if ahead.page(pid, page) == Some(content) { Twin::Found(pid, page) } else { Twin::None }
    }
}

/// The state of the page that the index names.
enum Twin {
    /// It is this one, of this process.
    Found(u32, u32),
    /// It is revoked, and is being recalled.
    Recalled,
    /// It is no longer valid.
    None,
}

/// Pages of a VM that were read together: if one has a twin, the next ones usually have theirs
/// next to it.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    pid: u32,
    pages: Range<u32>,
    bytes: Buffer<AHEAD>,
}

impl Ahead {
    /// Reads this page and the existing ones after it; `false`: it does not exist.
    fn read(&mut self, pid: u32, vm: &Vm, page: u32) -> bool {
        let read = vm.memory.read_there(page, self.bytes.bytes_mut()) / PAGE_LEN;
        self.pid = pid;
        self.pages = page..page + u32::try_from(read).unwrap_or(0);
        read > 0
    }

    fn page(&self, pid: u32, page: u32) -> Option<&[u8]> {
        let is_read = self.pid == pid && self.pages.contains(&page);
        let at = is_read.then(|| (page - self.pages.start) as usize * PAGE_LEN)?;
        self.bytes.bytes().get(at..at + PAGE_LEN)
    }

    /// Discards the pages read, which may have changed.
    fn forget(&mut self) {
        self.pages = Range::default();
    }
}
