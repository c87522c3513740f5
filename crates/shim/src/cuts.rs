//! Merged pages that become plain again: which, when, and the cost in mappings.
//!
//! One page at a time is replaced, so that all others stay shared; but each replaced page splits
//! a mapping in two. So consecutive writes replace ever larger ranges, and adjacent mappings are
//! joined. When there is no room for more mappings ([`Cuts::has_room`]), the kernel makes the
//! copy in place. The rules are those of [`unshare`].

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::time::Duration;

use protocol::Refusal;
use protocol::layout::{GiveBack, PageState};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use sys::mappings::has_policy;
use sys::memory_map::{HUGE_PAGE_BYTES, PAGE_BYTES, Range};
use sys::userfaultfd::Userfaultfd;

use crate::buffer::{AT_ONCE, TURN_BYTES};
use crate::channel::Channel;
use crate::descriptors::kept;
use crate::inhibitors::Inhibitors;
use crate::page_ops::{BegunTurn, PageOps};
use crate::process::userfaultfd;
use crate::ram::{common, end, page_of};
use crate::remapping::RemapReadGuard;
use crate::time::{Nanos, now};
use crate::unshare::{self, Replacement};
use crate::waiters::wake;

/// Writes that are this close to each other in time and address belong together: the guest reuses
/// the memory.
const NEAR: Duration = Duration::from_millis(100);
const NEAR_BYTES: u64 = TURN_BYTES;
/// A mapping of at most this size is joined with its neighbour while one of QEMU's threads waits.
const SOON_JOINED: u64 = 128 * PAGE_BYTES;
/// After a discard at most this number of its parts are joined with their neighbours. A balloon
/// discards one part at a time.
const MOST_JOINED: usize = 8;
/// The default limit, for a kernel whose `vm.max_map_count` cannot be read.
const USUAL_MAPPINGS: u32 = 65_530;
/// The minimum time between two counts of the mappings.
const COUNTED: Duration = Duration::from_secs(1);

/// Whether pages can be replaced on this host. Does not allocate.
pub(crate) fn is_possible(uffd: &Userfaultfd) -> bool {
    let mut first = [0];
    let read = overcommit().map(|file| rustix::io::pread(file, &mut first, 0));
    // 2: the kernel promises no more memory than it has.
    uffd.can_replace() && matches!(read, Some(Ok(1))) && matches!(first, [b'0' | b'1'])
}

/// The host's overcommit policy; the file is opened once and read at each call.
fn overcommit() -> Option<&'static OwnedFd> {
    static FILE: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let open = || {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        Ok(rustix::fs::open("/proc/sys/vm/overcommit_memory", flags, Mode::empty())?)
    };
    FILE.get_or_init(|| kept(open())).as_ref()
}

/// The number of mappings that a process may have.
fn most_mappings() -> u32 {
    static MOST: OnceLock<u32> = OnceLock::new();
    *MOST.get_or_init(|| {
        let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        allowed.trim().parse().unwrap_or(USUAL_MAPPINGS)
    })
}

/// Opens and reads the files that the fault thread needs: that thread allocates nothing.
pub(crate) fn prepare() {
    let _ = (most_mappings(), unshare::mappings(), overcommit());
}

/// Mappings that the guest's writes have split so far.
pub(crate) struct Cuts {
    /// The number of pages that the last write had replaced; below, its address and time.
    reach: u32,
    last: (u64, Nanos),
    /// The guest has written to a merged page, and is expected to do so again.
    pub(crate) is_written: bool,
    /// Mappings of this process other than merged runs and their neighbours: those counted, and
    /// those since then that could not be joined.
    others: u32,
    /// There was no room for a mapping, so a new count is worthwhile.
    is_full: bool,
    counted: Nanos,
}

impl Cuts {
    pub(crate) const fn new() -> Self {
        let last = (0, Nanos(0));
        Self { reach: 1, last, is_written: false, others: 0, is_full: false, counted: Nanos(0) }
    }

