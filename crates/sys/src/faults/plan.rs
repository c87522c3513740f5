//! The plan of a test, in memory shared with the process whose calls fail.

use std::fs::File;
use std::io;
use std::panic::Location;
use std::path::Path;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::Call;
use crate::memory_map::{PAGE_BYTES, length, pointer};
use crate::userfaultfd::{Progress, Range};

/// The environment variable that names the plan's file.
pub const PLAN_ENV: &str = "OVERBOOK_FAULTS";
/// The most faults that can be planned at once.
pub const MOST_FAULTS: usize = 4;
/// No call is held for longer, in case the test has ended.
const LONGEST_HOLD: Duration = Duration::from_secs(30);
const SITE_BYTES: usize = 120;
const BYTES: usize = 8192;

/// The effect of a fault on a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The call is not made.
    Refuse(Errno),
    /// `pages` pages are done, or the first half if the call has no more pages; then the call is
    /// refused. A call that maps something over memory has then only unmapped that memory.
    Part {
        /// The number of pages.
        pages: u64,
        /// The error that is reported then.
        errno: Errno,
    },
    /// The call is made, but reported as failed.
    Deny(Errno),
    /// The call waits, is made when the test releases it ([`Faults::go_on`]), and returns its own
    /// result.
    HoldBefore,
    /// The call is made, waits until the test releases it, and returns its own result.
    HoldAfter,
}

/// A fault: the calls at which it applies, and its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of call.
    pub call: Call,
    /// Only calls that concern this memory; for a move or copy, its source or its target. `None`:
    /// all calls.
    pub within: Option<Range>,
    /// The first affected call since the fault was planned, counted from 0.
    pub place: u64,
    /// The number of consecutive affected calls.
    pub times: u64,
    /// The effect on them.
    pub how: How,
}

impl Fault {
    /// A fault at the next call of a kind only.
    #[must_use]
    pub const fn once(call: Call, how: How) -> Self {
        Self { call, within: None, place: 0, times: 1, how }
    }
}

#[repr(C)]
struct FaultSlot {
    /// 0: no fault is planned. Otherwise the kind's number plus one.
    kind: AtomicU32,
    how: AtomicU32,
    errno: AtomicI32,
    /// The line of [`Self::site`].
    line: AtomicU32,
    pages: AtomicU64,
    start: AtomicU64,
    len: AtomicU64,
    place: AtomicU64,
    times: AtomicU64,
    /// Matching calls since the fault was planned.
    seen: AtomicU64,
    /// Affected calls.
    met: AtomicU64,
    /// Calls that were held, and calls that were released.
    held: AtomicU64,
    let_go: AtomicU64,
    /// The source file of the first affected call.
    site: [AtomicU8; SITE_BYTES],
}

#[repr(C)]
struct FaultTable {
    calls: [AtomicU64; 64],
    slots: [FaultSlot; MOST_FAULTS],
}

const _: () = assert!(size_of::<FaultTable>() <= BYTES && Call::ALL.len() <= 64);

/// The test's handle of the plan.
#[derive(Debug)]
pub struct Faults {
    table: &'static FaultTable,
}

impl std::fmt::Debug for FaultTable {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("FaultTable")
    }
}

impl Faults {
    /// Makes an empty plan in a file. A process that starts with its path in [`PLAN_ENV`] follows
    /// it.
    ///
    /// # Errors
    /// When the file cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
        file.set_len(BYTES as u64)?;
        map(&file)
    }

    /// Plans a fault under this number, which is below [`MOST_FAULTS`]. It replaces the previous
    /// fault of that number.
    ///
    /// # Panics
    /// There is no such number.
    pub fn plan(&self, number: usize, fault: Fault) {
        self.forget(number);
        let slot = &self.table.slots[number];
        let (how, errno, pages) = encode(fault.how);
        slot.how.store(how, Ordering::Relaxed);
        slot.errno.store(errno, Ordering::Relaxed);
        slot.pages.store(pages, Ordering::Relaxed);
        let within = fault.within.unwrap_or(Range { start: 0, len: u64::MAX });
        slot.start.store(within.start, Ordering::Relaxed);
        slot.len.store(within.len, Ordering::Relaxed);
        slot.place.store(fault.place, Ordering::Relaxed);
        slot.times.store(fault.times, Ordering::Relaxed);
        for counter in [&slot.seen, &slot.met, &slot.held, &slot.let_go] {
            counter.store(0, Ordering::Relaxed);
        }
        slot.site[0].store(0, Ordering::Relaxed);
        slot.kind.store(fault.call as u32 + 1, Ordering::Release);
    }

    /// Removes a fault, and releases the calls that it holds.
    ///
    /// # Panics
    /// There is no such number.
    pub fn forget(&self, number: usize) {
        let slot = &self.table.slots[number];
        slot.kind.store(0, Ordering::Release);
        slot.let_go.store(u64::MAX, Ordering::Release);
    }

    /// The number of calls of a kind so far.
    #[must_use]
    pub fn calls(&self, call: Call) -> u64 {
        self.table.calls[call as usize].load(Ordering::Relaxed)
    }

    /// The number of calls that a fault has affected.
    ///
    /// # Panics
    /// There is no such number.
    #[must_use]
    pub fn met(&self, number: usize) -> u64 {
        self.table.slots[number].met.load(Ordering::Acquire)
    }

    /// The file and line of the first affected call; empty if there was none.
    ///
    /// # Panics
    /// There is no such number.
    #[must_use]
    pub fn site(&self, number: usize) -> String {
        let slot = &self.table.slots[number];
        let bytes = slot.site.iter().map(|byte| byte.load(Ordering::Relaxed));
        let file: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
        if file.is_empty() {
            return String::new();
        }
        format!("{}:{}", String::from_utf8_lossy(&file), slot.line.load(Ordering::Relaxed))
    }

    /// Waits until a call is held; `false` if there was none within `most`.
    ///
    /// # Panics
    /// There is no such number.
    #[must_use]
    pub fn wait_until_held(&self, number: usize, most: Duration) -> bool {
        let slot = &self.table.slots[number];
        let let_go = slot.let_go.load(Ordering::Acquire);
        wait_until(most, || slot.held.load(Ordering::Acquire) > let_go)
    }

    /// Releases the call that is held.
    ///
    /// # Panics
    /// There is no such number.
    pub fn go_on(&self, number: usize) {
        self.table.slots[number].let_go.fetch_add(1, Ordering::AcqRel);
    }
}

