//! Pages that a tormentor has the shim share: their content of a moment ago, in a pool of its
//! own.
//!
//! The memory is written all the time, so some pages are unchanged when the shim checks them, and
//! some are not. A slot is used once: the number of its sharers does not matter here. When a
//! tormentor ends, its pool lives on in the mappings, like that of a dead worker.

use std::os::fd::OwnedFd;

use protocol::{Content, Merge, Region};
use sys::memory_map::{PAGE_BYTES, PAGE_LEN};
use sys::pool_file::PoolFile;
use sys::remote_memory::RemoteMemory;

use crate::random::Random;

/// Slots of a tormentor's pool: 8 MiB.
pub(crate) const SLOTS: u32 = 2048;
/// The most pages in a run.
const LONGEST: u64 = 80;

/// The source of the pages, and the pool.
pub(crate) struct Sharing {
    memory: RemoteMemory,
    pool: PoolFile,
    /// The first slot that was never used.
    next: u32,
}

impl Sharing {
    /// For the shim of this process; `None` when the process is gone.
    pub(crate) fn with(pid: u32) -> Option<Self> {
        let memory = RemoteMemory::of(pid).ok()?;
        let pool = PoolFile::create("torment", SLOTS).ok()?;
        Some(Self { memory, pool, next: 0 })
    }

    /// The pool's descriptor for a shim.
    pub(crate) fn pool(&self) -> Option<OwnedFd> {
        self.pool.reader().ok()
    }

    /// Some pages and slots that have, or had just now, the same content; `None` when there are
    /// no slots left.
    pub(crate) fn any_run(&mut self, random: &mut Random, regions: &[Region]) -> Option<Merge> {
        let (first, pages) = any_pages(random, regions, LONGEST)?;
        let pages = pages.min(SLOTS - self.next);
        let region = regions.iter().rfind(|region| region.first_page <= first)?;
        let address = region.address + u64::from(first - region.first_page) * PAGE_BYTES;
        let run = Merge { page: first, pages, content: Content::Slot(self.next) };
        for (page, slot) in (0..u64::from(pages)).zip(self.next..) {
            let mut bytes = [0; PAGE_LEN];
            // A page that cannot be read has been unplugged.
            self.memory.read(address + page * PAGE_BYTES, &mut bytes);
            self.pool.write(slot, &bytes).ok()?;
        }
        self.next += pages;
        (pages > 0).then_some(run)
    }
}

/// Some pages of a region, at most `most`.
pub(crate) fn any_pages(random: &mut Random, regions: &[Region], most: u64) -> Option<(u32, u32)> {
    let last = regions.len().checked_sub(1)?;
    let region = regions[usize::try_from(random.between(0, last as u64)).ok()?];
    let at = random.between(0, u64::from(region.pages) - 1);
    let pages = random.between(1, most).min(u64::from(region.pages) - at);
    Some((region.first_page + u32::try_from(at).ok()?, u32::try_from(pages).ok()?))
}
