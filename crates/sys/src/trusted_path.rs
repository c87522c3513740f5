//! Paths that only root and this process's user can redirect.
//!
//! **Problem.** A process with root's rights follows every path that it opens. A user who may
//! write to a directory on the path, or has put a symbolic link there, decides which file is
//! opened.
//!
//! **Idea.** The path is walked one name at a time, by descriptors. Each directory must belong to
//! root or to this process's user, and no other user may write to it. If all users may write, and
//! only an owner may rename (`/tmp`: the sticky bit), the entry must belong to root or to this
//! user. Symbolic links are followed if that holds: root made them (LVM's names of disks, for
//! example). The file at the end is opened without following a link. So the file that was checked
//! is the one that is opened.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, RawMode, Stat, fstat, openat, readlinkat, statat,
};
use rustix::io::Errno;
use rustix::process::geteuid;

/// The most symbolic links in one path, as in the kernel.
const MOST_LINKS: usize = 40;
/// Group or others may write.
const OTHERS_WRITE: RawMode = 0o022;
const STICKY: RawMode = 0o1000;

/// The reason why a path is not trusted, or leads nowhere.
#[derive(Debug, thiserror::Error)]
pub enum TrustedPathError {
    /// A directory of the path does not exist.
    #[error("the directory {} does not exist: make it", .0.display())]
    Missing(PathBuf),
    /// The path is not absolute, or has no file name at the end.
    #[error("{} is no path of a file that begins with /", .0.display())]
    NoFile(PathBuf),
    /// Others may write to a directory of the path.
    #[error(
        "the directory {} has mode {mode:04o}: others than its owner may write to it, and choose \
         which file this is (chmod go-w)", .path.display()
    )]
    Writable {
        /// The directory.
        path: PathBuf,
        /// Its mode.
        mode: RawMode,
    },
    /// Another user could redirect the path.
    #[error(
        "{} belongs to user {owner}, who can put another file in its place: let it belong to root",
        .path.display()
    )]
    Foreign {
        /// The entry that belongs to that user.
        path: PathBuf,
        /// That user.
        owner: u32,
    },
    /// There are too many symbolic links.
    #[error("{} has more than {MOST_LINKS} symbolic links", .0.display())]
    Links(PathBuf),
    /// Another error of the kernel.
    #[error("{}: {error}", .path.display())]
    Io {
        /// The entry.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}

/// A checked path to a file.
#[derive(Debug)]
pub struct TrustedPath {
    /// The directory of the file.
    directory: OwnedFd,
    /// The directory's path, with links followed.
    shown: PathBuf,
    name: OsString,
    /// The entry there; `None` if it does not exist.
    found: Option<Stat>,
}

impl TrustedPath {
    /// Walks an absolute path of a file, which need not exist.
    ///
    /// # Errors
    ///
    /// The reason why the path is not trusted, or leads nowhere.
    pub fn walk(path: &Path) -> Result<Self, TrustedPathError> {
        let mut names = names(path);
        if !path.is_absolute() || names.is_empty() {
            return Err(TrustedPathError::NoFile(path.to_owned()));
        }
        let (mut at, mut shown) = root()?;
        let mut links = 0;
        while let Some(name) = names.pop_front() {
            let here = shown.join(&name);
            let failed =
                |error: Errno| TrustedPathError::Io { path: here.clone(), error: error.into() };
            let found = match statat(&at, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Err(Errno::NOENT) if names.is_empty() => {
                    return Ok(Self { directory: at, shown, name, found: None });
                }
                Err(Errno::NOENT) => return Err(TrustedPathError::Missing(here)),
                found => found.map_err(failed)?,
            };
            // In directories where others may make entries, theirs are not followed.
            if fstat(&at).map_err(failed)?.st_mode & OTHERS_WRITE != 0 {
                is_ours(&found, &here)?;
            }
            match FileType::from_raw_mode(found.st_mode) {
                FileType::Symlink => {
                    links += 1;
                    if links > MOST_LINKS {
                        return Err(TrustedPathError::Links(path.to_owned()));
                    }
                    let target = readlinkat(&at, &name, Vec::new()).map_err(failed)?;
                    let target = PathBuf::from(OsStr::from_bytes(target.as_bytes()));
                    if target.is_absolute() {
                        (at, shown) = root()?;
                    }
                    let mut target = self::names(&target);
                    target.extend(names);
                    names = target;
                }
                FileType::Directory if !names.is_empty() => {
                    at = directory(&at, &name).map_err(failed)?;
                    shown = if name == ".." { parent(&shown) } else { here };
                    is_trusted(&at, &shown)?;
                }
                _ if !names.is_empty() => return Err(failed(Errno::NOTDIR)),
                _ => return Ok(Self { directory: at, shown, name, found: Some(found) }),
            }
        }
        Err(TrustedPathError::NoFile(path.to_owned()))
    }

    /// The entry that was found; `None` if it did not exist.
    #[must_use]
    pub fn found(&self) -> Option<&Stat> {
        self.found.as_ref()
    }

    /// The directory of the file.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.shown
    }

    /// The open directory (`O_PATH`).
    #[must_use]
    pub fn directory_handle(&self) -> impl AsFd + '_ {
        &self.directory
    }

    /// Opens the file; no link is followed any more.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn open(&self, flags: OFlags) -> io::Result<File> {
        // `NONBLOCK`: a pipe that was put there since must not block the open.
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
        Ok(openat(&self.directory, &self.name, flags, Mode::empty())?.into())
    }

    /// Creates a file that only its owner may read and write; there must be none.
    ///
    /// # Errors
    ///
    /// The kernel's; `EEXIST`: there is an entry.
    pub fn create(&self) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        Ok(openat(&self.directory, &self.name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Removes the file that [`TrustedPath::create`] has made.
    ///
    /// # Errors
    ///
    /// The kernel's.
    pub fn remove(&self) -> io::Result<()> {
        Ok(rustix::fs::unlinkat(&self.directory, &self.name, AtFlags::empty())?)
    }
}

fn names(path: &Path) -> VecDeque<OsString> {
    let name = |component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().filter_map(name).collect()
}

fn parent(path: &Path) -> PathBuf {
    path.parent().unwrap_or(path).to_owned()
}

fn root() -> Result<(OwnedFd, PathBuf), TrustedPathError> {
    let path = PathBuf::from("/");
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(&path, flags, Mode::empty());
    let root =
        opened.map_err(|error| TrustedPathError::Io { path: path.clone(), error: error.into() })?;
    is_trusted(&root, &path)?;
    Ok((root, path))
}

fn directory(at: &OwnedFd, name: &OsStr) -> Result<OwnedFd, Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(at, name, flags, Mode::empty())
}