const REFUSE: u32 = 0;
const PART: u32 = 1;
const DENY: u32 = 2;
const HOLD_BEFORE: u32 = 3;
const HOLD_AFTER: u32 = 4;

fn encode(how: How) -> (u32, i32, u64) {
    match how {
        How::Refuse(errno) => (REFUSE, errno.raw_os_error(), 0),
        How::Part { pages, errno } => (PART, errno.raw_os_error(), pages),
        How::Deny(errno) => (DENY, errno.raw_os_error(), 0),
        How::HoldBefore => (HOLD_BEFORE, 0, 0),
        How::HoldAfter => (HOLD_AFTER, 0, 0),
    }
}

fn map(file: &File) -> io::Result<Faults> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel chooses the place. The file belongs to a test, which does not shrink it,
    // and the mapping is never removed.
    let start = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), BYTES, protection, MapFlags::SHARED, file, 0)
    }?;
    // SAFETY: the mapping has that size, is zero at first, consists of atomics, and is permanent.
    let table = unsafe { &*start.cast::<FaultTable>() };
    Ok(Faults { table })
}

/// The plan of this process, if it has one.
fn table() -> Option<&'static FaultTable> {
    static TABLE: OnceLock<Option<&'static FaultTable>> = OnceLock::new();
    *TABLE.get_or_init(|| {
        let path = std::env::var_os(PLAN_ENV)?;
        match File::options().read(true).write(true).open(&path).and_then(|file| map(&file)) {
            Ok(faults) => Some(faults.table),
            Err(error) => {
                eprintln!("{PLAN_ENV}: {}: {error}", path.display());
                std::process::abort();
            }
        }
    })
}

/// A fault that applies to a call.
struct Met {
    slot: &'static FaultSlot,
    how: How,
}

#[track_caller]
fn met(kind: Call, ranges: [Range; 2], has_parts: bool) -> Option<Met> {
    let table = table()?;
    table.calls[kind as usize].fetch_add(1, Ordering::Relaxed);
    let mut slots = table.slots.iter();
    // A loop, because a closure would be the caller that `track_caller` reports.
    loop {
        if let Some(met) = slots.next()?.meets(kind, ranges, has_parts) {
            return Some(met);
        }
    }
}

impl FaultSlot {
    #[track_caller]
    fn meets(&'static self, kind: Call, ranges: [Range; 2], has_parts: bool) -> Option<Met> {
        if self.kind.load(Ordering::Acquire) != kind as u32 + 1
            || !ranges.iter().any(|range| self.concerns(*range))
        {
            return None;
        }
        let at = self.seen.fetch_add(1, Ordering::Relaxed);
        let first = self.place.load(Ordering::Relaxed);
        if at < first || at - first >= self.times.load(Ordering::Relaxed) {
            return None;
        }
        // Evaluated lazily: a hold has no errno.
        let errno = || Errno::from_raw_os_error(self.errno.load(Ordering::Relaxed));
        let how = match self.how.load(Ordering::Relaxed) {
            REFUSE => How::Refuse(errno()),
            PART => How::Part { pages: self.pages.load(Ordering::Relaxed), errno: errno() },
            DENY => How::Deny(errno()),
            HOLD_BEFORE => How::HoldBefore,
            _ => How::HoldAfter,
        };
        if matches!(how, How::Part { .. }) && !has_parts {
            return None;
        }
        self.note(Location::caller());
        Some(Met { slot: self, how })
    }

