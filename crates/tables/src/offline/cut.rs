//! Cuts files into pages.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    ops::Range,
    path::Path,
    slice,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use pages::offline::{Builder, PAGE_LEN, Page, Sampling};
use rustix::io::Errno;

use super::{BuildState, OfflineError, elf, limit::Left, lock, tally::Tally};

/// Bytes read of a file to tell its kind.
const HEAD_LEN: usize = 64 << 10;
/// Bytes read at a time.
const CHUNK_LEN: usize = 1 << 20;
/// Distinct pages that a thread collects before it hands them over.
const HELD: usize = 16 << 10;
const PAGE: u64 = PAGE_LEN as u64;

/// The contents of a file, read from its beginning.
pub(super) trait Contents: Read {
    /// Skips `bytes` bytes.
    fn skip(&mut self, bytes: u64) -> io::Result<()>;

    /// The place of the first data at or after `place`, the current one; zeros precede it.
    /// Without such data, the end of the last page.
    fn data_from(&mut self, place: u64) -> io::Result<u64> {
        Ok(place)
    }
}

impl Contents for File {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        skip_by_seeking(self, bytes)
    }

    fn data_from(&mut self, place: u64) -> io::Result<u64> {
        let data = match rustix::fs::seek(&*self, rustix::fs::SeekFrom::Data(place)) {
            Ok(data) => data,
            Err(Errno::NXIO) => self.metadata()?.len().next_multiple_of(PAGE).max(place),
            // A filesystem without holes.
            Err(Errno::INVAL) => place,
            Err(error) => return Err(error.into()),
        };
        self.seek(SeekFrom::Start(place))?;
        Ok(data)
    }
}

/// Cuts files, and collects their pages.
pub(super) struct Cutter<'a> {
    pub(super) shared: &'a BuildState,
    /// The source of the files.
    pub(super) source: Arc<Tally>,
    builder: Builder,
    buffer: Vec<u8>,
}

impl<'a> Cutter<'a> {
    pub(super) fn new(shared: &'a BuildState, sampling: Sampling) -> Self {
        let builder = Builder::new(sampling);
        Self { shared, source: Arc::default(), builder, buffer: vec![0; CHUNK_LEN] }
    }

    /// Reports a file that could not be read.
    pub(super) fn leave_out(&self, path: &Path, why: &dyn std::fmt::Display) {
        self.shared.leave_out(&self.source, path, why);
    }

