//! The cgroup v2 of a process, the CPU time spent in it, and its memory limit.
//!
//! `/proc/<pid>/cgroup` names the v2 group in its line `0::<path>`. The mount point of that tree
//! differs: `/sys/fs/cgroup` on a pure v2 host, `/sys/fs/cgroup/unified` on a hybrid one.
//! `cpu.stat` and the PSI files exist there even where all controllers are still bound to v1.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::procfs::{ProcError, read};

/// The most levels of cgroups searched below a VM's, and the most entries of each. libvirt makes
/// two levels, and one for each vCPU.
const MOST_DEPTH: u32 = 4;
const MOST_INSIDE: u32 = 4_096;
/// The v2 tree.
pub(crate) static V2: Mount = Mount::at(&["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]);

/// The mount point of a tree of cgroups, which stays as it is once it is found.
#[derive(Debug)]
pub(crate) struct Mount {
    places: &'static [&'static str],
    found: OnceLock<&'static Path>,
}

impl Mount {
    /// A tree that is mounted at the first of these places that has one.
    pub(crate) const fn at(places: &'static [&'static str]) -> Self {
        Self { places, found: OnceLock::new() }
    }

    /// Where it is mounted; `None`: not on this host.
    pub(crate) fn dir(&self) -> Option<&'static Path> {
        if let Some(found) = self.found.get() {
            return Some(found);
        }
        let mut places = self.places.iter().map(Path::new);
        let found = places.find(|dir| dir.join("cgroup.procs").exists())?;
        Some(self.found.get_or_init(|| found))
    }
}

/// The directory of the v2 cgroup of process `pid`; `None` on a host without a v2 tree.
///
/// # Errors
/// When the process is gone.
pub fn of_process(pid: u32) -> Result<Option<PathBuf>, ProcError> {
    let path = PathBuf::from(format!("/proc/{pid}/cgroup"));
    let text = read(&path)?;
    let Some(group) = text.lines().find_map(|line| line.strip_prefix("0::")) else {
        return Ok(None);
    };
    // In another cgroup namespace the path starts with `/..`; it is not below our mount.
    if !group.starts_with('/') || group.split('/').any(|part| part == "..") {
        return Ok(None);
    }
    Ok(V2.dir().map(|mount| mount.join(group.trim_start_matches('/'))))
}

/// The file that makes the kernel reclaim memory of process `pid` (`memory.reclaim`, Linux 5.19).
/// It belongs to the nearest cgroup above the process that has one; `None` if that cgroup
/// contains another process.
///
/// # Errors
/// When the process is gone.
pub fn reclaim_file(pid: u32) -> Result<Option<PathBuf>, ProcError> {
    let Some(dir) = of_process(pid)? else { return Ok(None) };
    let has_file = |dir: &&Path| dir.join("memory.reclaim").exists();
    // The root of the tree contains all processes of the host.
    let within = |dir: &&Path| V2.dir() != Some(*dir);
    let nearest = dir.ancestors().take_while(within).find(has_file);
    let is_alone = nearest.filter(|dir| has_no_other(dir, pid, MOST_DEPTH));
    Ok(is_alone.map(|dir| dir.join("memory.reclaim")))
}

/// Whether no visible process except `pid` is in a cgroup or below. A threaded cgroup lists no
/// processes; the one above it does.
fn has_no_other(dir: &Path, pid: u32, depth: u32) -> bool {
    let here = read(&dir.join("cgroup.procs")).unwrap_or_default();
    if here.lines().any(|other| other.parse() != Ok(pid)) {
        return false;
    }
    let inside = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut dirs = inside.filter(|it| it.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut looked = 0;
    dirs.all(|dir| {
        looked += 1;
        looked <= MOST_INSIDE && depth > 0 && has_no_other(&dir.path(), pid, depth - 1)
    })
}

/// CPU time spent in the cgroup at `dir` and below, in microseconds (`usage_usec` of `cpu.stat`).
///
/// # Errors
/// When the cgroup is gone, or the file is malformed.
pub fn cpu_usage_us(dir: &Path) -> Result<u64, ProcError> {
    let path = dir.join("cpu.stat");
    let text = read(&path)?;
    let field = "usage_usec";
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(field))
        .ok_or_else(|| ProcError::Missing { path: path.clone(), field })?;
    value
        .trim()
        .parse()
        .map_err(|_| ProcError::malformed(&path, field, value.trim(), "a number of µs"))
}

/// The least memory limit (`memory.max`) of the cgroup at `dir` and those above it, in bytes;
/// `None` without a limit.
#[must_use]
pub fn memory_max(dir: &Path) -> Option<u64> {
    let limit = |dir: &Path| read(&dir.join("memory.max")).ok()?.trim().parse().ok();
    dir.ancestors().filter_map(limit).min()
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;

    #[test]
    fn work_in_our_cgroup_shows_in_its_cpu_time() {
        let dir = of_process(std::process::id()).unwrap().ok_or("none");
        let Some(dir) = requires(Requirement::CgroupV2, dir) else { return };
        let before = cpu_usage_us(&dir).unwrap();
        let start = std::time::Instant::now();
        while start.elapsed().as_millis() < 50 {}
        assert!(cpu_usage_us(&dir).unwrap() > before);
    }

    #[test]
    fn the_least_limit_of_all_levels_counts() {
        let dir = tempfile::tempdir().unwrap();
        let (slice, scope) = (dir.path().join("slice"), dir.path().join("slice/scope"));
        std::fs::create_dir_all(&scope).unwrap();
        assert_eq!(memory_max(&scope), None);
        std::fs::write(scope.join("memory.max"), "max\n").unwrap();
        std::fs::write(slice.join("memory.max"), "4096\n").unwrap();
        std::fs::write(dir.path().join("memory.max"), "8192\n").unwrap();
        assert_eq!(memory_max(&scope), Some(4096));
    }

    #[test]
    fn a_malformed_cpu_stat_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("cpu.stat"), "usage_usec much\n").unwrap();
        let error = cpu_usage_us(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("usage_usec is \"much\", which is not a number of µs"), "{error}");
        assert!(of_process(u32::MAX).is_err());
    }
}
