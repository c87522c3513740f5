//! Where the content of a page is, and every step by which that changes.
//!
//! Each page of guest RAM is in exactly one state. The states stand in the memory that the worker
//! reads ([`PageState`]); what stands behind them is in the page tables, which have the last word:
//! **each step ends by asking them (`PAGEMAP_SCAN`) whether what it claims is so**, and a call's
//! own answer is never believed (Linux 6.18 has moved a whole granule and said that it had done
//! nothing).
//!
//! | state | its content lies |
//! |---|---|
//! | home (`Plain`) | where QEMU expects it, or nowhere: then it is zero |
//! | staged | in staging, or nowhere |
//! | out | in the host's swap, for staging |
//! | aside | in the [buffer](crate::merge::buffer), during a turn or until it will go home |
//! | shared (`Merged`) | in the pool, or in the kernel's copy of it, in its place |
//! | freed | where QEMU expects it, or nowhere; the kernel may drop it |
//!
//! | from | event | to | step | who | what is asked afterwards |
//! |---|---|---|---|---|---|
//! | home | revoke | staged, or home if all of it stays | [`stage`] | control | no page is in both places |
//! | staged | paged out | out | [`note_out`] | control | staging has it in swap |
//! | staged, out | touch, recall, release, whatever needs RAM in its place | home | [`unstage`] | fault thread, control, watchdog, QEMU | staging holds none of it; what it still holds stays staged |
//! | staged, out | discard | the same, and nowhere | `freed` | QEMU | staging holds none of it; else QEMU is told that its discard failed |
//! | home | merge, join | aside, or home if it stays | [`set_aside`] | control; fault thread (join) | no page is in both places |
//! | aside | equal to a slot | shared | [`share`] | control | before: home is empty; afterwards: the buffer holds none of it |
//! | aside | zeros | home, and nowhere | [`drop_zeros`] | control | the buffer holds none of it |
//! | aside | different; the turn ends; the next turn begins | home | [`put_back`] | whoever has the turn | the buffer holds none of it; what it still holds stays aside |
//! | shared, not written | write, unshare | home, by way of aside | [`replace`] | fault thread, control | the buffer held all of it before the place was taken, and none of it afterwards |
//! | shared | write, no room for mappings, or QEMU wants RAM for itself | shared | `cuts` | fault thread | – (the kernel copies) |
//! | shared | discard | home, and nowhere | `unshare::replace_by_fresh` | QEMU | no page of a file is there; else zeros are written |
//! | home, freed | report | freed | `freed` | QEMU | – (the kernel's `MADV_FREE` either was or was not) |
//! | freed | taken, kept, discarded, found missing at a touch | home | `freed`, `tracker` | control, QEMU, fault thread | – (both states name the same place) |
//! | home, nowhere | touch | home, zeros | `tracker` | fault thread | before: staging holds nothing for it, if the page tables can be asked |
//! | any | QEMU maps something else there | home | `interpose` | QEMU | everything was home before |
//!
//! A step whose pages are not all in the state that it begins with does nothing: a run that was put
//! together wrongly costs a measurement or a merge, and no page.
//!
//! All of it happens under the engine's lock. No step waits for long: a page that the kernel is
//! busy with is tried for [`HOLD`], stays in its state, and is tried again by the next touch and by
//! the watchdog. What staging or the buffer hold is discarded by the steps above only, and neither
//! is used or unmapped unless the page tables say that it is empty.
//!
//! **What does not add up** is repaired where the content is known: a page that will not move is
//! copied; a page that is in the buffer takes its place back. Three things end QEMU, loudly,
//! because going on would show the guest wrong memory: a page that is in two places
//! ([`TWO_PLACES`]), one that has not come home for 10 s ([`STUCK`]), and a place in guest RAM that
//! is gone and cannot be mapped again (`unshare::mend`).
//!
//! The steps are generic over the [`Kernel`], so that `tests` can run them in every interleaving
//! against one that is a model: with a guest that reads and writes, a disk that pins, a QEMU that
//! discards, and calls that fail, do a part, or lie.
//!
//! Nothing here allocates or touches guest RAM.

mod host;
mod kernel;
#[cfg(test)]
mod tests;
mod way;

use std::time::Duration;

use protocol::layout::{PageState, Shared};
use protocol::{Content, Merged};
use rustix::io::Errno;
use sys::memory_map::{PAGE_BYTES, PageSet, Range};

