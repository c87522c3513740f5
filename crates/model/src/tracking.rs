//! What a VM's memory is worth to it: its working set, its miss-ratio curve, and what it cost to
//! know.
//!
//! A reference is a piece of memory touched in a tenth of a second, counted once; a curve says
//! which share of the references would miss with less memory under LRU (Mattson). All of it is
//! measured from outside the guest, so no guest can make its working set look different but by
//! touching memory. What lies in the guest's swap is seen by nobody but the guest: it is added to
//! the working set as its own statement, and said apart.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Bytes, GroupName};

/// Most points that a curve is passed on with.
pub const MOST_CURVE_POINTS: usize = 64;

/// Whether VMs without the shim are tracked from outside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttachSpec {
    /// Each one that can be.
    #[default]
    On,
    /// None.
    Off,
}

/// One VM's memory as tracking sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tracking {
    /// The working set, `swapped` included; `None`: not seen for long enough yet.
    pub working_set: Option<Bytes>,
    /// What of it lies in the guest's swap, by the guest's own count.
    pub swapped: Bytes,
    /// The miss-ratio curve, by growing memory; at most [`MOST_CURVE_POINTS`].
    pub curve: Vec<CurvePoint>,
    /// References per second: times a miss ratio, the misses per second.
    pub references_per_s: f64,
    /// The piece of memory that is referenced at once; 0: a page.
    #[serde(default)]
    pub granule: Bytes,
    /// It is seen from outside, through so much of its memory; `None`: by its shim, all of it.
    #[serde(default)]
    pub seen_through: Option<Bytes>,
    /// What tracking has taken from the VM.
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

/// What tracking takes from a VM, as measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrackingCost {
    /// Traps, in the last half minute.
    pub traps_per_s: f64,
    /// Traps since the worker last connected to this VM's shim.
    pub traps: u64,
    /// For how long they held the guest's threads, in microseconds.
    #[serde(default)]
    pub held_us: u64,
    /// Share of one vCPU's time that tracking took in the last half minute: the time for which
    /// traps held the guest's threads, and CPU time of worker and shim. It is of when the report
    /// was made, also where the rest of the reading is older.
    pub vcpu_share: f64,
}

/// What tracking may take from each VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TrackingBudget {
    /// Nothing: it is off.
    Off,
    /// At most so many hundredths of a percent of one vCPU's time.
    BasisPoints(u16),
}

impl TrackingBudget {
    /// The least and the most that can be written, in hundredths of a percent.
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

/// The process that does a group's work on its VMs' memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerReading {
    /// Its process; `None`: none runs now.
    pub pid: Option<u32>,
    /// CPU time that the group's workers have used since the daemon started, in microseconds.
    pub cpu_us: u64,
    /// What it occupies.
    pub resident: Bytes,
    /// How often one had to be started again.
    pub restarts: u64,
    /// Why the last one ended, or what it lacks.
    pub last_error: Option<String>,
    /// What the group's pool of shared pages takes.
    #[serde(default)]
    pub pool: Bytes,
    /// Pages that the group's shared-pages tables name.
    #[serde(default)]
    pub known_pages: u64,
    /// Why these tables are of no use.
    #[serde(default)]
    pub why_not_known: Option<String>,
    /// The group that its CPU time is charged to now, if not its own.
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
