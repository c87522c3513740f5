//! A memory cgroup of the lab's own: a limit on the memory of several QEMU processes together.
//!
//! It works with cgroup v1 and v2, depending on which has the memory controller. Dropping it
//! removes it, and restores the setting that was switched on for it. All processes in it must
//! have ended by then.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use model::Bytes;

use crate::lab::LabError;

/// Timeout for the kernel to release a group whose processes have ended.
const REMOVAL: Duration = Duration::from_secs(5);

/// A cgroup below the root of its tree.
#[derive(Debug)]
pub struct MemoryGroup {
    dir: PathBuf,
    version: Version,
    /// The file in which the controller was switched on for it.
    switched: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

impl MemoryGroup {
    /// Makes a group without a limit.
    ///
    /// # Errors
    /// When this is not root, or the host has no memory controller.
    pub fn new(name: &str) -> Result<Self, LabError> {
        let (root, version) = tree(&fs::read_to_string("/proc/mounts")?)
            .ok_or_else(|| io::Error::other("no memory cgroups are mounted"))?;
        let dir = root.join(format!("overbook-lab-{name}-{}", std::process::id()));
        let mut group = Self { dir, version, switched: None };
        let control = root.join("cgroup.subtree_control");
        if version == Version::V2 && !names_memory(&fs::read_to_string(&control)?) {
            fs::write(&control, "+memory")?;
            group.switched = Some(control);
        }
        fs::create_dir(&group.dir)?;
        Ok(group)
    }

    /// Its directory, for [`MachineSpec::cgroup`](crate::MachineSpec).
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Moves a process into it; memory that the process takes from now on counts here.
    pub fn take_in(&self, pid: u32) -> Result<(), LabError> {
        Ok(fs::write(self.dir.join("cgroup.procs"), pid.to_string())?)
    }

    /// Sets its limit. The kernel reclaims memory above the limit before this returns, if it can.
    pub fn set_limit(&self, limit: Bytes) -> Result<(), LabError> {
        Ok(fs::write(self.file("memory.limit_in_bytes", "memory.max"), limit.0.to_string())?)
    }

    /// Keeps its anonymous memory out of the host's swap, so that a limit holds for all of it.
    ///
    /// # Errors
    /// When the kernel cannot exclude a single group.
    pub fn keep_from_swap(&self) -> Result<(), LabError> {
        Ok(fs::write(self.file("memory.swappiness", "memory.swap.max"), "0")?)
    }

    /// Has the kernel reclaim memory above `limit` once, if it can. The group may use more
    /// afterwards: under a lasting limit, the kernel kills a process when it finds nothing to
    /// reclaim.
    pub fn reclaim_to(&self, limit: Bytes) -> Result<(), LabError> {
        let file = self.file("memory.limit_in_bytes", "memory.high");
        // An error means that the kernel could not reclaim everything in time.
        let _ = fs::write(&file, limit.0.to_string());
        Ok(fs::write(file, self.unlimited())?)
    }

    /// Has the kernel reclaim `bytes` of its memory, or less if there is less.
    ///
    /// # Errors
    /// When the kernel cannot reclaim by request.
    pub fn reclaim(&self, bytes: Bytes) -> Result<(), LabError> {
        if self.version == Version::V1 {
            return self.reclaim_to(self.usage()?.minus(bytes));
        }
        match fs::write(self.dir.join("memory.reclaim"), bytes.0.to_string()) {
            // The kernel found less to reclaim.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            done => Ok(done?),
        }
    }

    /// Lifts the limit.
    pub fn set_unlimited(&self) -> Result<(), LabError> {
        Ok(fs::write(self.file("memory.limit_in_bytes", "memory.max"), self.unlimited())?)
    }

    fn unlimited(&self) -> &'static str {
        if self.version == Version::V1 { "-1" } else { "max" }
    }

    /// Its memory, including page cache and kernel memory.
    pub fn usage(&self) -> Result<Bytes, LabError> {
        let text = fs::read_to_string(self.file("memory.usage_in_bytes", "memory.current"))?;
        let bytes = text.trim().parse().map_err(io::Error::other)?;
        Ok(Bytes(bytes))
    }

    /// Anonymous memory that no process has mapped: it was read ahead from swap, or is about to
    /// be swapped out.
    pub fn unmapped(&self) -> Result<Bytes, LabError> {
        let text = fs::read_to_string(self.dir.join("memory.stat"))?;
        let mapped = if self.version == Version::V1 { "rss" } else { "anon" };
        Ok(unmapped(&text, mapped))
    }

    fn file(&self, v1: &str, v2: &str) -> PathBuf {
        self.dir.join(if self.version == Version::V1 { v1 } else { v2 })
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let until = Instant::now() + REMOVAL;
        while fs::remove_dir(&self.dir).is_err() && self.dir.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        if let Some(control) = &self.switched {
            let _ = fs::write(control, "-memory");
        }
    }
}

/// The mount point of the tree with the memory controller.
fn tree(mounts: &str) -> Option<(PathBuf, Version)> {
    let lines = || mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let of_kind = |kind| lines().filter(move |words| words.get(2) == Some(&kind));
    let has_memory = |words: &Vec<&str>| {
        words.get(3).is_some_and(|options| options.split(',').any(|option| option == "memory"))
    };
    let v1 = of_kind("cgroup").find(has_memory);
    if let Some(words) = v1 {
        return Some((PathBuf::from(words[1]), Version::V1));
    }
    let v2 = of_kind("cgroup2").map(|words| PathBuf::from(words[1])).find(|root| {
        fs::read_to_string(root.join("cgroup.controllers")).is_ok_and(|text| names_memory(&text))
    });
    v2.map(|root| (root, Version::V2))
}

/// Anonymous memory that is in the kernel's LRU lists and not mapped.
fn unmapped(stat: &str, mapped: &str) -> Bytes {
    let of = |wanted: &str| {
        let found = stat.lines().find_map(|line| line.strip_prefix(wanted)?.strip_prefix(' '));
        Bytes(found.and_then(|number| number.parse().ok()).unwrap_or(0))
    };
    let listed = of("active_anon").plus(of("inactive_anon")).plus(of("unevictable"));
    listed.minus(of(mapped)).minus(of("shmem"))
}

fn names_memory(controllers: &str) -> bool {
    controllers.split_whitespace().any(|name| name == "memory")
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;

    #[test]
    fn the_tree_is_that_of_the_memory_controller() {
        let mounts = "tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
            cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0\n\
            cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n";
        let (root, version) = tree(mounts).unwrap();
        assert_eq!((root.as_path(), version), (Path::new("/sys/fs/cgroup/memory"), Version::V1));
        assert!(tree("cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n").is_none());
    }

    #[test]
    fn what_is_listed_and_not_mapped_was_read_ahead() {
        let stat = "rss 100\nrss_huge 7\nshmem 10\nactive_anon 90\ninactive_anon 50\n";
        assert_eq!(unmapped(stat, "rss"), Bytes(30));
        assert_eq!(unmapped("anon 100\nactive_anon 90\n", "anon"), Bytes::ZERO);
    }

    #[test]
    fn a_group_has_a_limit_and_is_gone_when_dropped() {
        let Some(group) = requires(Requirement::MemoryCgroup, MemoryGroup::new("test")) else {
            return;
        };
        let dir = group.dir().to_owned();
        group.set_limit(Bytes::mib(64)).unwrap();
        assert!(group.usage().unwrap() < Bytes::mib(64));
        group.set_unlimited().unwrap();
        drop(group);
        assert!(!dir.exists());
    }
}
