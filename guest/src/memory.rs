//! Memory that is allocated from the kernel and returned to it at once.
//!
//! `malloc` may keep freed memory in its arenas; then a smaller working set would look unchanged
//! from outside. So memory is private anonymous mappings of 1 MB each, unmapped at once when the
//! size shrinks.

use std::io;

use memmap2::MmapMut;

use crate::error::WorkError;
use crate::rng::Rng;
use crate::run::RunState;

pub(crate) const MB: usize = 1 << 20;
pub(crate) const PAGE: usize = 4096;
pub(crate) const PAGES_PER_MB: usize = MB / PAGE;
pub(crate) const WORDS_PER_MB: usize = MB / 8;

/// A growable, shrinkable array of pages.
#[derive(Debug, Default)]
pub(crate) struct WorkMemory {
    chunks: Vec<MmapMut>,
}

impl WorkMemory {
    pub(crate) fn len_mb(&self) -> usize {
        self.chunks.len()
    }

    pub(crate) fn pages(&self) -> usize {
        self.len_mb() * PAGES_PER_MB
    }

    /// Maps one more MB. It is untouched, so it costs nothing until it is written.
    pub(crate) fn grow(&mut self) -> Result<&mut [u8], WorkError> {
        let failed = |source: io::Error| WorkError::Memory { mb: self.chunks.len() + 1, source };
        let chunk = MmapMut::map_anon(MB).map_err(failed)?;
        self.chunks.push(chunk);
        let last = self.chunks.len() - 1;
        Ok(&mut self.chunks[last])
    }

    /// Grows to `mb`, filled like programs' memory; a stop ends the growth early, but not before
    /// 1 MB.
    pub(crate) fn filled(mb: usize, rng: &mut Rng, shared: &RunState) -> Result<Self, WorkError> {
        let mut memory = Self::default();
        while memory.len_mb() < mb && !(shared.stopping() && memory.len_mb() > 0) {
            fill(memory.grow()?, rng);
            shared.mb.set(memory.len_mb());
        }
        Ok(memory)
    }

    /// Unmaps the memory above `mb`.
    pub(crate) fn shrink(&mut self, mb: usize) {
        self.chunks.truncate(mb);
    }

    pub(crate) fn page(&mut self, index: usize) -> &mut [u8] {
        let at = index % PAGES_PER_MB * PAGE;
        &mut self.chunks[index / PAGES_PER_MB][at..at + PAGE]
    }

    pub(crate) fn words(&self) -> usize {
        self.len_mb() * WORDS_PER_MB
    }

    /// The number at word `index`.
    pub(crate) fn get(&self, index: usize) -> u64 {
        let (words, _) = self.chunks[index / WORDS_PER_MB].as_chunks::<8>();
        u64::from_le_bytes(words[index % WORDS_PER_MB])
    }

    /// Writes a number at word `index`.
    pub(crate) fn set(&mut self, index: usize, value: u64) {
        *self.word(index) = value.to_le_bytes();
    }

    /// The 8 bytes at word `index`, to read and write.
    pub(crate) fn word(&mut self, index: usize) -> &mut [u8; 8] {
        let (words, _) = self.chunks[index / WORDS_PER_MB].as_chunks_mut::<8>();
        &mut words[index % WORDS_PER_MB]
    }
}

/// Maps one page by itself; `mb` is the memory held so far, for the error.
pub(crate) fn page(mb: usize) -> Result<MmapMut, WorkError> {
    MmapMut::map_anon(PAGE).map_err(|source| WorkError::Memory { mb: mb + 1, source })
}

/// Fills memory so that no page equals another, and each compresses to a third, as programs'
/// memory does: one word of four is random.
fn fill(bytes: &mut [u8], rng: &mut Rng) {
    for words in bytes.as_chunks_mut::<32>().0 {
        words[..8].copy_from_slice(&rng.next_u64().to_le_bytes());
    }
}

/// Fills memory with random words, so that no page compresses or equals another.
pub(crate) fn fill_random(bytes: &mut [u8], rng: &mut Rng) {
    for word in bytes.as_chunks_mut::<8>().0 {
        *word = rng.next_u64().to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resident_kb() -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find(|l| l.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn shrinking_gives_the_memory_back_to_the_kernel() {
        const TEST_MB: usize = 256;
        let mut memory = WorkMemory::default();
        let before = resident_kb();
        for _ in 0..TEST_MB {
            memory.grow().unwrap().fill(1);
        }
        let full = resident_kb();
        memory.shrink(16);
        let after = resident_kb();
        assert!(full > before + 200 * 1024, "{before} {full}");
        assert!(after + 200 * 1024 < full, "{full} {after}");
        assert_eq!(memory.len_mb(), 16);
    }

    #[test]
    fn words_and_pages_address_the_same_bytes() {
        let mut memory = WorkMemory::default();
        memory.grow().unwrap();
        memory.grow().unwrap();
        *memory.word(WORDS_PER_MB + 512) = *b"overbook";
        assert_eq!(&memory.page(PAGES_PER_MB + 1)[..8], b"overbook");
    }
}
