//! The whole host on one page, of one tick.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{GroupStatus, HostStatus, VmStatus};
use crate::shown::TickView;
use crate::verdict::HostVerdict;

/// The host, its groups and its VMs, all of the same tick.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
pub struct StatusPage {
    /// The state in one line, and all troubles.
    #[serde(default)]
    pub verdict: HostVerdict,
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
        let host = HostStatus::of(shown);
        Self { verdict: HostVerdict::judge(&host, &groups, &vms), host, groups, vms }
    }
}
