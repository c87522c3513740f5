//! Moving a granule out of the guest's reach and back, filling holes: the mover, without judgement.
//!
//! What a call says that it has done is a lower bound (see [`take`]): only the page tables know what is where.
//! `UFFDIO_MOVE` may do a part and say `EAGAIN`, meet a page that I/O has pinned (`EBUSY`), one that is
//! there already (`EEXIST`), or one that is not anonymous (`EINVAL`). Outwards every page may be left where
//! it is: that only costs a measurement. Homewards none may: a move is tried again, then the page is
//! copied, and when nothing helps for [`PATIENCE`] QEMU is ended rather than shown zeros.
//!
//! Runs under the engine's lock, in the fault thread too: allocates nothing, touches no guest RAM.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use sys::memory_map::{Advice, PAGE_BYTES, Pagemap, Range, advise};
use sys::userfaultfd::{Progress, Userfaultfd};

/// How often a page is tried that the kernel is busy with, before it stays where it is.
const TRIES: u32 = 8;
/// How long a page is tried that must come back.
const PATIENCE: Duration = Duration::from_secs(10);

/// What taking a granule came to, in pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// Out of reach, holes among them.
    pub(crate) moved: u64,
    /// Refused: pinned by I/O, or not to be moved.
    pub(crate) kept: u64,
}

/// Moves what can be moved of `guest` to `staging`, where nothing is yet. Pages that are there afterwards
/// count as moved, whatever the kernel says of them.
///
/// # Safety
/// Both ranges are registered, and the fault handler gives the pages back when they are touched.
pub(crate) unsafe fn take(uffd: &Userfaultfd, guest: Range, staging: u64) -> Taken {
    let mut taken = Taken::default();
    let mut way = Way::new(guest.len);
    let mut tries = 0;
    while let Some((at, len)) = way.next() {
        // SAFETY: as the caller promises.
        let progress = unsafe { uffd.move_pages(staging + at, guest.start + at, len) };
        taken.moved += progress.bytes / PAGE_BYTES;
        match way.went(progress) {
            None => tries = 0,
            Some(Errno::AGAIN) if tries < TRIES => tries += 1,
            // It is there: the call before has moved it and said otherwise. Linux 6.18 does so when it had to
            // try again: it forgets to count, and then meets its own work.
            Some(Errno::EXIST) => {
                taken.moved += 1;
                way.skip();
                tries = 0;
            }
            Some(_) => {
                taken.kept += 1;
                way.skip();
                tries = 0;
            }
        }
    }
    taken
}

/// Moves everything that lies in `staging` back to `guest`; answers how many pages.
///
/// # Safety
/// `staging` holds what [`take`] took from this `guest`, and both are registered.
pub(crate) unsafe fn give(
    uffd: &Userfaultfd,
    pagemap: &Pagemap,
    guest: Range,
    staging: u64,
) -> u64 {
    let mut way = Way::new(guest.len);
    let (mut moved, mut since) = (0, None);
    while let Some((at, len)) = way.next() {
        // SAFETY: as the caller promises.
        let progress = unsafe { uffd.move_pages(guest.start + at, staging + at, len) };
        moved += progress.bytes / PAGE_BYTES;
        let Some(errno) = way.went(progress) else {
            since = None;
            continue;
        };
        let home = Range { start: guest.start + at, len: PAGE_BYTES };
        match errno {
            // It had stayed where it was; or QEMU has nothing mapped there any more.
            Errno::EXIST | Errno::NOENT => way.skip(),
            // QEMU is ending: there is no address space left to put it into.
            Errno::SRCH => return moved,
            // SAFETY: the page belongs there.
            _ if errno != Errno::AGAIN
                && unsafe { copy_home(uffd, pagemap, home, staging + at) } =>
            {
                way.skip();
                moved += 1;
            }
            _ => wait_or_end(errno, since.get_or_insert_with(Instant::now)),
        }
    }
    moved
}

/// For a page that will not move, for example because the kernel has merged it with others. `true` when
/// there is nothing in staging any more.
///
/// # Safety
/// The page at `staged`, if there is one, belongs to `home`.
unsafe fn copy_home(uffd: &Userfaultfd, pagemap: &Pagemap, home: Range, staged: u64) -> bool {
    let from = Range { start: staged, len: home.len };
    // Copying from a hole of staging would be a fault that waits for the thread that is copying.
    match pagemap.populated(from) {
        Ok(0) => return true,
        Ok(_) => {}
        Err(_) => return false,
    }
    // SAFETY: as the caller promises.
    if unsafe { uffd.copy_pages(home.start, staged, home.len) }.stopped.is_some() {
        return false;
    }
    // SAFETY: its content is at home now. Should this fail, the memory is kept until release.
    let _ = unsafe { advise(from, Advice::LinuxDontNeed) };
    true
}

/// How far a range is done. What stops is tried as one page before it is judged: a range may span two
/// mappings, which the kernel refuses as a whole.
struct Way {
    len: u64,
    at: u64,
    one_page: bool,
}

impl Way {
    fn new(len: u64) -> Self {
        Self { len, at: 0, one_page: false }
    }

    /// Where to go on, and for how many bytes.
    fn next(&self) -> Option<(u64, u64)> {
        let rest = self.len.checked_sub(self.at).filter(|&rest| rest > 0)?;
        Some((self.at, if self.one_page { PAGE_BYTES.min(rest) } else { rest }))
    }

    /// Notes how far it went; answers what stopped a page that was tried alone.
    fn went(&mut self, progress: Progress) -> Option<Errno> {
        self.at += progress.bytes;
        let errno = progress.stopped.filter(|_| progress.bytes == 0);
        let judged = errno.filter(|_| self.one_page);
        self.one_page = errno.is_some();
        judged
    }

    /// Leaves a page as it is.
    fn skip(&mut self) {
        self.at += PAGE_BYTES;
        self.one_page = false;
    }
}

fn wait_or_end(errno: Errno, since: &Instant) {
    let waited = since.elapsed();
    if waited > PATIENCE {
        crate::threads::end_process("guest memory cannot be given back", errno);
    }
    if waited < Duration::from_millis(1) {
        rustix::thread::sched_yield();
    } else {
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Maps zeros at `page`, if it is a hole: no memory is used until the guest writes. Answers whether it was.
///
/// # Safety
/// Whatever belongs there is there already, and it is not mapped from a pool.
pub(crate) unsafe fn fill_hole(uffd: &Userfaultfd, page: Range) -> bool {
    // SAFETY: as the caller promises.
    unsafe { uffd.zero_pages(page) }.stopped != Some(Errno::EXIST)
}

/// Maps zeros wherever `range` has a hole.
///
/// # Safety
/// As for [`fill_hole`].
pub(crate) unsafe fn fill_holes(uffd: &Userfaultfd, range: Range) {
    let (mut at, mut tries) = (0, 0);
    while at < range.len {
        let rest = Range { start: range.start + at, len: range.len - at };
        // SAFETY: as the caller promises.
        let progress = unsafe { uffd.zero_pages(rest) };
        at += progress.bytes;
        match progress.stopped {
            None => break,
            Some(Errno::EXIST) => at += PAGE_BYTES,
            Some(Errno::AGAIN) if tries < TRIES => tries += 1,
            // Whoever waits for a page that is still missing traps again.
            Some(_) => break,
        }
    }
}
