//! Checks beyond the configuration itself: whether it can work on this host.
//!
//! `overbook check && systemctl restart overbook` stops a working daemon. So the check tests
//! everything that could make the daemon's start fail, with the functions of the start itself. It
//! also reports settings that would have no effect, and the number of VMs in each group.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use api::wire::VmStatus;
use model::{Bytes, GroupName, GroupSpec, NamePattern, Spec, VmName};
use serde::Serialize;
use sys::meminfo::MemInfo;

use crate::http::Doors;
use crate::lock::StateLock;

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Remark {
    /// The finding in words.
    pub(crate) what: String,
    /// Whether the daemon would not start, or could do nothing at all.
    pub(crate) is_fatal: bool,
}

fn fatal(what: String) -> Remark {
    Remark { what, is_fatal: true }
}

fn note(what: String) -> Remark {
    Remark { what, is_fatal: false }
}

/// Runs all checks. `vms`: the present VMs with their labels, if a daemon knows them.
#[must_use]
pub(crate) fn try_host(spec: &Spec, vms: Option<&[VmStatus]>) -> Vec<Remark> {
    let mut found = Vec::new();
    found.extend(Doors::check(&spec.api).into_iter().map(|error| fatal(error.to_string())));
    found.extend(no_network(spec));
    found.extend(StateLock::check(&spec.host.state).err().map(|error| fatal(error.to_string())));
    if let Ok(memory) = MemInfo::read() {
        found.extend(promises_more_than(spec, memory.total));
        found.extend(no_swap(spec, memory.swap_total));
    }
    found.extend(spec.host.qmp.iter().filter_map(|glob| no_directory(glob)));
    for (name, group) in &spec.groups {
        found.extend(group.vms.iter().filter_map(|pattern| no_wildcard(name, pattern)));
        found.extend(group.vms.iter().filter_map(|pattern| no_label(name, pattern)));
        if group.cold.is_on() && group.tracking.vcpu_share().is_none() {
            found.push(note(format!(
                "[group.{name}]: `cold` does nothing while tracking = \"off\": only \
                 tracking tells which memory is cold"
            )));
        }
        found.extend(vms.map(|vms| members(name, group, vms)));
    }
    found
}

/// Services that need the network by the configuration, but may not use it by their units.
fn no_network(spec: &Spec) -> Vec<Remark> {
    let daemon = "overbook.service".to_owned();
    let mut needs = Vec::new();
    needs.extend(spec.api.tcp.map(|_| (daemon.clone(), "`tcp` in [api]".to_owned())));
    needs.extend(spec.pool.as_ref().map(|_| (daemon, "[pool]".to_owned())));
    for (name, disk) in spec.disks.iter().filter(|(_, disk)| !disk.repositories.is_empty()) {
        let group = spec.group_of(&disk.vm).map(|(group, _)| group);
        needs.extend(group.map(|group| {
            (format!("overbook-disks@{group}.service"), format!("`repositories` of [disk.{name}]"))
        }));
    }
    let has_none = |unit: &str| families_of(unit).is_some_and(|found| is_cut_off(&found));
    needs.retain(|(unit, _)| has_none(unit));
    let remark = |(unit, what): (String, String)| {
        note(format!(
            "{what} needs the network, and {unit} has none: install network.conf, which says how"
        ))
    };
    needs.into_iter().map(remark).collect()
}

/// The address families that a unit may use, according to systemd; `None`: systemd cannot be
/// asked, or does not know the unit.
fn families_of(unit: &str) -> Option<String> {
    let asked = ["show", unit, "--property=LoadState,RestrictAddressFamilies"];
    let said = Command::new("systemctl").args(asked).stderr(Stdio::null()).output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let value = |key: &str| said.lines().find_map(|line| line.strip_prefix(key));
    value("LoadState=").filter(|state| *state == "loaded")?;
    value("RestrictAddressFamilies=").map(str::to_owned)
}

/// Whether a list of families excludes IPv4. `AF_UNIX`: only these are allowed; with a leading
/// `~`, all except these; an empty list: all.
fn is_cut_off(families: &str) -> bool {
    let names = |text: &str| text.split_whitespace().any(|family| family == "AF_INET");
    match families.strip_prefix('~') {
        Some(forbidden) => names(forbidden),
        None => !families.is_empty() && !names(families),
    }
}

/// Promises that a host of this size cannot keep.
fn promises_more_than(spec: &Spec, total: Bytes) -> Vec<Remark> {
    let mut found = Vec::new();
    if let Some(reserve) = spec.host.reserve.filter(|reserve| *reserve >= total) {
        found.push(fatal(format!(
            "`reserve` in [host] is {reserve}, and the host has {total}: nothing could ever be \
             handed out"
        )));
    }
    let groups = spec.groups.iter().map(|(name, group)| (format!("group.{name}"), group.limits));
    let vms = spec.vms.iter().map(|(name, vm)| (format!("vm.{name}"), vm.limits));
    for (table, limits) in groups.chain(vms) {
        for (key, size) in [("min", limits.min), ("base", limits.base)] {
            if let Some(size) = size.filter(|size| *size > total) {
                found.push(fatal(format!(
                    "`{key}` of [{table}] is {size}, and the host has {total}: that cannot be kept"
                )));
            }
        }
    }
    found
}

