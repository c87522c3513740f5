//! A VM's working set and miss-ratio curve, and the cost of the process that measures them.

use model::{Reading, Tracking, VmName, WorkerReading, tracking, view::Mechanism};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::shown::TickView;

/// Why a VM that can be tracked has no curve.
const NOT_YET: &str = "it has not been measured for long enough yet";

/// A VM's working set, and the cost of measuring it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TrackingStatus {
    /// Least memory with which few references miss, including used swap; absent: not known yet.
    pub working_set_bytes: Option<u64>,
    /// The part of it that is in the guest's swap, by the guest's own count.
    pub swapped_bytes: u64,
    /// Pieces of memory touched; each counts once per tenth of a second.
    pub references_per_second: f64,
    /// Accesses that were trapped, in the last half minute.
    pub traps_per_second: f64,
    /// Accesses trapped since the group's worker last connected to this VM.
    pub traps_total: u64,
    /// Cost of tracking in the last half minute, as a share of one vCPU's time: the time that
    /// traps held the guest's threads, and CPU time of worker and shim.
    pub cost_ratio: f64,
    /// Amount of its memory through which it is observed from outside; absent: its shim observes
    /// all.
    pub seen_through_bytes: Option<u64>,
    /// Age of the readings of the guest at the tick; the cost is never older.
    pub age_ms: u64,
}

impl TrackingStatus {
    /// The reading as an API object.
    pub(super) fn of(shown: &TickView, reading: &Reading<Tracking>) -> Self {
        let tracking = &reading.value;
        Self {
            working_set_bytes: tracking.working_set.map(|bytes| bytes.0),
            swapped_bytes: tracking.swapped.0,
            references_per_second: tracking.references_per_s,
            traps_per_second: tracking.cost.traps_per_s,
            traps_total: tracking.cost.traps,
            cost_ratio: tracking.cost.vcpu_share,
            seen_through_bytes: tracking.seen_through.map(|bytes| bytes.0),
            age_ms: reading.age(shown.published.at).0,
        }
    }
}

/// A VM's miss-ratio curve.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MissRatioCurve {
    /// The VM.
    pub vm: String,
    /// Its working set, including used swap; absent: not known yet.
    pub working_set_bytes: Option<u64>,
    /// The part of it that is in the guest's swap, beyond the end of the curve.
    pub swapped_bytes: u64,
    /// Limit of its resident memory, if the host pages out cold memory.
    #[serde(default)]
    pub resident_target_bytes: Option<u64>,
    /// References per second; times a miss ratio it gives misses per second.
    pub references_per_second: f64,
    /// The points, sorted by memory.
    pub points: Vec<CurvePoint>,
    /// Age of these readings at the tick.
    #[serde(default)]
    pub age_ms: u64,
}

/// One point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CurvePoint {
    /// With this much memory …
    pub memory_bytes: u64,
    /// … this share of the references misses.
    pub miss_ratio: f64,
}

impl MissRatioCurve {
    /// The curve of `vm`.
    ///
    /// # Errors
    /// The reason why there is no curve.
    pub fn of(shown: &TickView, vm: &VmName) -> Result<Self, String> {
        let view = shown.published.view.vms.get(vm);
        let reading = view.and_then(|view| view.tracking.as_ref());
        let reading = reading.filter(|reading| !reading.value.curve.is_empty());
        let Some(Reading { value: tracking, at }) = reading else {
            let limit = view.and_then(|view| view.limits.get(&Mechanism::Tracking));
            return Err(limit.cloned().unwrap_or_else(|| NOT_YET.to_owned()));
        };
        let cold = view.and_then(|view| view.cold.as_ref());
        let point = |point: &tracking::CurvePoint| CurvePoint {
            memory_bytes: point.memory.0,
            miss_ratio: point.miss_ratio,
        };
        Ok(Self {
            vm: vm.to_string(),
            working_set_bytes: tracking.working_set.map(|bytes| bytes.0),
            swapped_bytes: tracking.swapped.0,
            resident_target_bytes: cold.and_then(|cold| cold.value.target).map(|bytes| bytes.0),
            references_per_second: tracking.references_per_s,
            points: tracking.curve.iter().map(point).collect(),
            age_ms: shown.published.at.since(*at).0,
        })
    }
}

/// The process that works on a group's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct WorkerStatus {
    /// Its pid; absent: none runs now.
    pub pid: Option<u32>,
    /// CPU time of the group's workers since the daemon started.
    pub cpu_seconds: f64,
    /// Its resident memory.
    pub resident_bytes: u64,
    /// Number of restarts.
    pub restarts: u64,
    /// Why the last worker ended, or a fault of the running one.
    pub last_error: Option<String>,
    /// The group that its CPU time is charged to now, if it is not its own.
    #[serde(default)]
    pub charged_to: Option<String>,
}

impl From<&WorkerReading> for WorkerStatus {
    #[expect(clippy::cast_precision_loss, reason = "microseconds are exact for 285 years")]
    fn from(worker: &WorkerReading) -> Self {
        Self {
            pid: worker.pid,
            cpu_seconds: worker.cpu_us as f64 / 1e6,
            resident_bytes: worker.resident.0,
            restarts: worker.restarts,
            last_error: worker.last_error.clone(),
            charged_to: worker.payer.as_ref().map(ToString::to_string),
        }
    }
}
