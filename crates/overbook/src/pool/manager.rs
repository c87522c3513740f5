//! Tells whether another manager has started a QEMU. Such a manager knows the VM's host, so it
//! must move the VM itself.
//!
//! Managers mark a QEMU's command line, and put it into a cgroup with a name of theirs. Either
//! mark is enough. A QEMU may forge its own command line, but that harms only itself.

use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Bytes read of a command line; libvirt's have some 10 KiB.
const MOST: u64 = 128 << 10;

/// The marks of a manager.
struct Manager {
    name: &'static str,
    /// A part of an argument.
    argument: &'static str,
    /// The beginning of a cgroup's name.
    cgroup: &'static str,
}

const MANAGERS: [Manager; 2] = [
    Manager { name: "libvirt", argument: "id=charmonitor", cgroup: "machine-qemu" },
    Manager { name: "Proxmox", argument: "/run/qemu-server/", cgroup: "qemu.slice" },
];

/// The manager that has started process `pid`. `None`: no known one.
pub(super) fn of(pid: u32) -> Option<&'static str> {
    let mut arguments = Vec::new();
    // A QEMU that has just ended has no command line.
    let read = File::open(format!("/proc/{pid}/cmdline"));
    let _ = read.and_then(|file| file.take(MOST).read_to_end(&mut arguments));
    let cgroup = sys::cgroup::of_process(pid).ok().flatten().unwrap_or_default();
    by(&arguments, &cgroup)
}

fn by(arguments: &[u8], cgroup: &Path) -> Option<&'static str> {
    let arguments: Vec<_> =
        arguments.split(|byte| *byte == 0).map(|one| String::from_utf8_lossy(one)).collect();
    let found = MANAGERS.iter().find(|manager| {
        let mut parts = cgroup.iter().map(|part| part.to_string_lossy());
        arguments.iter().any(|one| one.contains(manager.argument))
            || parts.any(|part| part.starts_with(manager.cgroup))
    });
    found.map(|manager| manager.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn managers_are_known_by_their_arguments_and_by_their_cgroups() {
        let none = Path::new("/sys/fs/cgroup/system.slice/web.service");
        let libvirt = b"/usr/bin/qemu-system-x86_64\0-name\0guest=web-3,debug-threads=on\0-S\0\
            -sandbox\0on,obsolete=deny\0-chardev\0socket,id=charmonitor,fd=31,server=on,wait=off\0\
            -mon\0chardev=charmonitor,id=monitor,mode=control\0";
        assert_eq!(by(libvirt, none), Some("libvirt"));
        let proxmox = b"/usr/bin/kvm\0-id\x00100\0-chardev\0\
            socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on,wait=off\0";
        assert_eq!(by(proxmox, none), Some("Proxmox"));
        let scope =
            "/sys/fs/cgroup/machine.slice/machine-qemu\\x2d3\\x2dweb.scope/libvirt/emulator";
        assert_eq!(by(b"", Path::new(scope)), Some("libvirt"));
        assert_eq!(by(b"", Path::new("/sys/fs/cgroup/qemu.slice/100.scope")), Some("Proxmox"));
        let plain = b"qemu-system-x86_64\0-name\0web-1,debug-threads=on\0-sandbox\0on\0\
            -qmp\0unix:/run/overbook/qmp/web-1.sock,server=on,wait=off\0";
        assert_eq!(by(plain, none), None);
        assert_eq!(by(&[0xff, 0, 0xfe], none), None);
    }
}
