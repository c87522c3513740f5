//! Limits of memory that cgroups have.

use model::{Bytes, VmView, view::MemoryLimit};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A limit that a cgroup of a VM's QEMU has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryLimitStatus {
    /// The cgroup, as a path from the root of its tree.
    pub cgroup: String,
    /// The file that says so: `memory.max`, `memory.high`, or `memory.limit_in_bytes`.
    pub file: String,
    /// No more than this.
    pub limit_bytes: u64,
    /// Memory that all processes there occupy, without the cache of files.
    pub used_bytes: u64,
}

impl MemoryLimitStatus {
    /// Those of all levels, the VM's own first.
    #[must_use]
    pub fn of(view: &VmView) -> Vec<Self> {
        let limits = view.memory_limits.iter().flat_map(|reading| &reading.value);
        let of = |limit: &MemoryLimit| Self {
            cgroup: limit.cgroup.clone(),
            file: limit.file.clone(),
            limit_bytes: limit.limit.0,
            used_bytes: limit.used.0,
        };
        limits.map(of).collect()
    }

    /// Whether a VM that has all of its `max` would occupy more than this.
    #[must_use]
    pub fn is_below(&self, max: Bytes) -> bool {
        Bytes(self.limit_bytes) < max
    }

    /// In words.
    #[must_use]
    pub fn words(&self) -> String {
        let Self { cgroup, file, .. } = self;
        let (limit, used) = (Bytes(self.limit_bytes), Bytes(self.used_bytes));
        format!("{cgroup} may have {limit} ({file}), and has {used} without the cache of files")
    }
}
