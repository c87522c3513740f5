//! The keeper: holds the disks' sockets, and restarts the process that serves them.
//!
//! Problem: if no process listens on a socket, QEMU retries after one second, then two, four, up
//! to sixteen. So a guest would wait long after its disk is back. Idea: the sockets outlive the
//! process that serves them. The keeper only binds them; its child inherits them. If no child
//! runs, QEMU is connected already, and only waits until the next child has started. The keeper
//! also opens the disks' files, once: the child gets descriptors, and no paths.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use model::spec::DiskSpec;
use model::{GroupName, Spec};
use rustix::fs::{FlockOperation, flock};
use signal_hook::consts::{SIGINT, SIGTERM};
use sys::log;
use sys::process::{Child, Spawn};

use super::{DisksError, STATUS, files, status_socket};

/// How soon a signal to end is noticed.
const LOOK: Duration = Duration::from_millis(200);
/// How long the serving process may take to end.
const END: Duration = Duration::from_secs(10);
/// A child that ends sooner than this after its start is restarted with an increasing delay.
const SHORT: Duration = Duration::from_secs(1);
const DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A socket and the disk that it serves.
struct Socket {
    name: String,
    listener: UnixListener,
    /// The disk's file; `None` for the status socket.
    file: Option<fs::File>,
    /// The user that the socket belongs to.
    user: u32,
}

/// Keeps the disks of `group` served until it is asked to end.
pub(super) fn run(config: &Path, spec: &Spec, group: &GroupName) -> Result<(), DisksError> {
    let own: Vec<(&String, &DiskSpec)> = spec.disks_of(group).collect();
    if own.is_empty() {
        return Err(DisksError::None { group: group.to_string(), others: others(spec) });
    }
    let directory = spec.disk_directory();
    make_directory(&directory).map_err(unusable("directory", &directory))?;
    // Files and sockets created from here on are accessible to their owner alone.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    // The holder of this lock may remove sockets that an earlier process has left behind.
    let lock = directory.join(format!("{group}.lock"));
    let held = fs::File::create(&lock).map_err(unusable("lock", &lock))?;
    flock(&held, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| DisksError::Served(group.to_string()))?;
    let mut sockets = Vec::new();
    for (name, disk) in own {
        let opened = files::open(disk);
        let file = opened.map_err(|error| DisksError::Disk { disk: name.clone(), error })?;
        for news in &file.news {
            log::warn(&format!("disk {name}: {news}"));
        }
        let path = spec.disk_socket(name);
        let listener = listen(&path, file.owner).map_err(unusable("socket", &path))?;
        log::info(&format!("disk {name} of {} at {}", disk.vm, path.display()));
        let (handle, user) = (Some(file.handle), file.owner.0);
        sockets.push(Socket { name: name.clone(), listener, file: handle, user });
    }
    let path = status_socket(spec, group);
    let us = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let listener = listen(&path, us).map_err(unusable("socket", &path))?;
    sockets.push(Socket { name: STATUS.to_owned(), listener, file: None, user: us.0 });
    keep(config, group, &sockets)
}

/// Creates the directory of the sockets: all users may enter it, and only its owner may change
/// it.
fn make_directory(path: &Path) -> io::Result<()> {
    if path.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o711).create(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o711))
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
        log::warn(&format!("what serves the disks of group {group} has ended: {status}"));
        delay = if begun.elapsed() < SHORT { (2 * delay).min(DELAYS.1) } else { DELAYS.0 };
        std::thread::sleep(delay);
    }
}

/// Starts the serving process, which ends with this one.
fn serve(config: &Path, group: &GroupName, sockets: &[Socket]) -> io::Result<Child> {
    // Always runs this same program, even after an upgrade has replaced its file.
    let mut spawn = Spawn::new("/proc/self/exe").arg("--config").arg(config);
    spawn = spawn.args(["disks", group.as_str()]);
    for Socket { name, listener, file, user } in sockets {
        let mut inherited = format!("{name}={},{user}", spawn.pass(listener)?);
        if let Some(file) = file {
            inherited += &format!(",{}", spawn.pass(file)?);
        }
        spawn = spawn.arg("--inherited").arg(inherited);
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

/// Creates a socket for its owner alone, and replaces one that an earlier process has left
/// behind.
fn listen(socket: &Path, (user, group): (u32, u32)) -> io::Result<UnixListener> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // The socket has a temporary name until only its owner can use it.
    let hidden = socket.with_extension("new");
    let _ = fs::remove_file(&hidden);
    let listener = UnixListener::bind(&hidden)?;
    fs::set_permissions(&hidden, fs::Permissions::from_mode(0o600))?;
    chown(&hidden, Some(user), Some(group))?;
    fs::rename(&hidden, socket)?;
    Ok(listener)
}
