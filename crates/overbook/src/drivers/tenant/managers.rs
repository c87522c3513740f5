//! The records of the host's own VM managers about a process, in files that only root can write.
//!
//! * libvirt keeps `/run/libvirt/qemu/NAME.xml` for each VM that runs, with its pid.
//! * Proxmox keeps `/run/qemu-server/VMID.pid`, and the name in `/etc/pve/qemu-server/VMID.conf`.
//!
//! A file may outlive its process where the manager was killed. So one that was written before the
//! process began is not of it.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use model::VmName;
use sys::process::Identity;

use super::place::{Makers, is_trusted, makers_in};

const LIBVIRT: &str = "/run/libvirt/qemu";
const PROXMOX: &str = "/run/qemu-server";
const PROXMOX_CONF: &str = "/etc/pve/qemu-server";

/// Bytes that are read of a file: the fields looked for stand at its beginning.
const MOST_BYTES: u64 = 16 << 10;
/// Start times are known to 10 ms, and the wall clock may have been set a little since.
const CLOCKS: Duration = Duration::from_secs(1);

/// A VM of a manager's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Managed {
    pub(crate) manager: &'static str,
    pub(crate) name: VmName,
}

/// The VM that this process is, if a manager has started it.
pub(crate) fn name_of(process: Identity) -> Option<Managed> {
    libvirt(Path::new(LIBVIRT), process)
        .or_else(|| proxmox(Path::new(PROXMOX), Path::new(PROXMOX_CONF), process))
}

fn libvirt(dir: &Path, process: Identity) -> Option<Managed> {
    let is_of = |text: &str| pid_in_status(text) == Some(process.pid);
    let file = find(dir, "xml", process, is_of)?;
    Some(Managed { manager: "libvirt", name: VmName::from(file.file_stem()?.to_str()?) })
}

fn proxmox(dir: &Path, conf: &Path, process: Identity) -> Option<Managed> {
    let is_of = |text: &str| text.trim().parse() == Ok(process.pid);
    let file = find(dir, "pid", process, is_of)?;
    let conf = read(&conf.join(file.with_extension("conf").file_name()?))?;
    // Snapshots follow, each below its own heading.
    let current = conf.lines().take_while(|line| !line.starts_with('['));
    let name = current.filter_map(|line| line.strip_prefix("name:")).next();
    // QEMU is called so where the VM was given no name.
    let unnamed = || format!("vm{}", file.file_stem().unwrap_or_default().to_string_lossy());
    let name = name.map_or_else(unnamed, |name| name.trim().to_owned());
    Some(Managed { manager: "Proxmox", name: VmName::from(name) })
}

/// The file of a directory of root's that is of this process.
fn find(
    dir: &Path,
    extension: &str,
    process: Identity,
    is_of: impl Fn(&str) -> bool,
) -> Option<PathBuf> {
    let dir = std::fs::canonicalize(dir).ok().filter(|dir| makers_in(dir) == Makers::Root)?;
    let began = process.began()?;
    let files = std::fs::read_dir(dir).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files = files.filter(|path| path.extension().is_some_and(|found| found == extension));
    files.find(|path| {
        let meta = std::fs::symlink_metadata(path).ok().filter(std::fs::Metadata::is_file);
        let is_roots = meta.as_ref().is_some_and(|meta| is_trusted(meta.uid()));
        let written = meta.and_then(|meta| meta.modified().ok());
        let is_later = written.is_some_and(|written| written + CLOCKS >= began);
        is_roots && is_later && read(path).is_some_and(|text| is_of(&text))
    })
}

fn read(path: &Path) -> Option<String> {
    let mut bytes = Vec::new();
    File::open(path).ok()?.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// `<domstatus state='running' reason='booted' pid='4711'>`.
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
    fn a_directory_that_others_may_write_to_says_nothing() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("web-1.xml"), xml(own().pid)).unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o1777)).unwrap();
        assert_eq!(libvirt(dir.path(), own()), None);
    }

    #[test]
    fn proxmox_names_the_vm_by_its_number() {
        let (run, conf) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(run.path().join("101.pid"), format!("{}\n", own().pid)).unwrap();
        assert_eq!(proxmox(run.path(), conf.path(), own()), None);
        let name = || proxmox(run.path(), conf.path(), own()).map(|managed| managed.name);
        std::fs::write(conf.path().join("101.conf"), "memory: 512\n[before]\nname: db-1\n")
            .unwrap();
        assert_eq!(name(), Some("vm101".into()));
        let text = "memory: 512\nname: web-1\nsockets: 1\n[before]\nname: db-1\n";
        std::fs::write(conf.path().join("101.conf"), text).unwrap();
        let expected = Managed { manager: "Proxmox", name: "web-1".into() };
        assert_eq!(proxmox(run.path(), conf.path(), own()), Some(expected));
    }
}
