//! Generated text: lines of 4 to 12 words from 65,536 made-up words.
//!
//! Word frequencies follow roughly Zipf's law, as in real text. The number of bits of the word's
//! rank is drawn first, then the rank, so each octave of ranks is equally likely. The text
//! depends only on the seed.

use std::io;

use crate::error::WorkError;
use crate::memory::MB;
use crate::rng::Rng;
use crate::run::RunState;

const CONSONANTS: &[u8; 16] = b"bcdfghjklmnprstv";
const VOWELS: &[u8; 4] = b"aeio";
const RANK_BITS: usize = 16;

/// An endless text.
#[derive(Debug)]
pub(crate) struct Text {
    rng: Rng,
    line: Vec<u8>,
}

impl Text {
    pub(crate) fn new(seed: u64) -> Self {
        Self { rng: Rng::new(seed), line: Vec::new() }
    }

    /// The next line, with its newline.
    pub(crate) fn next_line(&mut self) -> &[u8] {
        self.line.clear();
        let words = 4 + self.rng.below(9);
        for _ in 0..words {
            let bits = self.rng.below(RANK_BITS + 1);
            let rank = self.rng.below(1 << bits);
            push_word(&mut self.line, rank);
            self.line.push(b' ');
        }
        self.line.pop();
        self.line.push(b'\n');
        &self.line
    }

    /// Hands the lines that fit into `mb` MB to `each`; returns their total length. Ends early on a
    /// stop.
    pub(crate) fn lines(
        &mut self,
        mb: usize,
        shared: &RunState,
        mut each: impl FnMut(&[u8]) -> io::Result<()>,
    ) -> io::Result<u64> {
        let mut bytes = 0;
        while !shared.stopping() {
            let line = self.next_line();
            if bytes + line.len() > mb * MB {
                break;
            }
            bytes += line.len();
            each(line)?;
        }
        Ok(bytes as u64)
    }
}

/// `mb` MB of text in one piece.
pub(crate) fn in_memory(
    text: &mut Text,
    mb: usize,
    shared: &RunState,
) -> Result<Vec<u8>, WorkError> {
    let failed = |source| WorkError::Memory { mb, source };
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(mb * MB).map_err(|e| failed(e.into()))?;
    let append = |line: &[u8]| {
        bytes.extend_from_slice(line);
        Ok(())
    };
    text.lines(mb, shared, append).map_err(failed)?;
    Ok(bytes)
}

/// Spells `rank` in base 64; a digit is a syllable, so different ranks are different words.
fn push_word(line: &mut Vec<u8>, mut rank: usize) {
    loop {
        line.push(CONSONANTS[rank % 16]);
        line.push(VOWELS[rank / 16 % 4]);
        rank /= 64;
        if rank == 0 {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn all_words_are_different() {
        let word = |rank| {
            let mut word = Vec::new();
            push_word(&mut word, rank);
            word
        };
        let words: HashSet<Vec<u8>> = (0..1 << RANK_BITS).map(word).collect();
        assert_eq!(words.len(), 1 << RANK_BITS);
    }

    #[test]
    fn the_same_seed_gives_the_same_text_and_another_one_another() {
        let start = |seed| Text::new(seed).next_line().to_vec();
        assert_eq!(start(1), start(1));
        assert_ne!(start(1), start(2));
    }
}
