//! `memory`: content in this process' own memory, for as long as the process runs.
//!
//! The memory consists of slabs of 16 MiB, each with its own lock. A slab is allocated at its
//! first write, or was given in advance ([`Memory::of`]). A bit per page says whether the page
//! was written; an unwritten page is a hole, and reads as zeros without being touched. A slab can
//! be taken back: from then on reads and writes there fail. A slab can be given notice before
//! that: it can then be read and zeroed, but not written.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use sys::slab::Slab;

use crate::layer::{Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::{self, Extent};

/// Size of a slab, in bytes.
pub const SLAB: usize = 16 << 20;
const PAGE: usize = 4096;
const PAGES: usize = SLAB / PAGE;
/// Maximum number of bytes that one answer about block status covers; the client asks again for
/// the rest.
const MOST_LOOKED_AT: u32 = 64 << 20;

/// Content in memory.
#[derive(Debug)]
pub struct Memory {
    size: u64,
    slabs: Vec<Mutex<SlabState>>,
}

/// State of a slab.
#[derive(Debug)]
enum SlabState {
    /// No byte of it was written, and it has no memory.
    Empty,
    /// It has memory.
    There(SlabPages),
    /// It has memory and is about to be taken back.
    Leaving(SlabPages),
    /// It was taken back.
    Gone,
}

/// A slab, and which of its pages were written.
#[derive(Debug)]
struct SlabPages {
    slab: Slab,
    written: Box<[u64; PAGES / 64]>,
}

/// The part of a request that lies in one slab.
#[derive(Clone, Copy)]
struct SlabPart {
    slab: usize,
    begin: usize,
    length: usize,
}

impl Memory {
    /// Memory of `size` bytes, all of which reads as zeros.
    #[must_use]
    pub fn new(size: u64) -> Self {
        let slabs = size.div_ceil(SLAB as u64);
        Self { size, slabs: (0..slabs).map(|_| Mutex::new(SlabState::Empty)).collect() }
    }

    /// Memory in these slabs, each of which has [`SLAB`] bytes and holds zeros.
    #[must_use]
    pub fn of(slabs: Vec<Slab>) -> Self {
        let size = (slabs.len() * SLAB) as u64;
        let there = |slab| Mutex::new(SlabState::There(SlabPages::of(slab)));
        Self { size, slabs: slabs.into_iter().map(there).collect() }
    }

    /// Takes the last slab that has memory; `None`: there is none.
    pub fn take_last(&self) -> Option<Slab> {
        (0..self.slabs.len()).rev().find_map(|slab| self.take(slab))
    }

    /// Gives notice to the last slab that has none yet; returns whether there was one.
    pub fn give_notice_of_last(&self) -> bool {
        (0..self.slabs.len()).rev().any(|slab| {
            let mut state = self.slab(slab);
            match std::mem::replace(&mut *state, SlabState::Gone) {
                SlabState::There(pages) => *state = SlabState::Leaving(pages),
                other => {
                    *state = other;
                    return false;
                }
            }
            true
        })
    }

    /// Takes all slabs that have notice.
    pub fn take_noticed(&self) -> Vec<Slab> {
        let leaving = |slab: &usize| matches!(*self.slab(*slab), SlabState::Leaving(_));
        (0..self.slabs.len()).filter(leaving).filter_map(|slab| self.take(slab)).collect()
    }

    /// Number of slabs that have notice.
    #[must_use]
    pub fn leaving(&self) -> usize {
        let leaving = |slab: &usize| matches!(*self.slab(*slab), SlabState::Leaving(_));
        (0..self.slabs.len()).filter(leaving).count()
    }

    /// Takes all slabs; reads and writes fail from then on.
    pub fn take_all(&self) -> Vec<Slab> {
        let take =
            |slab| std::mem::replace(&mut *self.slab(slab), SlabState::Gone).into_slab().ok();
        (0..self.slabs.len()).filter_map(take).collect()
    }

    /// Takes a slab if it has memory. An empty one stays as it is: it reads as zeros.
    fn take(&self, slab: usize) -> Option<Slab> {
        let mut state = self.slab(slab);
        let taken = std::mem::replace(&mut *state, SlabState::Gone).into_slab();
        taken.map_err(|other| *state = other).ok()
    }

    /// Number of slabs that have memory.
    #[must_use]
    pub fn there(&self) -> usize {
        let there =
            |slab: &usize| matches!(*self.slab(*slab), SlabState::There(_) | SlabState::Leaving(_));
        (0..self.slabs.len()).filter(there).count()
    }

    fn slab(&self, slab: usize) -> MutexGuard<'_, SlabState> {
        self.slabs[slab].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl SlabState {
    /// The slab, or the state itself if it has no memory.
    fn into_slab(self) -> Result<Slab, Self> {
        match self {
            Self::There(pages) | Self::Leaving(pages) => Ok(pages.slab),
            other @ (Self::Empty | Self::Gone) => Err(other),
        }
    }
}

/// Divides a range by slabs.
fn parts(offset: u64, length: u64) -> impl Iterator<Item = SlabPart> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        let begin = at % SLAB as u64;
        let length = (SLAB as u64 - begin).min(end - at);
        let slab = at / SLAB as u64;
        at += length;
        let fits = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        (length > 0).then(|| SlabPart {
            slab: fits(slab),
            begin: fits(begin),
            length: fits(length),
        })
    })
}

