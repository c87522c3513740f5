//! Users by name, from `/etc/passwd`.

use std::path::Path;

use crate::procfs;

/// The uid of a user given by name or number; `None`: this host has no such name. Names of
/// directory services are not looked up: their users are given by number.
#[must_use]
pub fn uid_of(user: &str) -> Option<u32> {
    if let Ok(uid) = user.parse() {
        return Some(uid);
    }
    // The comments of other users may contain any bytes.
    let passwd = std::fs::read("/etc/passwd").unwrap_or_default();
    uid_in(&String::from_utf8_lossy(&passwd), user)
}

/// The user that a process runs as; `None`: it has ended.
#[must_use]
pub fn user_of_process(pid: u32) -> Option<u32> {
    // The owner of `/proc/PID` is root if the process is not dumpable.
    let status = procfs::read(Path::new(&format!("/proc/{pid}/status"))).ok()?;
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    uids.split_whitespace().nth(1)?.parse().ok()
}

/// `name:x:64055:108:comment:/var/lib/libvirt:/usr/sbin/nologin`.
fn uid_in(passwd: &str, user: &str) -> Option<u32> {
    let fields = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    fields.filter(|fields| fields[0] == user).find_map(|fields| fields.get(2)?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_known_by_name_or_number() {
        let passwd = "root:x:0:0::/root:/bin/sh\nbroken\nlibvirt-qemu:x:64055:108:,,:/:/x\n";
        assert_eq!(uid_in(passwd, "libvirt-qemu"), Some(64055));
        assert_eq!((uid_in(passwd, "libvirt"), uid_in(passwd, "broken")), (None, None));
        let own = rustix::process::geteuid().as_raw();
        assert_eq!(user_of_process(std::process::id()), Some(own));
        assert_eq!((uid_of("0"), uid_of("root"), uid_of("no such")), (Some(0), Some(0), None));
    }
}
