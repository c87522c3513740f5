//! A pool of hosts, as one of its hosts sees it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::shown::TickView;

/// The pool of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolStatus {
    /// This host's name in the pool.
    pub host: String,
    /// Whether the other hosts know that this one is alive.
    pub is_seated: bool,
    /// A trouble with the pool.
    pub trouble: Option<String>,
    /// Age of the rest when the tick ran; absent: the pool's store was not read yet.
    pub age_ms: Option<u64>,
    /// All hosts and moves.
    #[serde(flatten)]
    pub records: PoolRecords,
}

/// The hosts of a pool, and the VMs that move between them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolRecords {
    /// The controller that decides; absent: none does.
    pub controller: Option<String>,
    /// Every host that has ever reported, by name.
    pub hosts: Vec<PoolHost>,
    /// VMs that change hosts, by name.
    pub moves: Vec<PoolMove>,
}

/// A host of the pool, by its own report.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolHost {
    /// Its name.
    pub host: String,
    /// Whether it is alive: it holds its lease.
    pub is_there: bool,
    /// VMs that it manages.
    pub vms: usize,
    /// Memory for VMs: all of its memory without its reserve and other processes.
    pub memory_bytes: u64,
    /// The part of it that VMs have.
    pub given_bytes: u64,
    /// Memory that its VMs were promised.
    pub promised_bytes: u64,
    /// Memory that it never hands out.
    pub reserve_bytes: u64,
    /// Pages of its VMs that lie in other hosts' memory.
    pub in_repositories_bytes: u64,
    /// Memory that it keeps for VMs that move to it.
    #[serde(default)]
    pub kept_for_vms_bytes: u64,
    /// Memory that it keeps for other hosts' pages.
    #[serde(default)]
    pub kept_for_pages_bytes: u64,
    /// VMs in transient overload.
    pub transient_overloads: usize,
    /// VMs in sustained overload.
    pub sustained_overloads: usize,
}

/// A VM that changes hosts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolMove {
    /// The VM.
    pub vm: String,
    /// The source host.
    pub from: String,
    /// The target host.
    pub to: String,
    /// Whether the move is withdrawn: a VM that has not left stays.
    pub is_withdrawn: bool,
    /// The step of the source host, in words.
    pub source: String,
    /// The step of the target host, in words.
    pub target: String,
}

impl PoolStatus {
    /// The pool as of the last tick. `None`: this host is in none.
    #[must_use]
    pub fn of(shown: &TickView) -> Option<Self> {
        let pool = shown.published.pool.as_ref()?;
        let read = pool.records.as_ref();
        Some(Self {
            host: pool.host.clone(),
            is_seated: pool.is_seated,
            trouble: pool.trouble.clone(),
            age_ms: read.map(|records| records.age(shown.published.at).0),
            records: read.map(|records| records.value.clone()).unwrap_or_default(),
        })
    }
}
