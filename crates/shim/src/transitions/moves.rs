//! The moves that the steps are made of: each moves, copies or discards what it can, and asks the
//! page tables where the content is.

use rustix::io::Errno;
use sys::memory_map::{PAGE_BYTES, PageSet, Range};

use super::way::RangeProgress;
use super::{Given, Kernel, PageRun, TRIES, TWO_PLACES};
use crate::retries::HOLD;

/// The result of taking.
pub(super) enum TakeOutcome {
    /// Nothing was tried: the other place is not known to be empty.
    Nothing,
    /// The pages that have content in the other place now, and those that have it in place.
    Known { there: PageSet, left: PageSet },
    /// The page tables could not be asked afterwards.
    Unknown,
}

/// Moves as much as possible of `run` away. Pinned pages stay; pages that the kernel is busy with
/// are retried a few times.
///
/// # Safety
/// Both ranges are registered, and a thread that touches a page that is away is served after
/// this.
pub(super) unsafe fn take<K: Kernel>(kernel: &K, run: PageRun) -> TakeOutcome {
    // Content that is already there would pass for these pages.
    if !kernel.populated(run.place()).is_ok_and(|there| there.is_empty()) {
        return TakeOutcome::Nothing;
    }
    let (mut way, mut tries) = (RangeProgress::new(run.home.len), 0);
    while let Some((at, len)) = way.next() {
        // SAFETY: as the caller promises.
        let progress = unsafe { kernel.move_pages(run.away + at, run.home.start + at, len) };
        match way.went(progress) {
            None => tries = 0,
            Some(Errno::AGAIN) if tries < TRIES => tries += 1,
            Some(_) => {
                way.skip();
                tries = 0;
            }
        }
    }
    match (kernel.populated(run.place()), kernel.populated(run.home)) {
        (Ok(there), Ok(left)) if there.meets(&left) => kernel.end(TWO_PLACES, Errno::EXIST),
        (Ok(there), Ok(left)) => TakeOutcome::Known { there, left },
        _ => TakeOutcome::Unknown,
    }
}

/// Moves back the pages of `run` that are away.
///
/// # Safety
/// The content that is away belongs to this run, and both ranges are registered.
pub(super) unsafe fn give<K: Kernel>(kernel: &K, run: PageRun) -> Given {
    let (mut way, mut moved) = (RangeProgress::new(run.home.len), 0);
    let (mut until, mut pauses) = (None, 0);
    while let Some((at, len)) = way.next() {
        // SAFETY: as the caller promises.
        let progress = unsafe { kernel.move_pages(run.home.start + at, run.away + at, len) };
        moved += progress.bytes / PAGE_BYTES;
        let Some(errno) = way.went(progress) else { continue };
        match errno {
            // QEMU is ending: there is no address space left to move pages into.
            Errno::SRCH => return Given { moved, away: PageSet::default() },
            // The page had stayed, or is back already: the page tables will tell.
            Errno::EXIST | Errno::NOENT => way.skip(),
            Errno::AGAIN => {
                let until = *until.get_or_insert_with(|| kernel.now().after(HOLD));
                if kernel.now() < until {
                    kernel.pause(pauses);
                    pauses += 1;
                } else {
                    way.skip();
                }
            }
            _ => {
                let page = Range { start: run.home.start + at, len: PAGE_BYTES };
                // SAFETY: the page belongs there.
                moved += u64::from(unsafe { copy_home(kernel, page, run.away + at) });
                way.skip();
            }
        }
    }
    let away = match kernel.populated(run.place()) {
        Ok(away) if away.is_empty() => away,
        Ok(away) => {
            if kernel.populated(run.home).is_ok_and(|at_home| at_home.meets(&away)) {
                kernel.end(TWO_PLACES, Errno::EXIST);
            }
            away
        }
        // The page tables will be asked again.
        Err(_) => {
            let mut all = PageSet::default();
            all.add(run.home, run.home);
            all
        }
    };
    kernel.tried(run.home, &away);
    Given { moved, away }
}

/// Copies a page that cannot be moved, for example because the kernel has merged it with others.
/// Returns whether it was copied.
///
/// # Safety
/// The page at `from`, if there is one, belongs at `home`.
unsafe fn copy_home<K: Kernel>(kernel: &K, home: Range, from: u64) -> bool {
    let from = Range { start: from, len: home.len };
    // Copying from a hole would be a fault that waits for the thread that is copying.
    if !kernel.populated(from).is_ok_and(|there| there.count() == 1) {
        return false;
    }
    // SAFETY: as the caller promises.
    if unsafe { kernel.copy_pages(home.start, from.start, home.len) }.stopped.is_some() {
        return false;
    }
    // SAFETY: the content is in place. If this fails, the page is in two places, and `give`
    // reports that.
    let _ = unsafe { discard(kernel, from) };
    true
}

/// Copies all pages of a run to their other place; returns whether all were copied.
///
/// # Safety
/// The pages can be read, and the other place is registered and the shim's own.
pub(super) unsafe fn copy_all<K: Kernel>(kernel: &K, run: PageRun) -> bool {
    let (mut done, mut tries) = (0, 0);
    while done < run.home.len {
        let (dst, src) = (run.away + done, run.home.start + done);
        // SAFETY: as the caller promises.
        let progress = unsafe { kernel.copy_pages(dst, src, run.home.len - done) };
        done += progress.bytes;
        match progress.stopped {
            // Mappings of this process are being changed.
            Some(Errno::AGAIN) if tries < TRIES => tries += 1,
            Some(_) => return false,
            None => {}
        }
    }
    true
}

/// Discards memory of the shim; returns whether the page tables confirm that it is gone.
///
/// # Safety
/// The content of the memory is not needed.
pub(super) unsafe fn discard<K: Kernel>(kernel: &K, ours: Range) -> bool {
    // The kernel does not refuse this call. The call may be interrupted, or short of memory to
    // split a huge page.
    (0..TRIES).any(|_| {
        // SAFETY: as the caller promises.
        let _ = unsafe { kernel.discard(ours) };
        kernel.populated(ours).is_ok_and(|left| left.is_empty())
    })
}
