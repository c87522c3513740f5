//! `random-array`: random read-modify-write over an array; the classic victim of a memory shortage.
//!
//! Every access hits a uniformly random word, so all pages are equally hot, the working set is
//! the array, and accesses per second drop sharply when it does not fit. With `--record-kb` an
//! access is to a whole record, one word in each of its pages. Neighbouring pages are then
//! swapped in and out together, as in a database, and swap readahead helps.
//!
//! Each phase has an array of its own: the one before is unmapped as a whole, then the new one is
//! mapped and filled (which counts no operations). An array that shrank in place after swapping
//! would keep pages that are scattered over all of the guest's memory, because each got a free
//! page when it came back from swap; a fresh array is contiguous. For a quick change, filling
//! writes one random word in each page. While it fills, the gauge `mb` does not restart at zero:
//! it begins with the smaller of both arrays' sizes, then grows with the new one. Phases repeat
//! until the end.

use std::thread;
use std::time::Duration;

use clap::Args;

use crate::args::{MAX_MB, megabytes, ranged};
use crate::error::WorkError;
use crate::memory::{PAGE, WORDS_PER_MB, WorkMemory};
use crate::rng::Rng;
use crate::run::{RunState, Worker};

const WORDS_PER_PAGE: usize = PAGE / 8;
/// Some tens of microseconds of work.
const ACCESSES_PER_BEAT: u64 = 256;

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Size of the array
    #[arg(long, value_name = "N", value_parser = megabytes, required_unless_present = "phases")]
    mb: Option<usize>,
    /// Sizes over time, repeated: "mb:secs,mb:secs,..."
    #[arg(long, value_name = "MB:SECS,...", value_parser = phases, conflicts_with = "mb")]
    phases: Option<Phases>,
    /// Access whole records of this size instead of single words
    #[arg(long, value_name = "KB", value_parser = record_pages)]
    record_kb: Option<RecordPages>,
}

/// The size of a record in pages; a power of two, so that records do not straddle mappings.
type RecordPages = usize;

