//! The records of the host's own VM managers about a process, in files that only root can write.
//!
//! * libvirt keeps `/run/libvirt/qemu/NAME.xml` for each running VM, with its PID.
//! * Proxmox keeps `/run/qemu-server/VMID.pid`. It has the name in a file of its cluster's files,
//!   which may hang. So another process reads that ([`crate::proxmox`]).
//!
//! A file may outlive its process if the manager was killed. So a file older than the process
//! does not count, unless the process is in the cgroup that the manager makes for that VM. The
//! cgroup decides because clocks can be set: a file that was written a second ago may look older
//! than its process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::VmName;
use sys::process::Identity;

use super::place::{Makers, is_trusted, makers_in};
use crate::proxmox;

const LIBVIRT: &str = "/run/libvirt/qemu";
const PROXMOX: &str = proxmox::RUN;

/// Maximum number of bytes read from a file: the relevant fields are at its beginning.
const MOST_BYTES: u64 = 16 << 10;
/// Start times have a resolution of 10 ms, and the wall clock may have been set a little since.
const CLOCKS: Duration = Duration::from_secs(1);

/// A VM in a manager's records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Managed {
    /// The VM manager.
    pub manager: &'static str,
    /// The VM's name in its records.
    pub name: VmName,
}

/// The VM of this process, if a manager has started it. `name` tells the name of a VM of Proxmox.
#[must_use]
pub fn name_of(process: Identity, name: impl Fn(u32) -> Option<VmName>) -> Option<Managed> {
    libvirt(Path::new(LIBVIRT), process).or_else(|| proxmox(Path::new(PROXMOX), process, name))
}

fn libvirt(dir: &Path, process: Identity) -> Option<Managed> {
    let file = find(dir, "xml", process, pid_in_status, is_libvirts)?;
    Some(Managed { manager: "libvirt", name: VmName::from(file.file_stem()?.to_str()?) })
}

fn proxmox(dir: &Path, process: Identity, name: impl Fn(u32) -> Option<VmName>) -> Option<Managed> {
    let file = find(dir, "pid", process, pid_in_file, is_proxmoxs)?;
    let vmid = file.file_stem()?.to_str()?.parse().ok()?;
    Some(Managed { manager: "Proxmox", name: name(vmid)? })
}

/// The process of each VM of Proxmox that runs, by the VM's number. `dir`: its directory of PIDs.
pub(crate) fn proxmoxs(dir: &Path) -> BTreeMap<u32, Identity> {
    let of = |path: PathBuf| {
        let vmid = path.file_stem()?.to_str()?.parse().ok()?;
        let process = Identity::of(pid_in_file(&read(&path)?)?)?;
        is_of(&path, process, is_proxmoxs).then_some((vmid, process))
    };
    files(dir, "pid").into_iter().filter_map(of).collect()
}

fn pid_in_file(text: &str) -> Option<u32> {
    text.trim().parse().ok()
}

/// Whether a manager has started another process that runs as the same user. If so, the user of a
/// process proves nothing about it.
pub(crate) fn share_user_of(process: Identity) -> bool {
    share_user_in(&[(LIBVIRT, "xml"), (PROXMOX, "pid")], process)
}

fn share_user_in(of_managers: &[(impl AsRef<Path>, &str)], process: Identity) -> bool {
    let user = |pid: u32| std::fs::metadata(format!("/proc/{pid}")).ok().map(|of| of.uid());
    let own = user(process.pid);
    of_managers.iter().flat_map(|(dir, extension)| files(dir.as_ref(), extension)).any(|path| {
        let pid = read(&path).and_then(|text| match text.trim().parse() {
            Ok(pid) => Some(pid),
            Err(_) => pid_in_status(&text),
        });
        pid.is_some_and(|pid| pid != process.pid && own.is_some() && user(pid) == own)
    })
}

