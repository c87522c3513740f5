//! What is found elsewhere is proposed for a merge.
//!
//! Reads what is to be read of a window. A hash says where the same may lie: in the pool, or in
//! another page, which is read again before both get a slot. The shims compare before anything is
//! shared.

use std::ops::Range;

use pages::dedup::{Place, Verdict};
use sys::memory_map::{PAGE_LEN, is_zeros};
use sys::pool_file::Page;

use super::super::tracked::Tracked;
use super::Dedup;
use super::asked::Target;
use super::buffer::{Buffer, Kept};
use super::vm::Vm;
use super::window::Window;

/// A huge page is split for so many pages saved: 1 of 64.
const LEAST_IN_HUGE_PAGE: usize = 8;
/// Pages that are read together where one of them is looked for.
const AHEAD: usize = 16;

/// Pages that were found elsewhere: at most all of a window.
pub(super) type KeptPages = Kept<{ Window::PAGES as usize }>;

/// A page that could be merged.
struct Candidate {
    page: u32,
    /// That of its content, which is kept; `None`: zeros.
    hash: Option<u64>,
}

impl Dedup {
    /// Reads a window and has merged what is found elsewhere; `true`: something of that is out of
    /// reach, and recalled.
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

    /// What is found elsewhere, its content kept: of what is read, little is the same as a rule,
    /// and the rest need not leave the CPU's cache.
    fn candidates(&mut self, pid: u32, window: &Window, kept: &mut KeptPages) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        let Some(vm) = self.vms.get_mut(&pid) else { return candidates };
        let buffer = self.buffer.bytes_mut();
        for run in window.runs() {
            let Some(bytes) = buffer.get_mut(..run.len() * PAGE_LEN) else { break };
            let read = vm.read(run.start, bytes);
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

    /// Has a page merged, if the same is really to be found where the index says; `true`: that is
    /// out of reach, and recalled.
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
            Some(Place::Pool(slot)) => {
                if let Some(store) = &mut self.store
                    && store.slots.hash(slot) == Some(hash)
                {
                    store.slots.share(slot);
                    self.queue(pid, page, Target::Slot(slot));
                }
            }
            Some(Place::Guest(twin)) if twin != number => match self.twin(twin, content, vms) {
                Twin::Found(twin_pid, twin_page) => {
                    self.pair(hash, content, [(twin_pid, twin_page), (pid, page)]);
                }
                Twin::Recalled => return true,
                Twin::None => {
                    self.index.set(hash, Place::Guest(number));
                }
            },
            _ => {}
        }
        false
    }

    /// Two pages with this content get a slot.
    fn pair(&mut self, hash: u64, content: &Page, pages: [(u32, u32); 2]) {
        let Some(store) = &mut self.store else { return };
        let Some(slot) = store.slots.take(hash) else { return };
        if store.file.write(slot, content).is_err() || !self.index.set(hash, Place::Pool(slot)) {
            self.leave(slot);
            return;
        }
        store.slots.share(slot);
        for (pid, page) in pages {
            self.queue(pid, page, Target::Slot(slot));
        }
    }

    /// The page of this number, if it still holds that and can be merged. One that is about to
    /// share another slot, or that was discarded and filled again since it was looked at, would
    /// lose count of that slot.
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
                    let is_out = linked.is_out_of_reach(page)?;
                    linked.recall()?;
                    Ok(is_out)
                })
            });
            return if recalls == Some(true) { Twin::Recalled } else { Twin::None };
        }
        if ahead.page(pid, page) == Some(content) { Twin::Found(pid, page) } else { Twin::None }
    }
}

/// What became of the page that the index names.
enum Twin {
    /// It is this one, of this process.
    Found(u32, u32),
    /// It is out of reach, and on its way back.
    Recalled,
    /// There is none any more.
    None,
}

/// Pages of a VM that were read together, for where one has a twin, the next ones have theirs as a
/// rule.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    pid: u32,
    pages: Range<u32>,
    bytes: Buffer<AHEAD>,
}

impl Ahead {
    /// Reads this page, and what is there behind it; `false`: it is not there.
    fn read(&mut self, pid: u32, vm: &Vm, page: u32) -> bool {
        let read = vm.read_there(page, self.bytes.bytes_mut()) / PAGE_LEN;
        self.pid = pid;
        self.pages = page..page + u32::try_from(read).unwrap_or(0);
        read > 0
    }

    fn page(&self, pid: u32, page: u32) -> Option<&[u8]> {
        let is_read = self.pid == pid && self.pages.contains(&page);
        let at = is_read.then(|| (page - self.pages.start) as usize * PAGE_LEN)?;
        self.bytes.bytes().get(at..at + PAGE_LEN)
    }

    /// What was read may have changed.
    fn forget(&mut self) {
        self.pages = Range::default();
    }
}
