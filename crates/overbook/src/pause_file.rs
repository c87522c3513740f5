//! The operator's pause, kept in a file so that it survives a restart of the daemon.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

const FILE_NAME: &str = "paused";

/// The file whose presence means "paused".
#[derive(Debug)]
pub(crate) struct PauseFile {
    path: PathBuf,
}

impl PauseFile {
    pub(crate) fn in_state(directory: &Path) -> Self {
        Self { path: directory.join(FILE_NAME) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file exists. If that cannot be told, the daemon counts as paused, which is safe.
    pub(crate) fn is_set(&self) -> bool {
        !matches!(self.path.try_exists(), Ok(false))
    }

    pub(crate) fn set(&self, paused: bool) -> io::Result<()> {
        if paused {
            return fs::write(&self.path, "paused by the operator; `overbook resume` goes on\n");
        }
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
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
}
