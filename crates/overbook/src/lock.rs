//! The state directory and its lock: one daemon per directory.
//!
//! Two daemons would undo each other's work and overwrite each other's journal. The lock is
//! `flock` on a file: the kernel releases it when its holder dies, however that happens, so there
//! is no stale lock. The file names its holder; the kernel confirms that this process holds the
//! lock ([`file_lock`]).

use std::{
    fmt,
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::process::geteuid;
use sys::file_lock;

const FILE_NAME: &str = "lock";
/// Permission bits that let others write.
const OTHERS_WRITE: u32 = 0o022;
/// How long to wait for a holder to identify itself, or to end.
const NAMELESS: Duration = Duration::from_secs(3);
/// Interval at which that is checked.
const LOOK: Duration = Duration::from_millis(10);

/// The kind of process that takes the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// A daemon, for as long as it runs.
    Daemon,
    /// `overbook release`, while it undoes changes.
    Release,
}

/// The present holder of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockHolder {
    /// Its kind; `None`: it has not written that, because its disk was full.
    pub by: Option<Holder>,
    /// Its process; `None`: it is not visible from here.
    pub pid: Option<u32>,
}

impl LockHolder {
    const fn advice(self) -> &'static str {
        match self.by {
            Some(Holder::Release) => "wait until it has ended",
            Some(Holder::Daemon) | None => "stop it first or set another `state` in [host]",
        }
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pid = self.pid.map_or("unknown".to_owned(), |pid| pid.to_string());
        match self.by {
            Some(Holder::Daemon) => write!(f, "another overbook daemon (pid {pid})"),
            Some(Holder::Release) => write!(f, "another `overbook release` (pid {pid})"),
            None => write!(f, "another overbook (pid {pid})"),
        }
    }
}

/// Why the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process holds the lock.
    #[error("{holder} uses {directory}; {}", holder.advice())]
    Held {
        /// The holder.
        holder: LockHolder,
        /// The state directory.
        directory: PathBuf,
    },
    /// Other users could forge the record of the changes to undo.
    #[error(
        "state directory {directory} belongs to user {owner} and has mode {mode:04o}: it must belong to \
         the user that runs this and be closed to other writers (chmod go-w)"
    )]
    Exposed {
        /// The state directory.
        directory: PathBuf,
        /// Its owner's user ID.
        owner: u32,
        /// Its permission bits.
        mode: u32,
    },
    /// The directory cannot be created or entered.
    #[error("state directory {directory}: {source}{advice}")]
    Directory {
        /// The state directory.
        directory: PathBuf,
        /// The system's error.
        source: io::Error,
        /// Advice for the operator.
        advice: &'static str,
    },
}

/// Holds the state directory until it is dropped or the process ends.
#[derive(Debug)]
pub struct StateLock {
    _file: File,
}

/// The error for a directory that cannot be used, with advice.
fn unusable(directory: &Path, source: io::Error) -> LockError {
    let advice = match source.kind() {
        io::ErrorKind::PermissionDenied => "; run as root, or set `state` in [host]",
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "; `state` in [host] must name a directory"
        }
        _ => "",
    };
    LockError::Directory { directory: directory.to_owned(), source, advice }
}

/// Whether no other user can write to the directory.
fn is_ours(directory: &Path, meta: fs::Metadata) -> Result<(), LockError> {
    let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
    if owner != geteuid().as_raw() || mode & OTHERS_WRITE != 0 {
        return Err(LockError::Exposed { directory: directory.to_owned(), owner, mode });
    }
    Ok(())
}

impl StateLock {
    /// Whether [`Self::acquire`] would find the directory usable, or could create it. Creates
    /// nothing.
    ///
    /// # Errors
    /// The directory cannot be used.
    pub fn check(directory: &Path) -> Result<(), LockError> {
        match fs::metadata(directory) {
            Ok(meta) if meta.is_dir() => is_ours(directory, meta),
            Ok(_) => Err(unusable(directory, io::ErrorKind::NotADirectory.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(unusable(directory, error)),
        }
    }

    /// Creates `directory` if it is missing (for its owner alone) and takes its lock. Waits at
    /// most [`NAMELESS`], and only for a holder that has not identified itself. A daemon that was
    /// killed while it started a child may leave one: that child holds the lock until it executes
    /// its program.
    ///
    /// # Errors
    /// Another process holds the lock, or the directory cannot be used.
    pub fn acquire(directory: &Path, holder: Holder) -> Result<Self, LockError> {
        let fail = |source: io::Error| unusable(directory, source);
        make_private(directory).map_err(fail)?;
        is_ours(directory, fs::metadata(directory).map_err(fail)?)?;
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed())
            .open(directory.join(FILE_NAME))
            .map_err(fail)?;
        let begun = Instant::now();
        while let Err(error) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if error != rustix::io::Errno::WOULDBLOCK {
                return Err(fail(error.into()));
            }
            let holder = held(&mut file);
            if holder.by.is_some() || begun.elapsed() >= NAMELESS {
                return Err(LockError::Held { holder, directory: directory.to_owned() });
            }
            thread::sleep(LOOK);
        }
        // On a full disk the holder's kind cannot be written, which is no reason to stop.
        let _ = write_holder(&mut file, holder);
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

/// The holder of this state directory's lock; `None`: there is none, or it is not visible.
pub(crate) fn held_in(directory: &Path) -> Option<LockHolder> {
    let mut file = File::open(directory.join(FILE_NAME)).ok()?;
    Some(held(&mut file)).filter(|held| held.pid.is_some())
}

const DAEMON: &str = "daemon";
const RELEASE: &str = "release";

fn write_holder(file: &mut File, holder: Holder) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    let word = match holder {
        Holder::Daemon => DAEMON,
        Holder::Release => RELEASE,
    };
    writeln!(file, "{} {word}", std::process::id())
}

fn held(file: &mut File) -> LockHolder {
    let holders = file_lock::holders(file).unwrap_or_default();
    let mut text = String::new();
    let _ = file.rewind().and_then(|()| file.take(32).read_to_string(&mut text));
    let mut words = text.split_whitespace();
    let written = words.next().and_then(|pid| pid.parse::<u32>().ok());
    // A child that the holder has just forked also has the lock, for a moment.
    let is_true = |pid: &u32| holders.contains(pid);
    let pid = written.filter(is_true).or(holders.first().copied());
    let by = words.next().filter(|_| written == pid).and_then(|word| match word {
        DAEMON => Some(Holder::Daemon),
        RELEASE => Some(Holder::Release),
        _ => None,
    });
    LockHolder { by, pid }
}

#[cfg(test)]
mod tests {
    use std::{os::unix::fs::PermissionsExt, process::Command};

