//! The memory limits that a process's cgroups set, at all levels.
//!
//! **Problem.** libvirt, systemd, Nomad and Kubernetes put a VM into a cgroup with a limit. The
//! kernel gives QEMU and its guest no memory beyond it: it kills QEMU, or stops it
//! (`memory.high`). Every level above counts as well, with the memory of all other processes
//! there.
//!
//! **Idea.** `/proc/<pid>/cgroup` names the group, and the directories above it are the levels.
//! Cgroup v2 has `memory.max` and `memory.high`, v1 has `memory.limit_in_bytes`. All memory
//! charged there counts, except the page cache, which the kernel drops first.
//!
//! **Cost.** One or two small files for each level, and two more for each that has a limit: some
//! 10 µs each. So the caller looks less often at a process without a limit.

use std::path::{Path, PathBuf};

use model::{Bytes, view::MemoryLimit};

use crate::cgroup::{self, Mount};
use crate::procfs::{ProcError, read};

/// The most levels that are read. No tree of cgroups is deeper (systemd's and Kubernetes' have
/// some six levels).
const MAX_LEVELS: usize = 32;

/// Cgroup v1 represents "no limit" by its largest number of pages; no host has that much memory.
const NO_LIMIT: Bytes = Bytes(1 << 60);

/// The names of a hierarchy's files.
struct Hierarchy {
    mount: &'static Mount,
    limits: &'static [&'static str],
    usage: &'static str,
    /// The page cache, and the part of it that is memory without a file on disk.
    cache: [&'static str; 2],
}

static V1_MOUNT: Mount = Mount::at(&["/sys/fs/cgroup/memory"]);

static V1: Hierarchy = Hierarchy {
    mount: &V1_MOUNT,
    limits: &["memory.limit_in_bytes"],
    usage: "memory.usage_in_bytes",
    cache: ["total_cache", "total_shmem"],
};

static V2: Hierarchy = Hierarchy {
    mount: &cgroup::V2,
    limits: &["memory.max", "memory.high"],
    usage: "memory.current",
    cache: ["file", "shmem"],
};

/// The limits of process `pid`, from its own cgroup upwards; empty without limits.
///
/// # Errors
/// When the process is gone.
pub fn of_process(pid: u32) -> Result<Vec<MemoryLimit>, ProcError> {
    let path = PathBuf::from(format!("/proc/{pid}/cgroup"));
    let text = read(&path)?;
    let mut found = Vec::new();
    for (hierarchy, group) in text.lines().filter_map(memory_cgroup) {
        if let Some(mount) = hierarchy.mount.dir() {
            found.extend(above(mount, group, hierarchy));
        }
    }
    Ok(found)
}

/// The hierarchy and the group of a line `id:controllers:path`, if it is about memory.
fn memory_cgroup(line: &str) -> Option<(&'static Hierarchy, &str)> {
    let mut parts = line.splitn(3, ':');
    let (id, controllers, group) = (parts.next()?, parts.next()?, parts.next()?);
    // In another cgroup namespace the path starts with `/..`; it is not below our mount.
    if !group.starts_with('/') || group.split('/').any(|part| part == "..") {
        return None;
    }
    let is_v1 = controllers.split(',').any(|controller| controller == "memory");
    match (id, controllers) {
        ("0", "") => Some((&V2, group)),
        _ => is_v1.then_some((&V1, group)),
    }
}

/// The limits at `group` and above it, in the tree at `mount`.
fn above(mount: &Path, group: &str, hierarchy: &Hierarchy) -> Vec<MemoryLimit> {
    let group = Path::new(group);
    let levels = group.ancestors().take(MAX_LEVELS);
    levels.flat_map(|level| at(mount, level, hierarchy)).collect()
}

/// The limits at `level`. A level that cannot be read is gone, or lacks the controller.
fn at(mount: &Path, level: &Path, hierarchy: &Hierarchy) -> Vec<MemoryLimit> {
    let dir = mount.join(level.strip_prefix("/").unwrap_or(level));
    let number = |file: &str| read(&dir.join(file)).ok()?.trim().parse().ok().map(Bytes);
    let limits = hierarchy.limits.iter().filter_map(|file| Some((*file, number(file)?)));
    let limits: Vec<_> = limits.filter(|(_, limit)| *limit < NO_LIMIT).collect();
    if limits.is_empty() {
        return Vec::new();
    }
    let stat = read(&dir.join("memory.stat")).unwrap_or_default();
    let [cache, shared] = hierarchy.cache.map(|name| field(&stat, name));
    let used = number(hierarchy.usage).unwrap_or_default().minus(cache.minus(shared));
    let cgroup = level.to_string_lossy().into_owned();
    let of = |(file, limit): (&str, Bytes)| MemoryLimit {
        cgroup: cgroup.clone(),
        file: file.to_owned(),
        limit,
        used,
    };
    limits.into_iter().map(of).collect()
}

/// A number of `memory.stat`; zero if it is missing.
fn field(stat: &str, name: &str) -> Bytes {
    let mut lines = stat.lines().filter_map(|line| line.split_once(' '));
    let value = lines.find(|(field, _)| *field == name).and_then(|(_, value)| value.parse().ok());
    Bytes(value.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(dir: &Path, files: &[(&str, &str)]) {
        std::fs::create_dir_all(dir).unwrap();
        for (file, text) in files {
            std::fs::write(dir.join(file), text).unwrap();
        }
    }

    #[test]
    fn limits_of_all_levels_are_found_and_the_cache_of_files_is_no_use_of_them() {
        let mount = tempfile::tempdir().unwrap();
        let slice = mount.path().join("machine.slice");
        let stat = "anon 900\nfile 300\nkernel 7\nshmem 100\n";
        write(&slice, &[("memory.max", "4096\n"), ("memory.high", "max\n")]);
        write(&slice, &[("memory.current", "1200\n"), ("memory.stat", stat)]);
        write(&slice.join("vm.scope"), &[("memory.max", "max\n"), ("memory.high", "2048\n")]);
        write(&slice.join("vm.scope"), &[("memory.current", "512\n")]);
        let limit = |cgroup: &str, file: &str, limit, used| MemoryLimit {
            cgroup: cgroup.to_owned(),
            file: file.to_owned(),
            limit: Bytes(limit),
            used: Bytes(used),
        };
        let found = above(mount.path(), "/machine.slice/vm.scope/libvirt", &V2);
        let expected = [
            limit("/machine.slice/vm.scope", "memory.high", 2048, 512),
            limit("/machine.slice", "memory.max", 4096, 1000),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn both_versions_are_told_apart_and_paths_outside_of_our_tree_are_passed_over() {
        let group = |line| memory_cgroup(line).map(|(hierarchy, group)| (hierarchy.usage, group));
        assert_eq!(group("0::/a/b:c"), Some((V2.usage, "/a/b:c")));
        assert_eq!(group("4:cpu,memory:/a"), Some((V1.usage, "/a")));
        for other in ["3:cpu:/a", "0::/../x", "1:name=systemd:/", "4:memory:a", "junk", ""] {
            assert_eq!(group(other), None, "{other}");
        }
    }

    #[test]
    fn a_version_1_group_without_a_limit_has_none_and_a_vanished_process_is_an_error() {
        let mount = tempfile::tempdir().unwrap();
        let none = "9223372036854771712\n";
        write(&mount.path().join("vm"), &[("memory.limit_in_bytes", none)]);
        assert_eq!(above(mount.path(), "/vm", &V1), []);
        assert!(of_process(u32::MAX).is_err());
        of_process(std::process::id()).unwrap();
    }
}
