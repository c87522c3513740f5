//! Where a VM's memory is, where the host may page it out.

use model::{Bytes, Cold};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Where a VM's memory is. Totals count since the group's worker began with this VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ColdStatus {
    /// In memory, without what it shares with others.
    pub resident_bytes: u64,
    /// In the host's swap, QEMU's own memory among it.
    pub out_bytes: u64,
    /// What it is to have in memory at most.
    pub target_bytes: Option<u64>,
    /// Not touched for ten seconds, wherever it is.
    pub untouched_10s_bytes: u64,
    /// Not touched for a minute.
    pub untouched_1min_bytes: u64,
    /// Not touched for ten minutes.
    pub untouched_10min_bytes: u64,
    /// Paged out and touched again, of late, in whole pieces of memory.
    pub refaulted_bytes_per_second: u64,
    /// How often it waited for that.
    pub refaults_per_second: f64,
    /// What one such wait takes; 0: not measured yet.
    pub refault_us: f64,
    /// Paged out, again and again.
    pub paged_out_bytes_total: u64,
    /// Touched again of that, or read back.
    pub returned_bytes_total: u64,
}

impl ColdStatus {
    /// The reading as it goes over the wire.
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
            paged_out_bytes_total: cold.paged_out.0,
            returned_bytes_total: cold.returned.0,
        }
    }

    /// All of it that a person wants to know at once.
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
