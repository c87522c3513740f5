//! Tells which of the host's QEMUs have the shim. A QEMU starts its shim with its first RAM, so the
//! checks of one without it become rare.

use std::collections::{BTreeMap, BTreeSet};

use sys::process::Identity;

use worker::shim_of;

/// The longest pause between two checks of a process, in ticks.
const MOST_PAUSE: u64 = 64;

/// QEMUs with the shim.
#[derive(Debug, Default)]
pub(super) struct Shims {
    known: BTreeSet<Identity>,
    /// Processes that were checked, and had none.
    without: BTreeMap<Identity, Checked>,
    ticks: u64,
}

/// A check that found nothing, in ticks.
#[derive(Clone, Copy, Debug)]
struct Checked {
    next: u64,
    pause: u64,
}

impl Shims {
    /// Checks these processes for the shim, if it is time to; a new one at once.
    pub(super) fn look(&mut self, processes: impl Iterator<Item = Identity>) {
        self.look_with(processes, |process| matches!(shim_of(process), Ok(Some(_))));
    }

    /// A process that cannot be inspected has no shim that could be used.
    fn look_with(
        &mut self,
        processes: impl Iterator<Item = Identity>,
        has_shim: impl Fn(Identity) -> bool,
    ) {
        let all: BTreeSet<Identity> = processes.collect();
        self.ticks += 1;
        self.known.retain(|process| all.contains(process));
        self.without.retain(|process, _| all.contains(process));
        for process in all.difference(&self.known.clone()) {
            let checked = self.without.get(process).copied();
            let Checked { next, pause } = checked.unwrap_or(Checked { next: 0, pause: 1 });
            if next > self.ticks {
                continue;
            }
            if has_shim(*process) {
                self.without.remove(process);
                self.known.insert(*process);
            } else {
                let again =
                    Checked { next: self.ticks + pause, pause: (pause * 2).min(MOST_PAUSE) };
                self.without.insert(*process, again);
            }
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
        let mut shims = Shims { known: [process(1, 7), process(2, 8)].into(), ..Shims::default() };
        shims.look_with([process(2, 8), process(1, 9)].into_iter(), |_| false);
        assert!(!shims.has(process(1, 7)) && !shims.has(process(1, 9)));
        assert!(shims.has(process(2, 8)));
        shims.look_with([process(2, 8)].into_iter(), |_| false);
        assert!(shims.without.is_empty());
    }

    #[test]
    fn a_process_without_the_shim_is_checked_ever_less_often_and_one_that_gets_it_is_found() {
        let process = Identity { pid: 1, start_ticks: 7 };
        let mut shims = Shims::default();
        let checks = std::cell::Cell::new(0);
        let mut look = |ticks: u32, has_shim: bool| {
            for _ in 0..ticks {
                shims.look_with([process].into_iter(), |_| {
                    checks.set(checks.get() + 1);
                    has_shim
                });
            }
            (checks.take(), shims.has(process))
        };
        assert_eq!(look(1, false), (1, false), "at once");
        assert_eq!(look(63, false), (6, false), "after 1, 2, 4, 8, 16 and 32 ticks");
        assert_eq!(look(640, false), (10, false));
        assert_eq!(look(64, true), (1, true));
        assert_eq!(look(64, true), (0, true));
    }
}
