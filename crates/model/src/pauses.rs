//! VMs and groups that the operator has paused, apart from a pause of the whole host.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{GroupName, Reason, VmName};

/// The part of a host that an order is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// All VMs, and the kernel's KSM.
    Host,
    /// The VMs of a group, also those that it gets later.
    Group(GroupName),
    /// One VM, also after a restart of its QEMU.
    Vm(VmName),
}

impl Scope {
    /// Whether a VM of this group is in this part of the host.
    #[must_use]
    pub fn has(&self, vm: &VmName, group: Option<&GroupName>) -> bool {
        match self {
            Self::Host => true,
            Self::Group(name) => group == Some(name),
            Self::Vm(name) => vm == name,
        }
    }
}

/// How a paused VM is left. A released VM that is paused again stays released.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hold {
    /// As it is: memory that was taken stays taken.
    Kept,
    /// As it was before Overbook changed it.
    Released,
}

/// The paused groups and VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pauses {
    /// Groups, with all of their VMs.
    #[serde(default)]
    pub groups: BTreeMap<GroupName, Hold>,
    /// VMs.
    #[serde(default)]
    pub vms: BTreeMap<VmName, Hold>,
}

impl Pauses {
    /// Whether nothing is paused.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.vms.is_empty()
    }

    /// Pauses a group or VM. The whole host is no member.
    pub fn add(&mut self, scope: &Scope, hold: Hold) {
        let known = match scope {
            Scope::Host => return,
            Scope::Group(name) => self.groups.entry(name.clone()).or_insert(hold),
            Scope::Vm(name) => self.vms.entry(name.clone()).or_insert(hold),
        };
        *known = hold.max(*known);
    }

    /// Ends the pause of a group or VM; `false`: it was not paused.
    pub fn remove(&mut self, scope: &Scope) -> bool {
        match scope {
            Scope::Host => false,
            Scope::Group(name) => self.groups.remove(name).is_some(),
            Scope::Vm(name) => self.vms.remove(name).is_some(),
        }
    }

    /// How a VM of this group is left; `None`: it is not paused.
    #[must_use]
    pub fn hold(&self, vm: &VmName, group: Option<&GroupName>) -> Option<Hold> {
        let of_group = group.and_then(|group| self.groups.get(group));
        self.vms.get(vm).max(of_group).copied()
    }

    /// Why nothing is changed on a VM of this group; `None`: it is not paused.
    #[must_use]
    pub fn refusal(&self, vm: &VmName, group: Option<&GroupName>) -> Option<Reason> {
        let group = group.filter(|group| self.groups.contains_key(*group)).map(GroupName::as_str);
        let vm = self.vms.contains_key(vm).then_some(vm.as_str());
        vm.or(group).map(|name| Reason::PausedAlone { name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_is_paused_by_its_own_name_or_by_that_of_its_group() {
        let (vm, group) = (VmName::from("web-1"), GroupName::from("web"));
        let (of_vm, of_group) = (Scope::Vm(vm.clone()), Scope::Group(group.clone()));
        let mut pauses = Pauses::default();
        let name = |pauses: &Pauses| match pauses.refusal(&vm, Some(&group)) {
            Some(Reason::PausedAlone { name }) => Some(name),
            _ => None,
        };
        assert_eq!(name(&pauses), None);
        pauses.add(&of_group, Hold::Kept);
        assert_eq!(name(&pauses).as_deref(), Some("web"));
        assert_eq!(pauses.refusal(&vm, None), None, "it is in no group");
        pauses.add(&of_vm, Hold::Kept);
        assert_eq!(name(&pauses).as_deref(), Some("web-1"));
        pauses.add(&Scope::Host, Hold::Kept);
        assert!(pauses.remove(&of_vm) && !pauses.remove(&of_vm));
        assert!(pauses.remove(&of_group) && pauses.is_empty(), "the host is no member");
    }

    #[test]
    fn a_released_vm_stays_released_in_a_further_pause_and_in_that_of_its_group() {
        let (vm, group) = (VmName::from("web-1"), GroupName::from("web"));
        let mut pauses = Pauses::default();
        pauses.add(&Scope::Vm(vm.clone()), Hold::Released);
        pauses.add(&Scope::Vm(vm.clone()), Hold::Kept);
        pauses.add(&Scope::Group(group.clone()), Hold::Kept);
        assert_eq!(pauses.hold(&vm, Some(&group)), Some(Hold::Released));
        assert_eq!(pauses.hold(&"web-2".into(), Some(&group)), Some(Hold::Kept));
        pauses.add(&Scope::Group(group.clone()), Hold::Released);
        assert_eq!(pauses.hold(&"web-2".into(), Some(&group)), Some(Hold::Released));
        assert_eq!(pauses.hold(&"web-2".into(), None), None);
    }
}