impl SlabPages {
    fn of(slab: Slab) -> Self {
        Self { slab, written: Box::new([0; PAGES / 64]) }
    }

    fn is_written(&self, page: usize) -> bool {
        self.written[page / 64] & (1 << (page % 64)) != 0
    }

    fn set(&mut self, page: usize, is_written: bool) {
        let bit = 1 << (page % 64);
        if is_written {
            self.written[page / 64] |= bit;
        } else {
            self.written[page / 64] &= !bit;
        }
    }

    fn read(&self, begin: usize, into: &mut [u8]) {
        let mut rest = into;
        let mut at = begin;
        while !rest.is_empty() {
            let length = (PAGE - at % PAGE).min(rest.len());
            let (part, after) = rest.split_at_mut(length);
            if self.is_written(at / PAGE) {
                part.copy_from_slice(&self.slab.bytes()[at..at + length]);
            } else {
                part.fill(0);
            }
            (rest, at) = (after, at + length);
        }
    }

    fn write(&mut self, begin: usize, data: &[u8]) {
        self.slab.bytes_mut()[begin..begin + data.len()].copy_from_slice(data);
        for page in begin / PAGE..(begin + data.len()).div_ceil(PAGE) {
            self.set(page, true);
        }
    }

    /// Gives whole pages back to the host, and fills the rest of the range with zeros.
    fn zero(&mut self, begin: usize, length: usize) {
        let end = begin + length;
        let whole = begin.next_multiple_of(PAGE)..end / PAGE * PAGE;
        if whole.start >= whole.end {
            self.slab.bytes_mut()[begin..end].fill(0);
            return;
        }
        self.slab.bytes_mut()[begin..whole.start].fill(0);
        self.slab.bytes_mut()[whole.end..end].fill(0);
        if self.slab.discard(whole.clone()).is_err() {
            // The slab is pinned and keeps its pages.
            self.slab.bytes_mut()[whole.clone()].fill(0);
        }
        for page in whole.start / PAGE..whole.end / PAGE {
            self.set(page, false);
        }
    }
}

impl Layer for Memory {
    fn size(&self) -> u64 {
        self.size
    }

