//! A record of every guest, second by second, as seen from outside of Overbook.
//!
//! **Idea.** A claim about Overbook must not rest on Overbook's own counters. Operations per
//! second come from the workloads, memory from the kernel's page tables (`smaps`, the exact and
//! expensive way). Only the guests' swap counters come from the daemon, where there is one,
//! because they are available only on its connection.
//!
//! **Invariant.** A missing measurement is `None` or NaN, never zero.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::{Bytes, VmName};
use policy::Case;
use sys::memory_of::Overhead;

use crate::interrupt;
use crate::lab::{Lab, LabError, Machine};

/// A workload reports every second. It is silent if its last report is older than this.
const SILENT_AFTER_S: f64 = 1.5;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// Seconds since the recording began.
    pub at_s: f64,
    /// Operations per second of its workload in that second; `None`: it was silent.
    pub ops_per_s: Option<f64>,
    /// Its newest report, of any age.
    pub progress: Option<RecordingProgress>,
    /// Its balloon's size: the memory that the guest may use.
    pub balloon: Option<Bytes>,
    /// Memory that it occupies on the host.
    pub used: Option<Bytes>,
    /// Memory swapped in and out since its boot.
    pub swapped: Option<Bytes>,
}

/// A workload's progress by its own count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecordingProgress {
    /// The arrival of the report, in seconds since the recording began.
    pub at_s: f64,
    /// Operations since the workload's start.
    pub ops: u64,
}

#[derive(Debug)]
pub struct Recording {
    began: Instant,
    /// Per guest, in order of time.
    pub guests: BTreeMap<String, Vec<Moment>>,
    /// Starts of phases, with their names.
    pub phases: Vec<(f64, String)>,
}

impl Recording {
    /// An empty recording, which begins now.
    pub fn begin() -> Self {
        Self { began: Instant::now(), guests: BTreeMap::new(), phases: Vec::new() }
    }

    /// Seconds since the beginning.
    pub fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// Starts a phase; returns its time.
    pub fn phase(&mut self, name: &str) -> f64 {
        let now_s = self.now_s();
        self.phases.push((now_s, name.to_owned()));
        now_s
    }

    /// Records every second for `length`. `case` returns the daemon's latest tick, or `None` when
    /// there is none.
    pub fn record(
        &mut self,
        lab: &Lab,
        length: Duration,
        mut case: impl FnMut() -> Result<Option<Case>, LabError>,
    ) -> Result<(), LabError> {
        let end = Instant::now() + length;
        while Instant::now() < end {
            let next = Instant::now() + Duration::from_secs(1);
            let case = case()?;
            for machine in lab.machines() {
                machine.ensure_alive()?;
                let moment = self.moment(machine, case.as_ref());
                self.guests.entry(machine.spec().name.clone()).or_default().push(moment);
            }
            interrupt::sleep(next.saturating_duration_since(Instant::now()))?;
        }
        Ok(())
    }

    /// The moments of `guest` from `from_s` on, before `until_s`.
    pub fn between(&self, guest: &str, from_s: f64, until_s: f64) -> impl Iterator<Item = &Moment> {
        let moments = self.guests.get(guest).map_or(&[][..], Vec::as_slice);
        moments.iter().filter(move |moment| (from_s..until_s).contains(&moment.at_s))
    }

    /// Operations per second of `guest` over that whole time, by its own count; NaN when it did
    /// not report. A silence does not stop the clock: it counts as time without work.
    pub fn rate(&self, guest: &str, from_s: f64, until_s: f64) -> f64 {
        let moments = self.between(guest, from_s, until_s);
        let mut seen = moments.filter_map(|moment| Some((moment.at_s, moment.progress?)));
        let (Some((_, first)), Some((now_s, last))) = (seen.next(), seen.last()) else {
            return f64::NAN;
        };
        let seconds = last.at_s.max(now_s - SILENT_AFTER_S) - first.at_s;
        match last.ops.checked_sub(first.ops) {
            Some(ops) if seconds > 0.0 => ops as f64 / seconds,
            _ => f64::NAN,
        }
    }

