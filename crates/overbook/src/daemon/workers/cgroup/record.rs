//! The cgroups that the daemons of a state directory have made for their workers.
//!
//! A daemon that is killed removes none. The next daemon with the same state directory removes
//! those without a process. The record does not have the cgroups of another Overbook.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::PREFIX;

/// The record in the state directory: one path a line.
pub(super) const FILE_NAME: &str = "cgroups";

/// The record of a daemon; by default, nothing is kept.
#[derive(Clone, Debug, Default)]
pub(in crate::daemon::workers) struct CgroupRecord {
    file: Option<PathBuf>,
    noted: Arc<Mutex<BTreeSet<PathBuf>>>,
}

impl CgroupRecord {
    /// The record in this state directory. Removes the cgroups that earlier daemons have left.
    pub(in crate::daemon::workers) fn in_state(directory: &Path) -> Self {
        let file = directory.join(FILE_NAME);
        let text = fs::read_to_string(&file).unwrap_or_default();
        let dirs = text.lines().map(PathBuf::from).filter(|dir| is_of_worker(dir));
        let noted: BTreeSet<PathBuf> = dirs.filter(|dir| !is_removed(dir)).collect();
        let left: String = noted.iter().map(|dir| line(dir)).collect();
        if left != text {
            // A record that cannot be written costs an empty cgroup.
            let _ = fs::write(&file, left);
        }
        Self { file: Some(file), noted: Arc::new(Mutex::new(noted)) }
    }

    /// Notes a cgroup that is about to be made, if it is not known.
    pub(super) fn note(&self, dir: &Path) -> Option<JoinHandle<io::Result<()>>> {
        let file = self.file.clone()?;
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if !noted.insert(dir.to_owned()) {
            return None;
        }
        let line = line(dir);
        let write = move || {
            let mut file = File::options().create(true).append(true).open(file)?;
            file.write_all(line.as_bytes())
        };
        // The disk may hang. The daemon's loop must not.
        thread::Builder::new().spawn(write).ok()
    }
}

fn line(dir: &Path) -> String {
    format!("{}\n", dir.display())
}

fn is_of_worker(dir: &Path) -> bool {
    let name = dir.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(PREFIX))
}

/// Whether the cgroup is gone now. The kernel refuses to remove one with a process.
fn is_removed(dir: &Path) -> bool {
    match fs::remove_dir(dir) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_daemon_removes_what_is_empty_and_on_record() {
        let state = tempfile::tempdir().unwrap();
        let at = |name: &str| state.path().join(name);
        let (left, busy) = (at("overbook-worker-left"), at("overbook-worker-busy"));
        let (of_another, other) = (at("overbook-worker-another"), at("other"));
        for dir in [&left, &busy, &of_another, &other] {
            fs::create_dir(dir).unwrap();
        }
        // A directory with a file cannot be removed, like a cgroup with a process.
        fs::write(busy.join("process"), "").unwrap();
        let killed = CgroupRecord::in_state(state.path());
        for dir in [&left, &busy, &other, &at("overbook-worker-gone")] {
            killed.note(dir).unwrap().join().unwrap().unwrap();
        }
        assert!(killed.note(&left).is_none(), "it is noted once");

        let next = CgroupRecord::in_state(state.path());
        let exist = [&left, &busy, &of_another, &other].map(|dir| dir.exists());
        assert_eq!(exist, [false, true, true, true]);
        assert_eq!(fs::read_to_string(at(FILE_NAME)).unwrap(), line(&busy));
        assert!(next.note(&busy).is_none(), "it is still on record");

        fs::remove_file(busy.join("process")).unwrap();
        CgroupRecord::in_state(state.path());
        assert!(!busy.exists() && of_another.exists());
        assert_eq!(fs::read_to_string(at(FILE_NAME)).unwrap(), "");
    }

    #[test]
    fn without_a_state_directory_nothing_is_kept() {
        assert!(CgroupRecord::default().note(Path::new("/x/overbook-worker-a")).is_none());
    }
}