    /// Takes a file's pages; none if it is not an executable and only executables are wanted.
    /// `left` is the number of bytes that may still be read of its source.
    pub(super) fn cut(
        &mut self,
        path: &Path,
        contents: &mut impl Contents,
        left: &Left,
    ) -> Result<(), OfflineError> {
        let fail = |error| left.unreadable(path, error);
        let mut head = vec![0; elf::MAGIC.len()];
        let mut has = fill(contents, &mut head).map_err(fail)?;
        let is_elf = head == elf::MAGIC;
        self.source.files.fetch_add(u64::from(has > 0), Relaxed);
        self.source.elf.fetch_add(u64::from(is_elf), Relaxed);
        if path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"vmlinuz")) {
            lock(&self.source.kernel).get_or_insert_with(|| path.to_owned());
        }
        if !is_elf && !self.shared.all_pages {
            left.spend(has as u64)?;
            return Ok(());
        }
        if has == head.len() {
            head.resize(HEAD_LEN, 0);
            has += fill(contents, &mut head[has..]).map_err(fail)?;
        }
        head.truncate(has);
        left.spend(has as u64)?;
        let code = if is_elf { elf::code(&head) } else { Ok(elf::Code::default()) };
        let elf::Code { pages: code, end } = code
            .map_err(|what| OfflineError::Source { path: path.into(), what: what.to_string() })?;
        let all = 0..u64::MAX / PAGE;
        let wanted = if self.shared.all_pages { slice::from_ref(&all) } else { &code };
        let mut input = Input { head: &head, place: 0, rest: contents };
        let mut reached = 0;
        for range in wanted {
            reached = self.take(path, &mut input, range.clone(), &code, left)?;
        }
        if reached < end && !self.shared.all_pages {
            let what = format!(
                "it is cut off: its code ends at byte {end}, and the file before; the pages that \
                 are there were taken"
            );
            return Err(OfflineError::Source { path: path.into(), what });
        }
        self.shared.files.fetch_add(1, Relaxed);
        if self.builder.len() >= HELD {
            self.hand_over()?;
        }
        Ok(())
    }

    /// Takes this range of pages, up to the end of the file. Returns the place where it stopped.
    fn take(
        &mut self,
        path: &Path,
        input: &mut Input<'_, impl Contents>,
        range: Range<u64>,
        code: &[Range<u64>],
        left: &Left,
    ) -> Result<u64, OfflineError> {
        const CHUNK_PAGES: u64 = CHUNK_LEN as u64 / PAGE;
        let fail = |error| left.unreadable(path, error);
        input.advance(range.start * PAGE).map_err(fail)?;
        let mut first = range.start;
        while first < range.end {
            let data = input.data_from().map_err(fail)?;
            let zeros = (data / PAGE - first).min(range.end - first);
            if zeros > 0 {
                self.builder.add_zeros(zeros);
                self.source.pages.fetch_add(zeros, Relaxed);
                first += zeros;
                input.advance(first * PAGE).map_err(fail)?;
                continue;
            }
            let taken = CHUNK_PAGES.min(range.end - first);
            let Ok(wanted) = usize::try_from(taken * PAGE) else { break };
            let Some(buffer) = self.buffer.get_mut(..wanted) else { break };
            let known = input.place.max(input.head.len() as u64);
            let has = input.fill(buffer).map_err(fail)?;
            left.spend(input.place.saturating_sub(known))?;
            self.shared.bytes.fetch_add(has as u64, Relaxed);
            let end = has.next_multiple_of(PAGE_LEN);
            buffer[has..end].fill(0);
            let pages = buffer[..end].as_chunks::<PAGE_LEN>().0;
            add(&mut self.builder, pages, first, code)?;
            self.source.pages.fetch_add(pages.len() as u64, Relaxed);
            if has < wanted {
                return Ok(first * PAGE + has as u64);
            }
            first += taken;
            if self.builder.len() >= HELD {
                self.hand_over()?;
            }
        }
        Ok(first * PAGE)
    }

    /// Merges the collected pages into the table.
    pub(super) fn hand_over(&mut self) -> Result<(), OfflineError> {
        Ok(lock(&self.shared.builder).merge(&mut self.builder)?)
    }
}

fn add(
    builder: &mut Builder,
    pages: &[Page],
    first: u64,
    code: &[Range<u64>],
) -> Result<(), OfflineError> {
    for (number, page) in (first..).zip(pages) {
        builder.add(page, code.iter().any(|range| range.contains(&number)))?;
    }
    Ok(())
}

/// A file whose beginning was already read.
struct Input<'a, C> {
    head: &'a [u8],
    place: u64,
    rest: &'a mut C,
}

impl<C: Contents> Input<'_, C> {
    /// Skips forward to this place.
    fn advance(&mut self, place: u64) -> io::Result<()> {
        let head = self.head.len() as u64;
        let from = self.place.max(head);
        if place > from {
            self.rest.skip(place - from)?;
        }
        self.place = self.place.max(place);
        Ok(())
    }

    fn data_from(&mut self) -> io::Result<u64> {
        if self.place < self.head.len() as u64 {
            return Ok(self.place);
        }
        self.rest.data_from(self.place)
    }

    /// Fills the buffer up to the end of the file.
    fn fill(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let at = usize::try_from(self.place).unwrap_or(usize::MAX).min(self.head.len());
        let known = &self.head[at..];
        let known = &known[..known.len().min(buffer.len())];
        buffer[..known.len()].copy_from_slice(known);
        let has = known.len() + fill(self.rest, &mut buffer[known.len()..])?;
        self.place += has as u64;
        Ok(has)
    }
}

/// Fills the buffer up to the end of the contents.
pub(super) fn fill(contents: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut has = 0;
    while has < buffer.len() {
        match contents.read(&mut buffer[has..]) {
            Ok(0) => break,
            Ok(more) => has += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(has)
}

/// Skips `bytes` bytes of contents that can be seeked.
pub(super) fn skip_by_seeking(contents: &mut impl Seek, bytes: u64) -> io::Result<()> {
    let bytes = i64::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    contents.seek(SeekFrom::Current(bytes)).map(drop)
}
