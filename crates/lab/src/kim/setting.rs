//! Settings that the guests of a mix run under.

use model::{ColdSpec, DedupSpec, FreePagesSpec, Mode, PagesPerMs, Policy, TrackingBudget};

use crate::daemon::DaemonSettings;

/// One of several settings that are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// Its name in figures.
    pub name: &'static str,
    /// The daemon's settings; `None`: there is no daemon.
    pub daemon: Option<DaemonSettings>,
}

/// Guests without Overbook: the baseline of all comparisons.
pub const BASELINE: Setting = Setting { name: "baseline", daemon: None };
/// Algorithm 1 as a whole.
pub const ADAPTIVE_CSD: Setting = merging("csd", DedupSpec::Adaptive);
/// All controllers of the paper's Figs. 5 and 6 (§6.2.1); the surplus goes to VMs that need it.
pub const CONTROLLERS: [Setting; 5] = [
    merging("static_5", DedupSpec::Fixed(PagesPerMs(5))),
    merging("static_50", DedupSpec::Fixed(PagesPerMs(50))),
    merging("c", DedupSpec::AdaptiveC),
    merging("cs", DedupSpec::AdaptiveCs),
    ADAPTIVE_CSD,
];
/// The reprovisioning policies (§6.2.2), all with Adaptive-CSD.
pub const POLICIES: [Setting; 3] = [
    sharing_out("fair", Policy::Fair),
    sharing_out("entitlement", Policy::Entitlement),
    sharing_out("demand", Policy::Demand),
];

const fn merging(name: &'static str, dedup: DedupSpec) -> Setting {
    Setting { name, daemon: Some(settings(dedup, Policy::Demand, false)) }
}

const fn sharing_out(name: &'static str, policy: Policy) -> Setting {
    Setting { name, daemon: Some(settings(DedupSpec::Adaptive, policy, false)) }
}

/// The paper's settings, without any tracking.
pub const fn settings(dedup: DedupSpec, policy: Policy, lend: bool) -> DaemonSettings {
    let (free_pages, tracking) = (FreePagesSpec::Off, TrackingBudget::Off);
    let mode = Mode::Enforce;
    let (cold, guaranteed, grace) = (ColdSpec::Off, None, model::Millis(0));
    DaemonSettings { mode, dedup, free_pages, tracking, cold, policy, lend, guaranteed, grace }
}
