//! Reads the facts about each VM's process from `/proc` and its manager's files.
//!
//! A process chooses the text of some of these files, and can place its command line in memory
//! whose reading blocks. So each process is read by a thread of its own, for [`PATIENCE`] at most.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use model::Bytes;
use model::proxmox::ProxmoxVm;
use sys::process::Identity;

use super::command_line::CommandLine;
use super::facts::{Backing, Objection, ProcessFacts, Shim, StartedBy, VmFacts};
use super::sockets::{self, SocketFile, SocketState};
use drivers::identity::is_qemu;
use drivers::managers;

/// Maximum time to read a process's description of itself.
const PATIENCE: Duration = Duration::from_secs(2);
/// Maximum number of bytes of a command line or an environment.
const MOST_BYTES: u64 = 128 << 10;
/// Maximum number of bytes of a table of mappings.
const MOST_OF_MAPS: u64 = 16 << 20;
const MOST_DESCRIPTORS: usize = 16 << 10;
const SHIM: &str = "liboverbook_shim.so";

/// The processes of the host with a VM: those that are called like QEMU, and those that use KVM.
pub(super) fn processes() -> BTreeSet<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_called_qemu(*pid) || uses_kvm(*pid)).collect()
}

fn program(pid: u32) -> Option<String> {
    let exe = std::fs::read_link(format!("/proc/{pid}/exe")).ok()?;
    let name = exe.file_name()?.to_string_lossy().into_owned();
    Some(model::words::plain(name.trim_end_matches(" (deleted)")))
}

fn is_called_qemu(pid: u32) -> bool {
    program(pid).is_some_and(|name| is_qemu(&name))
}

fn uses_kvm(pid: u32) -> bool {
    links(pid).any(|link| link.to_string_lossy().starts_with("anon_inode:kvm-vm"))
}

/// The files that a process has open. Empty: none, or they are not visible.
pub(super) fn links(pid: u32) -> impl Iterator<Item = PathBuf> {
    let open = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    open.take(MOST_DESCRIPTORS).filter_map(|entry| std::fs::read_link(entry.path()).ok())
}

/// The facts about a process, without those of the configuration and the daemon. `None`: it has
/// ended, or is no VM.
pub(super) fn vm(pid: u32, files: &[SocketFile], proxmoxs: &[ProxmoxVm]) -> Option<VmFacts> {
    let process = Identity::of(pid)?;
    let (sender, receiver) = mpsc::channel();
    // The thread is left alone if a read blocks; it ends with this process.
    std::thread::spawn(move || {
        let words = words_of(pid, "cmdline");
        let environment = words_of(pid, "environ");
        let _ = sender.send((words, environment, maps_of(pid)));
    });
    let told = receiver.recv_timeout(PATIENCE).ok();
    let is_silent = told.is_none();
    let (words, environment, maps) = told.unwrap_or_default();
    if words.iter().all(String::is_empty) && !is_silent {
        // It is a zombie, or has ended.
        return None;
    }
    let line = CommandLine::of(&words);
    if line.is_no_machine {
        return None;
    }
    let of_proxmox = |vmid: u32| proxmoxs.iter().find(|vm| vm.vmid == vmid);
    let managed = managers::name_of(process, |vmid| of_proxmox(vmid).map(ProxmoxVm::name));
    let started_by = started_by(&line, managed.as_ref().map(|managed| managed.manager));
    let name = managed.map(|managed| managed.name.to_string()).or_else(|| line.name.clone());
    let proxmox = match &started_by {
        StartedBy::Proxmox(id) => id.parse().ok().and_then(of_proxmox),
        _ => None,
    };
    let (sockets, has_client) = own(pid, &line, files);
    let mut process_facts = process_facts(pid, &line, &environment, &maps);
    process_facts.objection =
        if is_silent { Some(Objection::Silent) } else { objection(pid, &line) };
    let is_in_use = |path: &&PathBuf| {
        // A glob reads the path as it is.
        let glob = glob::Pattern::escape(&path.display().to_string());
        let found = sockets::survey(&[glob], &[pid]);
        found.iter().any(|it| matches!(it.state, SocketState::Listens { has_client: true, .. }))
    };
    // With a socket of its own, the others do not matter.
    let others = line.qmp.iter().filter(|_| sockets.is_empty());
    let in_use = others.filter(is_in_use).cloned().collect();
    let facts = VmFacts {
        pid,
        in_use,
        name: name.map(|name| model::words::plain(&name)),
        started_by,
        line,
        process: process_facts,
        sockets,
        has_client,
        proxmox: proxmox.map(|vm| vm.conf.clone()),
        labels: proxmox.map(|vm| vm.settings().labels).unwrap_or_default(),
        ..VmFacts::default()
    };
    process.is_alive().then_some(facts)
}

