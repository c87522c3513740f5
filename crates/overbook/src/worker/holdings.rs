//! What a VM holds of the host: what it occupies, what it shares, and what of it the host has swapped out.
//!
//! No working set is larger. An estimate can be: it stands for pieces of memory of which the guest has one page, it
//! needs a while to see that a program has ended, and after a worker's start much of the guest is not known yet. So
//! the kernel's counters are the bound, read as often as a reading is made (some tens of microseconds). QEMU's own
//! memory, which they count as well and which hardly changes, is measured now and then (`sys::memory_of`).

use std::time::{Duration, Instant};

use model::Bytes;
use sys::memory_of::{Counters, Overhead};

/// How often QEMU's own memory is measured, at most.
const MEASURE_EVERY: Duration = Duration::from_secs(10);

/// What one VM holds.
#[derive(Debug)]
pub(super) struct Holdings {
    pid: u32,
    own: Option<Overhead>,
    due: Instant,
    held: Option<Bytes>,
}

impl Holdings {
    pub(super) fn of(pid: u32) -> Self {
        Self { pid, own: None, due: Instant::now(), held: None }
    }

    /// Looks at a VM with these pieces of RAM, which shares so much with others.
    pub(super) fn look(&mut self, ram_sizes: &[Bytes], shared: Bytes) {
        if Instant::now() >= self.due {
            self.own = Overhead::measure(self.pid, ram_sizes).ok();
            let rest = self.own.as_ref().map_or(Duration::ZERO, Overhead::rest);
            self.due = Instant::now() + rest.max(MEASURE_EVERY);
        }
        // Page tables are the host's to need.
        let counters = Counters::of(self.pid).ok();
        let counters = counters.map(|all| Counters { page_tables: Bytes::ZERO, ..all });
        self.held =
            self.own.as_ref().zip(counters).map(|(own, counters)| {
                own.guest_used(&counters).plus(counters.swapped).plus(shared)
            });
    }

    /// What it held then; `None`: that cannot be known.
    pub(super) fn held(&self) -> Option<Bytes> {
        self.held
    }
}
