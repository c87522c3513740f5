//! Detects damage on a disk: blocks whose every word is known are read back past the guest's page
//! cache.
//!
//! With `O_DIRECT` the host's device works on the reader's own pages, while the guest does other
//! things. Only this test finds a page that is taken away meanwhile, or comes back with its old
//! content. The buffer is large, and each transfer takes another part of it, so that most of it
//! is cold. One transfer of eight writes the same content from the buffer, so that a page that
//! was wrong then is found later.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::MmapMut;

use crate::error::WorkError;
use crate::memory::{MB, PAGE};
use crate::rng::{Rng, STEP, mix};
use crate::run::RunState;

/// `O_DIRECT` on x86.
const DIRECT: i32 = 0o40_000;
const BUFFER: usize = 8 * MB;
/// Most pages of one transfer.
const MOST: usize = 64;
const TOLD: usize = 8;

/// Fills the first `mb` MB, then reads and verifies parts of it until the stop. Wrong bytes are
/// added to `bad_bytes`.
pub(super) fn verify(
    path: &Path,
    mb: usize,
    seed: u64,
    shared: &RunState,
    bad_bytes: &AtomicUsize,
) -> Result<(), WorkError> {
    let failed = WorkError::file("open", path);
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(DIRECT);
    let file = options.open(path).map_err(failed)?;
    let buffer = MmapMut::map_anon(BUFFER)
        .map_err(|source| WorkError::Memory { mb: BUFFER / MB, source })?;
    let mut disk = Witness { file, buffer, seed, told: 0 };
    let pages = mb * MB / PAGE;
    let mut filled = 0;
    while filled < pages && !shared.stopping() {
        disk.write(0, filled, MOST).map_err(WorkError::file("fill", path))?;
        filled += MOST;
    }
    let mut rng = Rng::new(seed);
    while !shared.stopping() {
        let count = 1 + rng.below(MOST);
        let block = rng.below(pages - count + 1);
        let place = rng.below(BUFFER / PAGE - count + 1);
        if rng.below(8) == 0 {
            disk.write(place, block, count).map_err(WorkError::file("write", path))?;
        } else {
            let bad = disk.read(place, block, count).map_err(WorkError::file("read", path))?;
            bad_bytes.fetch_add(bad, Ordering::Relaxed);
        }
    }
    Ok(())
}

struct Witness {
    file: File,
    buffer: MmapMut,
    seed: u64,
    told: usize,
}

impl Witness {
    /// Puts content into a part of the buffer, and writes it to its blocks.
    fn write(&mut self, place: usize, block: usize, count: usize) -> io::Result<()> {
        let part = place * PAGE..(place + count) * PAGE;
        for (index, page) in self.buffer[part.clone()].chunks_exact_mut(PAGE).enumerate() {
            let words = page.as_chunks_mut::<8>().0;
            let content = words_of(self.seed, block + index);
            words.iter_mut().zip(content).for_each(|(word, expected)| *word = expected);
        }
        self.file.write_all_at(&self.buffer[part], (block * PAGE) as u64)
    }

    /// Reads blocks into a part of the buffer; returns the number of wrong bytes, and corrects
    /// these on the disk.
    fn read(&mut self, place: usize, block: usize, count: usize) -> io::Result<usize> {
        let part = place * PAGE..(place + count) * PAGE;
        self.file.read_exact_at(&mut self.buffer[part.clone()], (block * PAGE) as u64)?;
        let mut bad = 0;
        for (index, page) in self.buffer[part].chunks_exact(PAGE).enumerate() {
            let words = page.as_chunks::<8>().0;
            let wrong = words.iter().zip(words_of(self.seed, block + index));
            let here: usize = wrong
                .map(|(word, expected)| word.iter().zip(&expected).filter(|(a, b)| a != b).count())
                .sum();
            if here > 0 && self.told < TOLD {
                self.told += 1;
                eprintln!("overbook-guest: verify: block {}: {here} wrong bytes", block + index);
            }
            bad += here;
        }
        if bad > 0 {
            self.write(place, block, count)?;
        }
        Ok(bad)
    }
}

/// The words that a block must hold.
fn words_of(seed: u64, block: usize) -> impl Iterator<Item = [u8; 8]> {
    // Different from the stream of any page in memory: those are mixed once more.
    let mut state = mix(seed) ^ mix(!(block as u64));
    std::iter::repeat_with(move || {
        state = state.wrapping_add(STEP);
        mix(state).to_le_bytes()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn witness() -> Witness {
        let buffer = MmapMut::map_anon(BUFFER).unwrap();
        Witness { file: tempfile::tempfile().unwrap(), buffer, seed: 7, told: 0 }
    }

    #[test]
    fn what_was_written_reads_back_right_anywhere_in_the_buffer() {
        let mut disk = witness();
        disk.write(5, 0, 20).unwrap();
        assert_eq!(disk.read(1000, 3, 17).unwrap(), 0);
    }

    #[test]
    fn a_wrong_byte_on_the_disk_counts_once() {
        let mut disk = witness();
        disk.write(0, 0, 20).unwrap();
        let mut byte = [0];
        disk.file.read_exact_at(&mut byte, 5000).unwrap();
        disk.file.write_all_at(&[byte[0] ^ 1], 5000).unwrap();
        assert_eq!(disk.read(0, 0, 20).unwrap(), 1);
        assert_eq!(disk.read(0, 0, 20).unwrap(), 0);
    }
}
