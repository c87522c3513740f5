//! Location of a VM's memory, if the host may page it out.

use model::{Bytes, Cold};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Location of a VM's memory. Totals count since the group's worker began with this VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColdStatus {
    /// Resident memory, without shared pages.
    pub resident_bytes: u64,
    /// Memory in the host's swap, including QEMU's own.
    pub out_bytes: u64,
    /// Limit of its resident memory.
    pub target_bytes: Option<u64>,
    /// Not touched for ten seconds, resident or not.
    pub untouched_10s_bytes: u64,
    /// Not touched for a minute.
    pub untouched_1min_bytes: u64,
    /// Not touched for ten minutes.
    pub untouched_10min_bytes: u64,
    /// Memory refaulted per second lately.
    pub refaulted_bytes_per_second: u64,
    /// Refaults per second.
    pub refaults_per_second: f64,
    /// Time of one refault; 0: not measured yet.
    pub refault_us: f64,
    /// Share of one vCPU's time for which it waits for refaults, at most 1.
    #[serde(default)]
    pub wait_ratio: f64,
    /// Paged out; a page may count several times.
    pub paged_out_bytes_total: u64,
    /// Refaulted or read back.
    pub returned_bytes_total: u64,
}

impl ColdStatus {
    /// The reading as an API object.
    #[expect(clippy::cast_precision_loss, reason = "nanoseconds of one touch")]
    pub fn of(cold: &Cold) -> Self {
        let [ten_s, minute, ten_min] = cold.untouched.map(|size| size.0);
        Self {
            resident_bytes: cold.resident.0,
            out_bytes: cold.out.0,
            target_bytes: cold.target.map(|target| target.0),
            untouched_10s_bytes: ten_s,
            untouched_1min_bytes: minute,
            untouched_10min_bytes: ten_min,
            refaulted_bytes_per_second: cold.refaulted_per_s.0,
            refaults_per_second: cold.refaults_per_s,
            refault_us: cold.refault_ns as f64 / 1e3,
            wait_ratio: policy::waits(cold).min(1.0),
            paged_out_bytes_total: cold.paged_out.0,
            returned_bytes_total: cold.returned.0,
        }
    }

    /// A summary in words.
    #[must_use]
    pub fn words(&self) -> String {
        let size = |bytes: u64| Bytes(bytes).to_string();
        let untouched = match (self.untouched_10min_bytes, self.untouched_1min_bytes) {
            (0, minute) => format!("{} untouched for a minute", size(minute)),
            (ten, _) => format!("{} untouched for ten minutes", size(ten)),
        };
        let waits = if self.refaults_per_second >= 0.05 {
            let us = self.refault_us;
            format!(
                "; it waits {:.1} times a second for what is out, {us:.0} us each",
                self.refaults_per_second
            )
        } else {
            String::new()
        };
        let (resident, out) = (size(self.resident_bytes), size(self.out_bytes));
        format!("{resident} in memory, {out} paged out; {untouched}{waits}")
    }
}