    fn moment(&self, machine: &Machine, case: Option<&Case>) -> Moment {
        let report = machine.last_metric();
        let progress = report.as_ref().and_then(|report| {
            let at_s = report.arrived.saturating_duration_since(self.began).as_secs_f64();
            Some(RecordingProgress { at_s, ops: report.value["ops"].as_u64()? })
        });
        let fresh = report.filter(|r| r.arrived.elapsed().as_secs_f64() < SILENT_AFTER_S);
        let ops_per_s = fresh.and_then(|report| report.value["ops_per_s"].as_f64());
        let ram = machine.spec().memory_max;
        let used = Overhead::measure(machine.process().pid, &[ram]).ok().map(|o| o.guest);
        let name = VmName::from(machine.spec().name.as_str());
        let vm = case.and_then(|case| case.view.vms.get(&name));
        let balloon = vm.and_then(|vm| vm.balloon).map(|reading| reading.value);
        let stats = vm.and_then(|vm| vm.stats).map(|reading| reading.value);
        let swapped = stats.and_then(|s| Some(s.swap_in?.plus(s.swap_out?)));
        Moment { at_s: self.now_s(), ops_per_s, progress, balloon, used, swapped }
    }
}

/// The median of the values; NaN when there are none, or when one of them is NaN: a middle of the
/// rest would say more than was measured.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        _ if values.iter().any(|value| value.is_nan()) => f64::NAN,
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

/// The mean of the values; NaN when there are none, or when one of them is NaN.
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let add = |(sum, count), value| (sum + value, count + 1.0);
    let (sum, count) = values.into_iter().fold((0.0, 0.0), add);
    sum / count
}

/// The ends of a list of numbers. Each is NaN when there are none, or when one of them is not
/// finite: an extreme of the rest would say more than was measured.
pub trait Extremes: Iterator<Item = f64> + Sized {
    fn largest(self) -> f64 {
        let known: Option<Vec<f64>> = self.map(|it| it.is_finite().then_some(it)).collect();
        known.into_iter().flatten().reduce(f64::max).unwrap_or(f64::NAN)
    }

    fn smallest(self) -> f64 {
        -self.map(|value| -value).largest()
    }
}

impl<I: Iterator<Item = f64>> Extremes for I {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_and_of_nothing_is_no_number() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0]) - 2.5).abs() < 1e-9);
        assert!(median([]).is_nan());
        assert!(median([1.0, f64::NAN, 2.0]).is_nan() && median([-f64::NAN, 1.0, 2.0]).is_nan());
    }

    #[test]
    fn an_extreme_needs_every_number() {
        assert!(([1.0, 3.0, 2.0].into_iter().largest() - 3.0).abs() < 1e-9);
        assert!(([1.0, -3.0, 2.0].into_iter().smallest() + 3.0).abs() < 1e-9);
        for unread in [vec![], vec![f64::NAN, 1.0], vec![1.0, f64::NAN], vec![2.0, f64::NAN, 1.0]] {
            assert!(unread.iter().copied().largest().is_nan(), "{unread:?}");
            assert!(unread.iter().copied().smallest().is_nan(), "{unread:?}");
        }
    }

    /// One moment per second; each report is its arrival and its count.
    fn recorded(reports: &[(f64, u64)]) -> Recording {
        let moment = |(second, &(at_s, ops)): (u32, &(f64, u64))| Moment {
            at_s: f64::from(second),
            ops_per_s: None,
            progress: Some(RecordingProgress { at_s, ops }),
            balloon: None,
            used: None,
            swapped: None,
        };
        let mut recording = Recording::begin();
        recording.guests.insert("a".into(), (0..).zip(reports).map(moment).collect());
        recording
    }

    #[test]
    fn a_rate_is_the_work_done_between_two_reports() {
        let recording = recorded(&[(0.0, 5), (1.0, 15), (2.0, 25)]);
        assert!((recording.rate("a", 0.0, 9.0) - 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_guest_that_falls_silent_does_not_keep_its_rate() {
        let mut reports = vec![(0.0, 0), (1.0, 10)];
        reports.resize(21, (1.0, 10));
        assert!(recorded(&reports).rate("a", 0.0, 30.0) < 0.6);
    }

    #[test]
    fn a_guest_that_did_not_report_has_no_rate() {
        assert!(recorded(&[]).rate("a", 0.0, 9.0).is_nan());
        assert!(recorded(&[(0.0, 5)]).rate("a", 0.0, 9.0).is_nan());
        assert!(recorded(&[(0.0, 5), (1.0, 1)]).rate("a", 0.0, 9.0).is_nan());
        assert!(recorded(&[(0.0, 5)]).rate("b", 0.0, 9.0).is_nan());
    }
}