fn started_by(line: &CommandLine, manager: Option<&str>) -> StartedBy {
    // The number is a part of paths and commands, and a process may write anything here.
    let id = line.vmid.as_ref().filter(|id| id.chars().all(|c| c.is_ascii_digit()));
    match (id, manager) {
        (_, Some("libvirt")) => StartedBy::Libvirt,
        (Some(id), _) => StartedBy::Proxmox(id.clone()),
        _ if line.is_libvirts => StartedBy::Libvirt,
        _ => StartedBy::Hand,
    }
}

/// The sockets that `qmp` names and this process has, and whether one of them has a client.
fn own(pid: u32, line: &CommandLine, files: &[SocketFile]) -> (Vec<PathBuf>, bool) {
    let inodes = sockets::inodes_of(pid);
    let is_own = |file: &SocketFile| match &file.state {
        // Without the right to see them, the command line has to do.
        SocketState::Listens { inodes: found, .. } if inodes.is_empty() || found.is_empty() => {
            line.qmp.contains(&file.path)
        }
        SocketState::Listens { inodes: found, .. } => !found.is_disjoint(&inodes),
        SocketState::Stale | SocketState::NoSocket => false,
    };
    let own: Vec<&SocketFile> = files.iter().filter(|file| is_own(file)).collect();
    let has_client =
        own.iter().any(|file| matches!(file.state, SocketState::Listens { has_client: true, .. }));
    (own.into_iter().map(|file| file.path.clone()).collect(), has_client)
}

fn objection(pid: u32, line: &CommandLine) -> Option<Objection> {
    let name = program(pid)?;
    if !is_qemu(&name) {
        let is_qemus = name.contains("qemu") || (line.ram.is_some() && line.name.is_some());
        return Some(if is_qemus { Objection::Name } else { Objection::NotQemu });
    }
    let owner = sys::procfs::owner_of_program(pid)?;
    let is_trusted = [0, rustix::process::geteuid().as_raw()].contains(&owner);
    (!is_trusted).then_some(Objection::Owner(owner))
}

fn process_facts(pid: u32, line: &CommandLine, environment: &[String], maps: &str) -> ProcessFacts {
    let status = read(&format!("/proc/{pid}/status"), MOST_BYTES);
    let kib = |field: &str| {
        let value = status.lines().find_map(|it| it.strip_prefix(field)?.strip_prefix(':'));
        let kib = value.and_then(|value| value.trim().strip_suffix(" kB")?.trim().parse().ok());
        kib.map_or(Bytes::ZERO, Bytes::kib)
    };
    let ram = line.ram.unwrap_or_default();
    let half = Bytes(ram.0 / 2).max(Bytes::mib(1));
    let uid = sys::users::user_of_process(pid).unwrap_or_default();
    let numbers = |field: &str| -> Vec<u32> {
        let value = status.lines().find_map(|it| it.strip_prefix(field));
        value.unwrap_or_default().split_whitespace().filter_map(|it| it.parse().ok()).collect()
    };
    let groups = [numbers("Gid:"), numbers("Groups:")].concat();
    let backing =
        if kib("HugetlbPages") >= half { Some(Backing::HugePages) } else { backing_in(maps, ram) };
    ProcessFacts {
        program: program(pid).unwrap_or_default(),
        objection: None,
        uid,
        backing,
        is_locked: kib("VmLck") >= half,
        passes_devices: sys::outside::passes_devices_through(pid),
        shim: shim(environment, maps),
        may_trap: may_trap(uid, &groups),
        is_in_other_network: sockets::is_in_other_network(pid),
        label: label(pid),
        forbids_swap: forbids_swap(pid),
        memory_limits: sys::memory_limits::of_process(pid).unwrap_or_default(),
    }
}

/// How the largest mappings are mapped, which together are at least as large as the RAM.
fn backing_in(maps: &str, ram: Bytes) -> Option<Backing> {
    let mut kinds = [Backing::Private, Backing::Shared, Backing::File].map(|kind| (0_u64, kind));
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let (Some(range), Some(mode)) = (words.next(), words.next()) else { continue };
        let Some((start, end)) = range.split_once('-') else { continue };
        let hex = |text| u64::from_str_radix(text, 16).unwrap_or_default();
        let len = hex(end).saturating_sub(hex(start));
        let is_file = words.nth(2).is_some_and(|inode| inode != "0");
        if !mode.starts_with("rw") || len < 2 << 20 {
            continue;
        }
        let kind = match (mode.ends_with('s'), is_file) {
            (true, _) => 1,
            (false, true) => 2,
            (false, false) => 0,
        };
        kinds[kind].0 += len;
    }
    // QEMU's own memory is private: a kind of which there is enough for all RAM comes first.
    let [private, shared, file] = kinds;
    let holds = |len: u64| ram.0 > 0 && len >= ram.0;
    [shared, file, private].into_iter().find(|(len, _)| holds(*len)).map(|(_, kind)| kind)
}

