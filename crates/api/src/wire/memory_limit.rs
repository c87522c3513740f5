//! Memory limits of cgroups.

use model::{Bytes, VmView, view::MemoryLimit};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A memory limit of a cgroup of a VM's QEMU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryLimitStatus {
    /// The cgroup, as a path from the root of its tree.
    pub cgroup: String,
    /// The file with the limit: `memory.max`, `memory.high`, or `memory.limit_in_bytes`.
    pub file: String,
    /// The limit.
    pub limit_bytes: u64,
    /// Memory that all processes in it occupy, without the page cache.
    pub used_bytes: u64,
}

impl MemoryLimitStatus {
    /// The limits of all levels, the VM's own first.
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

    /// Whether the limit is below the VM's `max`.
    #[must_use]
    pub fn is_below(&self, max: Bytes) -> bool {
        Bytes(self.limit_bytes) < max
    }

    /// The limit in words.
    #[must_use]
    pub fn words(&self) -> String {
        let Self { cgroup, file, .. } = self;
        let (limit, used) = (Bytes(self.limit_bytes), Bytes(self.used_bytes));
        format!("{cgroup} may have {limit} ({file}), and has {used} without the cache of files")
    }
}