fn is_ours(found: &Stat, path: &Path) -> Result<(), TrustedPathError> {
    let ours = [0, geteuid().as_raw()];
    if ours.contains(&found.st_uid) {
        return Ok(());
    }
    Err(TrustedPathError::Foreign { path: path.to_owned(), owner: found.st_uid })
}

fn is_trusted(directory: &OwnedFd, path: &Path) -> Result<(), TrustedPathError> {
    let found = fstat(directory)
        .map_err(|error| TrustedPathError::Io { path: path.to_owned(), error: error.into() })?;
    is_ours(&found, path)?;
    let mode = found.st_mode & 0o7777;
    if mode & OTHERS_WRITE != 0 && mode & STICKY == 0 {
        return Err(TrustedPathError::Writable { path: path.to_owned(), mode });
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use requires::{Requirement, requires};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_file_is_found_made_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub").join("file");
        let missing = TrustedPath::walk(&path).unwrap_err().to_string();
        assert!(missing.contains("/sub does not exist"), "{missing}");
        fs::create_dir(dir.path().join("sub")).unwrap();
        let way = TrustedPath::walk(&path).unwrap();
        assert!(way.found().is_none());
        way.create().unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(way.create().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let again = TrustedPath::walk(&dir.path().join("sub/../sub/./file")).unwrap();
        assert!(again.found().is_some() && again.open(OFlags::RDWR).is_ok());
        way.remove().unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn links_are_followed_where_nobody_else_can_have_made_them_and_never_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let (file, link) = (dir.path().join("file"), dir.path().join("link"));
        fs::write(&file, "right").unwrap();
        symlink("file", &link).unwrap();
        let way = TrustedPath::walk(&link).unwrap();
        assert_eq!(io::read_to_string(way.open(OFlags::RDONLY).unwrap()).unwrap(), "right");
        // A link that is put there after the walk is not followed.
        let way = TrustedPath::walk(&file).unwrap();
        fs::remove_file(&file).unwrap();
        symlink("/etc/passwd", &file).unwrap();
        assert!(way.open(OFlags::RDONLY).is_err());
        fs::remove_file(&file).unwrap();
        symlink("link", &file).unwrap();
        assert!(matches!(TrustedPath::walk(&file), Err(TrustedPathError::Links(_))));
    }

    #[test]
    fn a_way_that_others_can_change_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let sub = dir.path().join("sub");
        fs::create_dir(&sub).unwrap();
        fs::write(sub.join("file"), "").unwrap();
        set_mode(&sub, 0o777);
        let error = TrustedPath::walk(&sub.join("file")).unwrap_err().to_string();
        assert!(error.contains("/sub has mode 0777"), "{error}");
        set_mode(&sub, 0o1777);
        assert!(TrustedPath::walk(&sub.join("file")).is_ok());
        let Some(()) = requires(Requirement::Root, requires::root()) else { return };
        chown(sub.join("file"), Some(65534), None).unwrap();
        assert!(matches!(
            TrustedPath::walk(&sub.join("file")),
            Err(TrustedPathError::Foreign { .. })
        ));
        set_mode(&sub, 0o755);
        assert!(TrustedPath::walk(&sub.join("file")).is_ok());
        chown(&sub, Some(65534), None).unwrap();
        let error = TrustedPath::walk(&sub.join("file")).unwrap_err().to_string();
        assert!(error.contains("/sub belongs to user 65534"), "{error}");
    }
}
