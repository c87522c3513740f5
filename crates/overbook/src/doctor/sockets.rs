//! The files that `qmp` names, and which processes listen there. Nothing connects to them: a QMP
//! socket serves one client at a time, and that may be a manager's or the daemon's.
//!
//! The kernel lists the unix sockets of a network namespace by the path at which they were bound
//! (`/proc/net/unix`). A path may lead through links, so files are compared, not paths. These
//! tables are never complete: a listener may be in a namespace of a process that is not looked at.
//! So only the kernel's answer for the file itself proves that no process listens ([`refuses`]).

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// Most files that are looked at: other users may be able to make more.
const MOST: usize = 16 << 10;
/// Flags of a socket that accepts connections.
const LISTENS: &str = "00010000";
/// State of a socket with a client.
const CONNECTED: &str = "03";

/// A file that a glob of `qmp` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SocketFile {
    pub(super) path: PathBuf,
    pub(super) state: SocketState,
}

/// The state of such a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SocketState {
    /// Sockets with these inodes listen there; none: it is not known which.
    Listens { inodes: BTreeSet<u64>, has_client: bool },
    /// A socket at which surely no process listens.
    Stale,
    /// It is no socket.
    NoSocket,
}

/// A line of `/proc/net/unix` with a path.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SocketLine {
    path: PathBuf,
    inode: u64,
    listens: bool,
    is_connected: bool,
}

/// The files that these globs name. `pids`: processes whose network namespaces may be others.
pub(super) fn survey(globs: &[String], pids: &[u32]) -> Vec<SocketFile> {
    let paths: BTreeSet<PathBuf> = globs
        .iter()
        .filter_map(|glob| glob::glob(glob).ok())
        .flat_map(|paths| paths.flatten().take(MOST))
        .filter(|path| path.symlink_metadata().is_ok_and(|meta| !meta.is_dir()))
        .collect();
    let tables = std::iter::once("/proc/net/unix".to_owned())
        .chain(in_other_networks(pids).map(|pid| format!("/proc/{pid}/net/unix")));
    let lines: Vec<SocketLine> = tables
        .filter_map(|table| std::fs::read(table).ok())
        .flat_map(|bytes| lines(&String::from_utf8_lossy(&bytes)))
        .collect();
    let mut by_file: BTreeMap<(u64, u64), Vec<&SocketLine>> = BTreeMap::new();
    for line in &lines {
        // A path that is relative to a process's directory leads to no file from here.
        if let Some(file) = file_of(&line.path).filter(|_| line.path.is_absolute()) {
            by_file.entry(file).or_default().push(line);
        }
    }
    paths.into_iter().map(|path| SocketFile { state: state(&path, &by_file), path }).collect()
}

fn state(path: &Path, by_file: &BTreeMap<(u64, u64), Vec<&SocketLine>>) -> SocketState {
    if !path.symlink_metadata().is_ok_and(|meta| meta.file_type().is_socket()) {
        return SocketState::NoSocket;
    }
    let of_file = file_of(path).and_then(|file| by_file.get(&file)).into_iter().flatten();
    let inodes: BTreeSet<u64> =
        of_file.clone().filter(|line| line.listens).map(|line| line.inode).collect();
    if inodes.is_empty() && refuses(path) {
        return SocketState::Stale;
    }
    let has_client = of_file.clone().any(|line| line.is_connected);
    SocketState::Listens { inodes, has_client }
}

/// Whether no process of any namespace listens at the file. `false` also where that is not known.
///
/// A datagram socket cannot connect to a stream socket. The kernel tells that by another error than
/// the absence of a listener, and the listener hears nothing of it.
fn refuses(path: &Path) -> bool {
    let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
    let address = SocketAddrUnix::new(path);
    let (Ok(socket), Ok(address)) = (socket, address) else { return false };
    connect(&socket, &address) == Err(Errno::CONNREFUSED)
}

fn file_of(path: &Path) -> Option<(u64, u64)> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino()))
}

