//! The operator's pauses, kept in files so that they survive a restart of the daemon: one for the
//! whole host, whose presence is enough, and one that names groups and VMs.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use model::Pauses;

const FILE_NAME: &str = "paused";
const NAMES_FILE_NAME: &str = "paused.json";

/// The file whose presence means "paused", and the file of paused groups and VMs.
#[derive(Debug)]
pub(crate) struct PauseFile {
    path: PathBuf,
    of_names: PathBuf,
}

impl PauseFile {
    pub(crate) fn in_state(directory: &Path) -> Self {
        Self { path: directory.join(FILE_NAME), of_names: directory.join(NAMES_FILE_NAME) }
    }

    /// Whether the file exists. If that cannot be told, the daemon counts as paused, which is safe.
    pub(crate) fn is_set(&self) -> bool {
        !matches!(self.path.try_exists(), Ok(false))
    }

    pub(crate) fn set(&self, paused: bool) -> Result<(), String> {
        let told = |error| forgotten(&self.path, &error);
        if paused {
            let text = "paused by the operator; `overbook resume` goes on\n";
            return fs::write(&self.path, text).map_err(told);
        }
        removed(&self.path).map_err(told)
    }

    /// The paused groups and VMs. An error also says that the whole host counts as paused.
    pub(crate) fn pauses(&self) -> Result<Pauses, String> {
        let read = match fs::read(&self.of_names) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Pauses::default()),
            read => read,
        };
        let pauses = read.and_then(|bytes| Ok(serde_json::from_slice(&bytes)?));
        pauses.map_err(|error| {
            format!(
                "{} does not say which VMs are paused, so all are: {error}; remove it, then \
                 `overbook resume`",
                self.of_names.display()
            )
        })
    }

    pub(crate) fn set_pauses(&self, pauses: &Pauses) -> Result<(), String> {
        let told = |error| forgotten(&self.of_names, &error);
        if pauses.is_empty() {
            return removed(&self.of_names).map_err(told);
        }
        let text = serde_json::to_string_pretty(pauses).map_err(|error| told(error.into()))?;
        let new = self.of_names.with_extension("json.new");
        fs::write(&new, text + "\n").and_then(|()| fs::rename(new, &self.of_names)).map_err(told)
    }
}

fn forgotten(path: &Path, error: &io::Error) -> String {
    format!("a restart will not know it: {}: {error}", path.display())
}

fn removed(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use model::{Hold, Scope};

    use super::*;

    #[test]
    fn a_pause_outlives_who_set_it() {
        let state = tempfile::tempdir().unwrap();
        let file = PauseFile::in_state(state.path());
        assert!(!file.is_set());
        file.set(true).unwrap();
        assert!(PauseFile::in_state(state.path()).is_set());
        file.set(false).unwrap();
        file.set(false).unwrap();
        assert!(!file.is_set());
    }

    #[test]
    fn so_does_a_pause_of_a_vm_and_of_a_group() {
        let state = tempfile::tempdir().unwrap();
        let file = PauseFile::in_state(state.path());
        let mut pauses = Pauses::default();
        assert_eq!(file.pauses().unwrap(), pauses);
        pauses.add(&Scope::Vm("web-1".into()), Hold::Released);
        pauses.add(&Scope::Group("db".into()), Hold::Kept);
        file.set_pauses(&pauses).unwrap();
        assert_eq!(PauseFile::in_state(state.path()).pauses().unwrap(), pauses);
        assert!(!file.is_set(), "the host is not paused");
        file.set_pauses(&Pauses::default()).unwrap();
        assert_eq!(file.pauses().unwrap(), Pauses::default());
    }

    #[test]
    fn a_file_that_makes_no_sense_is_named_with_the_remedy() {
        let state = tempfile::tempdir().unwrap();
        fs::write(state.path().join(NAMES_FILE_NAME), "{\"vms\": [\"web-1\"]}").unwrap();
        let error = PauseFile::in_state(state.path()).pauses().unwrap_err();
        let named = error.contains("paused.json does not say which VMs are paused, so all are");
        assert!(named && error.ends_with("then `overbook resume`"), "{error}");
    }
}