    /// The number of pages to replace for a write to this address now: a power of two, at most
    /// [`AT_ONCE`].
    fn reach_of(&mut self, address: u64, at: Nanos) -> u32 {
        self.is_written = true;
        let (last, then) = std::mem::replace(&mut self.last, (address, at));
        let is_near = address.abs_diff(last) <= NEAR_BYTES && at.since(then) < NEAR;
        self.reach = if is_near { (2 * self.reach).min(AT_ONCE) } else { 1 };
        self.reach
    }

    /// Whether another run may be split in two: each run has two mappings. The worker leaves half
    /// of the kernel's limit free; runs take half of that half.
    fn has_room(&mut self, merged_runs: u32) -> bool {
        let has_room =
            2 * u64::from(merged_runs) + u64::from(self.others) < u64::from(most_mappings()) / 4;
        self.is_full |= !has_room;
        has_room
    }

    /// The guest writes to a merged page: the page is replaced by its own copy, if possible.
    /// Otherwise the kernel makes the copy.
    pub(crate) fn break_sharing(
        &mut self,
        ops: &mut PageOps,
        inhibitors: &Inhibitors,
        uffd: &Userfaultfd,
        address: u64,
        received: Nanos,
    ) {
        let reach = self.reach_of(address, received);
        let around = ops.channel.as_ref().and_then(|it| it.merged_around(address, reach));
        let block = ops.ram.block(address).map(|block| block.range);
        // Where no page can be replaced nothing is registered either: QEMU may be about to
        // register the range itself.
        let wanted = around.zip(block).filter(|_| ops.obstacle(inhibitors).is_none());
        let part = wanted.and_then(|(around, block)| {
            // SAFETY: merged, and a thread that writes to it is served after this.
            unsafe { unshare::unwritten_around(uffd, common(around, block), address) }
        });
        let mut is_replaced = false;
        if let Some(part) = part.filter(|part| self.has_room_without(ops, *part)) {
            with_replacement(ops, inhibitors, &[part], |replacement| {
                // SAFETY: the page tables say so, and the remapping thread reads while mappings
                // are moved.
                is_replaced = unsafe { replacement.replace_unwritten(part) };
            });
            if is_replaced {
                wake(uffd, part);
                self.join_at_ends(ops, inhibitors, part, SOON_JOINED);
            }
        }
        if !is_replaced {
            let_write(inhibitors, uffd, page_of(address));
        }
    }

    /// Whether there is room for the mappings that are left when this part is no longer merged.
    fn has_room_without(&mut self, ops: &PageOps, part: Range) -> bool {
        let Some(channel) = &ops.channel else { return false };
        let is_merged = |start| channel.merged(Range { start, len: PAGE_BYTES }).next().is_some();
        let cuts = is_merged(part.start - PAGE_BYTES) && is_merged(end(part));
        !cuts || self.has_room(channel.merged_runs())
    }

    /// QEMU has discarded these parts, which were merged.
    pub(crate) fn join_after_discard(
        &mut self,
        ops: &mut PageOps,
        inhibitors: &Inhibitors,
        fresh: &[Range],
    ) {
        for part in fresh.iter().take(MOST_JOINED) {
            self.join_at_ends(ops, inhibitors, *part, SOON_JOINED);
        }
    }

    /// `range` is no longer merged: joins its mapping with its neighbours where possible. The
    /// smaller mapping of each pair must have at most `most` bytes.
    pub(crate) fn join_at_ends(
        &mut self,
        ops: &mut PageOps,
        inhibitors: &Inhibitors,
        range: Range,
        most: u64,
    ) {
        let Some(block) = ops.ram.block(range.start).map(|block| block.range) else { return };
        let inside = |seam: &u64| block.start < *seam && *seam < end(block);
        for seam in [range.start, end(range)].into_iter().filter(inside) {
            if let Ok(Some(piece)) = unshare::smaller_at(seam) {
                join(ops, inhibitors, piece, block, most);
            }
            // A seam that the kernel cannot report counts as one.
            if unshare::smaller_at(seam) != Ok(None) {
                self.others = self.others.saturating_add(1);
            }
        }
    }

