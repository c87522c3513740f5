//! Checks and finishes `[disk.*]`.

use std::collections::BTreeMap;

use super::{SOCKET_PATH_BYTES, absolute, group_of, path};
use crate::config::Fault;
use crate::config::draft::{DiskDraft, Draft};
use crate::config::table::{Located, printable};
use crate::spec::{ApiSpec, DiskSpec};
use crate::{Bytes, VmName};

/// A disk consists of whole pages.
const PAGE: u64 = 4096;
/// Longest name of an export, in bytes (NBD's protocol: names of up to 256 bytes are sure to work).
const NAME_BYTES: usize = 64;

pub(super) fn finish(
    draft: &Draft,
    api: &ApiSpec,
    faults: &mut Vec<Fault>,
) -> BTreeMap<String, DiskSpec> {
    let mut disks = BTreeMap::new();
    let mut files: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, disk) in &draft.disks {
        names_a_socket(name, disk, api, faults);
        for key in DiskDraft::NEEDED.iter().filter(|key| !disk.written.contains(*key)) {
            let shown = printable(name);
            faults.push(disk.place.fault(format!("[disk.{shown}] has no `{key}`")));
        }
        let (Some(vm), Some(file), Some(size)) = (&disk.vm, &disk.file, &disk.size) else {
            continue;
        };
        is_in_a_group(vm, draft, faults);
        if let Some(other) = files.insert(&file.value, name) {
            let (file_shown, other) = (printable(&file.value), printable(other));
            let message = format!("`file` \"{file_shown}\" is the disk `{other}` already");
            faults.push(file.place.fault(message));
        }
        disks.insert(
            name.clone(),
            DiskSpec {
                vm: VmName::from(vm.value.as_str()),
                file: path("file", Some(file), faults).unwrap_or_default(),
                size: whole_pages(size, faults),
                repositories: repositories(disk, faults),
                tls: path("tls", disk.tls.as_ref(), faults),
                cache: disk.cache.unwrap_or_default(),
                shared: disk.shared.unwrap_or(*DiskSpec::SHARED.start()),
                read_delay_us: disk.read_delay_us.unwrap_or_default(),
            },
        );
        if let (Some(true), Some(repositories)) = (disk.cache, &disk.repositories) {
            faults.push(repositories.place.fault(
                "`repositories` are for swap and `cache` is for data disks: a disk has one of them",
            ));
        }
        if let (Some(tls), None) = (&disk.tls, &disk.repositories) {
            faults.push(tls.place.fault("`tls` has no effect without `repositories`"));
        }
    }
    disks
}

/// A disk's name becomes the name of a socket file and of an export.
fn names_a_socket(name: &str, disk: &DiskDraft, api: &ApiSpec, faults: &mut Vec<Fault>) {
    let shown = printable(name);
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if name.starts_with('.') || !name.chars().all(is_plain) || name.len() > NAME_BYTES {
        faults.push(disk.place.fault(format!(
            "a disk cannot be called `{shown}`: letters, digits, `-`, `_` and `.`, at most \
             {NAME_BYTES}, and no `.` in front"
        )));
        return;
    }
    let directory = api.socket.parent().map_or(0, |path| path.as_os_str().len());
    let length = directory + "/disks/.sock".len() + name.len();
    if length > SOCKET_PATH_BYTES {
        faults.push(disk.place.fault(format!(
            "the socket of disk `{shown}` would have a path of {length} bytes; a unix socket's has \
             at most {SOCKET_PATH_BYTES}"
        )));
    }
}

fn is_in_a_group(vm: &Located<String>, draft: &Draft, faults: &mut Vec<Fault>) {
    let lists_are_known =
        draft.groups.values().all(|g| g.vms.as_ref().is_some_and(|list| !list.value.is_empty()));
    if lists_are_known && group_of(&vm.value, draft).is_none() {
        let shown = printable(&vm.value);
        let message = format!("`vm` is \"{shown}\", which no group's `vms` match");
        faults.push(vm.place.fault(message));
    }
}

fn whole_pages(size: &Located<Bytes>, faults: &mut Vec<Fault>) -> Bytes {
    if !size.value.0.is_multiple_of(PAGE) {
        let message = format!("`size` of {} is no multiple of 4 KiB", size.value.0);
        faults.push(size.place.fault(message));
    }
    size.value
}

fn repositories(disk: &DiskDraft, faults: &mut Vec<Fault>) -> Vec<String> {
    let mut found = Vec::new();
    for at in disk.repositories.iter().flat_map(|list| &list.value) {
        if at.value.starts_with('/') {
            absolute("repositories", at, faults);
        } else if !at.value.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
        }) {
            let shown = printable(&at.value);
            faults.push(at.place.fault(format!(
                "`repositories` has \"{shown}\"; write a host and a port such as \
                 \"host-b:10810\", or the path of a socket"
            )));
            continue;
        }
        found.push(at.value.clone());
    }
    found
}