/// The files that root has written, in a directory that only root can write to.
fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let dir = std::fs::canonicalize(dir).ok().filter(|dir| makers_in(dir) == Makers::Root);
    let entries = dir.and_then(|dir| std::fs::read_dir(dir).ok()).into_iter().flatten();
    let is_roots = |path: &PathBuf| {
        path.extension().is_some_and(|found| found == extension)
            && std::fs::symlink_metadata(path)
                .is_ok_and(|meta| meta.is_file() && is_trusted(meta.uid()))
    };
    entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_roots).collect()
}

/// The file of this process. `pid_in` extracts the PID from a file; `is_in` tells whether a
/// cgroup is the one that the manager makes for the VM of a file's stem.
fn find(
    dir: &Path,
    extension: &str,
    process: Identity,
    pid_in: impl Fn(&str) -> Option<u32>,
    is_in: impl Fn(&str, &str) -> bool,
) -> Option<PathBuf> {
    files(dir, extension).into_iter().find(|path| {
        read(path).is_some_and(|text| pid_in(&text) == Some(process.pid))
            && is_of(path, process, &is_in)
    })
}

/// Whether a file with the PID of this process was written for this process, and not for an
/// earlier one with the same PID.
fn is_of(path: &Path, process: Identity, is_in: impl Fn(&str, &str) -> bool) -> bool {
    let written = std::fs::metadata(path).ok().and_then(|meta| meta.modified().ok());
    let began = process.began();
    let is_later = || {
        let (Some(written), Some(began)) = (written, began) else { return false };
        written + CLOCKS >= began
    };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    is_later() || cgroups_of(process).iter().any(|name| is_in(name, &stem))
}

/// The paths of the cgroups that a process is in, without the leading slash.
fn cgroups_of(process: Identity) -> Vec<String> {
    let text = read(Path::new(&format!("/proc/{}/cgroup", process.pid))).unwrap_or_default();
    let paths = text.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.map(|path| path.trim_start_matches('/').to_owned()).collect()
}

/// Recognizes `machine.slice/machine-qemu\x2d3\x2dweb\x2d1.scope`, in which systemd puts the VM
/// `web-1` with the number 3. Only root creates cgroups there.
fn is_libvirts(cgroup: &str, vm: &str) -> bool {
    let name = in_slice(cgroup, "machine.slice").replace(r"\x2d", "-");
    let rest = name.strip_prefix("machine-qemu-").and_then(|rest| rest.split_once('-'));
    rest.is_some_and(|(id, name)| id.parse::<u32>().is_ok() && name == vm)
}

/// Recognizes `qemu.slice/101.scope`.
fn is_proxmoxs(cgroup: &str, vmid: &str) -> bool {
    in_slice(cgroup, "qemu.slice") == vmid
}

