//! `kv`: a key-value store in memory, like Redis or memcached: gets and sets on keys of Zipf
//! popularity.
//!
//! An open-addressing hash table and a heap of values fill `--mb`. Keys are scattered over both,
//! so that popular keys make single pages hot all over the memory instead of one hot region. A
//! get finds its key and reads the whole value; a set (`--set-percent` of the requests) rewrites
//! it. Values hold their key and a version: a get that finds another's value fails the run.

use clap::Args;

use crate::args::{megabytes, ranged};
use crate::error::WorkError;
use crate::memory::{WORDS_PER_MB, WorkMemory};
use crate::rng::{Rng, mix};
use crate::run::Worker;
use crate::zipf::Zipf;

/// A value: 512 bytes.
const VALUE_WORDS: usize = 64;
/// A slot of the table: key, place of the value.
const SLOT_WORDS: usize = 2;
/// Slots per key: the table is at most half full.
const SLOTS_PER_KEY: usize = 2;
const WORDS_PER_KEY: usize = VALUE_WORDS + SLOTS_PER_KEY * SLOT_WORDS;
const LATENCY_EVERY: usize = 16;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of table and values together
    #[arg(long, value_name = "N", value_parser = megabytes)]
    mb: usize,
    /// How unequal the keys' popularity is: 0 = all alike
    #[arg(long, value_name = "S", value_parser = skew, default_value_t = 0.99)]
    skew: f64,
    /// Sets per hundred requests
    #[arg(long, value_name = "PERCENT", value_parser = percent, default_value_t = 10)]
    set_percent: usize,
}

pub(crate) fn skew(text: &str) -> Result<f64, String> {
    ranged(text, 0.0, 4.0)
}

fn percent(text: &str) -> Result<usize, String> {
    ranged(text, 0, 100)
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let mut store = KvStore::new(options.mb)?;
    for number in 0..store.keys {
        if worker.shared.stopping() {
            return Ok(());
        }
        store.insert(number);
        worker.shared.mb.set(number * WORDS_PER_KEY / WORDS_PER_MB + 1);
    }
    let popularity = Zipf::new(store.keys, options.skew);
    let mut rng = Rng::new(worker.seed);
    let mut request = 0;
    while worker.proceed(1) {
        let start = (request % LATENCY_EVERY == 0).then(|| worker.shared.now());
        request += 1;
        let number = popularity.choose(&mut rng);
        if rng.below(100) < options.set_percent {
            store.set(number, rng.next_u64());
        } else {
            store.get(number)?;
        }
        if let Some(start) = start {
            worker.shared.latency.record(worker.shared.now() - start);
        }
        worker.done(1);
    }
    Ok(())
}

/// Values first, then the table. Key 0 marks a free slot.
struct KvStore {
    memory: WorkMemory,
    keys: usize,
}

impl KvStore {
    fn new(mb: usize) -> Result<Self, WorkError> {
        let mut memory = WorkMemory::default();
        for _ in 0..mb {
            memory.grow()?;
        }
        Ok(Self { keys: memory.words() / WORDS_PER_KEY, memory })
    }

    /// The key of this number, never 0.
    fn key(number: usize) -> u64 {
        mix(number as u64 + 1) | 1
    }

    /// The key's slot, or the free one that it would get.
    fn slot(&self, key: u64) -> usize {
        let slots = self.keys * SLOTS_PER_KEY;
        let mut slot = Rng::new(key).below(slots);
        loop {
            let at = self.keys * VALUE_WORDS + slot * SLOT_WORDS;
            let found = self.memory.get(at);
            if found == key || found == 0 {
                return at;
            }
            slot = (slot + 1) % slots;
        }
    }

    /// Values lie in the order of insertion, which is unrelated to popularity: ranks are mixed.
    fn insert(&mut self, place: usize) {
        let key = Self::key(self.number_at(place));
        let slot = self.slot(key);
        self.memory.set(slot, key);
        self.memory.set(slot + 1, place as u64);
        self.write(place, key, 0);
    }

    /// The rank of the value at `place`: a permutation by a step that shares no factor with the
    /// count.
    fn number_at(&self, place: usize) -> usize {
        let mut step = (self.keys * 5 / 8) | 1;
        while gcd(step, self.keys) != 1 {
            step += 2;
        }
        place * step % self.keys
    }

    fn set(&mut self, number: usize, version: u64) {
        let key = Self::key(number);
        if let Ok(place) = usize::try_from(self.memory.get(self.slot(key) + 1)) {
            self.write(place, key, version);
        }
    }

    fn write(&mut self, place: usize, key: u64, version: u64) {
        let first = place * VALUE_WORDS;
        self.memory.set(first, key);
        (1..VALUE_WORDS).for_each(|word| self.memory.set(first + word, version));
    }

    /// The version of the value.
    fn get(&self, number: usize) -> Result<u64, WorkError> {
        let key = Self::key(number);
        let place = self.memory.get(self.slot(key) + 1);
        let first = usize::try_from(place).unwrap_or(0) * VALUE_WORDS;
        let got = self.memory.get(first);
        let version = self.memory.get(first + 1);
        let whole = (1..VALUE_WORDS).all(|word| self.memory.get(first + word) == version);
        if got == key && whole {
            Ok(version)
        } else {
            Err(WorkError::WrongResult { expected: key, got })
        }
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(mb: usize) -> KvStore {
        let mut store = KvStore::new(mb).unwrap();
        (0..store.keys).for_each(|place| store.insert(place));
        store
    }

    #[test]
    fn every_key_is_found_with_its_last_value() {
        let mut store = full(2);
        assert!(store.keys > 3000);
        for number in (0..store.keys).step_by(7) {
            store.set(number, number as u64);
        }
        for number in 0..store.keys {
            let expected = if number % 7 == 0 { number as u64 } else { 0 };
            assert_eq!(store.get(number).unwrap(), expected, "{number}");
        }
    }

    #[test]
    fn a_damaged_value_fails_the_run() {
        let mut store = full(1);
        let place = (0..store.keys).find(|&place| store.number_at(place) == 5).unwrap();
        store.memory.set(place * VALUE_WORDS + 9, 1);
        assert!(matches!(store.get(5), Err(WorkError::WrongResult { .. })));
    }
}