use crate::channel::Channel;

pub(crate) use host::{Host, fill_hole, fill_holes, forget_late, late};
pub(crate) use kernel::{Fresh, HasKernel, Kernel, Mapper, Verdict};
use way::Way;

/// How long a step tries a page that the kernel is busy with.
pub(crate) const HOLD: Duration = Duration::from_millis(1);
/// How often a page is tried that need not move, or a copy that need not be made.
const TRIES: u32 = 8;

/// Why QEMU is ended: nobody can say which of the two is the guest's.
pub(crate) const TWO_PLACES: &str = "a page of guest memory is in two places";
/// Why QEMU is ended: a guest that waits for ever is no better, and its content would be lost with
/// the next step.
pub(crate) const STUCK: &str = "guest memory cannot be given back";

/// Pages side by side of one block: their home, where they lie otherwise, and the first one's
/// number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) home: Range,
    pub(crate) away: u64,
    pub(crate) page: u32,
}

impl Run {
    fn place(self) -> Range {
        Range { start: self.away, len: self.home.len }
    }

    fn pages(self) -> u32 {
        // A run has 512 pages at most.
        u32::try_from(self.home.len / PAGE_BYTES).unwrap_or(u32::MAX)
    }

    /// `pages` of its pages, from its `first` one on.
    fn part(self, first: usize, pages: usize) -> Self {
        let (skipped, len) = (first as u64 * PAGE_BYTES, pages as u64 * PAGE_BYTES);
        let home = Range { start: self.home.start + skipped, len };
        let page = self.page.saturating_add(u32::try_from(first).unwrap_or(u32::MAX));
        Self { home, away: self.away + skipped, page }
    }
}

/// What staging came to, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Staged {
    /// Out of reach now, holes among them.
    pub(crate) staged: u32,
    /// Of them, those that have content.
    pub(crate) moved: u32,
    /// Those that stay at home: pinned by I/O, or not to be moved.
    pub(crate) kept: u32,
}

/// What bringing pages home came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Given {
    /// Pages that the kernel says it has moved.
    pub(crate) moved: u64,
    /// Those that are still away.
    pub(crate) away: PageSet,
}

/// Home → staged, as far as the kernel does it.
///
/// # Safety
/// Both ranges are registered, and the fault thread serves when the lock is free.
pub(crate) unsafe fn stage<K: Kernel>(kernel: &K, shared: Shared<'_>, run: Run) -> Staged {
    if !is_all(shared, run, PageState::Plain) {
        return Staged::default();
    }
    mark(shared, run, PageState::Staged, |_| true);
    // SAFETY: as the caller promises.
    let taken = unsafe { take(kernel, run) };
    if matches!(taken, Taken::Nothing) {
        // Is it the content of a page that was thought to be home? Then it goes there.
        // SAFETY: as the caller promises, and nobody else has this part of staging.
        let _ = unsafe { unstage(kernel, shared, run) };
        return Staged { kept: run.pages(), ..Staged::default() };
    }
    let stays = |page: usize| matches!(&taken, Taken::Known { left, .. } if left.has(page));
    mark(shared, run, PageState::Plain, stays);
    match taken {
        Taken::Known { there, left } => {
            let kept = left.count();
            Staged { staged: run.pages() - kept, moved: there.count(), kept }
        }
        Taken::Nothing | Taken::Unknown => Staged { staged: run.pages(), ..Staged::default() },
    }
}

/// Staged → out, where the kernel has paged out what staging holds of it; answers how many pages.
/// Nothing is moved by it.
pub(crate) fn note_out<K: Kernel>(kernel: &K, shared: Shared<'_>, run: Run) -> u32 {
    let Ok(swapped) = kernel.swapped(run.place()) else { return 0 };
    let is_out = |page: usize| swapped.has(page) && state(shared, run, page) == PageState::Staged;
    let out = (0..pages_of(run.home)).filter(|&page| is_out(page)).count();
    mark(shared, run, PageState::Out, is_out);
    u32::try_from(out).unwrap_or(u32::MAX)
}

/// Staged, or out → home. What will not go stays as it is: what is out is read there when it is
/// touched.
///
/// # Safety
/// Both ranges are registered; what staging holds there belongs to this home.
pub(crate) unsafe fn unstage<K: Kernel>(kernel: &K, shared: Shared<'_>, run: Run) -> Given {
    // SAFETY: as the caller promises.
    let given = unsafe { give(kernel, run) };
    mark(shared, run, PageState::Plain, |page| !given.away.has(page));
    given
}

