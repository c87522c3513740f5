//! Finds VMs: one task per QMP socket that the configured globs name.
//!
//! The globs are evaluated every [`EVERY`]. A new socket gets a slot and a task; a slot loses
//! both when its QEMU has ended and its socket is gone. A socket that outlived its QEMU keeps its
//! task, which tries it now and then, and is not shown.
//!
//! A QEMU without such a socket is found by its process ([`process_vm`]), unless the operator has
//! switched that off. So is each domain of libvirt. Such a slot is removed when a socket of it is
//! found.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use glob::Pattern;
use sys::no_links;
use tokio::sync::watch;
use tokio::task::{AbortHandle, spawn_blocking};
use tokio::time::timeout;

use super::shared::DriverState;
use super::slot::Slot;
use super::tenant::place::makers_in;
use super::vm;
use super::{identity, is_first_contact, process_vm};

/// Maximum number of sockets per directory: a directory that QEMUs can write to may hold any
/// number.
const MOST_SOCKETS: usize = 4096;
/// Maximum number of directories: where QEMUs can create some, there may be any number.
const MOST_DIRECTORIES: usize = 1024;
/// Interval at which the globs are evaluated.
const EVERY: Duration = Duration::from_secs(2);
/// Processes are searched once in this number of intervals: a host may have thousands.
const PROCESSES_EVERY: u32 = 5;
/// Pause for sockets that have not been asked yet, before processes are searched.
const SOON: Duration = Duration::from_millis(500);
/// Maximum number of these pauses.
const MOST_WAITS: u32 = 12;

/// An invalid glob.
#[derive(Debug, thiserror::Error)]
#[error("`{glob}` is no glob: {why}; write for example \"/run/qemu/*.qmp\"")]
pub struct GlobError {
    /// The glob as written.
    pub glob: String,
    /// The error in it.
    pub why: &'static str,
}

/// Rejects globs that [`find`] could not use.
pub fn check(globs: &[String]) -> Result<(), GlobError> {
    for glob in globs {
        Pattern::new(glob).map_err(|error| GlobError { glob: glob.clone(), why: error.msg })?;
    }
    Ok(())
}

/// Matches tasks to sockets until it is aborted; its tasks end with it.
pub(super) async fn run(shared: Arc<DriverState>, mut places: watch::Receiver<Places>) {
    let (mut tasks, mut looks, mut waits) = (Tasks::default(), 0_u32, 0_u32);
    shared.records.strike_the_dead().await;
    loop {
        let now = places.borrow_and_update().clone();
        // The searches read directories, so they run on threads that may block.
        let globs = now.globs.clone();
        let Ok(sockets) = spawn_blocking(move || find(&globs)).await else { return };
        let mut found = Found { sockets, processes: None };
        let mut is_any_gone = tasks.follow(&shared, &found);
        // A socket that has not been asked yet may belong to any process. Some sockets may always
        // be new.
        let is_due = looks.is_multiple_of(PROCESSES_EVERY) || is_any_listed_twice(&shared);
        let by_socket = is_due.then(|| by_socket(&shared, waits < MOST_WAITS)).flatten();
        waits = if is_due && by_socket.is_none() { waits + 1 } else { 0 };
        // If a socket has not been asked yet, the next round tries again.
        looks = looks.wrapping_add(u32::from(!is_due || by_socket.is_some()));
        if let Some(known) = by_socket {
            let domains = shared.domains.pids();
            let search = move || processes(now.processes, &known, domains);
            let Ok(processes) = spawn_blocking(search).await else { return };
            found.processes = Some(processes);
            is_any_gone |= tasks.follow(&shared, &found);
            shared.searched();
        }
        if is_due {
            shared.forget_names(identity::has_ended);
        }
        if is_any_gone {
            shared.records.strike_the_dead().await;
        }
        // New globs end the wait early. An error means that no globs can be set any more.
        let pause = if waits > 0 { SOON } else { EVERY };
        if let Ok(Err(_)) = timeout(pause, places.changed()).await {
            return;
        }
    }
}

