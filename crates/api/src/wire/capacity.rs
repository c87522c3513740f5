//! The number of VMs that fit on a host with a given certainty, and the memory kept free for that.

use std::fmt::Write;

use model::{Bytes, Profile};
use policy::excess::{self, AtOnce, Need, Promise};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::published::Published;

/// VMs count as alike, and as overloaded equally often, if their shares of promised memory differ
/// by at most this.
const ALIKE: f64 = 0.05;
/// Loads follow the hour of the day. Measurements of less than a day have not seen each hour.
const ENOUGH_S: u64 = 24 * 3600;

/// How many VMs fit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CapacityStatus {
    /// Probability that all overloads find room, 0 to 1.
    pub certainty: f64,
    /// Mean share of their promised memory that VMs are given.
    pub given_ratio: f64,
    /// VMs of groups on the host.
    pub vms: u32,
    /// Those of them that were measured for overloads.
    pub measured_vms: u32,
    /// Mean time for which they were measured.
    pub measured_seconds: u64,
    /// Memory that VMs can have: the host's, without its reserve and without `others_bytes`.
    pub memory_bytes: u64,
    /// Memory that is neither available nor occupied by a VM: the host's other processes and its
    /// kernel.
    #[serde(default)]
    pub others_bytes: u64,
    /// Memory given to all VMs.
    pub given_bytes: u64,
    /// Maximum number of VMs in sustained overload at once.
    pub sustained: AtOnceStatus,
    /// Maximum number of VMs in transient overload at once.
    pub transient: AtOnceStatus,
    /// Room for VMs that are migrated.
    pub targets_bytes: u64,
    /// Room for swapped-out pages.
    pub repositories_bytes: u64,
    /// Number of VMs like these that fit.
    pub fit_vms: u32,
}

/// Maximum number of VMs that are overloaded at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AtOnceStatus {
    /// The number.
    pub vms: u32,
    /// The number if overloads were independent.
    pub if_independent: u32,
}

impl From<AtOnce> for AtOnceStatus {
    fn from(at_once: AtOnce) -> Self {
        Self { vms: at_once.vms, if_independent: at_once.if_independent }
    }
}

/// Why the capacity is not known.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum NoCapacity {
    /// The host's memory is not known.
    #[error("the host's own memory was not readable lately")]
    HostUnknown,
    /// No group has a VM.
    #[error("no VM of a group is on this host")]
    NoVms,
    /// Nothing was measured.
    #[error("of no VM it is known yet how often it is overloaded")]
    NothingMeasured,
    /// No VM was given that small a share.
    #[error(
        "no VM here has about {0:.0} % of what it was promised: how often such ones are overloaded \
         is not known"
    )]
    NobodyAlike(f64),
}

impl CapacityStatus {
    /// The capacity for the VMs on this host, or for VMs that are given `given_ratio` of their
    /// promised memory.
    pub fn of(
        tick: &Published,
        certainty: f64,
        given_ratio: Option<f64>,
    ) -> Result<Self, NoCapacity> {
        let host = tick.view.host.ok_or(NoCapacity::HostUnknown)?.value;
        let reserve = tick.spec.host.reserve;
        let reserve =
            reserve.unwrap_or_else(|| host.total.percent(policy::tuning::HOST_RESERVE_PERCENT));
        let vms = tick.view.vms.values().filter_map(policy::used);
        let occupied: Bytes = vms.map(|reading| reading.value).sum();
        let others = host.total.minus(host.available.plus(occupied));
        let memory = host.total.minus(reserve).minus(others);
        let (mut all, known_for) = promises(tick);
        if all.is_empty() {
            return Err(NoCapacity::NoVms);
        }
        let known = all.iter().zip(&known_for).filter(|(_, intervals)| **intervals > 0);
        let measured: Vec<Promise> = known.map(|(vm, _)| *vm).collect();
        let mean = mean(&measured).ok_or(NoCapacity::NothingMeasured)?;
        // A VM that was not measured counts as an average one.
        for (vm, _) in all.iter_mut().zip(&known_for).filter(|(_, intervals)| **intervals == 0) {
            (vm.transient, vm.sustained) = (mean.transient, mean.sustained);
        }
        let need = Need::of(&all, &tick.memory.learned.together, certainty);
        let like = match given_ratio {
            None => self::mean(&all).unwrap_or(mean),
            Some(ratio) => alike(&measured, ratio).ok_or(NoCapacity::NobodyAlike(ratio * 100.0))?,
        };
        let (fit_vms, _) = excess::most(like, memory, certainty, together_factor(&need));
        let given: Bytes = all.iter().map(|vm| vm.given).sum();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let per_vm = known_for.iter().sum::<u64>() / measured.len().max(1) as u64;
        Ok(Self {
            certainty,
            given_ratio: like.given.0 as f64 / like.promised.0.max(1) as f64,
            vms: count(all.len()),
            measured_vms: count(measured.len()),
            measured_seconds: per_vm * u64::from(tick.spec.overload.interval_s),
            memory_bytes: memory.0,
            others_bytes: others.0,
            given_bytes: given.0,
            sustained: need.sustained.into(),
            transient: need.transient.into(),
            targets_bytes: need.targets.0,
            repositories_bytes: need.repositories.0,
            fit_vms,
        })
    }

