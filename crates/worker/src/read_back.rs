//! Reads back the memory of VMs that is paged out, when no worker does it any more.

use std::time::{Duration, Instant};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_has_ended_is_passed_over() {
        read_back(&[Identity { pid: u32::MAX, start_ticks: 0 }]);
    }
}
