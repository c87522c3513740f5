//! Finds the holder of a file's lock (`flock`) from the kernel's view of every process's open
//! files. A pid written in the file may be stale.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;

use crate::process::Identity;

/// The processes that hold a lock on `file`, the oldest first: one, and for a moment the children
/// that it has just forked. Processes that cannot be inspected are missing.
///
/// # Errors
/// When the file or `/proc` cannot be read.
pub fn holders(file: &File) -> io::Result<Vec<u32>> {
    let file = file.metadata()?;
    let is_same = |path: &str| {
        fs::metadata(path).is_ok_and(|other| (other.dev(), other.ino()) == (file.dev(), file.ino()))
    };
    let mut holders = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // It has ended, or this user may not inspect it.
        let Ok(fds) = fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let names = fds.flatten().filter_map(|fd| fd.file_name().into_string().ok());
        let holds = |fd: &String| {
            is_same(&format!("/proc/{pid}/fd/{fd}")) && is_locked(pid, fd).unwrap_or(false)
        };
        if names.into_iter().any(|fd| holds(&fd)) {
            holders.extend(Identity::of(pid));
        }
    }
    holders.sort_by_key(|holder| holder.start_ticks);
    Ok(holders.into_iter().map(|holder| holder.pid).collect())
}

/// Whether the lock is held through this descriptor.
fn is_locked(pid: u32, fd: &str) -> io::Result<bool> {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"))?;
    Ok(info.lines().any(|line| line.starts_with("lock:") && line.contains("FLOCK")))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use rustix::fs::{FlockOperation, flock};

    use super::*;

    /// Other tests fork, and a child shares our files until it calls `exec`.
    fn until(holds: impl Fn() -> bool) {
        let end = Instant::now() + Duration::from_secs(30);
        while !holds() {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn the_holder_is_found_and_who_only_has_the_file_open_is_not() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (held, open) = (file.reopen().unwrap(), file.reopen().unwrap());
        assert_eq!(holders(&open).unwrap(), []);
        flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        until(|| holders(&open).unwrap() == [std::process::id()]);
        assert_eq!(holders(&tempfile::tempfile().unwrap()).unwrap(), []);
        drop(held);
        until(|| holders(&open).unwrap().is_empty());
    }
}