    use super::*;

    #[test]
    fn a_second_daemon_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("deep/state");
        let first = StateLock::acquire(&state, Holder::Daemon).unwrap();
        let error = StateLock::acquire(&state, Holder::Daemon).unwrap_err().to_string();
        let expected = format!("another overbook daemon (pid {})", std::process::id());
        assert!(error.starts_with(&expected), "{error}");
        drop(first);
        StateLock::acquire(&state, Holder::Daemon).unwrap();
    }

    #[test]
    fn a_release_at_work_is_told_from_a_daemon() {
        let dir = tempfile::tempdir().unwrap();
        let _release = StateLock::acquire(dir.path(), Holder::Release).unwrap();
        let error = StateLock::acquire(dir.path(), Holder::Daemon).unwrap_err();
        let LockError::Held { holder, .. } = &error else { panic!("{error}") };
        assert_eq!(
            *holder,
            LockHolder { by: Some(Holder::Release), pid: Some(std::process::id()) }
        );
        assert!(error.to_string().ends_with("wait until it has ended"), "{error}");
    }

    #[test]
    fn what_an_earlier_holder_wrote_is_not_believed() {
        let dir = tempfile::tempdir().unwrap();
        let _daemon = StateLock::acquire(dir.path(), Holder::Daemon).unwrap();
        // As after a write to a full disk.
        fs::write(dir.path().join("lock"), "1 release\n").unwrap();
        let error = StateLock::acquire(dir.path(), Holder::Daemon).unwrap_err();
        let LockError::Held { holder, .. } = &error else { panic!("{error}") };
        assert_eq!(*holder, LockHolder { by: None, pid: Some(std::process::id()) });
    }

    #[test]
    fn a_child_that_a_killed_daemon_was_starting_is_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join(FILE_NAME)).unwrap();
        flock(&file, FlockOperation::NonBlockingLockExclusive).unwrap();
        // The child has the file open by now, so the lock ends with it.
        let mut child = Command::new("sleep").arg("0.2").stdin(file).spawn().unwrap();
        StateLock::acquire(dir.path(), Holder::Daemon).unwrap();
        assert!(child.wait().unwrap().success());
    }

    #[test]
    fn the_directory_is_made_for_its_owner_alone() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let _lock = StateLock::acquire(&state, Holder::Daemon).unwrap();
        assert_eq!(fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_directory_that_others_may_write_in_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o770)).unwrap();
        let error = StateLock::acquire(dir.path(), Holder::Daemon).unwrap_err().to_string();
        assert!(error.contains("has mode 0770") && error.contains("chmod go-w"), "{error}");
    }

    #[test]
    fn a_lock_file_with_garbage_in_it_is_no_obstacle() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("lock"), [0xff; 4096]).unwrap();
        let _first = StateLock::acquire(dir.path(), Holder::Daemon).unwrap();
        let error = StateLock::acquire(dir.path(), Holder::Daemon).unwrap_err().to_string();
        assert!(error.contains(&format!("pid {}", std::process::id())), "{error}");
    }

    #[test]
    fn a_file_in_the_directorys_place_is_a_clear_error() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        fs::write(&state, "").unwrap();
        let error = StateLock::acquire(&state, Holder::Daemon).unwrap_err().to_string();
        assert!(error.contains("must name a directory"), "{error}");
    }

    #[test]
    fn a_directory_that_cannot_be_made_is_a_clear_error() {
        let error = StateLock::acquire(Path::new("/proc/overbook"), Holder::Daemon)
            .unwrap_err()
            .to_string();
        assert!(error.starts_with("state directory /proc/overbook: "), "{error}");
    }
}
