//! One VM, as its guest reports it and as the host counts it.
//!
//! The two never agree: a guest counts its page cache, the host counts pages that were ever
//! touched. So each field's name tells its origin: `guest_…` is the guest's own claim and may be
//! false; `used_bytes` is the host's count.

use std::collections::BTreeMap;

use model::{Decision, Link, Migration, Reason, VmName, VmView, plan::Change};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    ColdStatus, DedupStatus, DiskStatus, FreePagesStatus, LastChange, MemoryLimitStatus,
    OverloadStatus, ShimStatus, TrackingStatus, Words, host::is_uncooperative, raw,
};
use crate::published::Published;
use crate::shown::{self, TickView};

/// Readings of a VM and the decision about it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmStatus {
    /// Its name.
    pub name: String,
    /// The name that its owner knows it by, if its manager tells another one (Nova).
    #[serde(default)]
    pub title: Option<String>,
    /// Labels that it has from its manager, such as `pool:web`; the patterns of groups may name
    /// them.
    #[serde(default)]
    pub labels: Vec<String>,
    /// Its group; absent: it is watched, and its memory is left alone.
    pub group: Option<String>,
    /// Whether the operator paused it, or its group, by name.
    #[serde(default)]
    pub paused: bool,
    /// Whether QEMU answers.
    pub link_up: bool,
    /// Why there is no connection to QEMU.
    pub link_error: Option<String>,
    /// `none`, `active` or `unknown`.
    pub migration: String,
    /// Whether its vCPUs are stopped.
    #[serde(default)]
    pub suspended: bool,
    /// RAM that its balloon covers, as it is now: base memory and DIMMs.
    pub ram_bytes: u64,
    /// Memory of other devices (NVDIMM, virtio-mem and the like), which no balloon covers.
    #[serde(default)]
    pub devices_bytes: u64,
    /// The memory limits of its QEMU's cgroups, at all levels; empty: none is known.
    #[serde(default)]
    pub memory_limits: Vec<MemoryLimitStatus>,
    /// Minimum size.
    pub min_bytes: Option<u64>,
    /// Guaranteed size.
    pub base_bytes: Option<u64>,
    /// Maximum size.
    pub max_bytes: Option<u64>,
    /// The memory that it is meant to have.
    pub target_bytes: Option<u64>,
    /// Memory that the balloon leaves the guest.
    pub balloon_bytes: Option<u64>,
    /// Whether its balloon deflates before the guest's OOM killer runs (`deflate-on-oom`);
    /// absent: not known.
    #[serde(default)]
    pub deflates_on_oom: Option<bool>,
    /// The shim in its QEMU, if a worker talks to it.
    #[serde(default)]
    pub shim: Option<ShimStatus>,
    /// Host view: memory that the guest occupies on the host.
    pub used_bytes: Option<u64>,
    /// Host view: its working set, if it is tracked.
    pub tracking: Option<TrackingStatus>,
    /// Host view: its part in its group's shared pages, if they are looked for.
    pub dedup: Option<DedupStatus>,
    /// Host view: memory that it has freed, if it hands over free pages.
    #[serde(default)]
    pub free_pages: Option<FreePagesStatus>,
    /// Host view: location of its memory, if the host may page it out.
    #[serde(default)]
    pub cold: Option<ColdStatus>,
    /// Its disks that Overbook serves, by name.
    #[serde(default)]
    pub disks: BTreeMap<String, DiskStatus>,
    /// Whether it is overloaded, if its paging is known.
    #[serde(default)]
    pub overload: Option<OverloadStatus>,
    /// Guest view: memory that its kernel manages.
    pub guest_total_bytes: Option<u64>,
    /// Guest view: free memory.
    pub guest_free_bytes: Option<u64>,
    /// Guest view: memory available without swapping.
    pub guest_available_bytes: Option<u64>,
    /// Guest view: page cache.
    pub guest_disk_caches_bytes: Option<u64>,
    /// Guest view: number of OOM kills since it booted; absent: its kernel does not tell.
    #[serde(default)]
    pub guest_oom_kills_total: Option<u64>,
    /// Guest view: age of its statistics at the tick.
    pub stats_age_ms: Option<u64>,
    /// Bytes swapped in and out per second, between the last two statistics.
    pub swap_bytes_per_second: Option<u64>,
    /// Whether its balloon does not follow.
    pub uncooperative: bool,
    /// Mechanisms that it cannot take part in, each with the reason.
    pub unsupported: BTreeMap<String, String>,
    /// The last action that QEMU refused.
    pub last_error: Option<String>,
    /// The change of this tick.
    pub change: Option<VmChange>,
    /// Why nothing, or not more, was taken or given.
    pub refusals: Vec<Words>,
    /// The last change that was carried out before this tick, since the daemon started.
    pub last_change: Option<LastChange>,
}

