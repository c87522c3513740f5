//! The API's objects: flat, with units in the names of fields.
//!
//! These types are separate from the model's. The model may change with the policy, but scripts
//! and dashboards rely on these fields. One function makes each object from the daemon's state
//! ([`TickView`](crate::shown::TickView)), and the CLI reads the same objects back. So the API,
//! `--json` and the tables have one list of fields. OpenAPI is derived from them.

mod cache;
mod capacity;
mod cold;
mod dedup;
mod disk;
mod free_pages;
mod group;
mod history;
mod host;
mod loan;
mod memory_limit;
pub(crate) mod overload;
mod page;
mod plan;
mod pool;
mod release;
mod shim;
mod tracking;
mod vm;

use model::{Bytes, Reason};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

pub use cache::{CacheSize, CacheStatus};
pub use capacity::{AtOnceStatus, CapacityStatus, NoCapacity};
pub use cold::ColdStatus;
pub use dedup::{DedupStatus, GroupDedup, GroupKsm, ScanStatus};
pub use disk::{DiskStatus, RepositoriesStatus};
pub use free_pages::{FreePagesStatus, GroupFreePages};
pub use group::GroupStatus;
pub use history::HistoryRow;
pub use host::HostStatus;
pub use loan::{LoanRow, LoanStatus};
pub use memory_limit::MemoryLimitStatus;
pub use overload::OverloadStatus;
pub use page::StatusPage;
pub use plan::{PlanStatus, PlannedVm};
pub use pool::{PoolHost, PoolMove, PoolRecords, PoolStatus};
pub use release::{ReleasePreview, ReleasedVm};
pub use shim::{ADVICE as SHIM_ADVICE, ShimStatus};
pub use tracking::{CurvePoint, MissRatioCurve, TrackingStatus, WorkerStatus};
pub use vm::{VmChange, VmStatus};

pub use crate::shown::LastChange;

/// A reason: the code for programs, the words for people.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Words {
    /// Stable name of the reason, for example `stale_stats`.
    pub code: String,
    /// The reason with its figures.
    pub text: String,
}

impl Words {
    /// A reason, for the user.
    pub fn of(reason: &Reason) -> Self {
        let value = serde_json::to_value(reason).unwrap_or_default();
        let code = value.get("code").and_then(|c| c.as_str()).unwrap_or("unknown");
        Self { code: code.to_owned(), text: reason.to_string() }
    }

    /// Several reasons.
    pub fn all(reasons: &[Reason]) -> Vec<Self> {
        reasons.iter().map(Self::of).collect()
    }
}

/// Why a VM has the memory that it has, in words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// The VM.
    pub vm: String,
    /// Several lines of plain text.
    pub text: String,
}

/// The answer to the host's repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MayHold {
    /// Memory that it may hold, lent or free.
    pub may_hold_bytes: u64,
}

/// The answer to a request that changes something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// The result, for the operator.
    pub message: String,
}

/// The answer to a request that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Failure {
    /// The error, for the operator.
    pub error: String,
}

/// The number of bytes.
fn raw(amount: Option<Bytes>) -> Option<u64> {
    amount.map(|bytes| bytes.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_carries_its_code_and_its_words() {
        let words = Words::of(&Reason::AtMax { max: Bytes::mib(384) });
        assert_eq!(words.code, "at_max");
        assert_eq!(words.text, "it is at its maximum of 384 MiB");
    }
}
