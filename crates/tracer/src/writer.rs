//! The thread that ends the ticks and writes the pages touched in them.
//!
//! A tick ends when its time on CLOCK_MONOTONIC is over. On a busy host the thread may wake late.
//! The tick is then longer than planned, its record says how long, and the next one ends on time
//! again. If the file can no longer be written (disk full), the thread reports that and ends. The
//! last tick then never ends, soon every page counts as touched in it, and the guest goes on.

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use crate::recorder::Recorder;
use crate::trace;

/// The planned length of a tick (tau).
pub(crate) const TICK_US: u64 = 100_000;

/// Now, in microseconds of CLOCK_MONOTONIC: the shim's clock.
pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * 1_000_000 + u64::try_from(now.tv_nsec).unwrap_or(0) / 1000
}

/// The request to end, on which the writer waits between its ticks.
#[derive(Debug, Default)]
pub(crate) struct Stop {
    wanted: Mutex<bool>,
    changed: Condvar,
}

impl Stop {
    /// Wakes the writer for the last time.
    pub(crate) fn ask(&self) {
        *self.wanted.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    /// True when the request comes before `moment_us`.
    fn comes_before(&self, moment_us: u64) -> bool {
        let mut wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner);
        while !*wanted {
            let left_us = moment_us.saturating_sub(now_us());
            if left_us == 0 {
                return false;
            }
            let waited = self.changed.wait_timeout(wanted, Duration::from_micros(left_us));
            wanted = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// Ends ticks and writes them until it is asked to stop.
pub(crate) fn run(recorder: &Recorder, stop: &Stop, file: &mut File, pages: u64) -> io::Result<()> {
    let begun_us = now_us();
    file.write_all(&trace::header(u32::try_from(TICK_US).unwrap_or(u32::MAX), begun_us, pages))?;
    let mut ended_us = begun_us;
    let mut next_us = begun_us + TICK_US;
    let (mut touched, mut bytes) = (Vec::new(), Vec::new());
    loop {
        let mut last = stop.comes_before(next_us);
        let tick = recorder.advance();
        let now_us = now_us();
        // Half a tick for vCPUs that were interrupted while they recorded a page.
        last = last || stop.comes_before(now_us + TICK_US / 2);
        touched.clear();
        recorder.take(tick, &mut touched);
        trace::record(&mut bytes, now_us - ended_us, &touched);
        file.write_all(&bytes)?;
        if last {
            return Ok(());
        }
        ended_us = now_us;
        next_us += TICK_US * (1 + now_us.saturating_sub(next_us) / TICK_US);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_written_as_they_end_and_the_rest_at_the_stop() {
        let recorder = Recorder::new(100);
        let stop = Stop::default();
        let path = tempfile::NamedTempFile::new().unwrap();
        recorder.touch(42);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| run(&recorder, &stop, &mut path.reopen().unwrap(), 100));
            // The header, and two records without pages at least.
            while std::fs::metadata(path.path()).unwrap().len() < 32 + 2 * 8 {
                std::thread::sleep(Duration::from_millis(10));
            }
            stop.ask();
            writer.join().unwrap().unwrap();
        });
        let bytes = std::fs::read(path.path()).unwrap();
        assert_eq!(bytes[24..32], 100_u64.to_le_bytes());
        // The first record: 4 bytes of length, 3 of time, the count, page 42 as zigzag.
        assert_eq!(bytes[39..41], [1, 84]);
        let (mut at, mut records) = (32, 0);
        while at < bytes.len() {
            at += 4 + usize::from(bytes[at]);
            records += 1;
        }
        assert_eq!(at, bytes.len());
        assert!(records >= 3, "{records}");
    }

    #[test]
    fn a_full_disk_is_an_error_that_ends_it() {
        let recorder = Recorder::new(10);
        let mut full = File::options().write(true).open("/dev/full").unwrap();
        let error = run(&recorder, &Stop::default(), &mut full, 10).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    }
}