    /// Whether the mappings should be counted again: there was no room for more.
    pub(crate) fn is_recount_due(&self) -> bool {
        self.is_full && now().since(self.counted) > COUNTED
    }

    /// The process has `all` mappings, and `merged_runs` runs of merged pages.
    pub(crate) fn recounted(&mut self, all: u32, merged_runs: u32) {
        self.others = all.saturating_sub(2 * merged_runs);
        self.is_full = false;
        self.counted = now();
    }
}

/// Joins a mapping with its neighbour if it is small and belongs to no pool. A mapping that can
/// have a huge page is left alone, and so is memory with a NUMA policy: a fresh mapping has none.
fn join(ops: &mut PageOps, inhibitors: &Inhibitors, piece: Range, block: Range, most: u64) {
    let Ok(uffd) = userfaultfd() else { return };
    let is_small = piece.len <= most && piece.len < HUGE_PAGE_BYTES;
    // Moved pages count as written, and so would freed pages. Staged pages are not there to be
    // moved.
    let is_plain = |channel: &Channel| {
        let others = [PageState::Freed, PageState::Staged, PageState::Aside];
        channel.merged(piece).next().is_none()
            && !others.into_iter().any(|state| channel.has(piece, state))
    };
    let is_inside = common(piece, block) == piece && !has_policy(block.start);
    if is_small && is_inside && ops.channel.as_ref().is_some_and(is_plain) {
        with_replacement(ops, inhibitors, &[piece], |replacement| {
            // SAFETY: the kernel says so, and the remapping thread reads while mappings are
            // moved.
            unsafe { replacement.rejoin(piece) };
        });
        wake(uffd, piece);
    }
}

/// Replaces those of these merged pages that have not been written, for one turn. Returns the
/// ranges of merged pages found.
pub(crate) fn unshare_turn(
    ops: &mut PageOps,
    inhibitors: &Inhibitors,
    page: u32,
    pages: u32,
) -> Vec<Range> {
    let Some(channel) = &ops.channel else { return Vec::new() };
    let parts = channel.parts(page, pages, PageState::Merged);
    let ranges: Vec<Range> = parts.iter().map(|part| part.range).collect();
    with_replacement(ops, inhibitors, &ranges, |replacement| {
        for &merged in &ranges {
            // SAFETY: their states say so, and the remapping thread reads while mappings are
            // moved.
            unsafe { replacement.replace(merged) };
        }
    });
    ranges
}

/// Has the kernel copy the pages of this run that are still merged, one turn's worth.
///
/// # Errors
/// QEMU watches writes to these pages itself; or the kernel's.
pub(crate) fn copy_turn(
    ops: &PageOps,
    inhibitors: &Inhibitors,
    page: u32,
    pages: u32,
) -> Result<(), Refusal> {
    let (Ok(uffd), Some(channel)) = (userfaultfd(), &ops.channel) else { return Ok(()) };
    let refused = |call: &str, errno: Errno| Refusal::Kernel {
        call: call.to_owned(),
        errno: errno.raw_os_error(),
    };
    for part in channel.parts(page, pages, PageState::Merged) {
        if inhibitors.are_qemus(part.range) {
            return Err(Refusal::NotMerging { why: GiveBack::QemuRegisters.to_string() });
        }
        // A write that trapped would wait for this turn: so nothing stays registered there.
        // SAFETY: every page is in its place.
        unsafe { uffd.unregister(part.range) }
            .map_err(|errno| refused("UFFDIO_UNREGISTER", errno))?;
        wake(uffd, part.range);
        unshare::copy(part.range)
            .map_err(|errno| refused("madvise(MADV_POPULATE_WRITE)", errno))?;
    }
    Ok(())
}

