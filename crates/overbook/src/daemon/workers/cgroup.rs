//! A cgroup for each worker, below the daemon's own: what a group's worker uses is counted apart, and
//! can be limited by the operator without limiting the daemon.
//!
//! Nothing depends on it. Where the tree is not ours to write (a container, no cgroup v2), workers run in
//! the daemon's cgroup.

use std::fs;
use std::io;
use std::path::PathBuf;

use model::GroupName;

/// A worker's cgroup, removed when dropped: it is empty then, or the kernel refuses.
#[derive(Debug)]
pub(super) struct Cgroup {
    dir: PathBuf,
}

impl Cgroup {
    /// Makes the cgroup of the worker of `group`.
    pub(super) fn make(group: &GroupName) -> io::Result<Self> {
        let own = sys::cgroup::of_process(std::process::id()).map_err(io::Error::other)?;
        let own = own.ok_or_else(|| io::Error::other("this host has no cgroup v2 tree"))?;
        let dir = own.join(directory_name(group));
        match fs::create_dir(&dir) {
            // An earlier daemon's, whose worker died with it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other?,
        }
        Ok(Self { dir })
    }

    /// Moves a process in.
    pub(super) fn take(&self, pid: u32) -> io::Result<()> {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // If it cannot be, the next worker of the group takes it over.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// A name that any file system takes: letters and digits stay, everything else becomes its bytes.
fn directory_name(group: &GroupName) -> String {
    let mut name = "overbook-worker-".to_owned();
    for byte in group.as_str().bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' => name.push(byte.into()),
            other => name += &format!("_{other:02x}"),
        }
    }
    // 255 bytes are the most that a name may have.
    name.truncate(255);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_group_name_leads_out_of_the_directory() {
        assert_eq!(directory_name(&"web-1".into()), "overbook-worker-web-1");
        assert_eq!(directory_name(&"../a b".into()), "overbook-worker-_2e_2e_2fa_20b");
        assert!(directory_name(&"ü".repeat(200).as_str().into()).len() <= 255);
    }
}
