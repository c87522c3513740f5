//! What happened to every guest, second by second, as seen from outside of Overbook.
//!
//! **Idea.** A claim about Overbook must not rest on Overbook's own counters. Operations per second come
//! from the workloads, memory from the kernel's page tables (`smaps`, the exact and expensive way);
//! only what nobody else can read (the guests' swap counters, which come over the daemon's connection)
//! is asked of the daemon, where there is one.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use model::{Bytes, VmName};
use policy::Case;
use sys::memory_of::Overhead;

use crate::interrupt;
use crate::lab::{Lab, LabError, Machine};

/// One guest in one second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    /// Seconds since the recording began.
    pub at_s: f64,
    /// Operations per second of its workload in that second; `None`: it reported nothing.
    pub ops_per_s: Option<f64>,
    /// Where its balloon stands.
    pub balloon: Option<Bytes>,
    /// What it occupies on the host.
    pub used: Option<Bytes>,
    /// Swapped in and out since its boot.
    pub swapped: Option<Bytes>,
}

/// Everything recorded.
#[derive(Debug)]
pub struct Recording {
    began: Instant,
    /// Per guest, in order of time.
    pub guests: BTreeMap<String, Vec<Moment>>,
    /// Beginnings of phases, with their names.
    pub phases: Vec<(f64, String)>,
}

impl Recording {
    /// Nothing yet.
    #[must_use]
    pub fn begin() -> Self {
        Self { began: Instant::now(), guests: BTreeMap::new(), phases: Vec::new() }
    }

    /// Seconds since the beginning.
    #[must_use]
    pub fn now_s(&self) -> f64 {
        self.began.elapsed().as_secs_f64()
    }

    /// A phase begins; answers when.
    pub fn phase(&mut self, name: &str) -> f64 {
        let now_s = self.now_s();
        self.phases.push((now_s, name.to_owned()));
        now_s
    }

    /// Records every second for `length`. `case` is asked for the daemon's latest tick; `None` while
    /// there is no daemon.
    ///
    /// # Errors
    /// When a guest dies or the user interrupts.
    pub fn record(
        &mut self,
        lab: &Lab,
        length: Duration,
        mut case: impl FnMut() -> Option<Case>,
    ) -> Result<(), LabError> {
        let end = Instant::now() + length;
        while Instant::now() < end {
            let next = Instant::now() + Duration::from_secs(1);
            let case = case();
            for machine in lab.machines() {
                if !machine.alive() {
                    return Err(machine.death());
                }
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

    fn moment(&self, machine: &Machine, case: Option<&Case>) -> Moment {
        let report = machine.last_metric().filter(|m| m.arrived.elapsed().as_secs_f64() < 1.5);
        let ops_per_s = report.and_then(|report| report.value["ops_per_s"].as_f64());
        let ram = machine.spec().memory_max;
        let used = Overhead::measure(machine.process().pid, &[ram]).ok().map(|o| o.guest);
        let name = VmName::from(machine.spec().name.as_str());
        let vm = case.and_then(|case| case.view.vms.get(&name));
        let balloon = vm.and_then(|vm| vm.balloon).map(|reading| reading.value);
        let stats = vm.and_then(|vm| vm.stats).map(|reading| reading.value);
        let swapped = stats.and_then(|s| Some(s.swap_in?.plus(s.swap_out?)));
        Moment { at_s: self.now_s(), ops_per_s, balloon, used, swapped }
    }
}

/// The middle of the values; not a number when there are none.
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => f64::midpoint(values[n / 2 - 1], values[n / 2]),
    }
}

/// The mean of the values; not a number when there are none.
#[must_use]
pub fn mean(values: impl IntoIterator<Item = f64>) -> f64 {
    let (sum, count) = values.into_iter().fold((0.0, 0.0), |(sum, n), v| (sum + v, n + 1.0));
    sum / count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_and_of_nothing_is_no_number() {
        assert!((median([3.0, 1.0, 2.0]) - 2.0).abs() < 1e-9);
        assert!((median([4.0, 1.0]) - 2.5).abs() < 1e-9);
        assert!(median([]).is_nan());
        assert!(mean([]).is_nan());
    }
}
