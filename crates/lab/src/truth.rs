//! The ground truth: the exact working set and miss-ratio curve of a traced guest.
//!
//! **Definitions**, the same as the tracker's. Time is cut into ticks of 100 ms. A *reference* is
//! a granule (a fixed number of neighbouring pages) that was touched in a tick, once per tick.
//! Its *stack distance* is the number of distinct granules referenced in the ticks after that of
//! its own last reference up to this one, itself included: a memory of `m` granules under LRU
//! hits just those with distance ≤ `m`. A first reference has no distance and misses everywhere.
//! The order within a tick is ignored: a granule is touched often in it, and the first touch says
//! little. The *miss-ratio curve* at `m` is the share of references, aged by one time constant,
//! that miss a memory of `m`. The *working set size* is the least `m` whose miss ratio is
//! tolerable.
//!
//! **Idea.** The tracer's file ([`trace`]) is fed to the exact algorithms of `pages` ([`exact`]).
//! It can be read while the guest runs and writes it: [`Truth::advance_to`] follows the file. An
//! estimate and the truth of the same moment, on the same clock, can therefore be compared while
//! the guest runs.
//!
//! ```no_run
//! # fn main() -> Result<(), lab::truth::TraceError> {
//! use lab::truth::{Definition, Truth};
//! let mut truth = Truth::open("vm.pages".as_ref(), Definition::default())?;
//! truth.advance_to(u64::MAX)?;
//! println!("{} at {} us", truth.exact().working_set_size(), truth.exact().now_us());
//! # Ok(())
//! # }
//! ```

pub mod exact;
pub mod trace;

use std::path::Path;

use model::{Bytes, Millis};
use pages::curve::MissRatioCurve;

pub use exact::{Definition, Exact};
pub use trace::{Tick, TraceError, TraceReader};

/// The truth at one moment.
#[derive(Debug, Clone)]
pub struct TruthSample {
    /// Its time, in microseconds of CLOCK_MONOTONIC.
    pub at_us: u64,
    /// The working set size.
    pub working_set: Bytes,
    /// The aged miss-ratio curve over bytes of memory.
    pub curve: MissRatioCurve,
    /// References per second, aged alike: the curve times this is misses per second.
    pub references_per_s: f64,
}

/// A trace, and the results of the part that was read.
#[derive(Debug)]
pub struct Truth {
    reader: TraceReader,
    exact: Exact,
    /// A tick that was read and ends later than any moment that was asked for.
    ahead: Option<Tick>,
}

impl Truth {
    /// Opens a trace, which may still grow.
    pub fn open(path: &Path, definition: Definition) -> Result<Self, TraceError> {
        let reader = TraceReader::open(path)?;
        let exact = Exact::new(definition, reader.pages(), reader.start_us());
        Ok(Self { reader, exact, ahead: None })
    }

    /// Reads every tick in the file that ended by `until_us`. Returns false when the file has no
    /// more ticks as yet and `until_us` was not reached.
    pub fn advance_to(&mut self, until_us: u64) -> Result<bool, TraceError> {
        loop {
            let tick = match self.ahead.take() {
                Some(tick) => tick,
                None => match self.reader.next_tick()? {
                    Some(tick) => tick,
                    None => return Ok(self.exact.now_us() >= until_us),
                },
            };
            if tick.end_us > until_us {
                self.ahead = Some(tick);
                return Ok(true);
            }
            self.exact.tick(&tick);
        }
    }

    /// The results of the ticks so far.
    pub fn exact(&self) -> &Exact {
        &self.exact
    }

    /// The truth every `every` from the trace's start to its present end.
    pub fn samples(
        path: &Path,
        definition: Definition,
        every: Millis,
    ) -> Result<Vec<TruthSample>, TraceError> {
        let mut truth = Self::open(path, definition)?;
        let step_us = every.0.max(1) * 1000;
        let mut next_us = truth.exact.now_us() + step_us;
        let mut samples = Vec::new();
        while truth.advance_to(next_us)? {
            samples.push(truth.exact.sample(next_us));
            next_us += step_us;
        }
        Ok(samples)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_growing_trace_is_followed_and_a_moment_holds_what_ended_by_then() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let tick = |pages: &[u32]| trace::tests::record(100_000, pages);
        let header = trace::tests::header(1_000_000, 64);
        std::fs::write(file.path(), [header, tick(&[0, 1, 2]), tick(&[0])].concat()).unwrap();
        let definition = Definition { granule_pages: 1, ..Definition::default() };
        let mut truth = Truth::open(file.path(), definition).unwrap();
        assert!(truth.advance_to(1_150_000).unwrap());
        assert_eq!(truth.exact().now_us(), 1_100_000);
        assert_eq!(truth.exact().working_set_over(Millis(100)), Bytes::kib(12));
        assert!(!truth.advance_to(1_300_000).unwrap());
        let more = std::fs::File::options().append(true).open(file.path()).unwrap();
        std::io::Write::write_all(&mut &more, &tick(&[5])).unwrap();
        assert!(truth.advance_to(1_300_000).unwrap());
        assert_eq!(truth.exact().working_set_over(Millis(100)), Bytes::kib(4));
        assert_eq!(truth.exact().working_set_over(Millis(300)), Bytes::kib(16));
        let samples = Truth::samples(file.path(), definition, Millis(100)).unwrap();
        assert_eq!(samples.len(), 3);
    }
}
