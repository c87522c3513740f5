//! Everything that the daemon publishes after each tick.
//!
//! The loop owns the policy's memory and the drivers; everything else (the API, the history, the
//! pool) reads the latest [`Published`] from a watch channel. So nothing shares a lock with the
//! loop, and a slow reader costs only itself.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use model::cluster::ExcessSpace;
use model::{Bytes, HostView, Plan, Reading, Spec, Time, VmName};
use policy::{Case, Memory};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::moves::Moves;
use crate::wire::PoolRecords;

/// One tick.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Published {
    /// When the tick ran, on the boot clock.
    pub at: Time,
    /// When the tick ran, in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// The configuration in force.
    pub spec: Arc<Spec>,
    /// The readings.
    pub view: HostView,
    /// State of the policy *before* the tick, so that the tick can be replayed.
    pub memory: Memory,
    /// The decisions.
    pub plan: Plan,
    /// Whether the operator paused Overbook.
    pub paused: bool,
    /// Why the newest configuration on disk is not the one in force.
    pub config_error: Option<String>,
    /// The part of the newest configuration that waits for a restart; the rest of it is in force.
    pub waits_for_restart: Option<String>,
    /// Why readings and decisions are not kept (a full disk, for example).
    pub history_error: Option<String>,
    /// The host's state as a member of its pool, if it is in one.
    pub pool: Option<MemberState>,
    /// The host's repository; `None`: it has none.
    #[serde(default)]
    pub lender: Option<Lender>,
    /// Time that this tick and those before it took.
    pub ticks: TickTimes,
}

impl Published {
    /// The input of this tick's decisions.
    #[must_use]
    pub fn case(&self) -> Case {
        Case {
            now: self.at,
            spec: (*self.spec).clone(),
            view: self.view.clone(),
            memory: self.memory.clone(),
        }
    }
}

/// The state of a host in its pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberState {
    /// The host's name in the pool.
    pub host: String,
    /// Whether the host holds its lease, so that other hosts know that it is alive.
    pub is_seated: bool,
    /// Why it does not, or another error of the store.
    pub trouble: Option<String>,
    /// VMs that are moving to or from this host, and the news about them.
    pub moves: Moves,
    /// The memory that this host keeps for overloads.
    #[serde(default)]
    pub share: ExcessSpace,
    /// VMs that have come to this host for their overloads a short while ago.
    #[serde(default)]
    pub arrived: BTreeSet<VmName>,
    /// All hosts of the pool, when its store was last read.
    #[serde(default)]
    pub records: Option<Reading<PoolRecords>>,
}

/// The host's repository, as it has told the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lender {
    /// The memory that it holds, lent or free.
    pub holds: Bytes,
    /// The most that it may hold by its operator.
    pub most: Bytes,
}

/// Time that the ticks took, added up since the daemon started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TickTimes {
    /// Number of ticks.
    pub count: u64,
    /// Their time in microseconds.
    pub micros: u64,
}

impl TickTimes {
    /// Counts one tick.
    pub fn record(&mut self, took: Duration) {
        self.micros += u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.count += 1;
    }
}

/// The latest tick, for any number of readers.
pub type Latest = watch::Receiver<Arc<Published>>;
