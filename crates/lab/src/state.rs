//! The state directory: everything of a running lab in one place, held by one process.
//!
//! ```text
//! overbook-lab.lock   locked (flock) as long as the lab is held; also marks the directory as ours
//! lab.json            the holder, and its running guests and helpers
//! qmp/  lab/          QMP sockets, for the daemon and for the lab
//! disks/              swap and data, sparse
//! trace/              pages that traced guests touched
//! etc/  run/          configuration and sockets of helpers (the daemon)
//! log/                consoles, metrics, output: kept when the lab ends, until the next one starts
//! ```
//!
//! **Invariants.** The lock alone decides whether a lab is held: the kernel drops it when its
//! holder ends in any way, so a crash never blocks the next lab. The next holder of the lock
//! sweeps the remains of a crash. Only the names above are ever removed, and only in a directory
//! that is the user's own, closed to others, and marked by the lock.
//!
//! The default is below `/var/tmp` and not the run-time directory, which lies in memory on most
//! machines. A swap disk in memory would distort the measurements.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};
use sys::process::Identity;

/// The environment variable that names the state directory.
pub const DIR_VARIABLE: &str = "OVERBOOK_LAB_DIR";

const LOCK: &str = "overbook-lab.lock";
const RECORD: &str = "lab.json";
const RUN_TIME: [&str; 6] = ["qmp", "lab", "disks", "trace", "etc", "run"];
const LOG: &str = "log";

/// Errors of the state directory.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// Another lab holds the directory.
    #[error(
        "a lab runs in {dir} already{holder}: end it with `overbook lab down`, or use another --dir"
    )]
    Held {
        dir: PathBuf,
        /// The holder, if the record names one.
        holder: String,
    },
    /// The directory belongs to another user, who could have prepared it.
    #[error("{dir} belongs to user {owner}, not to user {user}: use another --dir")]
    Foreign { dir: PathBuf, owner: u32, user: u32 },
    /// Other users could access the guests.
    #[error("{dir} has mode {mode:04o}: a lab's directory must be closed to others (chmod 0700)")]
    Open { dir: PathBuf, mode: u32 },
    /// The directory was not made by a lab.
    #[error("{dir} is not empty and no lab made it: use another --dir")]
    Occupied { dir: PathBuf },
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessRecord {
    pub pid: u32,
    /// Its start, in clock ticks since boot, which reveals a reused pid.
    pub start_ticks: u64,
}

impl From<Identity> for ProcessRecord {
    fn from(id: Identity) -> Self {
        Self { pid: id.pid, start_ticks: id.start_ticks }
    }
}

impl ProcessRecord {
    /// The process that it names.
    pub fn identity(&self) -> Identity {
        Identity { pid: self.pid, start_ticks: self.start_ticks }
    }
}

/// A recorded guest or helper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChildRecord {
    pub name: String,
    /// The guest's group; `None` for a helper.
    pub group: Option<String>,
    pub process: ProcessRecord,
}

/// `lab.json`: the holder of the lab, and its running guests and helpers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LabRecord {
    /// The parent process of everything.
    pub holder: ProcessRecord,
    /// The lab's start, in seconds since 1970.
    pub since: u64,
    /// The accelerator that the guests run on, once it is known.
    pub accel: Option<crate::accel::Accel>,
    pub children: Vec<ChildRecord>,
}

/// The default state directory: `$OVERBOOK_LAB_DIR`, or below `/var/tmp`.
pub fn default_dir() -> PathBuf {
    let named = std::env::var_os(DIR_VARIABLE).filter(|value| !value.is_empty());
    let user = rustix::process::getuid().as_raw();
    named.map_or_else(|| PathBuf::from(format!("/var/tmp/overbook-lab-{user}")), PathBuf::from)
}

/// The content of `lab.json`, whether or not the lab is held.
pub fn read_record(dir: &Path) -> Option<LabRecord> {
    serde_json::from_slice(&std::fs::read(dir.join(RECORD)).ok()?).ok()
}

/// A directory that this process holds.
#[derive(Debug)]
pub struct StateDir {
    dir: PathBuf,
    swept: bool,
    _lock: File,
}