/// Home → aside; answers which pages lie there. `None`: none does.
///
/// # Safety
/// Both ranges are registered, and the fault thread serves when the lock is free.
pub(crate) unsafe fn set_aside<K: Kernel>(
    kernel: &K,
    channel: &Channel,
    run: Run,
) -> Option<PageSet> {
    let shared = channel.shared();
    if !is_all(shared, run, PageState::Plain) {
        return None;
    }
    mark(shared, run, PageState::Aside, |_| true);
    // SAFETY: as the caller promises.
    let there = match unsafe { take(kernel, run) } {
        Taken::Nothing => PageSet::default(),
        Taken::Known { there, .. } => there,
        // All of it is put back.
        Taken::Unknown => return Some(PageSet::default()),
    };
    mark(shared, run, PageState::Plain, |page| !there.has(page));
    (!there.is_empty()).then_some(there)
}

/// Aside → home; answers whether all of it is there.
///
/// # Safety
/// Both ranges are registered; what the buffer holds there belongs to this home.
pub(crate) unsafe fn put_back<K: Kernel>(kernel: &K, channel: &Channel, run: Run) -> bool {
    let shared = channel.shared();
    let is_aside = |page| state(shared, run, page) == PageState::Aside;
    // What has been shared or dropped since is not to be moved: its place is taken, and the buffer
    // has a hole there.
    let (mut first, mut all_home) = (0, true);
    while let Some(from) = (first..pages_of(run.home)).find(|&page| is_aside(page)) {
        let to = (from..pages_of(run.home)).find(|&page| !is_aside(page));
        first = to.unwrap_or(pages_of(run.home));
        let part = run.part(from, first - from);
        // SAFETY: as the caller promises.
        let given = unsafe { give(kernel, part) };
        mark(shared, part, PageState::Plain, |page| !given.away.has(page));
        all_home &= given.away.is_empty();
    }
    all_home
}

/// Aside → shared; answers whether it is. If not, it is still aside.
///
/// # Safety
/// All pages of the run are aside and hold what the slots do; the fault thread serves when the lock
/// is free.
pub(crate) unsafe fn share<M: Mapper>(mapper: &M, channel: &Channel, run: Run, slot: u32) -> bool {
    if !is_all(channel.shared(), run, PageState::Aside) {
        return false;
    }
    // Whoever has something there now would lose it. That a page is in two places is found when it
    // is put back.
    if !mapper.kernel().populated(run.home).is_ok_and(|at_home| at_home.is_empty()) {
        return false;
    }
    // SAFETY: the pages are aside.
    if !unsafe { mapper.map_slots(slot, run.home) } {
        return false;
    }
    channel.set(run.home, PageState::Merged);
    // From here on the guest may have written there: whatever is found now, nothing is to be mapped
    // over it. SAFETY: what they hold is in the pool. Should this fail, the buffer is not empty,
    // and no more is set aside.
    let _ = unsafe { discard(mapper.kernel(), run.place()) };
    true
}

/// Aside → home, where nothing is: a hole reads as zeros.
///
/// # Safety
/// All pages of the run are aside and hold zeros.
pub(crate) unsafe fn drop_zeros<K: Kernel>(kernel: &K, channel: &Channel, run: Run) -> bool {
    // SAFETY: they hold zeros.
    let is_dropped =
        is_all(channel.shared(), run, PageState::Aside) && unsafe { discard(kernel, run.place()) };
    if is_dropped {
        mark(channel.shared(), run, PageState::Plain, |_| true);
    }
    is_dropped
}

