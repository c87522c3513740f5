//! A guest's disk: the kernel itself reads into guest RAM and writes from it.
//!
//! A file of pages with known content stands for the disk. Runs of pages travel both ways: past
//! the page cache (`O_DIRECT`, QEMU's `cache=none`: the kernel pins the pages while the device
//! works), through it (the kernel copies, and faults on the thread's behalf), and asynchronously
//! in batches (`io_submit`, QEMU's `aio=native`). Batches leave many pages pinned for longer.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crate::aio::{Queue, Read};
use crate::crew::{CrewRun, CrewState, Hand};
use crate::page::{Content, PAGE};
use crate::watch::WorkKind;

/// Number of blocks in the file, of one page each.
const BLOCKS: usize = 4096;
/// Most pages of one transfer: QEMU's requests reach a megabyte and more.
const MOST: usize = 256;
/// Number of reads in flight together.
const BATCH: usize = 8;

/// A disk that one thread uses.
#[derive(Debug)]
pub(crate) struct RamDisk {
    file: File,
    blocks: Vec<Content>,
    is_direct: bool,
}

impl RamDisk {
    /// Makes the file, all zeros, and opens it with or without the page cache. The file is
    /// unlinked afterwards.
    ///
    /// # Errors
    /// When the file cannot be made, or its file system does not support direct I/O.
    pub(crate) fn new(path: &Path, is_direct: bool) -> io::Result<Self> {
        let flags = if is_direct { libc::O_DIRECT } else { 0 };
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .custom_flags(flags)
            .open(path)?;
        std::fs::remove_file(path)?;
        file.set_len((BLOCKS * PAGE) as u64)?;
        Ok(Self { file, blocks: vec![Content::ZERO; BLOCKS], is_direct })
    }

    /// Reads a run of blocks into a run of pages.
    fn read(&self, block: usize, run: &CrewRun<'_>) -> io::Result<()> {
        let (start, bytes) = run.range();
        // SAFETY: the range is RAM that is held and pages that are owned; other threads access it
        // by atomics only.
        let done =
            unsafe { libc::pread64(self.file.as_raw_fd(), start.cast(), bytes, offset(block)) };
        complete(done, bytes)?;
        self.note_read(block, run);
        Ok(())
    }

    fn note_read(&self, block: usize, run: &CrewRun<'_>) {
        run.pages.iter().zip(&self.blocks[block..]).for_each(|(page, content)| page.set(*content));
    }

    /// Writes a run of pages to a run of blocks.
    fn write(&mut self, block: usize, run: &CrewRun<'_>) -> io::Result<()> {
        let (start, bytes) = run.range();
        // SAFETY: as above.
        let done =
            unsafe { libc::pwrite64(self.file.as_raw_fd(), start.cast(), bytes, offset(block)) };
        complete(done, bytes)?;
        for (content, page) in self.blocks[block..].iter_mut().zip(&run.pages) {
            *content = page.content();
        }
        Ok(())
    }
}

fn offset(block: usize) -> i64 {
    i64::try_from(block * PAGE).unwrap_or(i64::MAX)
}

fn complete(done: isize, bytes: usize) -> io::Result<()> {
    match usize::try_from(done) {
        Ok(done) if done == bytes => Ok(()),
        Ok(_) => Err(io::ErrorKind::UnexpectedEof.into()),
        Err(_) => Err(io::Error::last_os_error()),
    }
}

/// Reads and writes runs until the end.
///
/// # Errors
/// When a transfer fails: none may fail because pages are staged.
pub(crate) fn work(hand: &mut Hand<'_>, mut disk: RamDisk) -> io::Result<()> {
    let (reads, writes) = if disk.is_direct {
        (WorkKind::DirectRead, WorkKind::DirectWrite)
    } else {
        (WorkKind::BufferedRead, WorkKind::BufferedWrite)
    };
    while !hand.shared.is_stopping() {
        let Some(run) = hand.own_any(MOST) else { continue };
        let block = hand.rng.below(BLOCKS - MOST);
        let shared = hand.shared;
        let is_read = hand.rng.chance(50);
        if is_read {
            let result = hand.time(reads, || Some(disk.read(block, &run)));
            result.transpose()?;
        } else {
            run.settle(shared);
            let result = hand.time(writes, || Some(disk.write(block, &run)));
            result.transpose()?;
        }
        let is_harmed = hand.rng.chance(50)
            && run.check(
                shared,
                if is_read { "a look after a read" } else { "a look after a write" },
            );
        // A wrong block on the disk counts once.
        if is_read && is_harmed {
            disk.write(block, &run)?;
        }
        drop(run);
        hand.rest(std::time::Duration::from_millis(2));
    }
    Ok(())
}

/// Reads batches of runs asynchronously until the end.
///
/// # Errors
/// When a read fails.
pub(crate) fn work_in_batches(hand: &mut Hand<'_>, mut disk: RamDisk) -> io::Result<()> {
    fill(&mut disk, hand.shared)?;
    let mut queue = Queue::new(BATCH)?;
    while !hand.shared.is_stopping() {
        let runs: Vec<(usize, CrewRun<'_>)> = (0..BATCH)
            .filter_map(|_| Some((hand.rng.below(BLOCKS - MOST), hand.own_any(MOST)?)))
            .collect();
        let reads: Vec<Read> = runs
            .iter()
            .map(|(block, run)| {
                let (start, bytes) = run.range();
                Read { start, bytes, offset: offset(*block) }
            })
            .collect();
        let result = hand.time(WorkKind::AsyncRead, || {
            // SAFETY: the runs are held and owned until all reads have completed, for which this
            // call waits.
            Some(unsafe { queue.read_all(disk.file.as_raw_fd(), &reads) })
        });
        result.transpose()?;
        for (block, run) in &runs {
            disk.note_read(*block, run);
        }
        // Each run is released right after its check: other threads wait for the pages.
        for (_, run) in runs {
            run.check(hand.shared, "a look after asynchronous reads");
        }
        hand.rest(std::time::Duration::from_millis(5));
    }
    Ok(())
}

/// Writes known content from RAM into every block.
fn fill(disk: &mut RamDisk, shared: &CrewState) -> io::Result<()> {
    let Some(held) = shared.slots[0].hold() else { return Ok(()) };
    for block in 0..BLOCKS {
        let page = block % shared.slots[0].pages();
        let Some(owned) = held.entry(page).own() else { continue };
        let content = shared.fresh();
        content.fill(held.words(page));
        owned.set(content);
        // SAFETY: one page of RAM that is held and owned.
        let done = unsafe {
            let (fd, from) = (disk.file.as_raw_fd(), held.address(page));
            libc::pwrite64(fd, from.cast(), PAGE, offset(block))
        };
        complete(done, PAGE)?;
        disk.blocks[block] = content;
    }
    Ok(())
}
