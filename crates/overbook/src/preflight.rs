//! Checks beyond the configuration itself: whether this host lets it work.
//!
//! `overbook check && systemctl restart overbook` stops a daemon that works. So the check tries all
//! that the start of a daemon would fail by, with the start's own functions; and it says what would
//! start and be of no use.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use model::{Bytes, GroupName, NamePattern, Spec, VmName};
use serde::Serialize;
use sys::meminfo::MemInfo;

use crate::http::Doors;
use crate::lock::StateLock;

/// Something that was found out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Remark {
    /// In words.
    pub(crate) what: String,
    /// The daemon would not start, or could do nothing at all.
    pub(crate) is_fatal: bool,
}

fn fatal(what: String) -> Remark {
    Remark { what, is_fatal: true }
}

fn note(what: String) -> Remark {
    Remark { what, is_fatal: false }
}

/// All of it. `vms`: the VMs that are there now, if a daemon knows them.
#[must_use]
pub(crate) fn try_host(spec: &Spec, vms: Option<&BTreeSet<VmName>>) -> Vec<Remark> {
    let mut found = Vec::new();
    found.extend(Doors::check(&spec.api).into_iter().map(|error| fatal(error.to_string())));
    found.extend(StateLock::check(&spec.host.state).err().map(|error| fatal(error.to_string())));
    if let Ok(memory) = MemInfo::read() {
        found.extend(promises_more_than(spec, memory.total));
    }
    found.extend(spec.host.qmp.iter().filter_map(|glob| no_directory(glob)));
    for (name, group) in &spec.groups {
        found.extend(group.vms.iter().filter_map(|pattern| no_wildcard(name, pattern)));
        if group.cold.is_on() && group.tracking.vcpu_share().is_none() {
            found.push(note(format!(
                "[group.{name}]: `cold` does nothing while tracking = \"off\": what nobody touches is \
                 known by tracking"
            )));
        }
        found.extend(vms.and_then(|vms| no_vm(name, &group.vms, vms)));
    }
    found
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

/// A directory for QEMU's sockets that is not there.
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

/// A pattern that an operator may take for more than it is.
fn no_wildcard(group: &GroupName, pattern: &NamePattern) -> Option<Remark> {
    let text = pattern.as_str();
    text.contains(['[', ']', '{', '}', '|', '\\']).then(|| {
        note(format!(
            "[group.{group}]: only `*` and `?` are wildcards; \"{text}\" is otherwise taken literally"
        ))
    })
}

/// Patterns that no VM fits.
fn no_vm(group: &GroupName, patterns: &[NamePattern], vms: &BTreeSet<VmName>) -> Option<Remark> {
    let count = vms.iter().filter(|vm| patterns.iter().any(|p| p.matches(vm))).count();
    Some(note(match count {
        0 => format!("[group.{group}]: no VM that is here now belongs to it"),
        1 => format!("[group.{group}]: 1 VM that is here now belongs to it"),
        count => format!("[group.{group}]: {count} VMs that are here now belong to it"),
    }))
}