/// Shared → aside → home; answers whether the place is the guest's own. Then what will not go home
/// is aside. If not, it is shared as it was.
///
/// # Safety
/// The pages of the run are the pool's, and nobody can write to them; buffer and what is mapped
/// over them are registered, and the fault thread serves when the lock is free.
pub(crate) unsafe fn replace<F: Fresh>(mapper: &F, channel: &Channel, run: Run) -> bool {
    let (kernel, place) = (mapper.kernel(), run.place());
    if !is_all(channel.shared(), run, PageState::Merged) {
        return false;
    }
    if !kernel.populated(place).is_ok_and(|there| there.is_empty()) {
        return false;
    }
    // SAFETY: the buffer is registered and empty; the pool's pages can be read.
    let is_copied = unsafe { copy_all(kernel, run) };
    let there = kernel.populated(place);
    if !is_copied || !there.is_ok_and(|there| there.count() == run.pages()) {
        // SAFETY: they are copies.
        let _ = unsafe { discard(kernel, place) };
        return false;
    }
    channel.set(run.home, PageState::Aside);
    // SAFETY: a copy of all of it is aside.
    if !unsafe { mapper.map_fresh(run.home) } {
        channel.set(run.home, PageState::Merged);
        // SAFETY: they are copies.
        let _ = unsafe { discard(kernel, place) };
        return false;
    }
    // SAFETY: as the caller promises.
    unsafe { put_back(kernel, channel, run) };
    true
}

/// Home → aside → home, in a mapping that nobody has touched; answers whether all of it is home.
///
/// # Safety
/// As for [`set_aside`].
pub(crate) unsafe fn map_anew<F: Fresh>(mapper: &F, channel: &Channel, run: Run) -> bool {
    let kernel = mapper.kernel();
    if !is_all(channel.shared(), run, PageState::Plain) {
        return true;
    }
    // SAFETY: as the caller promises.
    unsafe { set_aside(kernel, channel, run) };
    if kernel.populated(run.home).is_ok_and(|left| left.is_empty()) {
        // SAFETY: all that it held is aside. If it fails, it stays as it was.
        let _ = unsafe { mapper.map_fresh(run.home) };
    }
    // SAFETY: as the caller promises.
    unsafe { put_back(kernel, channel, run) }
}

/// Merges what is equal of a run whose pages are home, and brings home what is not.
///
/// # Safety
/// As for [`set_aside`] and [`share`]. The run has 64 pages at most.
pub(crate) unsafe fn merge<M: Mapper>(
    mapper: &M,
    channel: &Channel,
    run: Run,
    content: Content,
) -> Merged {
    let (kernel, mut merged) = (mapper.kernel(), Merged::default());
    let mut verdicts = [Verdict::Absent; 64];
    let verdicts = &mut verdicts[..pages_of(run.home).min(64)];
    // SAFETY: as the caller promises.
    let Some(there) = (unsafe { set_aside(kernel, channel, run) }) else {
        merged.kept = run.pages();
        return merged;
    };
    mapper.judge(run.place(), content, verdicts);
    for (page, verdict) in verdicts.iter_mut().enumerate() {
        if !there.has(page) {
            *verdict = Verdict::Absent;
        }
    }
    let mut first = 0;
    for equal in verdicts.chunk_by(|one, other| one == other) {
        let part = run.part(first, equal.len());
        let at = match (equal[0], content) {
            (Verdict::Absent, _) => &mut merged.kept,
            (Verdict::Different, _) => &mut merged.different,
            (Verdict::Same, Content::Zeros) => {
                // SAFETY: they hold zeros, as was just seen.
                if unsafe { drop_zeros(kernel, channel, part) } {
                    &mut merged.dropped
                } else {
                    &mut merged.kept
                }
            }
            (Verdict::Same, Content::Slot(slot)) => {
                let slot = slot.saturating_add(part.page - run.page);
                // SAFETY: they are aside, and equal, as was just seen.
                if unsafe { share(mapper, channel, part, slot) } {
                    &mut merged.shared
                } else {
                    &mut merged.no_room
                }
            }
        };
        *at += part.pages();
        first += equal.len();
    }
    // SAFETY: as the caller promises.
    unsafe { put_back(kernel, channel, run) };
    merged
}

/// Has the buffer be empty, of which no page is aside: a copy may be left there that could not be
/// discarded. Answers whether it is.
///
/// # Safety
/// No page's state says that it is aside.
pub(crate) unsafe fn clear<K: Kernel>(kernel: &K, buffer: Range) -> bool {
    // SAFETY: as the caller promises.
    kernel.populated(buffer).is_ok_and(|left| left.is_empty()) || unsafe { discard(kernel, buffer) }
}

/// What taking came to.
enum Taken {
    /// Nothing was tried: its place is not known to be empty.
    Nothing,
    /// Which pages have content there now, and which at home.
    Known { there: PageSet, left: PageSet },
    /// The page tables could not be asked afterwards.
    Unknown,
}

