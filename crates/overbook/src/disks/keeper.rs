//! The keeper: holds the disks' sockets, and starts again what serves them.
//!
//! Problem: QEMU tries a socket that nobody listens on again after one second, then two, four, up
//! to sixteen: a guest would wait long after its disk is back. Idea: the sockets outlive the
//! process that serves them. The keeper binds them and does nothing else; its child inherits them.
//! While no child runs, QEMU is connected already, and waits no longer than the start takes. The
//! keeper opens the disks' files as well, once: the child gets descriptors, and no path.

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
use sys::process::{Child, Spawn};

use super::{DisksError, STATUS, files, status_socket};
use crate::config_files;

/// How soon an end that was asked for is noticed.
const LOOK: Duration = Duration::from_millis(200);
/// How long who serves may take to end.
const END: Duration = Duration::from_secs(10);
/// Who ended sooner than this after his start is started again a little later each time.
const SHORT: Duration = Duration::from_secs(1);
const DELAYS: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// A socket, and what it serves.
struct Socket {
    name: String,
    listener: UnixListener,
    /// The disk's file; `None`: it is the status'.
    file: Option<fs::File>,
    /// The user that it belongs to.
    user: u32,
}

/// Keeps the disks of `group` served until it is asked to end.
pub(super) fn run(config: &Path, group: &GroupName) -> Result<(), DisksError> {
    let spec = config_files::load(config)?;
    let own: Vec<(&String, &DiskSpec)> = spec.disks_of(group).collect();
    if own.is_empty() {
        return Err(DisksError::None { group: group.to_string(), others: others(&spec) });
    }
    let directory = spec.disk_directory();
    make_directory(&directory).map_err(unusable("directory", &directory))?;
    // From here on whatever is made is for its owner alone.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
    // Whoever has this may remove sockets that somebody left behind.
    let lock = directory.join(format!("{group}.lock"));
    let held = fs::File::create(&lock).map_err(unusable("lock", &lock))?;
    flock(&held, FlockOperation::NonBlockingLockExclusive)
        .map_err(|_| DisksError::Served(group.to_string()))?;
    let mut sockets = Vec::new();
    for (name, disk) in own {
        let opened = files::open(disk);
        let file = opened.map_err(|error| DisksError::Disk { disk: name.clone(), error })?;
        for news in &file.news {
            eprintln!("overbook: disk {name}: {news}");
        }
        let path = spec.disk_socket(name);
        let listener = listen(&path, file.owner).map_err(unusable("socket", &path))?;
        eprintln!("overbook: disk {name} of {} at {}", disk.vm, path.display());
        let (handle, user) = (Some(file.handle), file.owner.0);
        sockets.push(Socket { name: name.clone(), listener, file: handle, user });
    }
    let path = status_socket(&spec, group);
    let us = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let listener = listen(&path, us).map_err(unusable("socket", &path))?;
    sockets.push(Socket { name: STATUS.to_owned(), listener, file: None, user: us.0 });
    keep(config, group, &sockets)
}

/// The directory of the sockets: everybody may go through it, and only its owner may change it.
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
        eprintln!("overbook: what serves the disks of group {group} has ended: {status}");
        delay = if begun.elapsed() < SHORT { (2 * delay).min(DELAYS.1) } else { DELAYS.0 };
        std::thread::sleep(delay);
    }
}

/// Starts who serves; it ends with this process.
fn serve(config: &Path, group: &GroupName, sockets: &[Socket]) -> io::Result<Child> {
    let mut spawn = Spawn::new(std::env::current_exe()?).arg("--config").arg(config);
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
