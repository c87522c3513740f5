//! Which of the host's QEMUs have the shim: looked up only while there is one that is not known to
//! have it, and not in every tick.

use std::collections::BTreeSet;

use sys::process::Identity;

use crate::worker::shim_of;

/// Ticks between two looks.
const LOOK_EVERY: u8 = 3;

/// QEMUs with the shim.
#[derive(Debug, Default)]
pub(super) struct Shims {
    known: BTreeSet<Identity>,
    /// Those that were looked at.
    looked: BTreeSet<Identity>,
    ticks: u8,
}

impl Shims {
    /// Looks for the shims of these processes, if it is time to.
    pub(super) fn look(&mut self, processes: impl Iterator<Item = Identity>) {
        let all: BTreeSet<Identity> = processes.collect();
        self.known.retain(|process| all.contains(process));
        let is_time = self.ticks == 0;
        self.ticks = (self.ticks + 1) % LOOK_EVERY;
        self.looked.retain(|process| all.contains(process));
        // One that has just come is looked at at once.
        if is_time || self.looked.len() < all.len() {
            let unknown: Vec<_> = all.difference(&self.known).copied().collect();
            // One that cannot be looked into has nothing that could be worked with either.
            let has_shim = |process: &Identity| matches!(shim_of(*process), Ok(Some(_)));
            self.known.extend(unknown.into_iter().filter(has_shim));
            self.looked = all;
        }
    }

    /// Takes it that this process has one.
    #[cfg(test)]
    pub(super) fn assume(&mut self, process: Identity) {
        self.known.insert(process);
    }

    /// Whether this process has it.
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
