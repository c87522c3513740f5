//! A cgroup that limits its processes' reads of one of the host's disks, so that swap-in takes as
//! long as on a slower disk.
//!
//! Writes are not throttled, because the kernel writes to swap in the name of the process that
//! reclaims. Dropping it removes the cgroup, whose processes must have ended by then. **Left
//! out**: cgroup v2, where the memory's cgroup would have to be the same one.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::lab::LabError;

const ROOT: &str = "/sys/fs/cgroup/blkio";
/// Timeout for the kernel to release a group whose processes have ended.
const REMOVAL: Duration = Duration::from_secs(5);

/// Such a cgroup.
#[derive(Debug)]
pub struct SlowDisk {
    dir: PathBuf,
    /// `major:minor` of the disk.
    device: String,
}

impl SlowDisk {
    /// Makes one for the disk that holds the file or directory `on`, with `reads_per_s` for all
    /// processes in it together.
    ///
    /// # Errors
    /// When this is not root, or the host has no such cgroups, or the file is on no disk.
    pub fn new(name: &str, on: &Path, reads_per_s: u32) -> Result<Self, LabError> {
        let dir = Path::new(ROOT).join(format!("overbook-lab-{name}-{}", std::process::id()));
        let group = Self { dir, device: whole_disk(on)? };
        if !Path::new(ROOT).exists() {
            return Err(
                io::Error::other(format!("no cgroups for disks at {ROOT} (version 1)")).into()
            );
        }
        fs::create_dir(&group.dir)?;
        group.set_rate(reads_per_s)?;
        Ok(group)
    }

    /// Changes the reads per second of all processes in it together.
    pub fn set_rate(&self, reads_per_s: u32) -> Result<(), LabError> {
        let rule = format!("{} {reads_per_s}", self.device);
        Ok(fs::write(self.dir.join("blkio.throttle.read_iops_device"), rule)?)
    }

    /// Moves this process into it.
    pub fn take_in(&self, pid: u32) -> Result<(), LabError> {
        Ok(fs::write(self.dir.join("cgroup.procs"), pid.to_string())?)
    }
}

impl Drop for SlowDisk {
    fn drop(&mut self) {
        let until = Instant::now() + REMOVAL;
        while fs::remove_dir(&self.dir).is_err() && self.dir.exists() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// `major:minor` of the whole disk, even if the file is on a partition.
fn whole_disk(path: &Path) -> io::Result<String> {
    let device = path.metadata()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let known = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    let is_partition = known.join("partition").exists();
    let disk = if is_partition { fs::canonicalize(&known)?.join("..") } else { known };
    Ok(fs::read_to_string(disk.join("dev"))?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use requires::{Requirement, requires};

    use super::*;

    #[test]
    fn a_group_is_gone_when_dropped() {
        let Some(group) =
            requires(Requirement::DiskCgroup, SlowDisk::new("test", &std::env::temp_dir(), 1000))
        else {
            return;
        };
        let dir = group.dir.clone();
        let rule = fs::read_to_string(dir.join("blkio.throttle.read_iops_device")).unwrap();
        assert!(rule.trim().ends_with(" 1000"), "{rule}");
        group.set_rate(2000).unwrap();
        let rule = fs::read_to_string(dir.join("blkio.throttle.read_iops_device")).unwrap();
        assert!(rule.trim().ends_with(" 2000"), "{rule}");
        drop(group);
        assert!(!dir.exists());
    }
}