/// The directory for QEMU's sockets, if it is missing.
fn no_directory(glob: &str) -> Option<Remark> {
    let directory = Path::new(glob).parent()?;
    let known: PathBuf = directory
        .components()
        .take_while(|part| !part.as_os_str().to_string_lossy().contains(['*', '?', '[']))
        .collect();
    (!known.is_dir()).then(|| {
        note(format!(
            "`qmp` \"{glob}\": there is no directory {}: no QEMU can make its socket there",
            known.display()
        ))
    })
}

/// A pattern that an operator may misunderstand.
fn no_wildcard(group: &GroupName, pattern: &NamePattern) -> Option<Remark> {
    let text = pattern.as_str();
    text.contains(['[', ']', '{', '}', '|', '\\']).then(|| {
        note(format!(
            "[group.{group}]: only `*` and `?` are wildcards; \"{text}\" is otherwise taken literally"
        ))
    })
}

/// A pattern that looks like one of labels, and is none.
fn no_label(group: &GroupName, pattern: &NamePattern) -> Option<Remark> {
    let is_odd = pattern.as_str().contains(':') && !pattern.is_of_labels();
    is_odd.then(|| {
        let kinds = NamePattern::LABELS.join(", ");
        note(format!(
            "[group.{group}]: \"{pattern}\" is compared with VMs' names; patterns of labels begin \
             with {kinds}"
        ))
    })
}

/// Groups whose memory the host can page out only with swap.
fn no_swap(spec: &Spec, swap: Bytes) -> Vec<Remark> {
    let paged = spec.groups.iter().filter(|(_, group)| swap.is_zero() && group.cold.is_on());
    let remark = |(name, _)| {
        note(format!("[group.{name}]: `cold` does nothing on this host, which has no swap"))
    };
    paged.map(remark).collect()
}

/// The present VMs whose names or labels match the group's patterns, and their memory: an operator
/// sees by it whether patterns and budget are right.
fn members(name: &GroupName, group: &GroupSpec, vms: &[VmStatus]) -> Remark {
    let is_member = |vm: &&VmStatus| {
        let name = VmName::from(vm.name.as_str());
        let is = |p: &NamePattern| {
            p.matches(&name) || vm.labels.iter().any(|label| p.matches_label(label))
        };
        group.vms.iter().any(is)
    };
    let members: Vec<_> = vms.iter().filter(is_member).collect();
    let used: Bytes = members.iter().filter_map(|vm| vm.used_bytes.map(Bytes)).sum();
    let of = group.budget.map(|budget| format!(" of a budget of {budget}")).unwrap_or_default();
    note(match members.len() {
        0 => format!("[group.{name}]: no VM that is here now belongs to it"),
        1 => format!("[group.{name}]: 1 VM that is here now belongs to it, and uses {used}{of}"),
        count => format!(
            "[group.{name}]: {count} VMs that are here now belong to it, and use {used}{of}"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vms_of_a_group_are_counted_with_their_memory_also_where_there_are_none() {
        let vm = |name: &str, mib: u64| VmStatus {
            name: name.to_owned(),
            labels: vec!["pool:shop".to_owned()],
            used_bytes: Some(mib << 20),
            ..VmStatus::default()
        };
        let vms = [vm("web-1", 200), vm("web-2", 238), vm("db-1", 100)];
        let budget = Some(Bytes::mib(400));
        for (pattern, budget, expected) in [
            (
                "web-*",
                budget,
                "2 VMs that are here now belong to it, and use 438 MiB of a budget of 400 MiB",
            ),
            ("db-*", None, "1 VM that is here now belongs to it, and uses 100 MiB"),
            ("pool:s*", None, "3 VMs that are here now belong to it, and use 538 MiB"),
            ("mail-*", budget, "no VM that is here now belongs to it"),
        ] {
            let group =
                GroupSpec { vms: vec![NamePattern::new(pattern)], budget, ..GroupSpec::default() };
            let expected = note(format!("[group.g]: {expected}"));
            assert_eq!(members(&GroupName::from("g"), &group, &vms), expected);
        }
    }

    #[test]
    fn a_label_of_no_known_kind_is_told() {
        let said = |text: &str| no_label(&"g".into(), &NamePattern::new(text));
        assert_eq!((said("pool:web"), said("web-*")), (None, None));
        assert!(said("pools:web").unwrap().what.ends_with("vmid:, pool:, tag:, project:"));
    }

    #[test]
    fn paging_without_swap_is_noted() {
        let text = "[group.web]\nvms = [\"web-*\"]\ncold = \"when-needed\"\n".to_owned();
        let spec = model::config::parse(&[("x".to_owned(), text)]).unwrap();
        assert_eq!(no_swap(&spec, Bytes::mib(1)), []);
        let [remark] = no_swap(&spec, Bytes::ZERO).try_into().unwrap();
        let expected = "[group.web]: `cold` does nothing on this host, which has no swap";
        assert_eq!(remark, note(expected.to_owned()));
    }

    #[test]
    fn a_unit_is_cut_off_unless_its_families_have_the_internets() {
        for (families, is) in [
            ("AF_UNIX", true),
            ("AF_UNIX AF_INET AF_INET6", false),
            ("AF_UNIX AF_INET6", true),
            ("~AF_INET AF_INET6", true),
            ("~AF_PACKET", false),
            ("", false),
        ] {
            assert_eq!(is_cut_off(families), is, "{families}");
        }
    }
}
