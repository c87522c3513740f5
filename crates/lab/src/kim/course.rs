//! One mix under one setting: the work that each guest got done, and the daemon's ticks
//! meanwhile.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::{Bytes, GroupName, Plan, VmName};
use policy::Case;
use sys::cpu_time::CpuTime;

use super::setting::Setting;
use crate::chart::Line;
use crate::daemon::Daemon;
use crate::interrupt;
use crate::lab::{Lab, LabError};
use crate::machine::MachineSpec;
use crate::meb::progress;
use crate::scenario::Context;

const TICK: Duration = Duration::from_secs(1);

/// The result of a run.
#[derive(Debug)]
pub struct SharingRun {
    /// Operations per second of each guest, in the order of the mix, over the whole window or
    /// until its work ended. A guest that works in phases is counted without the first, which
    /// fills its memory.
    pub speeds: Vec<f64>,
    /// Share of the host's CPU time that was used.
    pub cpu_busy: f64,
    /// One per second; none where there is no daemon.
    pub ticks: Vec<Tick>,
}

/// One of the daemon's ticks.
#[derive(Debug)]
pub struct Tick {
    /// Its time, in seconds since the daemon was started.
    pub at_s: f64,
    /// The input of its decision.
    pub case: Case,
    pub plan: Plan,
}

/// Runs fresh guests under `setting` for `window`, or until the work of all has ended. The window
/// begins when the guests have run for `warm_up` under the setting. Tells the result.
pub fn run(
    context: &Context,
    mix: &[MachineSpec],
    setting: &Setting,
    warm_up: Duration,
    window: Duration,
) -> Result<SharingRun, LabError> {
    let course = follow(context.start(mix.to_vec())?, setting, warm_up, window)?;
    context.say(&course.in_words());
    Ok(course)
}

/// [`run`] with guests that have just been started.
pub fn follow(
    mut lab: Lab,
    setting: &Setting,
    warm_up: Duration,
    window: Duration,
) -> Result<SharingRun, LabError> {
    progress::wait_until_working(&lab)?;
    let began = Instant::now();
    let (mut first, cpu) = (lines(&lab), CpuTime::read()?);
    let daemon = setting.daemon.map(|settings| Daemon::start(&mut lab, settings)).transpose()?;
    let mut ticks: Vec<Tick> = Vec::new();
    let (mut is_warm, end) = (warm_up.is_zero(), warm_up + window);
    let has_ended = |line: Option<progress::Line>| line.is_some_and(|line| line.has_ended());
    while began.elapsed() < end && !lines(&lab).into_iter().all(has_ended) {
        if !is_warm && began.elapsed() >= warm_up {
            (first, is_warm) = (lines(&lab), true);
        }
        let next = Instant::now() + TICK;
        lab.ensure_alive()?;
        for (first, newest) in first.iter_mut().zip(lines(&lab)) {
            if in_first_phase(first.as_ref()) && !in_first_phase(newest.as_ref()) {
                *first = newest;
            }
        }
        let case = daemon.as_ref().map(Daemon::latest).transpose()?.flatten();
        ticks.extend(case.map(|case| {
            let plan = case.decide();
            Tick { at_s: began.elapsed().as_secs_f64(), case, plan }
        }));
        let left = end.saturating_sub(began.elapsed());
        interrupt::sleep(next.saturating_duration_since(Instant::now()).min(left))?;
    }
    let now = CpuTime::read()?;
    let speed =
        |(first, last): (Option<progress::Line>, Option<progress::Line>)| match (first, last) {
            (Some(first), Some(last)) => last.rate_since(&first),
            _ => f64::NAN,
        };
    let speeds = first.into_iter().zip(lines(&lab)).map(speed).collect();
    lab.stop()?;
    let cpu_busy = now.busy_since(cpu).map_or(f64::NAN, f64::from);
    Ok(SharingRun { speeds, cpu_busy, ticks })
}

fn lines(lab: &Lab) -> Vec<Option<progress::Line>> {
    lab.machines().iter().map(progress::Line::newest).collect()
}

/// Whether a guest works in phases and is in its first one.
fn in_first_phase(line: Option<&progress::Line>) -> bool {
    line.and_then(|line| line.number("phase")) == Some(0.0)
}

impl SharingRun {
    /// The speed of the guest at this place of the mix; NaN when there is none.
    pub fn speed(&self, guest: usize) -> f64 {
        self.speeds.get(guest).copied().unwrap_or(f64::NAN)
    }

    /// A line of a plot, of the ticks at which there is a value.
    pub fn line(&self, name: &str, value: impl Fn(&Tick) -> Option<f64>) -> Line {
        Line::new(name, self.ticks.iter().filter_map(|tick| Some((tick.at_s, value(tick)?))))
    }

    /// Major faults of all guests while the daemon ran, by its readings, from the first tick that
    /// has all of them on; NaN when the last one lacks a guest.
    pub fn major_faults(&self) -> f64 {
        let of = |tick: &Tick| {
            let vms = tick.case.view.vms.values();
            sum_of_all(vms.map(|vm| vm.stats?.value.major_faults), self.speeds.len())
        };
        let (first, last) = (self.ticks.iter().find_map(of), self.ticks.last().and_then(of));
        first.zip(last).map_or(f64::NAN, |(first, last)| last - first)
    }