impl StateDir {
    /// Takes the directory (making it if it is missing), and sweeps the remains of a crashed lab.
    pub fn hold(dir: &Path) -> Result<Self, StateError> {
        let dir = prepare(dir)?;
        let path = dir.join(LOCK);
        let lock = File::options().create(true).truncate(false).write(true).open(&path);
        let lock = lock.map_err(|source| StateError::Io { path, source })?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            let holder =
                read_record(&dir).map(|record| format!(" (process {})", record.holder.pid));
            return Err(StateError::Held { dir, holder: holder.unwrap_or_default() });
        }
        let mut state = Self { dir, swept: false, _lock: lock };
        state.swept = state.sweep()?;
        Ok(state)
    }

    /// Empties the logs of the last lab, makes the directories and writes the first record.
    pub fn begin(&self, record: &LabRecord) -> Result<(), StateError> {
        self.remove(LOG)?;
        for name in RUN_TIME.into_iter().chain([LOG]) {
            let path = self.dir.join(name);
            let made = std::fs::DirBuilder::new().mode(0o700).create(&path);
            made.map_err(|source| StateError::Io { path, source })?;
        }
        self.write_record(record)
    }

    /// Replaces the record atomically.
    pub fn write_record(&self, record: &LabRecord) -> Result<(), StateError> {
        let path = self.dir.join(RECORD);
        let failed = |source| StateError::Io { path: path.clone(), source };
        let text = serde_json::to_vec_pretty(record).map_err(|error| failed(error.into()))?;
        let temporary = self.dir.join("lab.json.new");
        std::fs::write(&temporary, text).map_err(failed)?;
        std::fs::rename(&temporary, &path).map_err(failed)
    }

    /// Ends the processes that the record names, and removes everything but the logs. Returns
    /// whether there was a record.
    pub fn sweep(&self) -> Result<bool, StateError> {
        let record = read_record(&self.dir);
        for child in record.iter().flat_map(|record| &record.children) {
            let ended = child.process.identity().end(Duration::from_secs(3));
            ended.map_err(|source| StateError::Io { path: self.dir.join(RECORD), source })?;
        }
        for name in RUN_TIME.into_iter().chain([RECORD]) {
            self.remove(name)?;
        }
        Ok(record.is_some())
    }

    /// Whether a crashed lab had left a record here.
    pub fn swept(&self) -> bool {
        self.swept
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    fn remove(&self, name: &str) -> Result<(), StateError> {
        let path = self.dir.join(name);
        let removed = match path.symlink_metadata() {
            Ok(metadata) if metadata.is_dir() => std::fs::remove_dir_all(&path),
            Ok(_) => std::fs::remove_file(&path),
            Err(_) => Ok(()),
        };
        removed.map_err(|source| StateError::Io { path, source })
    }
}

/// Makes or checks the directory; returns its absolute path.
pub fn prepare(dir: &Path) -> Result<PathBuf, StateError> {
    let failed = |source| StateError::Io { path: dir.to_owned(), source };
    match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => check(dir)?,
        Err(source) => return Err(failed(source)),
    }
    dir.canonicalize().map_err(failed)
}

fn check(dir: &Path) -> Result<(), StateError> {
    let failed = |source| StateError::Io { path: dir.to_owned(), source };
    let metadata = dir.symlink_metadata().map_err(failed)?;
    if !metadata.is_dir() {
        return Err(failed(io::ErrorKind::NotADirectory.into()));
    }
    let (owner, user) = (metadata.uid(), rustix::process::getuid().as_raw());
    if owner != user {
        return Err(StateError::Foreign { dir: dir.to_owned(), owner, user });
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(StateError::Open { dir: dir.to_owned(), mode });
    }
    let empty = std::fs::read_dir(dir).map_err(failed)?.next().is_none();
    if !empty && !dir.join(LOCK).exists() {
        return Err(StateError::Occupied { dir: dir.to_owned() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> LabRecord {
        let holder = Identity::own().unwrap().into();
        LabRecord { holder, since: 0, accel: None, children: Vec::new() }
    }

    #[test]
    fn a_second_holder_is_refused_and_told_who_holds_it() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("lab");
        let state = StateDir::hold(&dir).unwrap();
        state.begin(&record()).unwrap();
        let error = StateDir::hold(&dir).unwrap_err().to_string();
        assert!(error.contains(&format!("(process {})", std::process::id())), "{error}");
    }

    #[test]
    fn what_a_crashed_lab_left_is_swept_and_its_logs_are_kept() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("lab");
        let state = StateDir::hold(&dir).unwrap();
        state.begin(&record()).unwrap();
        std::fs::write(dir.join("log/a.console"), "oops").unwrap();
        drop(state);
        let _state = StateDir::hold(&dir).unwrap();
        assert!(!dir.join("qmp").exists() && !dir.join(RECORD).exists());
        assert!(dir.join("log/a.console").exists());
    }

    #[test]
    fn a_directory_open_to_others_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("lab");
        std::fs::create_dir(&dir).unwrap();
        std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        assert!(matches!(StateDir::hold(&dir), Err(StateError::Open { mode: 0o755, .. })));
    }

    #[test]
    fn a_directory_with_other_files_is_refused_and_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let closed = PermissionsExt::from_mode(0o700);
        std::fs::set_permissions(dir.path(), closed).unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        assert!(matches!(StateDir::hold(dir.path()), Err(StateError::Occupied { .. })));
        assert!(dir.path().join("etc").exists());
    }
}
