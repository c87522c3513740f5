//! Reads memory back in bulk: a part in each step, and no more than the host has room for.

use std::io;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use model::Bytes;
use sys::meminfo::MemInfo;
use sys::memory_of::Counters;
use sys::outside::{self, Outside as Memory, Place};
use sys::process::Identity;
use sys::userfaultfd::Range;

use super::blocks::{BLOCK, block_range};
use crate::granules::PAGE;

/// The most memory that one step reads back.
pub(super) const BATCH: Bytes = Bytes::mib(256);
/// The most threads that read.
const MOST_THREADS: usize = 4;
/// The longest time of one step.
pub(super) const LONGEST: Duration = Duration::from_millis(100);
/// The most memory in swap that needs no further pass.
const LITTLE: Bytes = Bytes::mib(1);
/// The inverse of the share of the host's memory that stays available during a recall.
const SPARE: u64 = 32;

/// The host's memory that may be filled by reading back.
pub(super) fn room() -> Bytes {
    MemInfo::read().map_or(Bytes::ZERO, |host| host.available.minus(Bytes(host.total.0 / SPARE)))
}

/// Reads back the pages of this range that are out; returns their size.
fn read_back(memory: &Memory, range: Range) -> io::Result<Bytes> {
    let mut runs: Vec<Range> = Vec::new();
    for (at, _) in (0..).zip(memory.places(range)?).filter(|(_, place)| *place == Place::Out) {
        let start = range.start + at * PAGE;
        match runs.last_mut() {
            Some(last) if last.start + last.len == start => last.len += PAGE,
            _ => runs.push(Range { start, len: PAGE }),
        }
    }
    memory.bring_back(&runs);
    Ok(Bytes(runs.iter().map(|run| run.len).sum()))
}

/// Reads back the pages of these blocks that are out, about `most` and for [`LONGEST`] at most, on
/// up to [`MOST_THREADS`] threads. Returns how many blocks are done.
pub(super) fn read_blocks(memory: &Memory, blocks: &[Range], most: Bytes) -> io::Result<usize> {
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
    let (next, read) = (AtomicUsize::new(0), AtomicU64::new(0));
    let begun = Instant::now();
    let work = || {
        while read.load(Ordering::Relaxed) < most.0 && begun.elapsed() < LONGEST {
            let Some(block) = blocks.get(next.fetch_add(1, Ordering::Relaxed)) else { break };
            read.fetch_add(read_back(memory, *block)?.0, Ordering::Relaxed);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        all.into_iter().try_for_each(|one| {
            one.join().unwrap_or_else(|_| Err(io::Error::other("a thread that reads has ended")))
        })
    })?;
    Ok(next.into_inner().min(blocks.len()))
}

/// Reads back all memory of a process, including QEMU's own.
#[derive(Debug)]
pub(super) struct Recall {
    blocks: Vec<Range>,
    next: usize,
}

impl Recall {
    pub(super) fn of(process: Identity) -> io::Result<Self> {
        let ranges = outside::anonymous(process.pid).map_err(io::Error::other)?;
        let count: u64 = ranges.iter().map(|range| range.len.div_ceil(BLOCK)).sum();
        let blocks = (0..count).map(|block| block_range(&ranges, block)).collect();
        process.still(Self { blocks, next: 0 })
    }

    /// Reads back a part; returns whether it was the last.
    pub(super) fn step(&mut self, memory: &Memory) -> io::Result<bool> {
        let rest = self.blocks.get(self.next..).unwrap_or_default();
        self.next += read_blocks(memory, rest, BATCH.min(room()))?;
        Ok(self.next >= self.blocks.len())
    }
}

/// Reads back all memory of a process that is in swap, until `until` at the latest. A shim that
/// lost its worker may still move pages, also to memory that was already read. So further passes
/// read all memory again, until little is in swap, or a pass has not reduced it.
pub(in super::super) fn recall_all(process: Identity, until: Instant) -> io::Result<()> {
    let memory = Memory::of(process)?;
    loop {
        let (mut recall, before) = (Recall::of(process)?, swapped(process)?);
        while !recall.step(&memory)? {
            if Instant::now() > until {
                return Ok(());
            }
            if room().is_zero() {
                std::thread::sleep(LONGEST);
            }
        }
        let left = swapped(process)?;
        if left <= LITTLE || left >= before {
            return Ok(());
        }
    }
}

/// Whether part of a process's memory is in swap.
pub(in super::super) fn is_swapped(process: Identity) -> bool {
    swapped(process).is_ok_and(|swapped| !swapped.is_zero())
}

fn swapped(process: Identity) -> io::Result<Bytes> {
    Counters::of(process.pid).map(|counters| counters.swapped).map_err(io::Error::other)
}
