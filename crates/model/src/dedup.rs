//! Deduplication of identical pages: a group's setting, and the result for each VM.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Bytes;

/// One VM's part in its group's shared pages since its worker connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dedup {
    /// Memory of the VM that is shared now.
    pub shared: Bytes,
    /// Memory that the VM saves by sharing. Of a page that `n` VMs share, each VM saves all but
    /// one `n`th.
    pub saved: Bytes,
    /// Memory merged so far.
    pub merged: Bytes,
    /// Merged memory that the guest has written since and has to itself again.
    pub broken: Bytes,
    /// Zero pages that were dropped: they take no memory until the guest writes to them.
    pub dropped: Bytes,
    /// Number of complete scans of the VM's memory.
    pub passes: u64,
}

impl Dedup {
    /// The VM's part of the group's pool: its share of each shared page.
    #[must_use]
    pub const fn part(&self) -> Bytes {
        self.shared.minus(self.saved)
    }
}

/// A scan rate: pages scanned per millisecond.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PagesPerMs(pub u32);

impl fmt::Display for PagesPerMs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} pages/ms", self.0)
    }
}

/// How a group's identical pages are searched for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DedupSpec {
    /// Never; shared pages are unshared.
    #[default]
    Off,
    /// As fast as the group can afford (Kim 2014, Algorithm 1: Adaptive-CSD).
    Adaptive,
    /// As fast as the host's CPUs allow, regardless of the benefit (Kim 2014 §6.2: Adaptive-C).
    AdaptiveC,
    /// The same, and fast while the group's VMs swap (Kim 2014 §6.2: Adaptive-CS).
    AdaptiveCs,
    /// Always at this rate.
    Fixed(PagesPerMs),
}

impl DedupSpec {
    /// The range that the configuration accepts, in pages per millisecond.
    pub const RANGE: core::ops::RangeInclusive<u32> = 1..=1000;

    /// Whether identical pages are searched for at all.
    #[must_use]
    pub const fn is_on(self) -> bool {
        !matches!(self, Self::Off)
    }
}

impl fmt::Display for DedupSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.pad("off"),
            Self::Adaptive => f.pad("adaptive"),
            Self::AdaptiveC => f.pad("adaptive-c"),
            Self::AdaptiveCs => f.pad("adaptive-cs"),
            Self::Fixed(rate) => rate.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::LendSpec;

    #[test]
    fn of_a_page_among_four_a_quarter_is_a_vms_part() {
        let dedup = Dedup { shared: Bytes::mib(40), saved: Bytes::mib(30), ..Dedup::default() };
        assert_eq!(dedup.part(), Bytes::mib(10));
    }

    #[test]
    fn an_export_from_before_there_was_dedup_still_reads() {
        let vm = r#"{"incarnation": 1, "link": {"state": "up"}, "ram": 1, "balloon": null, "stats": null,
            "used": null, "migration": "none", "limits": {}, "last_error": null}"#;
        let vm: crate::VmView = serde_json::from_str(vm).unwrap();
        assert_eq!(vm.dedup, None);
        let host = r#"{"total": 1, "available": 1, "swap_total": 0, "swap_free": 0, "psi_some_avg10": null,
            "psi_full_avg10": null}"#;
        let host: crate::HostReading = serde_json::from_str(host).unwrap();
        assert_eq!(host.cpu_busy, None);
        let worker = r#"{"pid": 1, "cpu_us": 1, "resident": 1, "restarts": 0, "last_error": null}"#;
        let worker: crate::WorkerReading = serde_json::from_str(worker).unwrap();
        assert!(worker.pool.is_zero());
        let group = r#"{"policy": "fair", "vms": [], "budget": null, "limits": {}}"#;
        let group: crate::GroupSpec = serde_json::from_str(group).unwrap();
        assert_eq!((group.dedup, group.lend), (DedupSpec::Off, LendSpec::Open(false)));
        let plan = r#"{"at": 1, "mode": "observe", "groups": {}, "vms": {}, "host": []}"#;
        let plan: crate::Plan = serde_json::from_str(plan).unwrap();
        assert!(plan.scans.is_empty() && plan.loans.is_empty());
    }
}
