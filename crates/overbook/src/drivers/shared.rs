//! What the VM tasks share: the slots, who owns which name, and what may be changed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use model::{VmName, VmView, words};

use super::records::Records;
use super::slot::Slot;

/// Shared by the loop, the discovery and every VM's task.
#[derive(Debug)]
pub(super) struct Shared {
    /// How often each VM is asked.
    pub(super) period: Duration,
    /// Where undo records go before anything is changed.
    pub(super) records: Records,
    /// Released: watch, and change nothing.
    hands_off: AtomicBool,
    slots: Mutex<BTreeMap<PathBuf, Arc<Slot>>>,
}

impl Shared {
    pub(super) fn new(period: Duration, records: Records) -> Self {
        let (hands_off, slots) = (AtomicBool::new(false), Mutex::default());
        Self { period, records, hands_off, slots }
    }

    /// The slots. Never held over an await, nor while a slot's own lock is held.
    pub(super) fn slots(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn is_hands_off(&self) -> bool {
        self.hands_off.load(Ordering::Relaxed)
    }

    pub(super) fn set_hands_off(&self, yes: bool) {
        self.hands_off.store(yes, Ordering::Relaxed);
    }

    /// The slot of the VM called `name`.
    pub(super) fn find(&self, name: &VmName) -> Option<Arc<Slot>> {
        self.slots().values().find(|slot| slot.state().name.as_ref() == Some(name)).cloned()
    }

    /// Gives `name` to the slot of `path`, unless the VM of another socket has it and lives.
    ///
    /// # Errors
    /// The other socket.
    pub(super) fn claim(&self, name: &VmName, path: &Path) -> Result<(), PathBuf> {
        let slots = self.slots();
        for slot in slots.values().filter(|slot| slot.path != path) {
            let mut state = slot.state();
            if state.name.as_ref() == Some(name) {
                if state.ended.is_none() {
                    return Err(slot.path.clone());
                }
                state.name = None;
            }
        }
        if let Some(slot) = slots.get(path) {
            slot.state().name = Some(name.clone());
        }
        Ok(())
    }

    /// Every VM that is to be seen. One that has not told its name goes by its socket's.
    pub(super) fn views(&self) -> BTreeMap<VmName, VmView> {
        let slots = self.slots();
        let mut views = BTreeMap::new();
        let mut nameless = Vec::new();
        for slot in slots.values().filter(|slot| !slot.is_over()) {
            let state = slot.state();
            match &state.name {
                Some(name) => drop(views.insert(name.clone(), state.view.clone())),
                None => nameless.push((slot.path.clone(), state.view.clone())),
            }
        }
        for (path, view) in nameless {
            let stem = name_of_socket(&path);
            let name = if views.contains_key(&stem) {
                VmName::from(words::plain(&path.to_string_lossy()))
            } else {
                stem
            };
            views.insert(name, view);
        }
        views
    }
}

/// The name that a socket suggests: its file name up to the last dot.
pub(super) fn name_of_socket(path: &Path) -> VmName {
    let stem = path.file_stem().unwrap_or(path.as_os_str());
    VmName::from(words::plain(&stem.to_string_lossy()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared(paths: &[&str]) -> Shared {
        let dir = tempfile::tempdir().unwrap();
        let records = Records::new(crate::journal::Journal::open(dir.path()).unwrap());
        let shared = Shared::new(Duration::from_secs(1), records);
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
        shared.claim(&name, Path::new("/b.qmp")).unwrap();
        assert_eq!(shared.claim(&name, Path::new("/a.qmp")), Err("/b.qmp".into()));
        shared.find(&name).unwrap().down("gone".into(), true);
        shared.claim(&name, Path::new("/a.qmp")).unwrap();
        assert_eq!(shared.find(&name).unwrap().path, Path::new("/a.qmp"));
    }

    #[test]
    fn sockets_of_one_file_name_are_all_to_be_seen() {
        let shared = shared(&["/a/qmp.sock", "/b/qmp.sock"]);
        let names: Vec<_> = shared.views().into_keys().collect();
        assert_eq!(names, ["/b/qmp.sock".into(), "qmp".into()]);
    }
}
