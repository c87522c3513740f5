//! The value of a VM's memory: its working set, its miss-ratio curve, and the cost of tracking
//! them.
//!
//! A reference is a piece of memory touched in a tenth of a second, counted once. A curve gives
//! the share of references that would miss with less memory under LRU (Mattson). All of it is
//! measured from outside the guest, so a guest can change its working set only by touching
//! memory. Only the guest sees its swap: the swapped amount is added to the working set by the
//! guest's own count, and is reported separately.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, GroupName};

/// The largest number of points in a reported curve.
pub const MOST_CURVE_POINTS: usize = 64;

/// Whether VMs without the shim are tracked from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachSpec {
    /// Every VM that can be tracked.
    #[default]
    On,
    /// No VM.
    Off,
}

/// One VM's memory as tracking sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tracking {
    /// The working set, `swapped` included; `None`: too short an observation.
    pub working_set: Option<Bytes>,
    /// The part of the working set in the guest's swap, by the guest's own count.
    pub swapped: Bytes,
    /// The miss-ratio curve in ascending order of memory; at most [`MOST_CURVE_POINTS`] points.
    pub curve: Vec<CurvePoint>,
    /// References per second. Multiplied by a miss ratio, they give misses per second.
    pub references_per_s: f64,
    /// The size of the piece of memory that one reference touches; 0: a page.
    #[serde(default)]
    pub granule: Bytes,
    /// The amount of memory through which the VM is sampled from outside; `None`: its shim sees
    /// all of it.
    #[serde(default)]
    pub seen_through: Option<Bytes>,
    /// The cost of tracking for the VM.
    pub cost: TrackingCost,
}

/// One point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CurvePoint {
    /// With this much memory …
    pub memory: Bytes,
    /// … this share of the references misses.
    pub miss_ratio: f64,
}

/// The measured cost of tracking for a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrackingCost {
    /// Traps per second in the last half minute.
    pub traps_per_s: f64,
    /// Traps since the worker last connected to this VM's shim.
    pub traps: u64,
    /// The time for which those traps stopped the guest's threads, in microseconds.
    #[serde(default)]
    pub held_us: u64,
    /// Share of one vCPU's time that tracking took in the last half minute: the time for which
    /// traps stopped the guest's threads, and the CPU time of worker and shim. It is always
    /// current as of the report, even where the rest of the reading is older.
    pub vcpu_share: f64,
}

/// The budget of tracking for each VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrackingBudget {
    /// Tracking is off.
    Off,
    /// At most this many hundredths of a percent of one vCPU's time.
    BasisPoints(u16),
}

impl TrackingBudget {
    /// The range that the configuration accepts, in hundredths of a percent.
    pub const RANGE: core::ops::RangeInclusive<u16> = 10..=1000;

    /// The share of one vCPU's time; `None`: off.
    #[must_use]
    pub fn vcpu_share(self) -> Option<f64> {
        match self {
            Self::Off => None,
            Self::BasisPoints(n) => Some(f64::from(n) / 10_000.0),
        }
    }
}

impl Default for TrackingBudget {
    fn default() -> Self {
        Self::BasisPoints(100)
    }
}

impl fmt::Display for TrackingBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.pad("off"),
            Self::BasisPoints(n) => f.pad(&format!("{} %", f64::from(*n) / 100.0)),
        }
    }
}

/// The process that works on the memory of a group's VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReading {
    /// The process id; `None`: no worker runs now.
    pub pid: Option<u32>,
    /// CPU time that the group's workers have used since the daemon started, in microseconds.
    pub cpu_us: u64,
    /// Memory that the worker occupies.
    pub resident: Bytes,
    /// Number of restarts.
    pub restarts: u64,
    /// Why the last worker ended, or which feature it lacks.
    pub last_error: Option<String>,
    /// Memory that the group's pool of shared pages takes.
    #[serde(default)]
    pub pool: Bytes,
    /// Number of pages in the group's shared-pages tables.
    #[serde(default)]
    pub known_pages: u64,
    /// Why these tables are of no use.
    #[serde(default)]
    pub why_not_known: Option<String>,
    /// The group that pays for the worker's CPU time now, if not its own.
    #[serde(default)]
    pub payer: Option<GroupName>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_from_before_there_was_tracking_still_reads() {
        let vm = r#"{"incarnation": 1, "link": {"state": "up"}, "ram": 1, "balloon": null, "stats": null,
            "used": null, "migration": "none", "limits": {}, "last_error": null}"#;
        let view = format!(r#"{{"host": null, "vms": {{"web-1": {vm}}}}}"#);
        let view: crate::HostView = serde_json::from_str(&view).unwrap();
        let vm = &view.vms[&"web-1".into()];
        assert!(vm.tracking.is_none() && vm.pid.is_none() && view.workers.is_empty());
        let group = r#"{"policy": "fair", "vms": [], "budget": null, "limits": {}}"#;
        let group: crate::GroupSpec = serde_json::from_str(group).unwrap();
        assert_eq!(group.tracking, TrackingBudget::default());
    }

    #[test]
    fn a_budget_reads_as_it_is_written() {
        assert_eq!(TrackingBudget::default().to_string(), "1 %");
        assert_eq!(TrackingBudget::BasisPoints(50).to_string(), "0.5 %");
        assert_eq!(TrackingBudget::Off.to_string(), "off");
        assert_eq!(TrackingBudget::BasisPoints(250).vcpu_share(), Some(0.025));
    }
}
