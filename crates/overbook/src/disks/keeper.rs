//! The keeper: holds the disks' sockets, and starts again what serves them.
//!
//! Problem: QEMU tries a socket that nobody listens on again after one second, then two, four, up
//! to sixteen: a guest would wait long after its disk is back. Idea: the sockets outlive who serves
//! them. This process binds them and does nothing else; whoever it starts inherits them. While
//! there is nobody, QEMU is connected already, and waits no longer than the start takes.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use model::spec::DiskSpec;
use model::{GroupName, Spec};
use pageserver::layers::file::File;
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use signal_hook::consts::{SIGINT, SIGTERM};
use sys::process::{Child, Spawn};

use super::{DisksError, STATUS, status_socket};
use crate::config_files;

/// How soon an end that was asked for is noticed.
const LOOK: Duration = Duration::from_millis(200);
/// How long who serves may take to end.
const END: Duration = Duration::from_secs(10);
/// Who ended sooner than this after his start is started again a little later each time.
const SHORT: Duration = Duration::from_secs(1);
const DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A socket, and whose it is.
struct Socket {
    name: String,
    listener: UnixListener,
}

/// Keeps the disks of `group` served until it is asked to end.
pub(super) fn run(config: &Path, group: &GroupName) -> Result<(), DisksError> {
    let spec = config_files::load(config)?;
    let own: Vec<(&String, &DiskSpec)> = spec.disks_of(group).collect();
    if own.is_empty() {
        return Err(DisksError::None { group: group.to_string(), others: others(&spec) });
    }
    let directory = spec.disk_directory();
    DirBuilder::new()
        .recursive(true)
        .mode(0o711)
        .create(&directory)
        .map_err(unusable("directory", &directory))?;
    // Whoever has this may remove sockets that somebody left behind.
    let lock = directory.join(format!("{group}.lock"));
    let held = fs::File::create(&lock).map_err(unusable("lock", &lock))?;
    flock(&held, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| DisksError::Served(group.to_string()))?;
    let mut sockets = Vec::new();
    for (name, disk) in own {
        // So that it has an owner.
        drop(File::create(&disk.file, disk.size.0).map_err(unusable("file", &disk.file))?);
        let owner = fs::metadata(&disk.file).map_err(unusable("file", &disk.file))?;
        let path = spec.disk_socket(name);
        let listener = listen(&path, (owner.uid(), owner.gid()));
        let listener = listener.map_err(unusable("socket", &path))?;
        eprintln!("overbook: disk {name} of {} at {}", disk.vm, path.display());
        sockets.push(Socket { name: name.clone(), listener });
    }
    let path = status_socket(&spec, group);
    let us = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let listener = listen(&path, us).map_err(unusable("socket", &path))?;
    sockets.push(Socket { name: STATUS.to_owned(), listener });
    keep(config, group, &sockets)
}

fn keep(config: &Path, group: &GroupName, sockets: &[Socket]) -> Result<(), DisksError> {
    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [SIGTERM, SIGINT] {
        signal_hook::flag::register(signal, is_over.clone())?;
    }
    let mut delay = DELAYS.0;
    loop {
        let begun = Instant::now();
        let mut child = serve(config, group, sockets)?;
        let status = loop {
            if is_over.load(Ordering::Relaxed) {
                child.end(END)?;
                return Ok(());
            }
            if let Some(status) = child.wait_for(LOOK)? {
                break status;
            }
        };
        eprintln!("overbook: what serves the disks of group {group} has ended: {status}");
        delay = if begun.elapsed() < SHORT { (2 * delay).min(DELAYS.1) } else { DELAYS.0 };
        std::thread::sleep(delay);
    }
}

/// Starts who serves; it ends with this process.
fn serve(config: &Path, group: &GroupName, sockets: &[Socket]) -> io::Result<Child> {
    let mut spawn = Spawn::new(std::env::current_exe()?).arg("--config").arg(config);
    spawn = spawn.args(["disks", group.as_str()]);
    for Socket { name, listener } in sockets {
        // Left open for the child, under the number that it has here.
        fcntl_setfd(listener.as_fd(), FdFlags::empty())?;
        spawn = spawn.arg("--inherited").arg(format!("{name}={}", listener.as_raw_fd()));
    }
    spawn.die_with_parent().spawn()
}

/// The groups that have disks.
fn others(spec: &Spec) -> String {
    let owners = spec.disks.values().filter_map(|disk| spec.group_of(&disk.vm));
    let mut others: Vec<String> = owners.map(|(group, _)| format!("`{group}`")).collect();
    others.sort();
    others.dedup();
    if others.is_empty() { "none".to_owned() } else { others.join(", ") }
}

fn unusable(what: &'static str, path: &Path) -> impl Fn(io::Error) -> DisksError {
    let path = path.to_owned();
    move |error| DisksError::File { what, path: path.clone(), error }
}

/// A socket for its owner alone, in place of one that somebody left behind.
fn listen(socket: &Path, (user, group): (u32, u32)) -> io::Result<UnixListener> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Under another name until it is its owner's alone.
    let hidden = socket.with_extension("new");
    let _ = fs::remove_file(&hidden);
    let listener = UnixListener::bind(&hidden)?;
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))?;
    chown(&hidden, Some(user), Some(group))?;
    fs::rename(&hidden, socket)?;
    Ok(listener)
}