    /// Misses of all guests while the daemon ran: major faults, and refaults of pages that the
    /// host had paged out, by the rates at its ticks.
    pub fn misses(&self) -> f64 {
        let per_s = |tick: &Tick| -> f64 {
            let cold = tick.case.view.vms.values().filter_map(|vm| vm.cold);
            cold.map(|cold| cold.value.refaults_per_s).sum()
        };
        let pairs = self.ticks.windows(2);
        let refaults: f64 = pairs.map(|two| per_s(&two[1]) * (two[1].at_s - two[0].at_s)).sum();
        self.major_faults() + refaults
    }

    /// New targets of VMs per hour, at the pace of the course.
    pub fn moves_per_hour(&self) -> f64 {
        self.per_hour(self.directions().map(|takes| takes.len()).sum())
    }

    /// Reversals (memory is taken from a guest, then given to it, or the other way round) per
    /// hour, at the pace of the course. The guest with the most reversals counts.
    pub fn reversals_per_hour(&self) -> f64 {
        let reversals =
            |takes: Vec<bool>| takes.windows(2).filter(|pair| pair[0] != pair[1]).count();
        self.per_hour(self.directions().map(reversals).max().unwrap_or_default())
    }

    /// The same course without the first half of its ticks.
    pub fn second_half(mut self) -> Self {
        self.ticks.drain(..self.ticks.len() / 2);
        self
    }

    /// For each guest, the direction of each change in time order: taken from (`true`) or given
    /// to.
    fn directions(&self) -> impl Iterator<Item = Vec<bool>> {
        let mut ticks: Vec<&Tick> = self.ticks.iter().collect();
        ticks.dedup_by_key(|tick| tick.plan.at);
        let mut guests: BTreeMap<&VmName, Vec<bool>> = BTreeMap::new();
        for (vm, decision) in ticks.into_iter().flat_map(|tick| &tick.plan.vms) {
            let change = decision.change.as_ref().filter(|change| !change.is_repeat);
            guests.entry(vm).or_default().extend(change.map(|change| change.is_take));
        }
        guests.into_values()
    }

    /// Each tick stands for the time until the next one.
    fn per_hour(&self, count: usize) -> f64 {
        let (Some(first), Some(last)) = (self.ticks.first(), self.ticks.last()) else {
            return f64::NAN;
        };
        let from_tick_to_tick = (last.at_s - first.at_s) / (self.ticks.len() - 1) as f64;
        count as f64 * 3600.0 / (from_tick_to_tick * self.ticks.len() as f64)
    }

    /// A summary for the terminal.
    pub fn in_words(&self) -> String {
        let speeds: Vec<String> = self.speeds.iter().map(|speed| format!("{speed:.0}")).collect();
        let (speeds, busy) = (speeds.join(", "), self.cpu_busy * 100.0);
        let misses = self.misses();
        let misses = if misses.is_nan() { String::new() } else { format!(", {misses:.0} misses") };
        format!("  {speeds} operations/s, CPUs {busy:.0} % busy{misses}")
    }
}

impl Tick {
    /// The group's scan rate from now on, in pages/ms; 0 when no page is scanned.
    pub fn scan_rate(&self, group: &str) -> f64 {
        let scan = self.plan.scans.get(&GroupName::from(group));
        scan.and_then(|scan| scan.rate).map_or(0.0, |rate| f64::from(rate.0))
    }

    /// CPU time that the group's worker has used since the daemon started, in seconds.
    pub fn worker_cpu_s(&self, group: &str) -> Option<f64> {
        let worker = &self.case.view.workers.get(&GroupName::from(group))?.value;
        Some(Duration::from_micros(worker.cpu_us).as_secs_f64())
    }

    /// Memory that merging has saved so far: pages merged, less pages written to since.
    pub fn merged_mib(&self, vm: &str) -> f64 {
        let dedup = self.case.view.vms.get(&VmName::from(vm)).and_then(|vm| vm.dedup);
        dedup.map_or(0.0, |dedup| dedup.value.merged.as_mib() - dedup.value.broken.as_mib())
    }

    /// Memory that a guest has swapped in and out since its boot.
    pub fn swapped_mib(&self, vm: &str) -> Option<f64> {
        let stats = self.case.view.vms.get(&VmName::from(vm))?.stats?.value;
        Some(stats.swap_in?.plus(stats.swap_out?).as_mib())
    }

    /// Memory that these guests may use together; `None`: not known of all.
    pub fn allocated_to_all_mib(&self, guests: &[String]) -> Option<f64> {
        guests.iter().map(|guest| self.allocated_mib(guest)).sum()
    }

    /// Memory that a guest may use: the size of its balloon.
    pub fn allocated_mib(&self, vm: &str) -> Option<f64> {
        let balloon = self.case.view.vms.get(&VmName::from(vm))?.balloon?;
        Some(Bytes::as_mib(balloon.value))
    }
}

/// The sum of `count` readings; `None` when one of them is missing.
fn sum_of_all(readings: impl Iterator<Item = Option<u64>>, count: usize) -> Option<f64> {
    let known: Vec<u64> = readings.flatten().collect();
    (known.len() == count).then(|| known.iter().sum::<u64>() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_without_a_reading_is_not_one_without_misses() {
        let sum = |readings: &[Option<u64>]| sum_of_all(readings.iter().copied(), 2);
        assert_eq!(sum(&[Some(5), Some(7)]), Some(12.0));
        assert_eq!((sum(&[Some(5), None]), sum(&[Some(5)])), (None, None));
    }
}