    fn describe(&self) -> String {
        "memory".to_owned()
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        let mut rest = into;
        for part in parts(offset, rest.len() as u64) {
            let (now, after) = rest.split_at_mut(part.length);
            match &*self.slab(part.slab) {
                SlabState::There(pages) | SlabState::Leaving(pages) => pages.read(part.begin, now),
                SlabState::Empty => now.fill(0),
                SlabState::Gone => return Read::Now(Err(Errno::Io)),
            }
            rest = after;
        }
        Read::Now(Ok(()))
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        let mut rest = &data[..];
        for part in parts(offset, data.len() as u64) {
            let (now, after) = rest.split_at(part.length);
            let mut slab = self.slab(part.slab);
            if let SlabState::Empty = *slab {
                match Slab::new(SLAB) {
                    Ok(new) => *slab = SlabState::There(SlabPages::of(new)),
                    Err(_) => return Answer::Now(Err(Errno::NoMemory)),
                }
            }
            match &mut *slab {
                SlabState::There(pages) => pages.write(part.begin, now),
                SlabState::Leaving(_) => return Answer::Now(Err(Errno::NoSpace)),
                SlabState::Empty | SlabState::Gone => return Answer::Now(Err(Errno::Io)),
            }
            rest = after;
        }
        Answer::Now(Ok(()))
    }

    fn zero(&self, offset: u64, length: u64, _: Zeros) -> Answer<'_> {
        for part in parts(offset, length) {
            let mut slab = self.slab(part.slab);
            match &mut *slab {
                SlabState::There(pages) | SlabState::Leaving(pages) => {
                    pages.zero(part.begin, part.length);
                }
                SlabState::Empty => {}
                SlabState::Gone => return Answer::Now(Err(Errno::Io)),
            }
        }
        Answer::Now(Ok(()))
    }

    fn flush(&self) -> Answer<'_> {
        Answer::Now(Ok(()))
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        let parts = parts(offset, length.min(MOST_LOOKED_AT).into());
        reply::join(parts.flat_map(|part| {
            let slab = self.slab(part.slab);
            let end = part.begin + part.length;
            let pages = part.begin / PAGE..end.div_ceil(PAGE);
            pages.map(move |page| {
                let is_hole = match &*slab {
                    SlabState::There(pages) | SlabState::Leaving(pages) => !pages.is_written(page),
                    SlabState::Empty => true,
                    SlabState::Gone => false,
                };
                let length = end.min((page + 1) * PAGE) - part.begin.max(page * PAGE);
                Extent { length: u32::try_from(length).unwrap_or(u32::MAX), is_hole }
            })
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first_byte(memory: &Memory, slab: u64) -> Option<u8> {
        let mut read = [9];
        match memory.read(slab * SLAB as u64, &mut read) {
            Read::Now(Ok(())) => Some(read[0]),
            _ => None,
        }
    }

    fn memory_of_three() -> Memory {
        let memory = Memory::new(3 * SLAB as u64);
        assert!(matches!(memory.write(0, vec![1].into()), Answer::Now(Ok(()))));
        memory
    }

    #[test]
    fn slabs_without_memory_stay_readable_when_others_are_taken() {
        let memory = memory_of_three();
        assert!(memory.take_last().is_some());
        assert_eq!([0, 1, 2].map(|slab| first_byte(&memory, slab)), [None, Some(0), Some(0)]);
        assert!(memory.take_last().is_none() && memory.take_noticed().is_empty());
        assert!(matches!(memory.write(2 * SLAB as u64, vec![3].into()), Answer::Now(Ok(()))));
        assert_eq!([0, 1, 2].map(|slab| first_byte(&memory, slab)), [None, Some(0), Some(3)]);
    }

    #[test]
    fn nothing_is_read_or_written_after_all_was_taken() {
        let memory = memory_of_three();
        assert_eq!(memory.take_all().len(), 1);
        assert_eq!([0, 1, 2].map(|slab| first_byte(&memory, slab)), [None; 3]);
        assert!(matches!(memory.write(SLAB as u64, vec![3].into()), Answer::Now(Err(Errno::Io))));
    }
}
