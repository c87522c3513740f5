//! Opens files without following symbolic links.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// A descriptor of the file itself, for `fstat` and paths below `/proc/self/fd`. The file is not
/// opened for I/O.
///
/// # Errors
/// The kernel's; `ELOOP`: the file, or a directory on the way, is a symbolic link.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let opened = rustix::fs::openat2(CWD, path, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS);
    let file = match opened {
        // Before Linux 5.6: at least the file itself is no link.
        Err(Errno::NOSYS) => rustix::fs::open(path, flags, Mode::empty()),
        opened => opened,
    }?;
    let kind = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode);
    if kind == FileType::Symlink { Err(Errno::LOOP.into()) } else { Ok(file) }
}

/// Whether there is a socket at this path.
#[must_use]
pub fn is_socket(path: &Path) -> bool {
    let kind = open(path).and_then(|file| Ok(rustix::fs::fstat(&file)?.st_mode));
    kind.is_ok_and(|mode| FileType::from_raw_mode(mode) == FileType::Socket)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn neither_a_link_nor_what_lies_behind_one_is_opened() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::create_dir(at("web")).unwrap();
        let _listener = UnixListener::bind(at("web/a.sock")).unwrap();
        symlink("a.sock", at("web/b.sock")).unwrap();
        symlink("web", at("db")).unwrap();
        assert!(is_socket(&at("web/a.sock")) && !is_socket(&at("web")));
        for path in ["web/b.sock", "db/a.sock"] {
            assert!(!is_socket(&at(path)), "{path}");
            let error = open(&at(path)).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(Errno::LOOP.raw_os_error()), "{path}");
        }
        assert_eq!(open(&at("c")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
