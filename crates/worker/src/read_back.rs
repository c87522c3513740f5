//! Reads back the memory of VMs that is paged out, when no worker does it any more.

use std::io;
use std::time::{Duration, Instant};

use model::Bytes;
use sys::memory_of::Counters;
use sys::pool_maps;
use sys::process::Identity;

use super::pager::{is_swapped, recall_all};

/// The longest time for one VM: its memory is read as long as the host has room for it.
const PATIENCE: Duration = Duration::from_secs(120);

/// Reads back the paged-out memory of these QEMU processes. A page that cannot be read stays in
/// the host's swap, and comes back at a touch.
pub fn read_back(processes: &[Identity]) {
    let until = Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        for process in processes.iter().filter(|process| is_swapped(**process)) {
            // A process that has ended has nothing to read.
            scope.spawn(|| drop(recall_all(*process, until)));
        }
    });
}

/// Memory of a VM that is not its own, or not in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Memory that it shares with other VMs, at most.
    pub shared: Bytes,
    /// Memory in the host's swap.
    pub out: Bytes,
}

/// The memory that [`unshare`](crate::unshare()) and [`read_back`] would give this QEMU process.
#[must_use]
pub fn held(process: Identity) -> Held {
    let shared = pool_maps::mappings(process.pid).and_then(|found| process.still(found));
    // A process that cannot be inspected has ended.
    let shared = shared.unwrap_or_default().iter().map(|mapping| Bytes(mapping.range.len)).sum();
    let counters = Counters::of(process.pid).map_err(io::Error::other);
    let out = counters.and_then(|found| process.still(found.swapped)).unwrap_or_default();
    Held { shared, out }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_is_passed_over() {
        read_back(&[Identity { pid: u32::MAX, start_ticks: 0 }]);
    }
}
