//! The whole host on one page, of one tick.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{GroupStatus, HostStatus, VmStatus};
use crate::shown::TickView;

/// The host, its groups and its VMs, all of the same tick.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StatusPage {
    /// The host and the daemon.
    pub host: HostStatus,
    /// Every group.
    pub groups: Vec<GroupStatus>,
    /// Every VM.
    pub vms: Vec<VmStatus>,
}

impl StatusPage {
    /// The page of the last tick.
    #[must_use]
    pub fn of(shown: &TickView) -> Self {
        let (groups, vms) = (GroupStatus::all(shown), VmStatus::all(shown));
        Self { host: HostStatus::of(shown), groups, vms }
    }
}
