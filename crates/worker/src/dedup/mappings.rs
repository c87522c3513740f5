//! The number of mappings of QEMU's process, which could not continue without room for another
//! one.
//!
//! The pool's mappings are counted together with all others, because some outlive the sharing. If
//! the shim could not replace a page that the guest has written, the page stays in its merged
//! mapping. Writes also split mappings; the shim stops that at half of the number that is left
//! for QEMU here.

use std::time::{Duration, Instant};

use pages::dedup::least_run;
use sys::pool_maps;

use super::super::granules::PAGE;

/// The kernel's default limit, if the real one is unreadable (`vm.max_map_count`).
const USUAL_MAPPINGS: u32 = 65_530;
/// The kernel's memory for a mapping with its dependents (`dedup-overhead`: 480 bytes for the two
/// of an isolated page).
const MAPPING_BYTES: u64 = 240;
/// The approximate number of QEMU's own mappings.
const QEMUS_OWN: u32 = 400;
/// Mappings may take one `DEAR`-th of the bytes that they save. Beyond that, only runs of at least
/// `RUN_IF_DEAR` pages get mappings. Those of such a run take up to a 17th of what it saves. So
/// where all runs are that short, mappings stay dear, and no dearer than a 17th.
const DEAR: u64 = 20;
const RUN_IF_DEAR: u32 = 4;
/// Mappings are counted again after `MAPPINGS_SOON` if there may be `MAPPINGS_MORE` more, and
/// after `MAPPINGS_LATE` in any case.
const MAPPINGS_SOON: Duration = Duration::from_secs(1);
const MAPPINGS_MORE: u32 = 500;
const MAPPINGS_LATE: Duration = Duration::from_secs(10);

/// The count of a process that may not be inspected.
const UNKNOWN: u32 = u32::MAX;

/// The mappings of one process.
#[derive(Debug)]
pub(super) struct Mappings {
    pid: u32,
    counted: u32,
    /// The most mappings made since the count, and the time of the count.
    since: u32,
    at: Instant,
    /// Half of the kernel's limit: the rest is for QEMU.
    most: u32,
}

impl Mappings {
    pub(super) fn of(pid: u32) -> Self {
        let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap_or_default();
        let most = allowed.trim().parse().unwrap_or(USUAL_MAPPINGS) / 2;
        let mut new = Self { pid, counted: 0, since: 0, at: Instant::now(), most };
        new.count();
        new
    }

    /// The least length of a run that is worth a mapping now, if `runs` runs are requested and
    /// `shared_pages` pages are shared afterwards; `None`: no run is.
    pub(super) fn least_run(&mut self, runs: u32, shared_pages: u32) -> Option<u32> {
        let is_due = self.since > MAPPINGS_MORE && self.at.elapsed() > MAPPINGS_SOON;
        if is_due || self.at.elapsed() > MAPPINGS_LATE {
            self.count();
        }
        let now = self.counted.saturating_add(self.since);
        let by_room = least_run(now, self.most)?;
        let then = u64::from(now.saturating_sub(QEMUS_OWN)) + 2 * u64::from(runs);
        let is_dear = is_dear(then, shared_pages.into());
        Some(if is_dear { by_room.max(RUN_IF_DEAR) } else { by_room })
    }

    /// The reason why no more pages are merged; `None`: there is room.
    pub(super) fn why_not(&self) -> Option<String> {
        let (now, most) = (self.counted.saturating_add(self.since), self.most);
        if self.counted == UNKNOWN {
            return Some("QEMU's mappings cannot be counted".to_owned());
        }
        let why = || {
            format!("QEMU has {now} mappings; merging stops at {most}, half of vm.max_map_count")
        };
        least_run(now, most).is_none().then(why)
    }

    /// Adds `mappings` mappings that may exist now.
    pub(super) fn more(&mut self, mappings: u32) {
        self.since = self.since.saturating_add(mappings);
    }

    fn count(&mut self) {
        // Pages of a process that may not be inspected are not merged any more.
        self.counted = pool_maps::count(self.pid).unwrap_or(UNKNOWN);
        (self.since, self.at) = (0, Instant::now());
    }
}

/// Whether this number of mappings takes too much memory for the shared pages.
fn is_dear(mappings: u64, shared_pages: u64) -> bool {
    // Each slot has at least two sharers, so at least half of the shared pages is saved.
    mappings * MAPPING_BYTES * DEAR > shared_pages * PAGE / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn isolated_pages_are_dear_and_what_is_natural_is_not() {
        // Two mappings for each page; one for twelve.
        assert!(is_dear(2_000, 1_000) && !is_dear(100, 1_200));
        assert!(is_dear(1, 0) && !is_dear(0, 0));
        // The shortest run that gets mappings if they are dear.
        let run = u64::from(RUN_IF_DEAR);
        assert!(is_dear(2, run) && !is_dear(2, run + 1), "it is dear by itself");
        assert!(2 * MAPPING_BYTES * 17 < run * PAGE / 2, "a 17th of what it saves at least");
    }

    #[test]
    fn this_process_has_room_and_one_that_is_gone_has_none() {
        let mut own = Mappings::of(std::process::id());
        assert_eq!(own.least_run(1, 1_000), Some(1));
        assert_eq!(own.least_run(1_000, 1_000), Some(RUN_IF_DEAR));
        assert_eq!(own.why_not(), None);
        own.more(own.most);
        assert_eq!(own.least_run(1, 1_000), None);
        let why = own.why_not().unwrap();
        assert!(why.contains(&format!("merging stops at {}", own.most)), "{why}");
        let mut gone = Mappings::of(u32::MAX);
        assert_eq!(gone.least_run(1, 1_000), None);
        assert_eq!(gone.why_not().unwrap(), "QEMU's mappings cannot be counted");
    }
}