    fn concerns(&self, range: Range) -> bool {
        let (start, len) = (self.start.load(Ordering::Relaxed), self.len.load(Ordering::Relaxed));
        // A call without memory matches only a fault without a range.
        len == u64::MAX
            || range.start < start.saturating_add(len)
                && start < range.start.saturating_add(range.len)
    }

    fn note(&self, location: &Location<'_>) {
        if self.met.fetch_add(1, Ordering::AcqRel) == 0 {
            self.line.store(location.line(), Ordering::Relaxed);
            let name = location.file().as_bytes();
            let name = &name[name.len().saturating_sub(SITE_BYTES - 1)..];
            for (to, &byte) in self.site.iter().zip(name.iter().chain(&[0])) {
                to.store(byte, Ordering::Relaxed);
            }
        }
    }

    fn hold(&self) {
        let ticket = self.held.fetch_add(1, Ordering::AcqRel);
        wait_until(LONGEST_HOLD, || self.let_go.load(Ordering::Acquire) > ticket);
    }
}

fn wait_until(most: Duration, is_so: impl Fn() -> bool) -> bool {
    let began = Instant::now();
    while !is_so() {
        if began.elapsed() > most {
            return false;
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    true
}

/// The result of a call that cannot be done in part.
fn whole<T>(met: &Met, call: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    match met.how {
        How::Refuse(errno) | How::Part { errno, .. } => Err(errno),
        How::Deny(errno) => call().and(Err(errno)),
        How::HoldBefore => {
            met.slot.hold();
            call()
        }
        How::HoldAfter => {
            let result = call();
            met.slot.hold();
            result
        }
    }
}

/// See the function of the same name in the module without the feature.
///
/// # Errors
/// The error of the call, or the one in the plan.
#[track_caller]
pub fn call<T>(
    kind: Call,
    range: Range,
    call: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    match met(kind, [range; 2], false) {
        None => call(),
        Some(met) => whole(&met, call),
    }
}

/// See the function of the same name in the module without the feature.
#[track_caller]
pub fn outcome(kind: Call, range: Range, call: impl FnOnce() -> libc::c_int) -> libc::c_int {
    let Some(met) = met(kind, [range; 2], false) else { return call() };
    let answered = std::cell::Cell::new(0);
    let planned = whole(&met, || {
        answered.set(call());
        Ok(())
    });
    if let Err(errno) = planned {
        // SAFETY: the C library's `errno` of this thread.
        unsafe { *libc::__errno_location() = errno.raw_os_error() };
        answered.set(-1);
    }
    answered.get()
}

#[track_caller]
pub(crate) fn through(
    kind: Call,
    range: Range,
    call: impl FnOnce(Range) -> Result<(), Errno>,
) -> Result<(), Errno> {
    // Part of a single page would be no page.
    match met(kind, [range; 2], range.len > PAGE_BYTES) {
        None => call(range),
        Some(Met { how: How::Part { pages, errno }, .. }) => {
            call(part(range, pages)).and(Err(errno))
        }
        Some(met) => whole(&met, || call(range)),
    }
}

#[track_caller]
pub(crate) fn progress(
    kind: Call,
    range: Range,
    from: u64,
    call: impl FnOnce(Range) -> Progress,
) -> Progress {
    let ranges = [range, Range { start: from, ..range }];
    let Some(met) = met(kind, ranges, range.len > PAGE_BYTES) else { return call(range) };
    match met.how {
        How::Refuse(errno) => Progress { bytes: 0, stopped: Some(errno) },
        How::Part { pages, errno } => {
            let done = call(part(range, pages));
            Progress { stopped: done.stopped.or(Some(errno)), ..done }
        }
        How::Deny(errno) => {
            call(range);
            Progress { bytes: 0, stopped: Some(errno) }
        }
        How::HoldBefore => {
            met.slot.hold();
            call(range)
        }
        How::HoldAfter => {
            let done = call(range);
            met.slot.hold();
            done
        }
    }
}

#[track_caller]
pub(crate) fn over<T>(
    kind: Call,
    range: Range,
    call: impl FnOnce() -> Result<T, Errno>,
) -> Result<T, Errno> {
    match met(kind, [range; 2], true) {
        None => call(),
        Some(Met { how: How::Part { errno, .. }, .. }) => {
            // SAFETY: the caller gives up the old mapping; the new one is what fails.
            unsafe { rustix::mm::munmap(pointer(range), length(range)) }?;
            Err(errno)
        }
        Some(met) => whole(&met, call),
    }
}

/// Part of a range, never all of it.
fn part(range: Range, pages: u64) -> Range {
    let bytes = pages * PAGE_BYTES;
    let half = range.len / 2 / PAGE_BYTES * PAGE_BYTES;
    Range { len: if bytes < range.len { bytes } else { half }, ..range }
}