/// Moves what can be moved of `run` away. What is pinned stays; what the kernel is busy with is
/// tried a few times.
///
/// # Safety
/// Both ranges are registered, and who touches a page that is away is served after this.
unsafe fn take<K: Kernel>(kernel: &K, run: Run) -> Taken {
    // What lay there already would pass for these pages.
    if !kernel.populated(run.place()).is_ok_and(|there| there.is_empty()) {
        return Taken::Nothing;
    }
    let (mut way, mut tries) = (Way::new(run.home.len), 0);
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
        (Ok(there), Ok(left)) => Taken::Known { there, left },
        _ => Taken::Unknown,
    }
}

/// Moves home what is away of `run`.
///
/// # Safety
/// What is away belongs to this home, and both are registered.
unsafe fn give<K: Kernel>(kernel: &K, run: Run) -> Given {
    let (mut way, mut moved, mut until) = (Way::new(run.home.len), 0, None);
    while let Some((at, len)) = way.next() {
        // SAFETY: as the caller promises.
        let progress = unsafe { kernel.move_pages(run.home.start + at, run.away + at, len) };
        moved += progress.bytes / PAGE_BYTES;
        let Some(errno) = way.went(progress) else { continue };
        match errno {
            // QEMU is ending: there is no address space left to put it into.
            Errno::SRCH => return Given { moved, away: PageSet::default() },
            // It had stayed at home, or is there already: the page tables will tell.
            Errno::EXIST | Errno::NOENT => way.skip(),
            Errno::AGAIN => {
                let until = *until.get_or_insert_with(|| kernel.now().after(HOLD));
                if kernel.now() < until {
                    kernel.pause();
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
        // It will be asked again.
        Err(_) => {
            let mut all = PageSet::default();
            all.add(run.home, run.home);
            all
        }
    };
    kernel.tried(run.home, &away);
    Given { moved, away }
}

/// For a page that will not move, for example because the kernel has merged it with others. Answers
/// whether it was copied.
///
/// # Safety
/// The page at `from`, if there is one, belongs to `home`.
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
    // SAFETY: its content is at home. If it stays, it is in two places, and `give` says so.
    let _ = unsafe { discard(kernel, from) };
    true
}

/// Copies all pages of a run from home to where it lies otherwise; answers whether that went well.
///
/// # Safety
/// They can be read, and the other place is registered and ours.
unsafe fn copy_all<K: Kernel>(kernel: &K, run: Run) -> bool {
    let (mut done, mut tries) = (0, 0);
    while done < run.home.len {
        let (dst, src) = (run.away + done, run.home.start + done);
        // SAFETY: as the caller promises.
        let progress = unsafe { kernel.copy_pages(dst, src, run.home.len - done) };
        done += progress.bytes;
        match progress.stopped {
            // Mappings of this process are just being changed.
            Some(Errno::AGAIN) if tries < TRIES => tries += 1,
            Some(_) => return false,
            None => {}
        }
    }
    true
}

/// Discards memory of ours, and asks whether it is gone.
///
/// # Safety
/// Nobody needs what it holds.
unsafe fn discard<K: Kernel>(kernel: &K, ours: Range) -> bool {
    // The kernel refuses nothing here; it may be interrupted, or short of memory to split a huge
    // page.
    (0..TRIES).any(|_| {
        // SAFETY: as the caller promises.
        let _ = unsafe { kernel.discard(ours) };
        kernel.populated(ours).is_ok_and(|left| left.is_empty())
    })
}

fn mark(shared: Shared<'_>, run: Run, state: PageState, is_meant: impl Fn(usize) -> bool) {
    for (at, number) in (run.page..run.page.saturating_add(run.pages())).enumerate() {
        if is_meant(at) {
            shared.set_state(number, state);
        }
    }
}

fn state(shared: Shared<'_>, run: Run, page: usize) -> PageState {
    shared.state(run.page.saturating_add(u32::try_from(page).unwrap_or(u32::MAX)))
}

fn is_all(shared: Shared<'_>, run: Run, wanted: PageState) -> bool {
    (0..pages_of(run.home)).all(|page| state(shared, run, page) == wanted)
}

fn pages_of(range: Range) -> usize {
    usize::try_from(range.len / PAGE_BYTES).unwrap_or(usize::MAX)
}
