//! The VMs and groups that the names of a command line mean.

use std::collections::BTreeSet;

use api::client::{ApiClient, ClientError};
use api::wire::StatusPage;
use model::{GroupName, Scope, VmName};

use super::error::CliError;

const VM: &str = "vm:";
const GROUP: &str = "group:";

/// The names of VMs and groups.
#[derive(Debug, Default)]
pub(super) struct KnownNames {
    pub(super) vms: BTreeSet<String>,
    pub(super) groups: BTreeSet<String>,
}

impl KnownNames {
    /// The names that a daemon knows, also of paused VMs and groups that are gone.
    pub(super) fn ask(client: &ApiClient) -> Result<Self, ClientError> {
        let StatusPage { host, groups, vms, .. } = client.get("/v1/status")?;
        let vms = vms.into_iter().map(|vm| vm.name).chain(host.paused_vms);
        let groups = groups.into_iter().map(|group| group.name).chain(host.paused_groups);
        Ok(Self { vms: vms.collect(), groups: groups.collect() })
    }

    /// The VM or group of this name. `vm:NAME` and `group:NAME` say which of both is meant.
    pub(super) fn scope(&self, name: &str) -> Result<Scope, CliError> {
        let vm = |name: &str| Scope::Vm(VmName::from(name));
        let group = |name: &str| Scope::Group(GroupName::from(name));
        match (self.vms.contains(name), self.groups.contains(name)) {
            (true, true) => Err(CliError::Said(format!(
                "a VM and a group are named `{name}`: write {VM}{name} or {GROUP}{name}"
            ))),
            (true, false) => Ok(vm(name)),
            (false, true) => Ok(group(name)),
            (false, false) => {
                let is_vm = name.strip_prefix(VM).filter(|name| self.vms.contains(*name));
                let is_group = name.strip_prefix(GROUP).filter(|name| self.groups.contains(*name));
                is_vm.map(vm).or(is_group.map(group)).ok_or_else(|| self.unknown(name))
            }
        }
    }

    fn unknown(&self, name: &str) -> CliError {
        let list = |names: &BTreeSet<String>| match names.len() {
            0 => "none".to_owned(),
            _ => names.iter().map(String::as_str).collect::<Vec<_>>().join(", "),
        };
        let (vms, groups) = (list(&self.vms), list(&self.groups));
        CliError::Said(format!("no VM or group is named `{name}`; VMs: {vms}; groups: {groups}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_vms_or_a_groups_and_one_that_is_both_must_say_which() {
        let set = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let known = KnownNames { vms: set(&["web-1", "both"]), groups: set(&["web", "both"]) };
        let (vm, group) = (Scope::Vm("both".into()), Scope::Group("both".into()));
        assert_eq!(known.scope("web-1").unwrap(), Scope::Vm("web-1".into()));
        assert_eq!(known.scope("web").unwrap(), Scope::Group("web".into()));
        assert_eq!(known.scope("vm:both").unwrap(), vm);
        assert_eq!(known.scope("group:both").unwrap(), group);
        let said = |name| known.scope(name).unwrap_err().to_string();
        let expected = "a VM and a group are named `both`: write vm:both or group:both";
        assert_eq!(said("both"), expected);
        let expected = "no VM or group is named `wbe`; VMs: both, web-1; groups: both, web";
        assert_eq!(said("wbe"), expected);
    }
}
