//! Which of the host's QEMUs have the shim: looked up only while there is one that is not known to
//! have it, and not in every tick.

use std::collections::BTreeSet;

use crate::worker::with_shim;

/// Ticks between two looks.
const LOOK_EVERY: u8 = 3;

/// QEMUs with the shim, by pid.
#[derive(Debug, Default)]
pub(super) struct Shims {
    known: BTreeSet<u32>,
    ticks: u8,
}

impl Shims {
    /// Looks for the shims of these processes, if it is time to.
    pub(super) fn look(&mut self, pids: impl Iterator<Item = u32>) {
        let pids: BTreeSet<u32> = pids.collect();
        // A pid that is gone may come back as another process.
        self.known.retain(|pid| pids.contains(pid));
        let is_time = self.ticks == 0;
        self.ticks = (self.ticks + 1) % LOOK_EVERY;
        if is_time && pids.len() > self.known.len() {
            self.known.extend(with_shim().into_iter().filter(|pid| pids.contains(pid)));
        }
    }

    /// Takes it that this process has one.
    #[cfg(test)]
    pub(super) fn assume(&mut self, pid: u32) {
        self.known.insert(pid);
    }

    /// Whether this process has it.
    pub(super) fn has(&self, pid: u32) -> bool {
        self.known.contains(&pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_forgotten_with_its_end() {
        let mut shims = Shims { known: BTreeSet::from([1, 2]), ticks: 1 };
        shims.look([2].into_iter());
        assert!(!shims.has(1) && shims.has(2));
    }
}