/// A change of a VM's target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmChange {
    /// Whether memory is taken from the VM.
    pub is_take: bool,
    /// The new target.
    pub target_bytes: u64,
    /// The reason.
    pub reason: Words,
}

impl VmChange {
    /// The change as an API object.
    pub fn of(change: &Change) -> Self {
        let model::Action::Resize { target, .. } = &change.action;
        Self { is_take: change.is_take, target_bytes: target.0, reason: Words::of(&change.reason) }
    }
}

impl VmStatus {
    /// Every VM that was found.
    pub fn all(shown: &TickView) -> Vec<Self> {
        let vms = &shown.published.view.vms;
        vms.iter().map(|(name, view)| Self::build(shown, name, view)).collect()
    }

    /// The VM with this name. `None`: not found on this host.
    pub fn of(shown: &TickView, name: &VmName) -> Option<Self> {
        let view = shown.published.view.vms.get(name)?;
        Some(Self::build(shown, name, view))
    }

    /// The most important state for an operator, in one word.
    #[must_use]
    pub fn state(&self) -> &'static str {
        if !self.link_up {
            "unreachable"
        } else if self.migration == "active" {
            "migrating"
        } else if self.suspended {
            // Its balloon cannot follow.
            "suspended"
        } else if self.uncooperative {
            "uncooperative"
        } else if self.paused {
            "paused"
        } else if self.group.is_none() {
            "no group"
        } else {
            "ok"
        }
    }

    /// Its working set, if it is known and recent enough to count.
    #[must_use]
    pub fn working_set_bytes(&self) -> Option<u64> {
        let counts =
            |tracking: &&TrackingStatus| tracking.age_ms <= policy::tuning::USED_STALE_AFTER.0;
        self.tracking.as_ref().filter(counts)?.working_set_bytes
    }

    /// Memory that shared pages save it, if they are looked for.
    #[must_use]
    pub fn saved_bytes(&self) -> Option<u64> {
        Some(self.dedup?.saved_bytes)
    }

    /// The text of the last column of `status`.
    pub fn headline(&self) -> String {
        if let Some(why) = &self.link_error {
            return Reason::Unreachable { why: why.clone() }.to_string();
        }
        let Some(change) = &self.change else {
            let refusal = self.refusals.first().map(|words| words.text.clone());
            return refusal.unwrap_or_default();
        };
        shown::change_words(change.is_take, model::Bytes(change.target_bytes), &change.reason.text)
    }

    fn build(shown: &TickView, name: &VmName, view: &VmView) -> Self {
        let seen = Self::seen(shown, name, view);
        let decided = shown.published.plan.vms.get(name).map(Self::decided).unwrap_or_default();
        let Published { memory, spec, .. } = shown.published.as_ref();
        let group = spec.group_of(name).map(|(group, _)| group);
        Self {
            name: name.to_string(),
            paused: memory.pauses.hold(name, group).is_some(),
            group: decided.group,
            min_bytes: decided.min_bytes,
            base_bytes: decided.base_bytes,
            max_bytes: decided.max_bytes,
            target_bytes: decided.target_bytes,
            uncooperative: decided.uncooperative,
            change: decided.change,
            refusals: decided.refusals,
            overload: OverloadStatus::of(shown, name),
            swap_bytes_per_second: raw(shown.swap_rate(name)),
            last_change: shown.last_changes.get(name).cloned(),
            ..seen
        }
    }

    fn seen(shown: &TickView, name: &VmName, view: &VmView) -> Self {
        let stats = view.stats.map(|reading| reading.value).unwrap_or_default();
        let link_error = match &view.link {
            Link::Up => None,
            Link::Down { why, .. } => Some(why.clone()),
        };
        let name_of = |mechanism| {
            let value = serde_json::to_value(mechanism).unwrap_or_default();
            value.as_str().unwrap_or_default().to_owned()
        };
        Self {
            title: view.manager.as_ref().and_then(|manager| manager.title.clone()),
            labels: view.manager.as_ref().map(|it| it.labels.clone()).unwrap_or_default(),
            link_up: link_error.is_none(),
            link_error,
            migration: migration_name(view.migration).to_owned(),
            suspended: view.suspended,
            ram_bytes: view.ram.0,
            devices_bytes: view.devices.0,
            memory_limits: MemoryLimitStatus::of(view),
            balloon_bytes: raw(view.balloon.map(|reading| reading.value)),
            deflates_on_oom: view.deflates_on_oom,
            shim: view.shim.as_ref().map(ShimStatus::of),
            used_bytes: raw(policy::used(view).map(|reading| reading.value)),
            tracking: view.tracking.as_ref().map(|r| TrackingStatus::of(shown, r)),
            dedup: view.dedup.as_ref().map(|r| DedupStatus::of(shown, r)),
            free_pages: view.free_pages.as_ref().map(|r| FreePagesStatus::of(shown, name, r)),
            cold: view.cold.as_ref().map(|reading| ColdStatus::of(&reading.value)),
            disks: view
                .disks
                .iter()
                .map(|(name, r)| (name.clone(), DiskStatus::of(shown, r)))
                .collect(),
            guest_total_bytes: raw(stats.total),
            guest_free_bytes: raw(stats.free),
            guest_available_bytes: raw(stats.available),
            guest_disk_caches_bytes: raw(stats.disk_caches),
            guest_oom_kills_total: stats.oom_kills,
            stats_age_ms: view.stats.map(|reading| reading.age(shown.published.at).0),
            unsupported: view.limits.iter().map(|(m, why)| (name_of(m), why.clone())).collect(),
            last_error: view.last_error.as_ref().map(|reading| reading.value.clone()),
            ..Self::default()
        }
    }

    fn decided(decision: &Decision) -> Self {
        Self {
            group: decision.group.as_ref().map(ToString::to_string),
            min_bytes: raw(decision.limits.map(|l| l.min)),
            base_bytes: raw(decision.limits.map(|l| l.base)),
            max_bytes: raw(decision.limits.map(|l| l.max)),
            target_bytes: raw(decision.target),
            uncooperative: is_uncooperative(decision),
            change: decision.change.as_ref().map(VmChange::of),
            refusals: Words::all(&decision.refusals),
            ..Self::default()
        }
    }
}