    /// The capacity in words.
    #[must_use]
    pub fn words(&self) -> String {
        let mut text = String::new();
        let percent = |part: u64| part as f64 * 100.0 / self.memory_bytes.max(1) as f64;
        let at_once = |n: AtOnceStatus| {
            if n.vms == n.if_independent {
                return format!("{}", n.vms);
            }
            format!("{} ({} if they did not come together)", n.vms, n.if_independent)
        };
        let more = i64::from(self.fit_vms) - i64::from(self.vms);
        let more = match more {
            1.. => format!("{more} more than there are"),
            0 => "as many as there are".to_owned(),
            _ => format!("{} fewer than there are", -more),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{} VMs fit, {more}, with certainty {}: each given {:.0} % of what it was promised.\n",
            self.fit_vms,
            self.certainty,
            self.given_ratio * 100.0
        );
        for (label, value) in [
            (
                "Memory",
                format!(
                    "{} without the host's reserve and the {} that other processes hold",
                    Bytes(self.memory_bytes),
                    Bytes(self.others_bytes)
                ),
            ),
            (
                "VMs",
                format!(
                    "{} are given {} ({:.1} %)",
                    self.vms,
                    Bytes(self.given_bytes),
                    percent(self.given_bytes)
                ),
            ),
            (
                "Sustained",
                format!(
                    "at most {} at once: {} to move to ({:.1} %)",
                    at_once(self.sustained),
                    Bytes(self.targets_bytes),
                    percent(self.targets_bytes)
                ),
            ),
            (
                "Transient",
                format!(
                    "at most {} at once: {} for pages ({:.1} %)",
                    at_once(self.transient),
                    Bytes(self.repositories_bytes),
                    percent(self.repositories_bytes)
                ),
            ),
            (
                "Measured",
                format!(
                    "{} of the VMs, for {} on average",
                    self.measured_vms,
                    model::Millis::secs(self.measured_seconds)
                ),
            ),
        ] {
            let _ = writeln!(text, "{label:<11}{value}");
        }
        if self.measured_seconds < ENOUGH_S {
            let _ = writeln!(
                text,
                "Caution    the certainty holds for loads like those of the time that was \
                 measured; measure for a day or more"
            );
        }
        text
    }
}

/// The VMs of groups on the host, and the number of intervals in which each was measured.
fn promises(tick: &Published) -> (Vec<Promise>, Vec<u64>) {
    let members = tick.plan.vms.iter().filter_map(|(name, decision)| {
        let (limits, given) = decision.limits.zip(decision.target)?;
        let nothing = Profile::default();
        let profile = tick.memory.learned.profiles.get(name).unwrap_or(&nothing);
        let share = |n: u64| n as f64 / profile.intervals.max(1) as f64;
        let vm = Promise {
            promised: limits.max,
            given: given.min(limits.max),
            transient: share(profile.transient),
            sustained: share(profile.sustained),
        };
        Some((vm, profile.intervals))
    });
    members.unzip()
}

/// Ratio of VMs overloaded at once to the number if overloads were independent.
fn together_factor(need: &Need) -> f64 {
    let factor = |n: AtOnce| f64::from(n.vms.max(1)) / f64::from(n.if_independent.max(1));
    factor(need.transient).max(factor(need.sustained)).max(1.0)
}

/// A VM with the average figures of these. `None`: there are none.
fn mean(vms: &[Promise]) -> Option<Promise> {
    let n = u64::try_from(vms.len()).ok().filter(|n| *n > 0)?;
    let size = |of: fn(&Promise) -> Bytes| Bytes(vms.iter().map(|vm| of(vm).0).sum::<u64>() / n);
    let share = |of: fn(&Promise) -> f64| vms.iter().map(of).sum::<f64>() / n as f64;
    Some(Promise {
        promised: size(|vm| vm.promised),
        given: size(|vm| vm.given),
        transient: share(|vm| vm.transient),
        sustained: share(|vm| vm.sustained),
    })
}

/// A VM that is given this share of its promised memory, averaged over measured VMs with a
/// similar share.
fn alike(measured: &[Promise], ratio: f64) -> Option<Promise> {
    let of = |vm: &Promise| vm.given.0 as f64 / vm.promised.0.max(1) as f64;
    let near: Vec<Promise> =
        measured.iter().copied().filter(|vm| (of(vm) - ratio).abs() <= ALIKE).collect();
    mean(&near)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_says_what_memory_is_kept_for() {
        let mib = |n: u64| n << 20;
        let capacity = CapacityStatus {
            certainty: 0.97,
            given_ratio: 0.625,
            vms: 120,
            measured_vms: 118,
            measured_seconds: 86_400,
            memory_bytes: mib(101_376),
            others_bytes: mib(2_048),
            given_bytes: mib(120 * 640),
            sustained: AtOnceStatus { vms: 3, if_independent: 3 },
            transient: AtOnceStatus { vms: 31, if_independent: 26 },
            targets_bytes: mib(3 * 1024),
            repositories_bytes: mib(31 * 384),
            fit_vms: 136,
        };
        assert_eq!(
            capacity.words(),
            "136 VMs fit, 16 more than there are, with certainty 0.97: each given 62 % of what it \
             was promised.\n\n\
             Memory     99 GiB without the host's reserve and the 2 GiB that other processes \
             hold\n\
             VMs        120 are given 75 GiB (75.8 %)\n\
             Sustained  at most 3 at once: 3 GiB to move to (3.0 %)\n\
             Transient  at most 31 (26 if they did not come together) at once: 11.6 GiB for pages \
             (11.7 %)\n\
             Measured   118 of the VMs, for 1440 min on average\n"
        );
        let brief = CapacityStatus { measured_seconds: 540, ..capacity.clone() };
        let caution =
            "\nCaution    the certainty holds for loads like those of the time that was measured";
        assert!(brief.words().contains(caution), "{}", brief.words());
        let crowded = CapacityStatus { fit_vms: 100, ..capacity };
        assert!(crowded.words().starts_with("100 VMs fit, 20 fewer than there are"));
    }
}
