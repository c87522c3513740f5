//! Statistics: operations done, the longest of each kind, stuck threads, and wrong bytes.
//!
//! Threads write relaxed atomics and never wait for one another; the main thread reads them. A
//! thread that hangs in a page fault cannot report it. So each thread records *before* an
//! operation its kind and the time.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use crate::page::Harm;

/// Number of cases of harm that are printed in full; later ones are only counted.
const TOLD: usize = 12;

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub(crate) enum WorkKind {
    Modify,
    Rewrite,
    Check,
    Glance,
    Discard,
    DirectRead,
    DirectWrite,
    BufferedRead,
    BufferedWrite,
    AsyncRead,
    Fork,
    Plug,
    Register,
    PageOut,
    KvmRound,
    KvmAccess,
}

const NAMES: [&str; 16] = [
    "modify",
    "rewrite",
    "check",
    "glance",
    "discard",
    "direct_read",
    "direct_write",
    "buffered_read",
    "buffered_write",
    "async_read",
    "fork",
    "plug",
    "register",
    "page_out",
    "kvm_round",
    "kvm_access",
];

#[derive(Debug, Default)]
struct Tally {
    done: AtomicU64,
    longest_us: AtomicU64,
}

/// The current operation of a thread: its kind (plus one; 0 is none) and its start.
#[derive(Debug, Default)]
struct Seat {
    kind: AtomicUsize,
    since_us: AtomicU64,
}

/// The statistics of all threads.
#[derive(Debug)]
pub(crate) struct WorkWatch {
    start: Instant,
    tallies: [Tally; NAMES.len()],
    seats: Box<[Seat]>,
    bad_bytes: AtomicUsize,
    told: AtomicUsize,
}

impl WorkWatch {
    /// Statistics for `threads` threads.
    pub(crate) fn new(threads: usize) -> Self {
        Self {
            start: Instant::now(),
            tallies: Default::default(),
            seats: (0..threads).map(|_| Seat::default()).collect(),
            bad_bytes: AtomicUsize::new(0),
            told: AtomicUsize::new(0),
        }
    }

    fn now_us(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Runs an operation as this thread's current one, and counts it if it was done.
    pub(crate) fn time<T>(
        &self,
        seat: usize,
        kind: WorkKind,
        operation: impl FnOnce() -> Option<T>,
    ) -> Option<T> {
        let (seat, tally) = (&self.seats[seat], &self.tallies[kind as usize]);
        let begun = self.now_us();
        seat.since_us.store(begun, Relaxed);
        seat.kind.store(kind as usize + 1, Relaxed);
        let result = operation();
        seat.kind.store(0, Relaxed);
        tally.longest_us.fetch_max(self.now_us().saturating_sub(begun), Relaxed);
        if result.is_some() {
            tally.done.fetch_add(1, Relaxed);
        }
        result
    }

    /// Counts operations that were part of another one.
    pub(crate) fn count(&self, kind: WorkKind, number: usize) {
        self.tallies[kind as usize].done.fetch_add(number as u64, Relaxed);
    }

    /// Records wrong bytes; prints the first cases.
    pub(crate) fn harm(&self, during: &str, page: usize, harm: &Harm) {
        self.bad_bytes.fetch_add(harm.bytes, Relaxed);
        if self.told.fetch_add(1, Relaxed) < TOLD {
            let at_s = self.now_us() / 1_000_000;
            eprintln!("overbook-stand-in: {at_s} s: {during}: page {page}: {harm}");
        }
    }

    /// Number of wrong bytes so far.
    pub(crate) fn bad_bytes(&self) -> usize {
        self.bad_bytes.load(Relaxed)
    }

    /// The operation that has been running for longest, and for how many microseconds.
    pub(crate) fn most_stuck(&self) -> (&'static str, u64) {
        let now = self.now_us();
        let of = |seat: &Seat| {
            let since = seat.since_us.load(Relaxed);
            let kind = seat.kind.load(Relaxed).checked_sub(1)?;
            Some((NAMES[kind], now.saturating_sub(since)))
        };
        self.seats.iter().filter_map(of).max_by_key(|seat| seat.1).unwrap_or(("nothing", 0))
    }

    /// All statistics as the inside of a JSON object.
    pub(crate) fn to_json(&self) -> String {
        let (stuck, stuck_us) = self.most_stuck();
        let mut text = format!(
            "\"bad_bytes\":{},\"stuck_us\":{stuck_us},\"stuck_in\":\"{stuck}\",\"operations\":{{",
            self.bad_bytes()
        );
        for (index, (name, tally)) in NAMES.iter().zip(&self.tallies).enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let (done, longest) = (tally.done.load(Relaxed), tally.longest_us.load(Relaxed));
            let _ = write!(text, "{comma}\"{name}\":{{\"done\":{done},\"longest_us\":{longest}}}");
        }
        text + "}"
    }
}
