//! What the daemon shows the world after each tick, and what the world may ask of it.
//!
//! The loop owns the policy's memory and the drivers; everybody else (HTTP, history, metrics) reads
//! the latest [`Published`] from a watch channel and sends [`Request`]s. So nobody shares a lock
//! with the loop, and a slow reader costs only itself.

use std::sync::Arc;

use model::{HostView, Plan, Spec, Time};
use policy::Memory;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot, watch};

use crate::pool::member::MemberState;

/// One tick, whole.
#[derive(Clone, Debug, Serialize)]
pub struct Published {
    /// When the tick ran, on the boot clock.
    pub at: Time,
    /// When the tick ran, in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// The configuration in force.
    pub spec: Arc<Spec>,
    /// What was seen.
    pub view: HostView,
    /// What the policy remembered *before* the tick, so that the tick can be replayed.
    pub memory: Memory,
    /// What was decided.
    pub plan: Plan,
    /// Whether the operator paused Overbook.
    pub paused: bool,
    /// Why the newest configuration on disk is not the one in force.
    pub config_error: Option<String>,
    /// The part of the newest configuration that waits for a restart; the rest of it is in force.
    pub waits_for_restart: Option<String>,
    /// Why readings and decisions are not being kept (a full disk, for example).
    pub history_error: Option<String>,
    /// How the host does in its pool, if it is in one.
    pub pool: Option<MemberState>,
}

/// The latest tick, for any number of readers.
pub type Latest = watch::Receiver<Arc<Published>>;

/// Something the operator wants of the running daemon.
#[derive(Debug)]
pub enum Request {
    /// Change nothing any more.
    Pause(Reply),
    /// Go on.
    Resume(Reply),
    /// Give every VM back what it had before Overbook touched it, and pause.
    Release(Reply),
}

/// Where the outcome goes: words for the operator either way.
pub type Reply = oneshot::Sender<Result<String, String>>;

/// The way to the loop.
pub type Requests = mpsc::Sender<Request>;
