//! The cost of tracking for a guest, by the clock instead of by the guest's speed.
//!
//! **Problem.** A cost of one percent has to be distinguished from zero, while a guest's speed
//! differs by 3 to 40 % from second to second: it works through stages of its own, and other
//! machines use the same caches and memory bus. No hour is long enough to see one percent in it.
//!
//! **Idea.** Where guest, shim and tracker share one CPU, all of tracking's work is time in which
//! the guest's code does not run. That time can be counted. The kernel counts the CPU time of the
//! tracker and of the shim's threads. The shim counts and times traps, from the touch until the
//! touching thread runs on. The same threads' time without tracking is subtracted.
//!
//! **Left out.** Caches that are colder after a trap, and huge pages that it has split. The
//! guest's speed includes them; it is shown next to this cost, with its confidence interval.
//! Where traps come by the ten thousand, they outweigh all that is counted here, and only the
//! speed is meaningful.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use super::watch::{Record, TrackingSample, Watch, now_us};
use crate::lab::{Lab, LabError, Machine};

/// Prefix of the names of the shim's threads.
const SHIM_THREADS: &str = "overbook-";
/// The thread whose work is already part of a trap's time.
const FAULT_THREAD: &str = "overbook-fault";

/// The clocks of each guest of a lab at one moment.
#[derive(Debug)]
pub struct Moment {
    at: Instant,
    at_us: u64,
    /// CPU seconds of the tracker and of the shim.
    of: Vec<(f64, f64)>,
}

impl Moment {
    /// Reads the clocks now. `watches` are in the lab's order; there are none where nothing is
    /// tracked.
    pub fn now(lab: &Lab, watches: &[Watch]) -> Result<Self, LabError> {
        let times = |(place, machine): (usize, &Machine)| {
            let tracker = watches.get(place).map_or(Duration::ZERO, Watch::cpu);
            shim_s(machine).map(|shim_s| (tracker.as_secs_f64(), shim_s))
        };
        let of = lab.machines().iter().enumerate().map(times).collect::<Result<_, _>>()?;
        Ok(Self { at: Instant::now(), at_us: now_us(), of })
    }
}

/// CPU time of the shim's threads, except the one that serves traps.
fn shim_s(machine: &Machine) -> Result<f64, LabError> {
    let threads = Path::new("/proc").join(machine.process().pid.to_string()).join("task");
    let mut shim_s = 0.0;
    for thread in fs::read_dir(&threads)? {
        let thread = thread?.path();
        // A thread may end meanwhile; it is left out then.
        let Ok(name) = fs::read_to_string(thread.join("comm")) else { continue };
        if name.starts_with(SHIM_THREADS) && name.trim_end() != FAULT_THREAD {
            shim_s += match fs::read_to_string(thread.join("schedstat")) {
                Ok(schedstat) => run_s(&schedstat),
                Err(_) if thread.exists() => f64::NAN,
                Err(_) => continue,
            };
        }
    }
    Ok(shim_s)
}

/// The first number of `schedstat`: nanoseconds on a CPU, here in seconds; NaN: it is not there.
fn run_s(schedstat: &str) -> f64 {
    schedstat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1e9
}

/// Time that was spent over some windows, in seconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct Account {
    wall: f64,
    tracker: f64,
    shim: f64,
    traps: f64,
}

impl Account {
    /// Adds the time that was spent between two moments on the guest at this place of the lab.
    /// `record` is its tracker's, if it had one.
    pub fn add(&mut self, begin: &Moment, end: &Moment, place: usize, record: Option<&Record>) {
        let ((tracker_before, shim_before), (tracker, shim)) = (begin.of[place], end.of[place]);
        let wall = end.at.duration_since(begin.at).as_secs_f64();
        self.wall += wall;
        self.tracker += tracker - tracker_before;
        self.shim += shim - shim_before;
        self.traps +=
            wall * record.map_or(0.0, |record| trap_share(record, begin.at_us, end.at_us));
    }
}

/// The share of the time for which the vCPU waited at traps, at most 1; NaN: it was not sampled
/// twice.
fn trap_share(record: &Record, from_us: u64, until_us: u64) -> f64 {
    let is_inside = |seen: &&TrackingSample| (from_us..=until_us).contains(&seen.at_us);
    let mut inside = record.seen.iter().filter(is_inside);
    let Some((first, last)) = inside.next().zip(inside.next_back()) else { return f64::NAN };
    let held_us = last.tracking.cost.held_us.saturating_sub(first.tracking.cost.held_us);
    (held_us as f64 / last.at_us.saturating_sub(first.at_us).max(1) as f64).min(1.0)
}

/// Time that tracking took, each part as a share of the CPU.
#[derive(Debug, Clone, Copy)]
pub struct Taken {
    pub tracker: f64,
    /// By the shim, without traps.
    pub shim: f64,
    pub traps: f64,
}

impl Taken {
    /// The difference of windows with tracking and windows without.
    pub fn of(with: &Account, without: &Account) -> Self {
        let share = |of: fn(&Account) -> f64| of(with) / with.wall - of(without) / without.wall;
        Self {
            tracker: share(|account| account.tracker),
            shim: share(|account| account.shim),
            traps: share(|account| account.traps),
        }
    }

    /// The increase of the guest's run time on the rest of the CPU: 0.01 is one percent.
    pub fn overhead(&self) -> f64 {
        1.0 / (1.0 - (self.tracker + self.shim + self.traps)).max(1e-3) - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::Tracking;
    use model::tracking::TrackingCost;

    #[test]
    fn the_difference_to_windows_without_is_what_was_taken() {
        let account = |wall, tracker, shim, traps| Account { wall, tracker, shim, traps };
        let taken = Taken::of(&account(10.0, 0.2, 0.3, 0.2), &account(5.0, 0.0, 0.05, 0.0));
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        assert!(near(taken.tracker, 0.02) && near(taken.shim, 0.02) && near(taken.traps, 0.02));
        assert!(near(taken.overhead(), 1.0 / 0.94 - 1.0));
    }

    #[test]
    fn traps_count_in_the_window() {
        let seen = |at_us, held_us| {
            let cost = TrackingCost { held_us, ..TrackingCost::default() };
            let tracking = Tracking { cost, ..Tracking::default() };
            let curve = pages::curve::MissRatioCurve::unknown();
            TrackingSample { at_us, tracking, curve, event: None }
        };
        let seen = vec![seen(1, 0), seen(10, 5), seen(20, 6), seen(30, 10), seen(41, 40)];
        let (second, cpu) = (Duration::from_secs(1), Duration::ZERO);
        let record = Record { seen, lasted: second, cpu, lost: 0, up_ratio: 1.0 };
        assert!((trap_share(&record, 5, 30) - 0.25).abs() < 1e-9);
        assert!(trap_share(&record, 50, 60).is_nan(), "nothing was seen");
    }

    #[test]
    fn cpu_time_of_a_thread_is_the_first_number() {
        assert!((run_s("2500000000 17 3\n") - 2.5).abs() < 1e-9);
        assert!(run_s("").is_nan(), "a kernel that does not count");
    }
}