/// Lets writes to `range` go on: the kernel makes the copies. If QEMU has registered the range,
/// or is about to, the waiting threads are only woken.
fn let_write(inhibitors: &Inhibitors, uffd: &Userfaultfd, range: Range) {
    if inhibitors.are_qemus(range) {
        wake(uffd, range);
    } else {
        unshare::let_write(uffd, range);
    }
}

/// Serving a fault of this page has failed. The waiting thread traps again or, in a merged page,
/// writes to the kernel's copy. Where a page may be moved away only a retry is possible.
pub(crate) fn let_go_on(ops: &PageOps, inhibitors: &Inhibitors, uffd: &Userfaultfd, page: Range) {
    if ops.channel.as_ref().is_some_and(|channel| channel.has(page, PageState::Merged)) {
        let_write(inhibitors, uffd, page);
    } else {
        wake(uffd, page);
    }
}

/// Lets all later writes to the merged pages of `range` go on: QEMU or the kernel is about to
/// write to all of them, or to protect them. Pages that QEMU has registered itself are left as
/// they are.
pub(crate) fn let_all_write(ops: &PageOps, inhibitors: &Inhibitors, range: Range) {
    let (Ok(uffd), Some(channel)) = (userfaultfd(), &ops.channel) else { return };
    for merged in channel.merged(range).filter(|merged| !inhibitors.are_qemus(*merged)) {
        // SAFETY: every page is in its place.
        let _ = unsafe { uffd.unregister(merged) };
        wake(uffd, merged);
    }
}

/// Does something with these parts of one block, if pages can be replaced now.
fn with_replacement(
    ops: &mut PageOps,
    inhibitors: &Inhibitors,
    parts: &[Range],
    act: impl FnOnce(&mut Replacement<'_>),
) {
    if ops.obstacle(inhibitors).is_some() || !userfaultfd().is_ok_and(is_possible) {
        return;
    }
    // One more page on each side is registered, so that the new mappings join those around them.
    let Ok(turn) = ops.begin_moving(parts, PAGE_BYTES) else { return };
    let BegunTurn { host, ram, channel, run, .. } = turn;
    let block = parts.first().and_then(|range| ram.block(range.start));
    let replacement = block.and_then(|block| {
        // SAFETY: the fault thread serves as soon as this turn is over.
        unsafe { Replacement::new(host, block, channel, run) }
    });
    if let Some(mut replacement) = replacement {
        let _remapping = RemapReadGuard::begin();
        act(&mut replacement);
    }
    ops.settle();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn around_writes_that_come_one_after_the_other_more_and_more_is_replaced() {
        let mut cuts = Cuts::new();
        let write = |cuts: &mut Cuts, page: u64, ms: u64| {
            cuts.reach_of(page * PAGE_BYTES, Nanos(10_000_000_000 + ms * 1_000_000))
        };
        assert_eq!(write(&mut cuts, 1000, 0), 1);
        let more = [1001, 1002, 990, 1006, 1020, 1040, 1090].map(|page| write(&mut cuts, page, 1));
        assert_eq!(more, [2, 4, 8, 16, 32, 64, 64]);
        assert_eq!(write(&mut cuts, 1091, 200), 1, "much later");
        assert_eq!(write(&mut cuts, 2000, 201), 1, "elsewhere");
        assert_eq!(write(&mut cuts, 2000, 202), 2);
    }

    #[test]
    fn runs_and_what_could_not_be_joined_leave_a_quarter_of_the_mappings_to_others() {
        let (mut cuts, quarter) = (Cuts::new(), most_mappings() / 4);
        assert!(cuts.has_room((quarter - 1) / 2) && !cuts.is_full);
        assert!(!cuts.has_room(quarter.div_ceil(2)) && cuts.is_full);
        cuts.others = quarter;
        assert!(!cuts.has_room(0));
    }
}
