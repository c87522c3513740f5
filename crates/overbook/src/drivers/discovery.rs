//! Finds VMs: one task per QMP socket that the configured globs name.
//!
//! The globs are read again every [`EVERY`]. A new socket gets a slot and a task; a slot whose QEMU
//! has ended and whose socket is gone loses both. A socket that outlived its QEMU keeps its task,
//! which tries it now and then, and is not shown.
//!
//! A QEMU that none of the sockets leads to is found by its process ([`process_vm`]), unless the
//! operator has switched that off. Its slot goes when a socket of it is found.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use glob::Pattern;
use sys::no_links;
use tokio::sync::watch;
use tokio::task::{AbortHandle, spawn_blocking};
use tokio::time::timeout;

use super::shared::Shared;
use super::slot::Slot;
use super::tenant::place::makers_in;
use super::vm;
use super::{identity, is_first_contact, process_vm};

/// Sockets of one directory that are looked at; where QEMUs may make some there may be any number.
const MOST_SOCKETS: usize = 4096;
/// Directories that are looked at; where QEMUs may make some there may be any number.
const MOST_DIRECTORIES: usize = 1024;
/// How often the globs are read.
const EVERY: Duration = Duration::from_secs(2);
/// Processes are looked at once in so many times: a host may have thousands.
const PROCESSES_EVERY: u32 = 5;
/// How often that waits for sockets that are not asked yet.
const MOST_WAITS: u32 = 3;

/// A glob that is none.
#[derive(Debug, thiserror::Error)]
#[error("`{glob}` is no glob: {why}; write for example \"/run/qemu/*.qmp\"")]
pub struct GlobError {
    /// As written.
    pub glob: String,
    /// What is wrong with it.
    pub why: &'static str,
}

/// Refuses what [`find`] could not use.
pub(crate) fn check(globs: &[String]) -> Result<(), GlobError> {
    for glob in globs {
        Pattern::new(glob).map_err(|error| GlobError { glob: glob.clone(), why: error.msg })?;
    }
    Ok(())
}

/// Keeps tasks and sockets in step until it is aborted; its tasks end with it.
pub(super) async fn run(shared: Arc<Shared>, mut places: watch::Receiver<Places>) {
    let (mut tasks, mut looks, mut waits) = (Tasks::default(), 0_u32, 0_u32);
    shared.records.strike_the_dead().await;
    loop {
        let now = places.borrow_and_update().clone();
        let is_due = looks.is_multiple_of(PROCESSES_EVERY);
        // A socket that is not asked yet may be of any process; some always may be new.
        let by_socket = is_due.then(|| by_socket(&shared, waits < MOST_WAITS)).flatten();
        waits = if is_due && by_socket.is_none() { waits + 1 } else { 0 };
        // Where it is not known yet which have sockets, the next look will tell.
        looks = looks.wrapping_add(u32::from(!is_due || by_socket.is_some()));
        // It reads directories: on a thread that may wait for them.
        let Ok(found) = spawn_blocking(move || find_all(&now, &by_socket)).await else { return };
        shared.forget_names(identity::has_ended);
        if tasks.follow(&shared, &found) {
            shared.records.strike_the_dead().await;
        }
        // Woken early by new globs; never again once nobody can set any.
        if let Ok(Err(_)) = timeout(EVERY, places.changed()).await {
            return;
        }
    }
}

/// Where VMs are looked for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Places {
    /// Globs of QMP sockets.
    pub(super) globs: Vec<String>,
    /// Whether QEMUs are found by their processes, too.
    pub(super) processes: bool,
}

/// The processes of the VMs whose sockets were found; `None`: of one of them it is not known yet.
fn by_socket(shared: &Shared, may_wait: bool) -> Option<BTreeSet<u32>> {
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

/// The keys of all VMs that exist now. No process is one's of which a socket may still tell.
fn find_all(places: &Places, by_socket: &Option<BTreeSet<u32>>) -> Found {
    let sockets = find(&places.globs);
    let processes = by_socket
        .as_ref()
        .filter(|_| places.processes)
        .map(|known| process_vm::find(known).into_iter().map(process_vm::place_of).collect());
    let processes = if places.processes { processes } else { Some(Vec::new()) };
    Found { sockets, processes }
}

struct Found {
    sockets: Vec<PathBuf>,
    /// `None`: those that are known stay, and none is new.
    processes: Option<Vec<PathBuf>>,
}

impl Found {
    fn has(&self, path: &Path) -> bool {
        match (process_vm::is_place(path), &self.processes) {
            (false, _) => self.sockets.iter().any(|found| found == path),
            (true, Some(processes)) => processes.iter().any(|found| found == path),
            (true, None) => true,
        }
    }

    fn all(&self) -> impl Iterator<Item = &PathBuf> {
        self.sockets.iter().chain(self.processes.iter().flatten())
    }
}

/// The sockets that exist now, by paths without symbolic links. Links in the part of a glob before
/// its first wildcard are the operator's and are followed; behind it, others may have made them.
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

/// Faults of the directories in which these globs look for sockets: a socket there proves nothing,
/// as any user may put it there.
pub(crate) fn faults_of_directories(globs: &[String]) -> Vec<String> {
    let makers = directories(globs).into_iter().map(|directory| makers_in(&directory));
    let faults: BTreeSet<String> =
        makers.filter_map(|makers| makers.fault().map(str::to_owned)).collect();
    faults.into_iter().collect()
}

/// The same glob with the real path of the directory where it begins.
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
        // It is not there, so nothing is in it.
        Err(_) => glob.to_owned(),
    }
}

/// The running tasks; dropping it ends them.
#[derive(Default)]
struct Tasks(BTreeMap<PathBuf, AbortHandle>);

impl Tasks {
    /// Answers whether a VM is gone.
    fn follow(&mut self, shared: &Arc<Shared>, found: &Found) -> bool {
        let mut slots = shared.slots();
        let before = self.0.len();
        self.0.retain(|path, task| {
            // A process that is found no more is behind a socket, or has ended.
            let is_ready = |slot: &Arc<Slot>| slot.is_over() || has_moved(slot);
            let over = !found.has(path) && slots.get(path).is_none_or(is_ready);
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

/// Whether a VM that was known by its process alone lives on behind a socket.
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

    /// The directory is one that the socket's owner may write to.
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