fn record_pages(text: &str) -> Result<RecordPages, String> {
    let kb: usize = ranged(text, 4, 1024)?;
    if kb.is_power_of_two() { Ok(kb * 1024 / PAGE) } else { Err("valid is a power of two".into()) }
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Phase {
    mb: usize,
    length: Duration,
}

type Phases = std::sync::Arc<[Phase]>;

fn phases(text: &str) -> Result<Phases, String> {
    // A plus sign serves where commas separate something else, as on the kernel's command line.
    text.split([',', '+']).map(phase).collect()
}

fn phase(text: &str) -> Result<Phase, String> {
    let bad = |why: &str| format!("'{text}': {why}; valid is mb:secs,mb:secs,...");
    let (mb, secs) = text.split_once(':').ok_or_else(|| bad("no ':'"))?;
    let mb = ranged(mb, 1, MAX_MB).map_err(|range| bad(&format!("for mb, {range}")))?;
    let secs = ranged(secs, 0.1, 86_400.0).map_err(|range| bad(&format!("for secs, {range}")))?;
    Ok(Phase { mb, length: Duration::from_secs_f64(secs) })
}

pub(crate) fn run(options: &Options, worker: &mut Worker) -> Result<(), WorkError> {
    let record_pages = options.record_kb;
    let mut array = Array { record_pages, ..Array::new(worker.seed) };
    let Some(phases) = &options.phases else {
        array.memory = WorkMemory::filled(options.mb.unwrap_or(1), &mut array.rng, &worker.shared)?;
        while worker.proceed(1) {
            array.work(worker);
        }
        return Ok(());
    };
    worker.shared.phase.set(0);
    let shared = std::sync::Arc::clone(&worker.shared);
    // The worker must not read the clock at each access, and may hang in one for long. So another
    // thread keeps time.
    thread::scope(|scope| {
        scope.spawn(|| keep_time(phases, &shared));
        let result = work_in_phases(&mut array, phases, worker);
        shared.stop();
        result
    })
}

/// Sets the gauge `phase`, which counts on over repetitions, at the start of each phase.
fn keep_time(phases: &[Phase], shared: &RunState) {
    let mut next = Duration::ZERO;
    for (number, phase) in phases.iter().cycle().enumerate() {
        shared.phase.set(number);
        next += phase.length;
        if !shared.sleep_until(next) {
            return;
        }
    }
}

fn work_in_phases(
    array: &mut Array,
    phases: &[Phase],
    worker: &mut Worker,
) -> Result<(), WorkError> {
    let mut current = None;
    while worker.proceed(1) {
        let number = worker.shared.phase.get();
        if number != current {
            current = number;
            let index = usize::try_from(number.unwrap_or(0)).unwrap_or(0) % phases.len();
            array.replace(phases[index].mb, &worker.shared)?;
        }
        array.work(worker);
    }
    Ok(())
}

struct Array {
    memory: WorkMemory,
    rng: Rng,
    record_pages: Option<RecordPages>,
}

impl Array {
    fn new(seed: u64) -> Self {
        Self { memory: WorkMemory::default(), rng: Rng::new(seed), record_pages: None }
    }

    /// Frees the memory and takes `mb` anew, at least 1; a stop ends the filling early.
    fn replace(&mut self, mb: usize, shared: &RunState) -> Result<(), WorkError> {
        shared.gap.pause();
        let in_both = self.memory.len_mb().min(mb);
        self.memory.shrink(0);
        while self.memory.len_mb() < mb && !(shared.stopping() && self.memory.len_mb() > 0) {
            for page in self.memory.grow()?.as_chunks_mut::<PAGE>().0 {
                page[..8].copy_from_slice(&self.rng.next_u64().to_le_bytes());
            }
            shared.mb.set(self.memory.len_mb().max(in_both));
        }
        Ok(())
    }

    /// One access, counted.
    fn work(&mut self, worker: &Worker) {
        self.access();
        worker.done(1);
        if worker.shared.ops().is_multiple_of(ACCESSES_PER_BEAT) {
            worker.beat();
        }
    }

    fn access(&mut self) {
        let Some(pages) = self.record_pages else {
            let index = self.rng.below(self.memory.len_mb() * WORDS_PER_MB);
            return self.modify(index);
        };
        let record = self.rng.below(self.memory.pages() / pages);
        for page in record * pages..(record + 1) * pages {
            let word = self.rng.below(WORDS_PER_PAGE);
            self.modify(page * WORDS_PER_PAGE + word);
        }
    }

    fn modify(&mut self, index: usize) {
        let random = self.rng.next_u64();
        let word = self.memory.word(index);
        *word = (u64::from_le_bytes(*word).rotate_left(5) ^ random).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_parsed_in_order() {
        let second = Duration::from_secs(1);
        let expected = [Phase { mb: 10, length: second }, Phase { mb: 3, length: second / 2 }];
        assert_eq!(*phases("10:1,3:0.5").unwrap(), expected);
        assert_eq!(*phases("10:1+3:0.5").unwrap(), expected);
        for bad in ["", "10", "10:1,", "0:1", "10:0", "10:-1", "a:1", "10:1:1", "10:inf"] {
            assert!(phases(bad).is_err(), "{bad}");
        }
    }

    fn pages_of(array: &mut Array) -> Vec<Vec<u8>> {
        (0..array.memory.pages()).map(|page| array.memory.page(page).to_vec()).collect()
    }

    #[test]
    fn an_array_follows_its_size_and_accesses_reach_all_of_it() {
        let shared = RunState::new();
        let mut array = Array::new(1);
        for mb in [3, 1, 2] {
            array.replace(mb, &shared).unwrap();
            assert_eq!((shared.mb.get(), array.memory.len_mb()), (Some(mb as u64), mb));
        }
        let before = pages_of(&mut array);
        (0..20_000).for_each(|_| array.access());
        assert!(pages_of(&mut array).iter().zip(&before).all(|(now, then)| now != then));
    }

    #[test]
    fn the_array_of_the_next_phase_is_another_and_all_of_it_is_written() {
        let shared = RunState::new();
        let mut array = Array::new(1);
        array.replace(2, &shared).unwrap();
        let before = pages_of(&mut array);
        array.replace(1, &shared).unwrap();
        let after = pages_of(&mut array);
        assert!(after.iter().all(|page| page.iter().any(|byte| *byte != 0)));
        assert!(after.iter().all(|page| !before.contains(page)));
    }

    #[test]
    fn a_record_is_touched_in_each_of_its_pages() {
        let shared = RunState::new();
        let mut array = Array { record_pages: Some(16), ..Array::new(1) };
        array.replace(2, &shared).unwrap();
        let before = pages_of(&mut array);
        array.access();
        let changed: Vec<usize> =
            (0..512).filter(|p| array.memory.page(*p) != before[*p]).collect();
        assert_eq!(changed.len(), 16);
        assert_eq!((changed[0] % 16, changed[15] - changed[0]), (0, 15));
        assert!(record_pages("48").is_err() && record_pages("2").is_err());
    }

    #[test]
    fn phases_advance_with_time_and_repeat() {
        let mut worker = Worker::for_test();
        let shared = std::sync::Arc::clone(&worker.shared);
        let watcher = thread::spawn(move || {
            let mut seen: Vec<u64> = Vec::new();
            while seen.len() < 3 && shared.now() < Duration::from_secs(60) {
                seen.extend(shared.mb.get().filter(|mb| seen.last() != Some(mb)));
                thread::sleep(Duration::from_millis(1));
            }
            shared.stop();
            seen
        });
        let phases = Some(phases("1:0.2,2:0.2").unwrap());
        run(&Options { mb: None, phases, record_kb: None }, &mut worker).unwrap();
        assert_eq!(watcher.join().unwrap(), [1, 2, 1]);
        assert!(worker.shared.phase.get() >= Some(2));
        assert!(worker.shared.ops() > 0);
    }
}
