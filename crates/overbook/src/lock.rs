//! The state directory and the lock on it: one daemon per directory.
//!
//! Two daemons would undo each other's work and write one journal over the other. The lock is
//! `flock` on a file: the kernel gives it up when its holder dies, however it dies, so there is no
//! stale lock. The pid inside is for the message only.

use std::{
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;

/// Permission bits that let others write.
const OTHERS_WRITE: u32 = 0o022;

/// Why the state directory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Somebody else has it.
    #[error(
        "another overbook daemon ({holder}) uses {directory}; stop it first or set another `state` in [host]"
    )]
    Held {
        /// "pid 123", or what is known instead.
        holder: String,
        /// The state directory.
        directory: PathBuf,
    },
    /// Others could forge the record of what is to be undone.
    #[error(
        "state directory {directory} belongs to user {owner} and has mode {mode:04o}: it must belong to \
         whoever runs this and be closed to other writers (chmod go-w)"
    )]
    Exposed {
        /// The state directory.
        directory: PathBuf,
        /// Its owner's number.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
    /// The directory cannot be made or entered.
    #[error("state directory {directory}: {source}{advice}")]
    Directory {
        /// The state directory.
        directory: PathBuf,
        /// What the operating system said.
        source: io::Error,
        /// What to do about it.
        advice: &'static str,
    },
}

/// Holds the state directory until it is dropped or the process ends.
#[derive(Debug)]
pub struct StateLock {
    _file: File,
}

impl StateLock {
    /// Makes `directory` if it is missing (for its owner alone) and takes its lock. Never waits.
    ///
    /// # Errors
    /// When another process holds it, or the directory cannot be used.
    pub fn acquire(directory: &Path) -> Result<Self, LockError> {
        let fail = |source: io::Error| {
            let advice = match source.kind() {
                io::ErrorKind::PermissionDenied => "; run as root, or set `state` in [host]",
                io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
                    "; `state` in [host] must name a directory"
                }
                _ => "",
            };
            LockError::Directory { directory: directory.to_owned(), source, advice }
        };
        make_private(directory).map_err(fail)?;
        let meta = fs::metadata(directory).map_err(fail)?;
        let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
        if owner != geteuid().as_raw() || mode & OTHERS_WRITE != 0 {
            return Err(LockError::Exposed { directory: directory.to_owned(), owner, mode });
        }
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
            .open(directory.join("lock"))
            .map_err(fail)?;
        if let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK {
                return Err(fail(error.into()));
            }
            return Err(LockError::Held {
                holder: holder(&mut file),
                directory: directory.to_owned(),
            });
        }
        // On a full disk the message of a second daemon lacks the pid, which is no reason to stop.
        let _ = write_pid(&mut file);
        Ok(Self { _file: file })
    }
}

fn make_private(directory: &Path) -> io::Result<()> {
    if let Some(parent) = directory.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => Ok(()),
        other => other,
    }
}

fn write_pid(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", std::process::id())
}

fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let read = file.take(32).read_to_string(&mut text);
    match (read, text.trim().parse::<u32>()) {
        (Ok(_), Ok(pid)) => format!("pid {pid}"),
        _ => "pid unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_second_daemon_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("deep/state");
        let first = StateLock::acquire(&state).unwrap();
        let error = StateLock::acquire(&state).unwrap_err().to_string();
        let expected = format!("another overbook daemon (pid {})", std::process::id());
        assert!(error.starts_with(&expected), "{error}");
        drop(first);
        StateLock::acquire(&state).unwrap();
    }

    #[test]
    fn the_directory_is_made_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let _lock = StateLock::acquire(&state).unwrap();
        assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_directory_that_others_may_write_in_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o770)).unwrap();
        let error = StateLock::acquire(dir.path()).unwrap_err().to_string();
        assert!(error.contains("has mode 0770") && error.contains("chmod go-w"), "{error}");
    }

    #[test]
    fn a_lock_file_with_garbage_in_it_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("lock"), [0xff; 4096]).unwrap();
        let _first = StateLock::acquire(dir.path()).unwrap();
        let error = StateLock::acquire(dir.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
    }

    #[test]
    fn a_file_in_the_directorys_place_is_a_clear_error() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        fs::write(&state, "").unwrap();
        let error = StateLock::acquire(&state).unwrap_err().to_string();
        assert!(error.contains("must name a directory"), "{error}");
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_a_clear_error() {
        let error = StateLock::acquire(Path::new("/proc/overbook")).unwrap_err().to_string();
        assert!(error.starts_with("state directory /proc/overbook: "), "{error}");
    }
}
