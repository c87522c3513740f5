//! Finds VMs: one task per QMP socket that the configured globs name.
//!
//! The globs are read again every [`EVERY`]. A new socket gets a slot and a task; a slot whose QEMU
//! has ended and whose socket is gone loses both. A socket that outlived its QEMU keeps its task,
//! which tries it now and then, and is not shown.
//!
//! The seam for libvirt is [`find`]: whatever else names VMs adds its places here, and its own way
//! of talking to QEMU beside [`super::vm`].

use std::collections::BTreeMap;
use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use glob::Pattern;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::shared::Shared;
use super::slot::Slot;
use super::vm;

/// How often the globs are read.
const EVERY: Duration = Duration::from_secs(2);

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
pub(super) async fn run(shared: Arc<Shared>, mut globs: watch::Receiver<Vec<String>>) {
    let mut tasks = Tasks::default();
    shared.records.strike_the_dead().await;
    loop {
        let found = find(&globs.borrow_and_update());
        if tasks.follow(&shared, &found) {
            shared.records.strike_the_dead().await;
        }
        // Woken early by new globs; never again once nobody can set any.
        if let Ok(Err(_)) = timeout(EVERY, globs.changed()).await {
            return;
        }
    }
}

/// The sockets that exist now.
fn find(globs: &[String]) -> Vec<PathBuf> {
    let files = globs.iter().filter_map(|pattern| glob::glob(pattern).ok()).flatten().flatten();
    let is_socket =
        |path: &PathBuf| std::fs::metadata(path).is_ok_and(|file| file.file_type().is_socket());
    files.filter(is_socket).collect()
}

/// The running tasks; dropping it ends them.
#[derive(Default)]
struct Tasks(BTreeMap<PathBuf, AbortHandle>);

impl Tasks {
    /// Answers whether a VM is gone.
    fn follow(&mut self, shared: &Arc<Shared>, found: &[PathBuf]) -> bool {
        let mut slots = shared.slots();
        let before = self.0.len();
        self.0.retain(|path, task| {
            let over = !found.contains(path) && slots.get(path).is_none_or(|slot| slot.is_over());
            if over {
                task.abort();
                slots.remove(path);
            }
            !over
        });
        let is_any_gone = self.0.len() < before;
        for path in found.iter().filter(|path| !self.0.contains_key(*path)).collect::<Vec<_>>() {
            let (slot, orders) = Slot::new(path.clone());
            let slot = Arc::new(slot);
            slots.insert(path.clone(), Arc::clone(&slot));
            let task = tokio::spawn(vm::run(Arc::clone(shared), slot, orders));
            self.0.insert(path.clone(), task.abort_handle());
        }
        is_any_gone
    }
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

    #[test]
    fn a_glob_that_is_none_is_named() {
        let error = check(&["/run/***".to_owned()]).unwrap_err();
        assert!(error.to_string().starts_with("`/run/***` is no glob"), "{error}");
        check(&["/run/*/[ab].qmp".to_owned()]).unwrap();
    }
}
