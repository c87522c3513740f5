//! State that the VM tasks share: the slots, the owners of names, and whether changes are
//! allowed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::{Pauses, VmName, VmView, words};
use tokio::sync::Semaphore;

use super::libvirt::Domains;
use super::proxmox::Proxmox;
use super::records::Records;
use super::slot::Slot;
use super::tenant::Rules;
use super::{is_first_contact, process_vm};

/// Shared by the loop, the discovery and every VM's task.
#[derive(Debug)]
pub(super) struct DriverState {
    /// How often each VM is queried.
    pub(super) period: Duration,
    /// The undo records, which are written before any change.
    pub(super) records: Records,
    /// Whether VMs are released: they are watched, but not changed.
    hands_off: AtomicBool,
    /// Whether all sockets and processes of the host were searched once.
    has_searched: AtomicBool,
    /// VMs that are left alone, although others are not.
    pauses: Mutex<Pauses>,
    slots: Mutex<BTreeMap<PathBuf, Arc<Slot>>>,
    rules: Mutex<Arc<Rules>>,
    lives: Mutex<BTreeMap<u64, Told>>,
    /// libvirt's domains, where a process tells of them.
    pub(super) domains: Domains,
    /// Proxmox's VMs, where a process tells of them.
    pub(super) proxmox: Arc<Proxmox>,
    /// Permits for reading about newly found processes.
    pub(super) meetings: Arc<Semaphore>,
}

/// Number of processes that are read about at a time; one that hangs keeps its permit.
const MEETINGS: usize = 64;

/// The names that the QEMU of one incarnation has reported.
#[derive(Debug)]
struct Told {
    first: VmName,
    /// Another name that it has reported later.
    second: Option<VmName>,
}

impl DriverState {
    /// `libvirt`: the socket of `overbook-libvirt`.
    pub(super) fn new(period: Duration, records: Records, libvirt: PathBuf) -> Self {
        let (hands_off, has_searched) = (AtomicBool::new(false), AtomicBool::new(false));
        let slots = Mutex::default();
        let (rules, lives, pauses) = (Mutex::default(), Mutex::default(), Mutex::default());
        let meetings = Arc::new(Semaphore::new(MEETINGS));
        let domains = Domains::new(libvirt);
        let proxmox = Arc::default();
        Self {
            period,
            records,
            hands_off,
            has_searched,
            pauses,
            slots,
            rules,
            lives,
            domains,
            proxmox,
            meetings,
        }
    }

    /// Notes that all sockets and processes of the host were searched.
    pub(super) fn searched(&self) {
        self.has_searched.store(true, Ordering::Relaxed);
    }

    /// Whether all VMs of the first search have been looked at.
    pub(super) fn knows_all(&self) -> bool {
        let is_known = |slot: &Arc<Slot>| !is_first_contact(&slot.state().view.link);
        self.has_searched.load(Ordering::Relaxed) && self.slots().values().all(is_known)
    }

    /// The rules that assign VMs to groups.
    pub(super) fn rules(&self) -> Arc<Rules> {
        Arc::clone(&lock(&self.rules))
    }

    pub(super) fn set_rules(&self, rules: Rules) {
        *lock(&self.rules) = Arc::new(rules);
    }

    /// Notes the name that the QEMU of this incarnation reports.
    ///
    /// # Errors
    /// It has reported another name before: neither is known to be true.
    pub(super) fn note_name(&self, life: u64, told: &VmName) -> Result<(), TwoNames> {
        let mut lives = lock(&self.lives);
        let known = lives.entry(life).or_insert(Told { first: told.clone(), second: None });
        if known.first != *told {
            known.second.get_or_insert_with(|| told.clone());
        }
        known.fault()
    }

    /// Checks that the QEMU of this incarnation has reported only one name, through any socket.
    pub(super) fn has_one_name(&self, life: u64) -> Result<(), TwoNames> {
        lock(&self.lives).get(&life).map_or(Ok(()), Told::fault)
    }

    /// Forgets the names of incarnations that are over.
    pub(super) fn forget_names(&self, is_over: impl Fn(u64) -> bool) {
        lock(&self.lives).retain(|life, _| !is_over(*life));
    }