/// The scope directly in this slice, without its suffix; empty: the cgroup is in none.
fn in_slice<'a>(cgroup: &'a str, slice: &str) -> &'a str {
    let inside = cgroup.strip_prefix(slice).and_then(|rest| rest.strip_prefix('/'));
    let scope = inside.and_then(|inside| inside.split('/').next());
    scope.and_then(|scope| scope.strip_suffix(".scope")).unwrap_or_default()
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Parses `<domstatus state='running' reason='booted' pid='4711'>`.
fn pid_in_status(text: &str) -> Option<u32> {
    let status = text.split_once("<domstatus ")?.1.split_once('>')?.0;
    status.split_once(" pid='")?.1.split_once('\'')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn xml(pid: u32) -> String {
        format!(
            "<!--\nWARNING: THIS IS AN AUTO-GENERATED FILE.\n-->\n\
             <domstatus state='running' reason='booted' pid='{pid}'>\n  <monitor path='/x'/>\n\
             <domain type='kvm' id='1'>\n    <name>web-1</name>\n"
        )
    }

    fn own() -> Identity {
        Identity::own().unwrap()
    }

    #[test]
    fn libvirts_status_names_the_vm_of_a_process() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("db-1.xml"), xml(own().pid + 1)).unwrap();
        assert_eq!(libvirt(dir.path(), own()), None);
        std::fs::write(dir.path().join("web-1.xml"), xml(own().pid)).unwrap();
        let expected = Managed { manager: "libvirt", name: "web-1".into() };
        assert_eq!(libvirt(dir.path(), own()), Some(expected));
        assert_eq!(pid_in_status("<domain pid='7'>"), None);
    }

    #[test]
    fn a_file_from_before_the_process_is_another_ones() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web-1.xml");
        std::fs::write(&path, xml(own().pid)).unwrap();
        let long_ago = own().began().unwrap() - Duration::from_secs(60);
        File::options().write(true).open(&path).unwrap().set_modified(long_ago).unwrap();
        assert_eq!(libvirt(dir.path(), own()), None);
    }

    #[test]
    fn a_cgroup_names_the_vm_that_its_manager_made_it_for() {
        let of = |name: &str| format!(r"machine.slice/machine-{name}.scope/libvirt/emulator");
        assert!(is_libvirts(&of(r"qemu\x2d3\x2dweb\x2d1"), "web-1"));
        assert!(!is_libvirts(&of(r"qemu\x2d3\x2dweb\x2d1"), "1"));
        assert!(!is_libvirts(&of(r"lxc\x2d3\x2dweb\x2d1"), "web-1"));
        assert!(is_proxmoxs("qemu.slice/101.scope", "101"));
        // A user may create a scope with that name.
        let users = "user.slice/user-7.slice/user@7.service/app.slice/101.scope";
        assert!(!is_proxmoxs(users, "101") && !is_proxmoxs("qemu.slice", "qemu"));
    }

    #[test]
    fn a_file_that_looks_older_is_the_processes_all_the_same_if_its_cgroup_says_so() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("web-1.xml");
        std::fs::write(&path, xml(own().pid)).unwrap();
        let before = own().began().unwrap() - Duration::from_secs(60);
        File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
        let found =
            |is_in: fn(&str, &str) -> bool| find(dir.path(), "xml", own(), pid_in_status, is_in);
        assert_eq!(found(|_, _| false), None);
        assert_eq!(found(|_, vm| vm == "web-1"), Some(path));
    }

    #[test]
    fn a_user_whose_processes_a_manager_starts_says_nothing() {
        use sys::process::Spawn;
        let dir = tempfile::tempdir().unwrap();
        let shares = || share_user_in(&[(dir.path(), "xml")], own());
        std::fs::write(dir.path().join("own.xml"), xml(own().pid)).unwrap();
        assert!(!shares(), "it is the only one");
        let mut other = Spawn::new("sleep").arg("60").die_with_parent().spawn().unwrap();
        std::fs::write(dir.path().join("other.xml"), xml(other.identity().pid)).unwrap();
        assert!(shares());
        other.end(Duration::from_secs(10)).unwrap();
    }

    #[test]
    fn a_directory_that_others_may_write_to_says_nothing() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("web-1.xml"), xml(own().pid)).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(libvirt(dir.path(), own()), None);
    }

    #[test]
    fn proxmox_names_the_vm_by_its_number() {
        let run = tempfile::tempdir().unwrap();
        std::fs::write(run.path().join("101.pid"), format!("{}\n", own().pid)).unwrap();
        std::fs::write(run.path().join("x.pid"), format!("{}\n", own().pid + 1)).unwrap();
        assert_eq!(proxmox(run.path(), own(), |_| None), None, "its file cannot be read");
        let name = |vmid| (vmid == 101).then(|| VmName::from("web-1"));
        let expected = Managed { manager: "Proxmox", name: "web-1".into() };
        assert_eq!(proxmox(run.path(), own(), name), Some(expected));
        assert_eq!(proxmoxs(run.path()), [(101, own())].into());
    }

    #[test]
    fn a_pid_that_was_given_to_another_process_is_not_the_vms() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join("101.pid");
        std::fs::write(&path, own().pid.to_string()).unwrap();
        let before = own().began().unwrap() - Duration::from_secs(60);
        File::options().write(true).open(&path).unwrap().set_modified(before).unwrap();
        assert!(proxmoxs(run.path()).is_empty());
    }
}
