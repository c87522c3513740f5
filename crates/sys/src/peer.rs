//! The process at the other end of a Unix socket.
//!
//! **Problem.** `SO_PEERCRED` gives a pid: that of the process that connected or called
//! `listen()`. If another process has the socket too, the socket outlives that process. The
//! kernel may then reuse the pid for an unrelated process.
//!
//! **Idea.** The kernel can return a pidfd for that process (`SO_PEERPIDFD`, since Linux 6.5). A
//! process that has ended is refused, and a pid is trusted only while the pidfd is held.
//!
//! **Limits.** An older kernel returns only the pid. Then the process that has it now is taken;
//! the caller may compare its start with the age of the socket ([`Peer::is_exact`]).

use std::fmt;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;

use crate::process::{self, Identity};

/// By `asm-generic/socket.h`.
const SO_PEERPIDFD: libc::c_int = 77;

/// A process that listens or has connected, held by its pidfd.
#[derive(Debug)]
pub struct Peer {
    /// The pid and start time.
    pub process: Identity,
    /// The effective user when it connected or listened.
    pub uid: u32,
    /// Whether the kernel has identified the process itself, and not only its pid.
    pub is_exact: bool,
    pidfd: OwnedFd,
}

/// The reason why a peer is unknown.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    /// The socket has outlived its process.
    #[error(
        "process {pid}, to which this socket belongs, has ended: another process keeps it open"
    )]
    Ended {
        /// The pid that it had.
        pid: u32,
        /// Its user.
        uid: u32,
    },
    /// It is in a PID namespace that is not visible to this process, or `/proc` hides it.
    #[error(
        "the process at the other end is not visible from here (another PID namespace, or /proc is \
         mounted with hidepid?)"
    )]
    Unseen {
        /// Its user.
        uid: u32,
    },
    /// Another error of the kernel.
    #[error("the process at the other end cannot be told: {0}")]
    System(#[from] io::Error),
}

impl PeerError {
    /// The user of the process, if the kernel reports it.
    #[must_use]
    pub fn uid(&self) -> Option<u32> {
        match self {
            Self::Ended { uid, .. } | Self::Unseen { uid } => Some(*uid),
            Self::System(_) => None,
        }
    }
}

impl Peer {
    /// The process at the other end of `socket`.
    ///
    /// # Errors
    /// When it has ended, or is not visible.
    pub fn of(socket: impl AsFd) -> Result<Self, PeerError> {
        let credentials = credentials(&socket)?;
        let (pid, uid) = (credentials.pid.cast_unsigned(), credentials.uid);
        if pid == 0 {
            return Err(PeerError::Unseen { uid });
        }
        let ended = || PeerError::Ended { pid, uid };
        let (pidfd, is_exact) = match pidfd_of(&socket) {
            Ok(pidfd) => (pidfd, true),
            Err(Errno::NOPROTOOPT) => match process::open_pidfd(pid) {
                Ok(pidfd) => (pidfd, false),
                Err(error) if process::is_gone(&error) => return Err(ended()),
                Err(error) => return Err(error.into()),
            },
            Err(Errno::SRCH | Errno::INVAL | Errno::NODATA) => return Err(ended()),
            Err(error) => return Err(io::Error::from(error).into()),
        };
        let process = Identity::of(pid);
        // The pid belongs to the process as long as that lives, so this is checked after the
        // start time is read.
        if process::has_ended(&pidfd) {
            return Err(ended());
        }
        // A live process without an entry in /proc is hidden (`hidepid`).
        let process = process.ok_or(PeerError::Unseen { uid })?;
        Ok(Self { process, uid, is_exact, pidfd })
    }

    /// Whether it has not ended. While it lives, no other process gets its pid.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !process::has_ended(&self.pidfd)
    }
}

