//! The effect that a release would have.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The effect of a release of all VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReleasePreview {
    /// The VMs in the order of their release: those that get back the least come first.
    pub vms: Vec<ReleasedVm>,
    /// Memory that the host has beyond its reserve.
    pub room_bytes: u64,
    /// Whether the kernel's KSM gets its settings back.
    pub ksm: bool,
}

/// The memory and settings that a release would give a VM back.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReleasedVm {
    /// The VM.
    pub vm: String,
    /// Its group.
    pub group: Option<String>,
    /// Memory that its balloon gives its guest.
    pub balloon_bytes: u64,
    /// Memory that it shares with other VMs, which becomes its own.
    pub shared_bytes: u64,
    /// Memory in the host's swap, which is read back.
    pub paged_out_bytes: u64,
    /// Its settings that are restored, in words.
    pub text: String,
    /// Why its settings would not be restored now.
    pub error: Option<String>,
    /// Whether the host has room for it and for all VMs before it.
    pub fits: bool,
}

impl ReleasedVm {
    /// The memory that the VM gets back.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.balloon_bytes.saturating_add(self.shared_bytes).saturating_add(self.paged_out_bytes)
    }
}

impl ReleasePreview {
    /// These VMs in order, on a host with this room.
    pub fn in_order(vms: impl Iterator<Item = ReleasedVm>, room_bytes: u64, ksm: bool) -> Self {
        let mut vms: Vec<_> = vms.collect();
        vms.sort_by(|one, other| {
            let key = |vm: &ReleasedVm| (vm.error.is_some(), vm.total_bytes());
            key(one).cmp(&key(other)).then_with(|| one.vm.cmp(&other.vm))
        });
        let mut preview = Self { vms, room_bytes, ksm };
        preview.fit();
        preview
    }

    /// The same for the VMs that `is_meant` names, without KSM.
    #[must_use]
    pub fn of(mut self, is_meant: impl Fn(&ReleasedVm) -> bool) -> Self {
        self.vms.retain(|vm| is_meant(vm));
        self.ksm = false;
        self.fit();
        self
    }

    fn fit(&mut self) {
        let mut sum = 0_u64;
        for vm in &mut self.vms {
            sum = sum.saturating_add(vm.total_bytes());
            vm.fits = sum <= self.room_bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vm(name: &str, balloon_bytes: u64) -> ReleasedVm {
        ReleasedVm { vm: name.to_owned(), balloon_bytes, ..ReleasedVm::default() }
    }

    #[test]
    fn the_least_comes_first_and_the_host_has_room_for_some() {
        let large = ReleasedVm { paged_out_bytes: 50, ..vm("large", 10) };
        let stuck = ReleasedVm { error: Some("stuck".to_owned()), ..vm("stuck", 0) };
        let vms = [large, stuck, vm("b", 20), vm("a", 20)];
        let preview = ReleasePreview::in_order(vms.into_iter(), 60, true);
        let told = |preview: &ReleasePreview| {
            let of = |vm: &ReleasedVm| (vm.vm.clone(), vm.fits);
            preview.vms.iter().map(of).collect::<Vec<_>>()
        };
        let all = [("a", true), ("b", true), ("large", false), ("stuck", false)];
        assert_eq!(told(&preview), all.map(|(name, fits)| (name.to_owned(), fits)));
        let one = preview.of(|vm| vm.vm == "large");
        assert_eq!((told(&one), one.ksm), (vec![("large".to_owned(), true)], false));
    }
}