    /// The slots. The lock is never held over an await, nor while a slot's own lock is held.
    pub(super) fn slots(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the VM of this slot is watched, but not changed.
    pub(super) fn is_hands_off(&self, slot: &Slot) -> bool {
        if self.hands_off.load(Ordering::Relaxed) {
            return true;
        }
        let name = slot.name();
        let pauses = lock(&self.pauses);
        !pauses.is_empty() && pauses.refusal(&name, self.rules().group_of(&name)).is_some()
    }

    pub(super) fn set_pauses(&self, pauses: Pauses) {
        *lock(&self.pauses) = pauses;
    }

    pub(super) fn set_hands_off(&self, yes: bool) {
        self.hands_off.store(yes, Ordering::Relaxed);
    }

    /// The slot of the VM called `name`.
    pub(super) fn find(&self, name: &VmName) -> Option<Arc<Slot>> {
        self.slots().values().find(|slot| slot.state().name.as_ref() == Some(name)).cloned()
    }

    /// Gives `name` to the slot of `path`, unless a live VM of another socket has it. A name
    /// reported on a socket takes precedence over one on a command line: a VM that is known only
    /// by its process loses the name. If the slot of the socket's own process `pid` exists, it is
    /// no longer shown.
    ///
    /// # Errors
    /// The other socket.
    pub(super) fn claim(
        &self,
        name: &VmName,
        path: &Path,
        pid: Option<u32>,
    ) -> Result<(), PathBuf> {
        let before = pid.map(process_vm::place_of);
        let by_socket = !process_vm::is_place(path);
        let slots = self.slots();
        for slot in slots.values().filter(|slot| slot.path != path) {
            let mut state = slot.state();
            if state.name.as_ref() == Some(name) {
                let gives_way = by_socket && process_vm::is_place(&slot.path);
                if state.ended.is_none() && !gives_way {
                    return Err(slot.path.clone());
                }
                state.name = None;
            }
            if by_socket && before.as_ref() == Some(&slot.path) {
                state.name = None;
                state.view.pid = None;
            }
        }
        if let Some(slot) = slots.get(path) {
            slot.state().name = Some(name.clone());
        }
        Ok(())
    }

    /// All VMs to be shown. A VM that has not reported its name is shown under its socket's.
    pub(super) fn views(&self) -> BTreeMap<VmName, VmView> {
        let slots = self.slots();
        let mut views = BTreeMap::new();
        let mut nameless = Vec::new();
        for slot in slots.values().filter(|slot| !slot.is_over()) {
            let state = slot.state();
            match &state.name {
                Some(name) => drop(views.insert(name.clone(), state.view.clone())),
                // The process is not a VM, or has a socket by now.
                None if process_vm::is_place(&slot.path) => {}
                None => nameless.push((slot.path.clone(), state.view.clone())),
            }
        }
        for (path, view) in nameless {
            let stem = name_of_socket(&path);
            let name = if views.contains_key(&stem) { name_of_stranger(&path) } else { stem };
            views.insert(name, view);
        }
        views
    }
}

/// A QEMU that has reported two names in one incarnation is not managed any more.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "QEMU has called itself `{first}` and then `{second}`: it is left alone under both names until it is started anew"
)]
pub(super) struct TwoNames {
    first: VmName,
    second: VmName,
}

impl Told {
    fn fault(&self) -> Result<(), TwoNames> {
        let two = |second: &VmName| TwoNames { first: self.first.clone(), second: second.clone() };
        self.second.as_ref().map_or(Ok(()), |second| Err(two(second)))
    }
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The name of a VM whose own name is not trusted: its socket's path, which matches no group.
pub(super) fn name_of_stranger(socket: &Path) -> VmName {
    VmName::from(words::plain(&socket.to_string_lossy()))
}

/// The name that a socket suggests: its file name up to the last dot.
pub(super) fn name_of_socket(path: &Path) -> VmName {
    let stem = path.file_stem().unwrap_or(path.as_os_str());
    VmName::from(words::plain(&stem.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(paths: &[&str]) -> DriverState {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::new(crate::journal::Journal::open(dir.path()).unwrap());
        let shared = DriverState::new(Duration::from_secs(1), records, "/none".into());
        for path in paths {
            let slot = Arc::new(Slot::new(path.into()).0);
            shared.slots().insert(path.into(), slot);
        }
        shared
    }

    #[test]
    fn a_name_belongs_to_the_first_socket_until_its_qemu_ends() {
        let shared = shared(&["/a.qmp", "/b.qmp"]);
        let name = VmName::from("web");
        shared.claim(&name, Path::new("/b.qmp"), None).unwrap();
        assert_eq!(shared.claim(&name, Path::new("/a.qmp"), None), Err("/b.qmp".into()));
        shared.find(&name).unwrap().down("gone".into(), true);
        shared.claim(&name, Path::new("/a.qmp"), None).unwrap();
        assert_eq!(shared.find(&name).unwrap().path, Path::new("/a.qmp"));
    }

    #[test]
    fn a_vm_that_was_known_by_its_process_is_the_one_whose_socket_is_found() {
        let shared = shared(&["/proc/7", "/a.qmp"]);
        let name = VmName::from("web");
        shared.claim(&name, Path::new("/proc/7"), Some(7)).unwrap();
        assert_eq!(shared.views().into_keys().collect::<Vec<_>>(), ["a".into(), name.clone()]);
        shared.claim(&name, Path::new("/a.qmp"), Some(7)).unwrap();
        assert_eq!(shared.find(&name).unwrap().path, Path::new("/a.qmp"));
        assert_eq!(shared.views().into_keys().collect::<Vec<_>>(), [name], "it is one VM");
    }

    #[test]
    fn a_life_has_one_name_by_whichever_socket_it_is_told() {
        let shared = shared(&[]);
        let (web, evil) = (VmName::from("web-1"), VmName::from("db-1"));
        assert_eq!(shared.note_name(7, &web), Ok(()));
        assert_eq!(shared.note_name(7, &web), Ok(()));
        assert_eq!(shared.note_name(8, &evil), Ok(()), "another life");
        let error = shared.note_name(7, &evil).unwrap_err();
        assert!(error.to_string().contains("`web-1` and then `db-1`"), "{error}");
        assert_eq!(shared.note_name(7, &web), Err(error), "there is no way back");
        assert!(shared.has_one_name(7).is_err() && shared.has_one_name(8).is_ok());
        shared.forget_names(|life| life == 7);
        assert_eq!(shared.note_name(7, &evil), Ok(()));
    }

    #[test]
    fn sockets_of_one_file_name_are_all_to_be_seen() {
        let shared = shared(&["/a/qmp.sock", "/b/qmp.sock"]);
        let names: Vec<_> = shared.views().into_keys().collect();
        assert_eq!(names, ["/b/qmp.sock".into(), "qmp".into()]);
    }
}
