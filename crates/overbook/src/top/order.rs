//! The order of the VMs, and which of them are shown.

use std::cmp::{Ordering, Reverse};

use api::wire::VmStatus;

/// The column that decides the order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SortKey {
    /// The VM that swaps most comes first.
    #[default]
    Swap,
    /// VMs in trouble come first.
    State,
    /// By name.
    Name,
    /// By group.
    Group,
    /// The largest balloon comes first.
    MayUse,
    /// The VM that occupies most comes first.
    HostUsed,
    /// The largest working set comes first.
    WorkingSet,
}

impl SortKey {
    const ALL: [Self; 7] = [
        Self::Swap,
        Self::State,
        Self::Name,
        Self::Group,
        Self::MayUse,
        Self::HostUsed,
        Self::WorkingSet,
    ];

    /// The next key.
    pub(super) fn next(self) -> Self {
        let at = Self::ALL.iter().position(|key| *key == self).unwrap_or_default();
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    /// The title of its column.
    pub(super) const fn title(self) -> &'static str {
        match self {
            Self::Swap => "GUEST:SWAP",
            Self::State => "STATE",
            Self::Name => "VM",
            Self::Group => "GROUP",
            Self::MayUse => "MAY USE",
            Self::HostUsed => "HOST:USED",
            Self::WorkingSet => "WSS",
        }
    }

    /// The order of two VMs; equal ones are ordered by name.
    fn compare(self, a: &VmStatus, b: &VmStatus) -> Ordering {
        let largest = |of: fn(&VmStatus) -> Option<u64>| Reverse(of(a)).cmp(&Reverse(of(b)));
        let first = match self {
            Self::Swap => largest(|vm| Some(vm.swap_bytes_per_second.unwrap_or(0))),
            Self::State => is_well(a).cmp(&is_well(b)).then(a.state().cmp(b.state())),
            Self::Name => Ordering::Equal,
            Self::Group => (a.group.is_none(), &a.group).cmp(&(b.group.is_none(), &b.group)),
            Self::MayUse => largest(|vm| vm.balloon_bytes),
            Self::HostUsed => largest(|vm| vm.used_bytes),
            Self::WorkingSet => largest(VmStatus::working_set_bytes),
        };
        first.then_with(|| a.name.cmp(&b.name))
    }

    /// Sorts VMs.
    pub(super) fn sort(self, vms: &mut [VmStatus], is_reversed: bool) {
        vms.sort_by(|a, b| {
            let order = self.compare(a, b);
            if is_reversed { order.reverse() } else { order }
        });
    }
}

/// Whether the VM's state needs no attention.
pub(super) fn is_well(vm: &VmStatus) -> bool {
    vm.group.is_none() && vm.link_up || vm.state() == "ok"
}

/// Whether the VM's name, group, state or reason contains the filter, in any case.
pub(super) fn matches(vm: &VmStatus, filter: &str) -> bool {
    let filter = filter.to_lowercase();
    let group = vm.group.as_deref().unwrap_or_default();
    let headline = vm.headline();
    [vm.name.as_str(), group, vm.state(), &headline]
        .iter()
        .any(|text| text.to_lowercase().contains(&filter))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::draw::tests::page;

    fn names(key: SortKey, is_reversed: bool) -> Vec<String> {
        let mut vms = page().vms;
        key.sort(&mut vms, is_reversed);
        vms.into_iter().map(|vm| vm.name).collect()
    }

    #[test]
    fn each_key_orders_the_vms() {
        assert_eq!(names(SortKey::Swap, false), ["web-1", "db-1", "web-2"]);
        assert_eq!(names(SortKey::State, false), ["web-2", "db-1", "web-1"]);
        assert_eq!(names(SortKey::Name, false), ["db-1", "web-1", "web-2"]);
        assert_eq!(names(SortKey::Name, true), ["web-2", "web-1", "db-1"]);
        assert_eq!(names(SortKey::Group, false), ["web-1", "web-2", "db-1"]);
        assert_eq!(names(SortKey::MayUse, false), ["web-2", "web-1", "db-1"]);
        assert_eq!(names(SortKey::HostUsed, false), ["web-2", "web-1", "db-1"]);
        assert_eq!(names(SortKey::WorkingSet, false), ["web-1", "db-1", "web-2"]);
    }

    #[test]
    fn the_keys_come_round() {
        let mut key = SortKey::default();
        for _ in SortKey::ALL {
            key = key.next();
        }
        assert_eq!(key, SortKey::default());
    }

    #[test]
    fn a_filter_looks_at_name_group_state_and_reason() {
        let vms = page().vms;
        let found = |filter: &str| -> Vec<&str> {
            let matching = vms.iter().filter(|vm| matches(vm, filter));
            matching.map(|vm| vm.name.as_str()).collect()
        };
        assert_eq!(found("WEB"), ["web-1", "web-2"]);
        assert_eq!(found("unreach"), ["db-1"]);
        assert_eq!(found("short of memory"), ["web-1"]);
        assert_eq!(found(""), ["db-1", "web-1", "web-2"]);
        assert!(found("nothing like it").is_empty());
    }
}
