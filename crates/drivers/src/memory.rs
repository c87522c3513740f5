//! Counts one VM's memory without ever waiting for the VM.
//!
//! The counters are read in every tick. QEMU's own share is measured on a helper thread, because
//! reading `smaps` waits for a lock of QEMU's, and a QEMU that is stuck in the kernel may hold it
//! for ever. Measurements are frequent at first, while QEMU's heap and TCG's buffer still grow,
//! and then take place every [`SLOWEST`]. They come sooner if the sum exceeds what the guest's
//! RAM can explain, but never take more than 0.1 % of a CPU (see [`sys::memory_of`]). While
//! QEMU's own memory stays as it is, they become rarer still, up to [`STEADY`].

use std::time::{Duration, Instant};

use model::Bytes;
use sys::memory_of::{CounterFile, Counters, Overhead, OverheadError};
use sys::procfs::ProcError;
use tokio::task::JoinHandle;

const FIRST: Duration = Duration::from_secs(1);
const SLOWEST: Duration = Duration::from_secs(15);
const STEADY: Duration = Duration::from_secs(60);
/// Memory of QEMU's that has changed by less than this is steady.
const SAME: Bytes = Bytes::mib(1);

/// Counts the memory of one QEMU process's guest.
#[derive(Debug)]
pub(super) struct Meter {
    pid: u32,
    counters: Option<CounterFile>,
    ram_sizes: Vec<Bytes>,
    overhead: Option<Overhead>,
    pending: Option<JoinHandle<Result<Overhead, OverheadError>>>,
    /// Pause after the next measurement.
    pause: Duration,
    earliest: Instant,
    due: Instant,
}

impl Meter {
    /// A meter for QEMU `pid`, whose guest's RAM consists of blocks of `ram_sizes`. Starts
    /// measuring.
    pub(super) fn new(pid: u32, ram_sizes: Vec<Bytes>) -> Self {
        let now = Instant::now();
        let mut meter = Self {
            pid,
            counters: None,
            ram_sizes,
            overhead: None,
            pending: None,
            pause: FIRST,
            earliest: now,
            due: now,
        };
        meter.start(now);
        meter
    }

    /// The counters of its process now.
    pub(super) fn counters(&mut self) -> Result<Counters, ProcError> {
        match &mut self.counters {
            Some(file) => file.read(),
            none => none.insert(CounterFile::open(self.pid)?).read(),
        }
    }

    /// Memory that the guest occupies by these counters of its process, without the pages of a
    /// pool; `None` before the first measurement has ended.
    pub(super) async fn read(
        &mut self,
        counters: Result<Counters, ProcError>,
    ) -> Result<Option<Bytes>, OverheadError> {
        self.collect().await?;
        let now = Instant::now();
        if now >= self.due {
            self.start(now);
        }
        let counters = counters?;
        let Some(overhead) = self.overhead else { return Ok(None) };
        let used = overhead.guest_used(&counters);
        if !self.explains(used, &counters) {
            self.due = self.earliest;
        }
        Ok(Some(used))
    }

    /// Sizes of the RAM blocks that it measures.
    pub(super) fn ram_sizes(&self) -> &[Bytes] {
        &self.ram_sizes
    }

    /// Memory that QEMU occupies in addition to its guest's, when last measured.
    pub(super) fn own(&self) -> Option<Bytes> {
        self.overhead.map(|overhead| overhead.own)
    }

    /// Whether guest RAM of this size can occupy `used`. Pages of a pool are not included; copies
    /// of them are, because they replace pages of RAM.
    fn explains(&self, used: Bytes, counters: &Counters) -> bool {
        let ram: Bytes = self.ram_sizes.iter().copied().sum();
        used > counters.page_tables && used <= ram.plus(ram.share(1, 64)).plus(counters.page_tables)
    }

    fn start(&mut self, now: Instant) {
        if self.pending.is_none() {
            let (pid, sizes) = (self.pid, self.ram_sizes.clone());
            let measure = move || Overhead::measure(pid, &sizes);
            self.pending = Some(tokio::task::spawn_blocking(measure));
            self.due = now + SLOWEST;
        }
    }

    /// Takes in a measurement that has ended.
    async fn collect(&mut self) -> Result<(), OverheadError> {
        let Some(task) = self.pending.take_if(|task| task.is_finished()) else { return Ok(()) };
        let now = Instant::now();
        self.due = now + SLOWEST;
        // If the helper thread panicked, the last measurement stays valid.
        if let Ok(outcome) = task.await {
            let overhead = outcome?;
            self.earliest = now + overhead.rest().max(FIRST);
            self.due = now + overhead.rest().max(self.pause);
            let is_same = |before: Overhead| before.own.0.abs_diff(overhead.own.0) < SAME.0;
            let longest = if self.overhead.is_some_and(is_same) { STEADY } else { SLOWEST };
            self.pause = (self.pause * 2).min(longest);
            self.overhead = Some(overhead);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_reading_comes_after_the_first_measurement() {
        // The block is large compared with the other tests' allocations in this process.
        let block = vec![1_u8; 192 << 20];
        let mut meter = Meter::new(std::process::id(), vec![Bytes::mib(192)]);
        let mut used = None;
        for _ in 0..100 {
            let counters = meter.counters();
            used = meter.read(counters).await.unwrap();
            if used.is_some() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let used = used.unwrap();
        assert!(used.0.abs_diff(192 << 20) < 32 << 20, "{used}");
        std::hint::black_box(&block);
    }

    #[tokio::test]
    async fn a_vanished_process_is_an_error() {
        let mut meter = Meter::new(u32::MAX, vec![Bytes::mib(1)]);
        let counters = meter.counters();
        assert!(meter.read(counters).await.is_err());
    }
}