/// Where to look for VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    /// Globs of QMP sockets.
    pub(super) globs: Vec<String>,
    /// Whether QEMUs are also found by their processes.
    pub(super) processes: bool,
}

/// Processes of the VMs whose sockets were found; `None`: the process of one is not known yet.
fn by_socket(shared: &DriverState, may_wait: bool) -> Option<BTreeSet<u32>> {
    let slots = shared.slots();
    let sockets = slots.values().filter(|slot| !process_vm::is_place(&slot.path));
    let mut known = BTreeSet::new();
    for slot in sockets {
        let state = slot.state();
        if may_wait && is_first_contact(&state.view.link) {
            return None;
        }
        known.extend(state.view.pid);
    }
    Some(known)
}

/// Whether a VM is known by its process, and by now also by a socket.
fn is_any_listed_twice(shared: &DriverState) -> bool {
    let slots = shared.slots();
    let of = |is_place: bool| {
        let wanted = slots.values().filter(move |it| process_vm::is_place(&it.path) == is_place);
        wanted.filter_map(|slot| slot.state().view.pid).collect::<BTreeSet<_>>()
    };
    !of(true).is_disjoint(&of(false))
}

/// Keys of the VMs without a socket; `known`: processes behind sockets, `domains`: those of
/// libvirt's domains. `others`: whether all other QEMUs count too.
fn processes(others: bool, known: &BTreeSet<u32>, mut domains: BTreeSet<u32>) -> Vec<PathBuf> {
    domains.retain(|pid| !known.contains(pid));
    if others {
        domains.extend(process_vm::find(known));
    }
    domains.into_iter().map(process_vm::place_of).collect()
}

struct Found {
    sockets: Vec<PathBuf>,
    /// `None`: known ones stay, and no new one is added.
    processes: Option<Vec<PathBuf>>,
}

impl Found {
    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.sockets.iter().chain(self.processes.iter().flatten())
    }
}

/// The sockets that exist now, by paths without symbolic links. Links before a glob's first
/// wildcard were made by the operator and are followed; after it, other users may have made them.
pub(super) fn find(globs: &[String]) -> Vec<PathBuf> {
    let found = globs.iter().filter_map(|glob| glob::glob(&without_links(glob)).ok());
    let mut counts: BTreeMap<PathBuf, usize> = BTreeMap::new();
    let mut has_room = |path: &PathBuf| {
        let count = counts.entry(path.parent().unwrap_or(Path::new("/")).to_owned()).or_default();
        *count += 1;
        *count <= MOST_SOCKETS
    };
    let sockets = found.flatten().flatten().filter(|path| no_links::is_socket(path));
    sockets.filter(|path| has_room(path)).collect()
}

/// The existing directories in which these globs look for sockets.
fn directories(globs: &[String]) -> BTreeSet<PathBuf> {
    let of_each = globs.iter().filter_map(|glob| {
        let glob = without_links(glob);
        glob::glob(&glob[..glob.rfind('/')?]).ok()
    });
    let is_directory = |path: &PathBuf| path.symlink_metadata().is_ok_and(|found| found.is_dir());
    of_each.flatten().flatten().filter(is_directory).take(MOST_DIRECTORIES).collect()
}

/// Faults of the directories in which these globs look for sockets. A socket in a faulty
/// directory proves nothing, because any user can create it.
pub fn faults_of_directories(globs: &[String]) -> Vec<String> {
    let makers = directories(globs).into_iter().map(|directory| makers_in(&directory));
    let faults: BTreeSet<String> =
        makers.filter_map(|makers| makers.fault().map(str::to_owned)).collect();
    faults.into_iter().collect()
}

/// The same glob, with the real path of the directory where it begins.
fn without_links(glob: &str) -> String {
    let wild = glob.find(['*', '?', '[']).unwrap_or(glob.len());
    let (Some(slash), true) = (glob[..wild].rfind('/'), glob.starts_with('/')) else {
        return glob.to_owned();
    };
    let (begin, rest) = glob.split_at(slash);
    match std::fs::canonicalize(Path::new("/").join(begin)) {
        Ok(real) => {
            let real = real.to_string_lossy();
            format!("{}{rest}", Pattern::escape(real.trim_end_matches('/')))
        }
        // The directory does not exist, so it has no sockets.
        Err(_) => glob.to_owned(),
    }
}