/// The migration's state in one word.
const fn migration_name(migration: Migration) -> &'static str {
    match migration {
        Migration::None => "none",
        Migration::Active => "active",
        Migration::Unknown => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vms_state_is_the_one_that_matters_most_to_an_operator() {
        type Change = fn(&mut VmStatus);
        let state = |changes: &[Change]| {
            let group = Some("web".to_owned());
            let mut vm = VmStatus { link_up: true, group, ..VmStatus::default() };
            changes.iter().for_each(|change| change(&mut vm));
            vm.state()
        };
        assert_eq!(state(&[]), "ok");
        // Each of them outweighs those before it.
        let changes: [(Change, &str); 6] = [
            (|vm| vm.group = None, "no group"),
            (|vm| vm.paused = true, "paused"),
            (|vm| vm.uncooperative = true, "uncooperative"),
            (|vm| vm.suspended = true, "suspended"),
            (|vm| vm.migration = "active".to_owned(), "migrating"),
            (|vm| vm.link_up = false, "unreachable"),
        ];
        for (count, (change, word)) in changes.iter().enumerate() {
            assert_eq!(state(&[*change]), *word);
            let so_far: Vec<_> = changes[..=count].iter().map(|(change, _)| *change).collect();
            assert_eq!(state(&so_far), *word);
        }
    }
}