/// Whether this process has a socket that listens at `path`, by the kernel's table of sockets.
#[must_use]
pub fn holds_listener(pid: u32, path: &Path) -> bool {
    /// From `linux/net.h`, in the form of the table.
    const ACCEPTS_CONNECTIONS: &[u8] = b"00010000";
    let table = std::fs::read("/proc/net/unix").unwrap_or_default();
    // Num RefCount Protocol Flags Type St Inode Path; a path may contain spaces.
    let inode_of = |line: &[u8]| {
        let mut fields = line.splitn(8, |byte| *byte == b' ').collect::<Vec<_>>().into_iter();
        let flags = fields.nth(3)?;
        let rest = [fields.nth(2)?, fields.next()?].join(&b' ');
        let rest = rest.trim_ascii_start();
        let (inode, name) = rest.split_at(rest.iter().position(|byte| *byte == b' ')?);
        let is_it = flags == ACCEPTS_CONNECTIONS && &name[1..] == path.as_os_str().as_bytes();
        is_it.then(|| format!("socket:[{}]", String::from_utf8_lossy(inode)))
    };
    let sockets: Vec<String> = table.split(|byte| *byte == b'\n').filter_map(inode_of).collect();
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    let targets = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    targets.into_iter().any(|target| sockets.iter().any(|socket| target == Path::new(socket)))
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} of user {}", self.process.pid, self.uid)
    }
}

pub(crate) fn credentials(socket: &impl AsFd) -> io::Result<libc::ucred> {
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    // Not through rustix: a peer in another PID namespace has pid 0, which its `Pid` cannot hold.
    option(socket, libc::SO_PEERCRED, &mut peer)?;
    Ok(peer)
}

fn pidfd_of(socket: &impl AsFd) -> Result<OwnedFd, Errno> {
    let mut fd: libc::c_int = -1;
    option(socket, SO_PEERPIDFD, &mut fd)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::INVAL))?;
    if fd < 0 {
        return Err(Errno::SRCH);
    }
    // SAFETY: the kernel has just made this descriptor for us, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Reads a socket option that is plain data.
fn option<T: Copy>(socket: &impl AsFd, name: libc::c_int, value: &mut T) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(size_of::<T>()).unwrap_or_default();
    // SAFETY: the kernel writes at most `length` bytes into `value`, which is plain data.
    let result = unsafe {
        let target = std::ptr::from_mut(value).cast();
        let fd = socket.as_fd().as_raw_fd();
        libc::getsockopt(fd, libc::SOL_SOCKET, name, target, &raw mut length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::process::{Command, Stdio};

    use requires::{Requirement, requires};

    use super::*;

    #[test]
    fn a_peer_that_lives_is_named_with_its_start() {
        let (one, _other) = UnixStream::pair().unwrap();
        let peer = Peer::of(&one).unwrap();
        assert_eq!(peer.process, Identity::own().unwrap());
        assert!(peer.is_alive());
        assert_eq!(peer.uid, rustix::process::geteuid().as_raw());
    }

    #[test]
    fn a_process_holds_the_sockets_at_which_it_listens() {
        let dir = tempfile::tempdir().unwrap();
        let (path, other) = (dir.path().join("with blank"), dir.path().join("other"));
        let _listener = UnixListener::bind(&path).unwrap();
        assert!(holds_listener(std::process::id(), &path));
        assert!(!holds_listener(std::process::id(), &other));
        assert!(!holds_listener(1, &path), "it is another process's");
    }

    /// The socket is bound and kept by this process; a child, which ends, has called `listen()`.
    #[test]
    fn a_socket_that_has_outlived_its_process_is_nobodys() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let script = "import socket; socket.socket(fileno=0).listen(9)";
        let child = Command::new("python3")
            .args(["-c", script])
            .stdin(Stdio::from(OwnedFd::from(listener.try_clone().unwrap())))
            .status();
        let Some(status) = requires(Requirement::Program("python3"), child) else { return };
        assert!(status.success());
        let error = Peer::of(UnixStream::connect(&path).unwrap()).unwrap_err();
        assert!(matches!(error, PeerError::Ended { .. }), "{error}");
    }

    #[test]
    fn what_is_no_socket_has_no_peer() {
        let (pipe, _writer) = io::pipe().unwrap();
        assert!(matches!(Peer::of(&pipe), Err(PeerError::System(_))));
    }
}
