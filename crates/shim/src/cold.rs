//! Cold memory: to the host's swap, and back.
//!
//! **Problem.** Revoked memory that stays untouched for long could serve other VMs. The guest alone
//! could give it up, page by page, and would get it back from a disk of its own. **Idea.** The
//! kernel pages out the buffer's pages (`MADV_PAGEOUT`) to the operator's swap: compressed memory,
//! or a disk. A touch traps as before. Swap entries are moved into place like pages
//! (`UFFDIO_MOVE`), the guest's thread goes on, and the kernel reads the touched page. The other
//! pages stay out until their own touch: granules go out, pages come back. Reading the rest at once
//! would fill memory with pages that the guest may not want, or the kernel's swap cache, which is
//! charged to no group and never paged out again.
//!
//! **Invariants.** No page changes its place here, so none can be lost: the kernel keeps the
//! content. The lock is not held while the kernel pages, for it may wait for a disk. Only pages in
//! swap are read (a hole would trap), and only while the host has memory for them ([`SPARED`]).
//!
//! **Leaves out.** Which granules, and when: the worker's. Pages that the kernel swaps out by
//! itself: they are read when all is ([`read_all`]), and are not told of.
//!
//! **Cost**: 3 to 5 µs of CPU a page to page out into compressed memory, 1.7 to be read in bulk,
//! 3.5 at a touch.
//!
//! Source: Waldspurger 2002 §3 (ballooning against paging by the host); Wang 2016 §3.6.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use protocol::Refusal;
use sys::meminfo::MemInfo;
use sys::memory_map::{Advice, HUGE_PAGE_BYTES, Range, advise};

use crate::engine::{self, is_on, lock, words};
use crate::ram::end;
use crate::time::now;
use crate::tracker;

/// How long one request pages out, or reads, at most: a disk may be slow, and a worker that hears
/// nothing for two seconds is taken for gone, and so is a shim.
const TURN: Duration = Duration::from_millis(100);
/// The host keeps a 32nd of its memory available while memory is read back.
const SPARED: u64 = 32;
/// How often it is asked what it has available, in bytes that were read.
const ASK_EVERY: u64 = 16 << 20;

/// Whether anything was ever paged out.
static HAS_PAGED_OUT: AtomicBool = AtomicBool::new(false);

/// Whether anything was ever paged out.
pub(crate) fn has_paged_out() -> bool {
    HAS_PAGED_OUT.load(Ordering::Relaxed)
}

/// Has the kernel page out what of these granules is staged, as long as that is wanted and for
/// [`TURN`] at most; answers to how many of them it came.
pub(crate) fn page_out(granules: &[u32], is_wanted: impl Fn() -> bool) -> Result<u32, Refusal> {
    if let (state, false) = is_on() {
        return Err(Refusal::NotTracking { why: words(&state) });
    }
    HAS_PAGED_OUT.store(true, Ordering::Relaxed);
    let (began, mut done) = (now(), 0);
    for &granule in granules {
        if now().since(began) > TURN || !is_wanted() {
            break;
        }
        for part in staged_of(granule) {
            // SAFETY: it discards nothing. Should it have been moved home meanwhile, there is
            // nothing, or memory of QEMU's that stays what it is.
            let _ = unsafe { advise(part, Advice::LinuxPageOut) };
        }
        let engine = lock();
        if let (Some(tracker), Some(channel)) = (&engine.tracker, &engine.channel) {
            tracker.note_out(channel, granule);
        }
        done += 1;
    }
    Ok(done)
}

fn staged_of(granule: u32) -> Vec<Range> {
    let engine = lock();
    match (&engine.tracker, &engine.channel) {
        (Some(tracker), Some(channel)) => tracker.staged_of(channel, granule),
        _ => Vec::new(),
    }
}

/// Moves granules back, and reads their paged-out pages for [`TURN`] at most; the kernel reads the
/// rest at a touch. Returns the number of granules that were revoked.
pub(crate) fn recall(granules: &[u32], is_wanted: impl Fn() -> bool) -> Result<u32, Refusal> {
    let mut out = Vec::new();
    let count = engine::recall(granules, |range| out.push(range))?;
    let (began, mut reading) = (now(), Reading::default());
    for range in out {
        if now().since(began) > TURN || !is_wanted() || !reading.read(range) {
            break;
        }
    }
    Ok(count)
}

/// Reads all of guest RAM that is in swap, as long as that is wanted. Nothing is staged.
pub(crate) fn read_all(is_wanted: impl Fn() -> bool) {
    let regions = lock().regions();
    let mut reading = Reading::default();
    for region in regions {
        let whole = Range { start: region.address, len: u64::from(region.pages) << 12 };
        let mut block = Range { len: 0, ..whole };
        while end(block) < end(whole) {
            let start = end(block);
            block = Range { start, len: (end(whole) - start).min(HUGE_PAGE_BYTES) };
            if !is_wanted() || !reading.read(block) {
                return;
            }
        }
    }
}

/// Reading in bulk, while the host has memory for it.
#[derive(Default)]
struct Reading {
    /// Bytes that may be read before the host is asked again.
    allowed: u64,
}

impl Reading {
    /// Reads what of `range`, of 512 pages at most, is in swap; `false`: the host has no memory for
    /// that, or is not asked.
    fn read(&mut self, range: Range) -> bool {
        let Some(swapped) = tracker::pagemap().and_then(|it| it.swapped_set(range).ok()) else {
            return false;
        };
        for part in swapped.parts(range) {
            if part.len > self.allowed {
                let Ok(host) = MemInfo::read() else { return false };
                let spared = host.total.0 / SPARED;
                if host.available.0.saturating_sub(spared) < part.len.max(ASK_EVERY) {
                    return false;
                }
                self.allowed = part.len.max(ASK_EVERY);
            }
            self.allowed -= part.len;
            // A page that has been discarded meanwhile traps, and the fault thread fills its place.
            // SAFETY: it changes no content.
            let _ = unsafe { advise(part, Advice::LinuxPopulateRead) };
        }
        true
    }
}
