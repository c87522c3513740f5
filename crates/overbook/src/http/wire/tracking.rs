//! What a VM's memory is worth to it, and what the process that finds it out takes.

use model::{Reading, Tracking, VmName, WorkerReading, tracking, view::Mechanism};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::http::follow::Shown;

/// Why a VM that can be tracked has no curve.
const NOT_YET: &str = "it has not been measured for long enough yet";

/// A VM's working set, and what it costs the VM to know it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TrackingStatus {
    /// Least memory with which few references miss, swap in use included; absent: not known yet.
    pub working_set_bytes: Option<u64>,
    /// What of it lies in the guest's swap, by the guest's own count.
    pub swapped_bytes: u64,
    /// Pieces of memory touched, each counted once in a tenth of a second.
    pub references_per_second: f64,
    /// Accesses that were trapped, in the last half minute.
    pub traps_per_second: f64,
    /// Accesses trapped since the group's worker last connected to this VM.
    pub traps_total: u64,
    /// What tracking took in the last half minute, as measured: the time that traps held the
    /// guest's threads, and CPU time of worker and shim, as a share of one vCPU's time.
    pub cost_ratio: f64,
    /// It is seen from outside, through so much of its memory; absent: by its shim, all of it.
    pub seen_through_bytes: Option<u64>,
    /// Age at the tick of what is known of the guest; the cost is never older.
    pub age_ms: u64,
}

impl TrackingStatus {
    /// The reading as it goes over the wire.
    pub(super) fn of(shown: &Shown, reading: &Reading<Tracking>) -> Self {
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
    /// Its working set, swap in use included; absent: not known yet.
    pub working_set_bytes: Option<u64>,
    /// What of it lies in the guest's swap, beyond the end of the curve.
    pub swapped_bytes: u64,
    /// What it is to have in memory at most, where the host pages out what it does not touch.
    #[serde(default)]
    pub resident_target_bytes: Option<u64>,
    /// Times a miss ratio: misses per second.
    pub references_per_second: f64,
    /// By growing memory.
    pub points: Vec<CurvePoint>,
    /// Age of all this at the tick.
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
    /// Why there is none.
    pub fn of(shown: &Shown, vm: &VmName) -> Result<Self, String> {
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
    /// Its process; absent: none runs now.
    pub pid: Option<u32>,
    /// CPU time of the group's workers since the daemon started.
    pub cpu_seconds: f64,
    /// What it occupies.
    pub resident_bytes: u64,
    /// How often one had to be started again.
    pub restarts: u64,
    /// Why the last one ended, or what it lacks.
    pub last_error: Option<String>,
    /// The group that its CPU time is charged to now, if not its own.
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
