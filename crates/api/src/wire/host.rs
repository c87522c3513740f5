//! The host on one page: its memory, Overbook's mode, and troubles.

use model::{Link, Reason};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Words, raw};
use crate::{published::Published, shown::TickView};

/// The host and the daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HostStatus {
    /// The daemon's version.
    pub version: String,
    /// When the tick ran, in milliseconds since the Unix epoch.
    pub wall_ms: u64,
    /// Time since the tick.
    pub tick_age_ms: u64,
    /// `observe`, `recommend` or `enforce`.
    pub mode: String,
    /// Whether the operator paused Overbook.
    pub paused: bool,
    /// Groups that the operator paused by name.
    #[serde(default)]
    pub paused_groups: Vec<String>,
    /// VMs that the operator paused by name.
    #[serde(default)]
    pub paused_vms: Vec<String>,
    /// Why the newest configuration on disk is not in force.
    pub config_error: Option<String>,
    /// The part of the newest configuration that waits for a restart; the rest of it is in force.
    #[serde(default)]
    pub waits_for_restart: Option<String>,
    /// Why history is not kept.
    pub history_error: Option<String>,
    /// `MemTotal`.
    pub total_bytes: Option<u64>,
    /// `MemAvailable`.
    pub available_bytes: Option<u64>,
    /// `SwapTotal`.
    pub swap_total_bytes: Option<u64>,
    /// `SwapFree`.
    pub swap_free_bytes: Option<u64>,
    /// Share of the last 10 s in which some task waited for memory.
    pub psi_some_avg10_percent: Option<f32>,
    /// Share of the last 10 s in which every task waited for memory.
    pub psi_full_avg10_percent: Option<f32>,
    /// Age of these readings at the tick.
    pub reading_age_ms: Option<u64>,
    /// Memory that KSM saves on the whole host, whether Overbook drives it or not.
    #[serde(default)]
    pub ksm_saved_bytes: Option<u64>,
    /// Memory that KSM's merged pages take.
    #[serde(default)]
    pub ksm_shared_bytes: Option<u64>,
    /// Whether Overbook drives it.
    #[serde(default)]
    pub ksm_is_driven: bool,
    /// A trouble with KSM, or settings that were not restored.
    #[serde(default)]
    pub ksm_trouble: Option<String>,
    /// The host's name in its pool; `null`: it is in none.
    #[serde(default)]
    pub pool_host: Option<String>,
    /// Whether the other hosts of the pool know that it is alive.
    #[serde(default)]
    pub pool_is_seated: bool,
    /// A trouble with the pool.
    #[serde(default)]
    pub pool_trouble: Option<String>,
    /// VMs that are moving to or from this host.
    #[serde(default)]
    pub pool_moving: Vec<String>,
    /// VMs found.
    pub vms: usize,
    /// VMs whose QEMU does not answer.
    pub unreachable_vms: usize,
    /// VMs whose balloon does not follow.
    pub uncooperative_vms: usize,
    /// Conditions of the host that concern every user.
    pub reasons: Vec<Words>,
}

impl HostStatus {
    /// The host as of the last tick.
    pub fn of(shown: &TickView) -> Self {
        let Published { view, plan, memory, .. } = shown.published.as_ref();
        let pauses = &memory.pauses;
        let host = view.host.map(|reading| reading.value);
        let ksm = view.ksm.as_ref().map(|reading| &reading.value);
        let pool = shown.published.pool.as_ref();
        let down = |vm: &&model::VmView| vm.link != Link::Up;
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            wall_ms: shown.published.wall_ms,
            tick_age_ms: shown.tick_age().0,
            mode: plan.mode.to_string(),
            paused: shown.published.paused,
            paused_groups: pauses.groups.keys().map(ToString::to_string).collect(),
            paused_vms: pauses.vms.keys().map(ToString::to_string).collect(),
            config_error: shown.published.config_error.clone(),
            waits_for_restart: shown.published.waits_for_restart.clone(),
            history_error: shown.published.history_error.clone(),
            total_bytes: raw(host.map(|h| h.total)),
            available_bytes: raw(host.map(|h| h.available)),
            swap_total_bytes: raw(host.map(|h| h.swap_total)),
            swap_free_bytes: raw(host.map(|h| h.swap_free)),
            psi_some_avg10_percent: host.and_then(|h| h.psi_some_avg10),
            psi_full_avg10_percent: host.and_then(|h| h.psi_full_avg10),
            reading_age_ms: view.host.map(|reading| reading.age(shown.published.at).0),
            ksm_saved_bytes: raw(ksm.map(|ksm| ksm.saved)),
            ksm_shared_bytes: raw(ksm.map(|ksm| ksm.shared)),
            ksm_is_driven: ksm.is_some_and(|ksm| ksm.is_driven),
            ksm_trouble: ksm.and_then(|ksm| ksm.trouble.clone()),
            pool_host: pool.map(|pool| pool.host.clone()),
            pool_is_seated: pool.is_some_and(|pool| pool.is_seated),
            pool_trouble: pool.and_then(|pool| pool.trouble.clone()),
            pool_moving: pool
                .map(|pool| pool.moves.under_way.iter().map(ToString::to_string).collect())
                .unwrap_or_default(),
            vms: view.vms.len(),
            unreachable_vms: view.vms.values().filter(down).count(),
            uncooperative_vms: plan.vms.values().filter(|d| is_uncooperative(d)).count(),
            reasons: Words::all(&plan.host),
        }
    }
}

/// Whether the VM's balloon does not follow its target.
pub(super) fn is_uncooperative(decision: &model::Decision) -> bool {
    decision.refusals.iter().any(|r| matches!(r, Reason::Uncooperative { .. }))
}