fn shim(environment: &[String], maps: &str) -> Shim {
    let file = |line: &str| line.rsplit('/').next().is_some_and(|it| it.starts_with(SHIM));
    if let Some(line) = maps.lines().find(|line| file(line)) {
        return if line.ends_with("(deleted)") { Shim::Replaced } else { Shim::Loaded };
    }
    let preloads = environment.iter().filter_map(|it| it.strip_prefix("LD_PRELOAD="));
    let named = preloads.flat_map(|list| list.split([':', ' '])).find(|path| path.ends_with(SHIM));
    named.map_or(Shim::None, |path| Shim::NotLoaded(path.into()))
}

/// Whether a user may trap page faults of the kernel in its own processes.
fn may_trap(uid: u32, groups: &[u32]) -> bool {
    let everyone = read("/proc/sys/vm/unprivileged_userfaultfd", 16);
    if uid == 0 || everyone.trim() == "1" {
        return true;
    }
    let Ok(device) = std::fs::metadata("/dev/userfaultfd") else { return false };
    let mode = device.mode();
    let has = |bits: u32| mode & bits == bits;
    has(0o006)
        || (has(0o060) && groups.contains(&device.gid()))
        || (has(0o600) && device.uid() == uid)
}

/// The label by which AppArmor or SELinux confines a process; `None`: nothing does.
fn label(pid: u32) -> Option<String> {
    let own = read(&format!("/proc/{pid}/attr/apparmor/current"), 4096);
    let own = if own.is_empty() { read(&format!("/proc/{pid}/attr/current"), 4096) } else { own };
    let label = own.trim_end_matches(['\0', '\n']);
    let is_enforced = !label.ends_with("(complain)") && label != "unconfined" && !label.is_empty();
    let name = label.strip_suffix(" (enforce)").unwrap_or(label);
    is_enforced.then(|| model::words::plain(name))
}

/// The cgroup of a process that may not swap, as a path from the root of the tree.
fn forbids_swap(pid: u32) -> Option<String> {
    let directory = sys::cgroup::of_process(pid).ok().flatten()?;
    let is_zero = |dir: &&Path| {
        let text = read(&dir.join("memory.swap.max").display().to_string(), 64);
        text.trim() == "0"
    };
    let found = directory.ancestors().find(is_zero)?;
    let path = found.strip_prefix("/sys/fs/cgroup").ok()?;
    let path = path.strip_prefix("unified").unwrap_or(path);
    Some(format!("/{}", path.display()))
}

fn maps_of(pid: u32) -> String {
    read(&format!("/proc/{pid}/maps"), MOST_OF_MAPS)
}

/// The words of a file that separates them by zero bytes.
fn words_of(pid: u32, file: &str) -> Vec<String> {
    let text = read(&format!("/proc/{pid}/{file}"), MOST_BYTES);
    text.split('\0').map(str::to_owned).collect()
}

/// The beginning of a file; empty if it cannot be read.
pub(super) fn read(path: &str, most: u64) -> String {
    let mut bytes = Vec::new();
    let opened = File::open(path);
    // A file that cannot be read to its end tells what came before.
    let _ = opened.and_then(|file| file.take(most).read_to_end(&mut bytes));
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backing_is_the_one_of_the_mappings_that_hold_the_ram() {
        let of = |line: &str| {
            backing_in(&format!("{line}\n5600-5700 rw-p 0 00:00 0 [heap]\n"), Bytes::mib(64))
        };
        let at = "7f0000000000-7f0004000000";
        assert_eq!(of(&format!("{at} rw-p 00000000 00:00 0 ")), Some(Backing::Private));
        let memfd = format!("{at} rw-s 00000000 00:01 99 /memfd:memory-backend-memfd (deleted)");
        assert_eq!(of(&memfd), Some(Backing::Shared));
        assert_eq!(of(&format!("{at} rw-p 00000000 08:01 99 /var/ram")), Some(Backing::File));
        assert_eq!(of("7f0000000000-7f0001000000 rw-p 00000000 00:00 0"), None, "too small");
        assert_eq!(backing_in("", Bytes::ZERO), None);
    }

    #[test]
    fn a_shim_is_known_by_its_mapping() {
        let maps = |end: &str| {
            format!("7f00-7f01 r-xp 0 08:01 9 /usr/lib/overbook/liboverbook_shim.so{end}\n")
        };
        assert_eq!(shim(&[], &maps("")), Shim::Loaded);
        assert_eq!(shim(&[], &maps(" (deleted)")), Shim::Replaced);
        let preload = ["LD_PRELOAD=/a/other.so:/x/liboverbook_shim.so".to_owned()];
        assert_eq!(shim(&preload, ""), Shim::NotLoaded("/x/liboverbook_shim.so".into()));
        assert_eq!(shim(&[], ""), Shim::None);
    }

    #[test]
    fn a_vms_process_is_found_only_if_it_is_one() {
        assert!(!processes().contains(&std::process::id()));
        assert!(may_trap(0, &[]));
    }
}