/// Those of the processes that are in another network namespace than this process.
fn in_other_networks(pids: &[u32]) -> impl Iterator<Item = u32> {
    pids.iter().copied().filter(|pid| is_in_other_network(*pid))
}

/// Whether a process is in another network namespace than this process. `false` also for a process
/// that this one may not look at.
pub(super) fn is_in_other_network(pid: u32) -> bool {
    let of = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
    of(&pid.to_string()).is_some_and(|found| Some(found) != of("self"))
}

/// Num RefCount Protocol Flags Type St Inode Path; a path may contain spaces.
fn lines(table: &str) -> Vec<SocketLine> {
    let line = |text: &str| {
        let mut rest = text;
        let mut words = Vec::new();
        for _ in 0..7 {
            let (word, after) = rest.trim_start().split_once(' ')?;
            words.push(word);
            rest = after;
        }
        // An abstract address begins with `@`.
        (!rest.is_empty() && !rest.starts_with('@')).then_some(())?;
        Some(SocketLine {
            path: PathBuf::from(rest),
            inode: words[6].parse().ok()?,
            listens: words[3] == LISTENS,
            is_connected: words[5] == CONNECTED,
        })
    };
    table.lines().skip(1).filter_map(line).collect()
}

/// The inodes of the sockets that a process has open. Empty: none, or they are not visible.
pub(super) fn inodes_of(pid: u32) -> BTreeSet<u64> {
    let inode = |link: PathBuf| {
        let link = link.to_str()?.to_owned();
        link.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    super::look::links(pid).filter_map(inode).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn files_are_told_apart_and_nothing_connects() {
        let dir = tempfile::tempdir().unwrap();
        let dir = std::fs::canonicalize(dir.path()).unwrap();
        let at = |name: &str| dir.join(name);
        std::os::unix::fs::symlink(&dir, at("link")).unwrap();
        let listener = UnixListener::bind(at("link/a b.sock")).unwrap();
        drop(UnixListener::bind(at("b.sock")).unwrap());
        std::fs::write(at("c.sock"), "").unwrap();
        let globs = [format!("{}/*.sock", dir.display())];
        let found = survey(&globs, &[std::process::id()]);
        let states: Vec<_> = found.iter().map(|file| &file.state).collect();
        let [
            SocketState::Listens { inodes, has_client: false },
            SocketState::Stale,
            SocketState::NoSocket,
        ] = states[..]
        else {
            panic!("{found:?}")
        };
        assert_eq!(inodes.len(), 1);
        assert!(inodes.is_subset(&inodes_of(std::process::id())));
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "nothing has connected");
        let _client = UnixStream::connect(at("a b.sock")).unwrap();
        let _server = listener.accept().unwrap();
        let found = survey(&globs, &[]);
        assert!(
            matches!(found[0].state, SocketState::Listens { has_client: true, .. }),
            "{found:?}"
        );
    }

    #[test]
    fn a_listener_that_no_table_names_keeps_its_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let state_of = || state(&path, &BTreeMap::new());
        let unknown = SocketState::Listens { inodes: BTreeSet::new(), has_client: false };
        assert_eq!(state_of(), unknown);
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "nothing has connected");
        drop(listener);
        assert_eq!(state_of(), SocketState::Stale);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(state_of(), SocketState::NoSocket);
    }

    #[test]
    fn tables_are_read_leniently() {
        let table = "Num       RefCount Protocol Flags    Type St Inode Path\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 12345 /run/a b.sock\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 12346 /run/a b.sock\n\
            0000000000000000: 00000003 00000000 00000000 0001 03 12347\n\
            0000000000000000: 00000002 00000000 00010000 0001 01 12348 @abstract\nx\n";
        let found = lines(table);
        assert_eq!(found.len(), 2);
        assert!(found[0].listens && !found[0].is_connected && found[0].inode == 12345);
        assert!(found[1].is_connected && found[1].path == Path::new("/run/a b.sock"));
    }
}
