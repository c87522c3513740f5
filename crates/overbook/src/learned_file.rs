//! The overload profiles of VMs, kept in a file so that a restart does not lose them.
//!
//! If the file cannot be read, only the profiles are lost: the error is reported, and the file is
//! overwritten.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use futures_util::FutureExt;
use model::Learned;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};

const FILE_NAME: &str = "learned.json";
/// Interval at which changed profiles are written.
const EVERY: Duration = Duration::from_secs(60);
/// Timeout of the last write.
const FAREWELL: Duration = Duration::from_secs(2);
/// Maximum size of the file, in bytes: ten times as much as ten thousand VMs need.
const MOST_BYTES: u64 = 64 << 20;

/// The file and its content.
#[derive(Debug)]
pub(crate) struct LearnedFile {
    path: PathBuf,
    written: Learned,
    written_at: Instant,
    /// The write in progress.
    writing: Option<JoinHandle<io::Result<()>>>,
}

impl LearnedFile {
    /// Reads the profiles of an earlier daemon. Also returns the error, if any.
    pub(crate) fn in_state(directory: &Path) -> (Self, Option<String>) {
        let path = directory.join(FILE_NAME);
        let (written, error) = match read(&path) {
            Ok(learned) => (learned, None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => (Learned::default(), None),
            Err(error) => {
                let path = path.display();
                let why = format!("{path}: {error}; how VMs are overloaded is learned anew");
                (Learned::default(), Some(why))
            }
        };
        (Self { path, written, written_at: Instant::now(), writing: None }, error)
    }

    pub(crate) fn learned(&self) -> Learned {
        self.written.clone()
    }

    /// Writes the profiles in the background, if the interval has passed and they have changed.
    /// Returns the error of the previous write.
    pub(crate) fn keep(&mut self, learned: &Learned) -> Option<String> {
        let is_at_work = self.writing.as_ref().is_some_and(|task| !task.is_finished());
        if self.written_at.elapsed() < EVERY || is_at_work || self.written == *learned {
            return None;
        }
        let before = self.writing.take().and_then(FutureExt::now_or_never);
        self.write(learned);
        let error =
            before.and_then(|done| done.map_err(io::Error::other).and_then(|done| done).err());
        error.map(|error| format!("{}: {error}", self.path.display()))
    }

    /// Writes the profiles a last time, if they have changed, and waits for that.
    pub(crate) async fn end(mut self, learned: &Learned) {
        if self.written != *learned {
            self.write(learned);
        }
        if let Some(writing) = self.writing {
            // A disk that hangs must not keep the daemon from ending.
            let _ = timeout(FAREWELL, writing).await;
        }
    }

    fn write(&mut self, learned: &Learned) {
        self.written.clone_from(learned);
        self.written_at = Instant::now();
        let (path, learned) = (self.path.clone(), learned.clone());
        self.writing = Some(spawn_blocking(move || write(&path, &learned)));
    }
}

/// A process that is killed during the write leaves the old file.
fn write(path: &Path, learned: &Learned) -> io::Result<()> {
    let new = path.with_extension("new");
    File::create(&new)?.write_all(&serde_json::to_vec(learned)?)?;
    fs::rename(&new, path)
}

fn read(path: &Path) -> io::Result<Learned> {
    let mut text = Vec::new();
    File::open(path)?.take(MOST_BYTES).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

#[cfg(test)]
mod tests {
    use model::Profile;

    use super::*;

    #[tokio::test]
    async fn what_was_learned_outlives_who_learned_it() {
        let state = tempfile::tempdir().unwrap();
        let (mut file, error) = LearnedFile::in_state(state.path());
        assert!(error.is_none() && file.learned() == Learned::default());
        let profile = Profile { intervals: 7, lengths: vec![1, 0, 2], ..Profile::default() };
        let profiles = [("web-1".into(), profile)].into();
        let learned = Learned { profiles, ..Learned::default() };
        assert_eq!(file.keep(&learned), None);
        assert!(file.writing.is_none(), "it is not time");
        file.end(&learned).await;
        assert_eq!(LearnedFile::in_state(state.path()).0.learned(), learned);
    }

    #[tokio::test]
    async fn a_file_that_cannot_be_read_costs_what_was_learned_alone() {
        let state = tempfile::tempdir().unwrap();
        fs::write(state.path().join(FILE_NAME), "{\"profiles\": 5}").unwrap();
        let (file, error) = LearnedFile::in_state(state.path());
        assert!(error.unwrap().contains("learned anew") && file.learned() == Learned::default());
        let profiles = [("web-1".into(), Profile::default())].into();
        let learned = Learned { profiles, ..Learned::default() };
        file.end(&learned).await;
        assert_eq!(LearnedFile::in_state(state.path()).0.learned(), learned);
    }
}
