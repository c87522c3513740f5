//! Tells which of the host's QEMUs have the shim. It looks only while there is a QEMU not known
//! to have it, and not in every tick.

use std::collections::BTreeSet;

use sys::process::Identity;

use worker::shim_of;

/// Ticks between two checks.
const LOOK_EVERY: u8 = 3;

/// QEMUs with the shim.
#[derive(Debug, Default)]
pub(super) struct Shims {
    known: BTreeSet<Identity>,
    /// Processes that were checked.
    looked: BTreeSet<Identity>,
    ticks: u8,
}

impl Shims {
    /// Checks these processes for the shim, if it is time to.
    pub(super) fn look(&mut self, processes: impl Iterator<Item = Identity>) {
        let all: BTreeSet<Identity> = processes.collect();
        self.known.retain(|process| all.contains(process));
        let is_time = self.ticks == 0;
        self.ticks = (self.ticks + 1) % LOOK_EVERY;
        self.looked.retain(|process| all.contains(process));
        // A new process is checked at once.
        if is_time || self.looked.len() < all.len() {
            let unknown: Vec<_> = all.difference(&self.known).copied().collect();
            // A process that cannot be inspected has no shim that could be used.
            let has_shim = |process: &Identity| matches!(shim_of(*process), Ok(Some(_)));
            self.known.extend(unknown.into_iter().filter(has_shim));
            self.looked = all;
        }
    }

    /// Assumes that this process has the shim.
    #[cfg(test)]
    pub(super) fn assume(&mut self, process: Identity) {
        self.known.insert(process);
    }

    /// Whether this process has the shim.
    pub(super) fn has(&self, process: Identity) -> bool {
        self.known.contains(&process)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_forgotten_with_its_end_and_its_pid_says_nothing_of_the_next() {
        let process = |pid, start_ticks| Identity { pid, start_ticks };
        let mut shims = Shims {
            known: [process(1, 7), process(2, 8)].into(),
            looked: BTreeSet::new(),
            ticks: 1,
        };
        shims.look([process(2, 8), process(1, 9)].into_iter());
        assert!(!shims.has(process(1, 7)) && !shims.has(process(1, 9)));
        assert!(shims.has(process(2, 8)));
    }
}
