//! The use of the host's CPU time, from `/proc/stat`.
//!
//! The kernel counts since boot, so a share takes two readings. Time that a hypervisor below this
//! host took (`steal`) counts as busy, because it is not available; a CPU that waits for a disk
//! counts as free.
//!
//! Source: Documentation/filesystems/proc.rst §1.7.

use std::path::Path;

use crate::procfs::{ProcError, read};

const PATH: &str = "/proc/stat";
/// user, nice, system, idle, iowait, irq, softirq, steal. The guests' time is included in user
/// and nice.
const COLUMNS: usize = 8;
const IDLE: usize = 3;
const IOWAIT: usize = 4;

/// The time spent by all CPUs together since boot, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTime {
    busy: u64,
    free: u64,
}

impl CpuTime {
    /// Reads the counters. This takes some 50 µs, more on hosts with many CPUs: the file has a
    /// line for each.
    ///
    /// # Errors
    /// When the file cannot be read or is malformed.
    pub fn read() -> Result<Self, ProcError> {
        Self::parse(&read(Path::new(PATH))?)
    }

    /// The busy share of the time since `before`, 0 to 1; `None`: no time has passed.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a share needs three digits")]
    pub fn busy_since(self, before: Self) -> Option<f32> {
        // The kernel's iowait may decrease between two readings.
        let busy = self.busy.saturating_sub(before.busy);
        let total = busy.saturating_add(self.free.saturating_sub(before.free));
        (total > 0).then(|| busy as f32 / total as f32)
    }

    fn parse(text: &str) -> Result<Self, ProcError> {
        let path = Path::new(PATH);
        let line = text.lines().find_map(|line| line.strip_prefix("cpu "));
        let line =
            line.ok_or_else(|| ProcError::Missing { path: path.to_owned(), field: "cpu" })?;
        let columns: Option<Vec<u64>> =
            line.split_whitespace().take(COLUMNS).map(|word| word.parse().ok()).collect();
        let columns = columns
            .filter(|columns| columns.len() == COLUMNS)
            .ok_or_else(|| ProcError::malformed(path, "cpu", line.trim(), "eight counters"))?;
        let free = columns[IDLE].saturating_add(columns[IOWAIT]);
        let all = columns.iter().fold(0_u64, |sum, n| sum.saturating_add(*n));
        Ok(Self { busy: all.saturating_sub(free), free })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_what_was_used_of_what_has_passed() {
        let before = CpuTime::parse("cpu  100 0 0 900 0 0 0 0 0 0\ncpu0 1 1 1 1\n").unwrap();
        let after = CpuTime::parse("cpu  120 5 10 930 30 0 4 1 77 0\n").unwrap();
        assert_eq!(after.busy_since(before), Some(0.4));
        assert_eq!(after.busy_since(after), None);
        assert_eq!(before.busy_since(after), None, "backwards");
    }

    #[test]
    fn this_host_has_spent_time() {
        let time = CpuTime::read().unwrap();
        let share = time.busy_since(CpuTime::default()).unwrap();
        assert!((0.0..=1.0).contains(&share), "{share}");
    }

    #[test]
    fn what_makes_no_sense_is_an_error() {
        assert!(matches!(CpuTime::parse("intr 1\n"), Err(ProcError::Missing { .. })));
        for bad in ["cpu  1 2 3\n", "cpu  1 2 3 x 5 6 7 8\n", "cpu  -1 2 3 4 5 6 7 8\n"] {
            assert!(matches!(CpuTime::parse(bad), Err(ProcError::Malformed { .. })), "{bad}");
        }
    }
}
