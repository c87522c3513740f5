//! Overloads: VMs that page because they were given less memory than they were promised.

use model::{Overload, Profile, Severity, VmName};
use policy::overload::Threshold;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Words;
use crate::shown::TickView;

/// Whether a VM is overloaded, and how often it has been.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OverloadStatus {
    /// `none`, `transient` or `sustained`.
    pub severity: String,
    /// Pages per second that it paged in and out in the latest interval.
    pub pages_per_second: u64,
    /// Why that is an overload, or is not.
    pub reason: Words,
    /// Measured intervals.
    pub intervals_total: u64,
    /// Those of them in transient overloads.
    pub transient_intervals_total: u64,
    /// Those of them in sustained overloads.
    pub sustained_intervals_total: u64,
    /// Transient overloads.
    pub transient_overloads_total: u64,
    /// Sustained overloads.
    pub sustained_overloads_total: u64,
    /// An overload is sustained when this many of the last intervals …
    pub threshold_intervals: u32,
    /// … out of this number were overloaded.
    pub threshold_window: u32,
}

impl OverloadStatus {
    /// The overload of this VM as an API object.
    pub(super) fn of(shown: &TickView, vm: &VmName) -> Option<Self> {
        let tick = &shown.published;
        let Overload { severity, pages_per_s, reason } = tick.plan.overloads.get(vm)?;
        let nothing = Profile::default();
        let profile = tick.memory.learned.profiles.get(vm).unwrap_or(&nothing);
        let threshold = Threshold::of(&tick.spec.overload, profile);
        Some(Self {
            severity: name(*severity).to_owned(),
            pages_per_second: *pages_per_s,
            reason: Words::of(reason),
            intervals_total: profile.intervals,
            transient_intervals_total: profile.transient,
            sustained_intervals_total: profile.sustained,
            transient_overloads_total: profile.lengths.iter().map(|n| u64::from(*n)).sum(),
            sustained_overloads_total: profile.sustained_overloads.into(),
            threshold_intervals: threshold.sustained,
            threshold_window: threshold.window,
        })
    }
}

/// The severity's name.
pub(crate) const fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::None => "none",
        Severity::Transient => "transient",
        Severity::Sustained => "sustained",
    }
}