/// The running tasks, which are aborted when this is dropped.
#[derive(Default)]
struct Tasks(BTreeMap<PathBuf, AbortHandle>);

impl Tasks {
    /// Returns whether a VM is gone.
    fn follow(&mut self, shared: &Arc<DriverState>, found: &Found) -> bool {
        let mut slots = shared.slots();
        let before = self.0.len();
        let all: HashSet<&Path> = found.all().map(PathBuf::as_path).collect();
        let stays = |path: &Path| {
            all.contains(path) || (found.processes.is_none() && process_vm::is_place(path))
        };
        self.0.retain(|path, task| {
            // A process that is not found any more is behind a socket, or has ended.
            let is_ready = |slot: &Arc<Slot>| slot.is_over() || has_moved(slot);
            let over = !stays(path) && slots.get(path).is_none_or(is_ready);
            if over {
                task.abort();
                slots.remove(path);
            }
            !over
        });
        let is_any_gone = self.0.len() < before;
        for path in found.all().filter(|path| !self.0.contains_key(*path)).collect::<Vec<_>>() {
            let (slot, orders) = Slot::new(path.clone());
            let slot = Arc::new(slot);
            slots.insert(path.clone(), Arc::clone(&slot));
            let task = match process_vm::is_place(path) {
                true => tokio::spawn(process_vm::run(Arc::clone(shared), slot, orders)),
                false => tokio::spawn(vm::run(Arc::clone(shared), slot, orders)),
            };
            self.0.insert(path.clone(), task.abort_handle());
        }
        is_any_gone
    }
}

/// Whether a VM that was known by its process alone still runs, and is now behind a socket.
fn has_moved(slot: &Arc<Slot>) -> bool {
    process_vm::is_place(&slot.path) && slot.state().ended.is_none()
}

impl Drop for Tasks {
    fn drop(&mut self) {
        for task in self.0.values() {
            task.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_are_found_and_each_once() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("a.qmp");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        std::fs::write(dir.path().join("b.qmp"), "").unwrap();
        let glob = format!("{}/*.qmp", dir.path().display());
        assert_eq!(find(&[glob]), [socket]);
    }

    /// The socket's owner may write to this directory.
    #[test]
    fn a_link_behind_a_wildcard_is_not_followed_and_one_before_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let dir = std::fs::canonicalize(dir.path()).unwrap();
        let at = |name: &str| dir.join(name);
        std::fs::create_dir(at("qmp")).unwrap();
        let _listener = std::os::unix::net::UnixListener::bind(at("qmp/a.sock")).unwrap();
        std::os::unix::fs::symlink("a.sock", at("qmp/b.sock")).unwrap();
        std::os::unix::fs::symlink("qmp", at("operators")).unwrap();
        let found = |glob: &str| find(&[format!("{}/{glob}", dir.display())]);
        assert_eq!(found("operators/*.sock"), [at("qmp/a.sock")]);
        assert_eq!(found("operators/a.sock"), [at("qmp/a.sock")]);
        assert_eq!(found("*/a.sock"), [at("qmp/a.sock")]);
    }

    #[test]
    fn a_directory_that_everybody_may_write_to_is_told() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let globs = [format!("{}/*.sock", dir.path().display()), "/nowhere/*/*.sock".to_owned()];
        assert_eq!(faults_of_directories(&globs), Vec::<String>::new());
        let open = std::fs::Permissions::from_mode(0o1777);
        std::fs::set_permissions(dir.path(), open).unwrap();
        let [fault] = faults_of_directories(&globs).try_into().unwrap();
        assert!(fault.starts_with("everybody may write to /"), "{fault}");
    }

    #[test]
    fn a_glob_that_is_none_is_named() {
        let error = check(&["/run/***".to_owned()]).unwrap_err();
        assert!(error.to_string().starts_with("`/run/***` is no glob"), "{error}");
        check(&["/run/*/[ab].qmp".to_owned()]).unwrap();
    }
}
