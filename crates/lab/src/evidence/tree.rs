//! The source tree: its root, its commit, and hashes of the files that a scenario measures.
//!
//! **Idea.** A hash is of contents, so it holds without git, in a tarball, and for changes that
//! are not committed. Tests are left out: they change no measurement, and no program is built
//! from them.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sys::process::Spawn;
use xxhash_rust::xxh3::Xxh3;

use super::EvidenceError;
use crate::command;

/// A file that only Overbook's tree has.
const MARK: &str = "crates/lab/src/evidence/tree.rs";

/// Overbook's sources.
#[derive(Debug, Clone)]
pub struct SourceTree {
    root: PathBuf,
}

impl SourceTree {
    /// The tree that the working directory lies in.
    pub fn find() -> Result<Self, EvidenceError> {
        let here = std::env::current_dir()
            .map_err(|source| EvidenceError::File { path: ".".into(), source })?;
        let root = here.ancestors().find(|dir| dir.join(MARK).is_file()).map(Path::to_owned);
        root.map(Self::at).ok_or(EvidenceError::NoTree(here))
    }

    pub fn at(root: PathBuf) -> Self {
        Self { root }
    }

    /// The path of a file in it.
    pub fn path(&self, within: &str) -> PathBuf {
        self.root.join(within)
    }

    /// The hash of a file, or of all files below a directory.
    pub fn hash(&self, within: &str) -> Result<String, EvidenceError> {
        let mut hash = Xxh3::new();
        for path in self.files(within)? {
            let bytes = read(&path)?;
            let name = path.strip_prefix(&self.root).unwrap_or(&path).to_string_lossy();
            for part in [name.as_bytes(), &bytes] {
                hash.update(&(part.len() as u64).to_le_bytes());
                hash.update(part);
            }
        }
        Ok(format!("{:032x}", hash.digest128()))
    }

    /// The file that was written last, with its time.
    pub fn newest(&self, within: &str) -> Result<Option<(SystemTime, PathBuf)>, EvidenceError> {
        let mut newest = None;
        for path in self.files(within)? {
            newest = newest.max(Some((written(&path)?, path)));
        }
        Ok(newest)
    }

    /// The commit, and whether these sources differ from it; `None` without git.
    pub fn commit(&self, sources: &[&str]) -> Option<(String, bool)> {
        let git = |arguments: &[&str]| {
            let spawn = Spawn::new("git").current_dir(&self.root).args(arguments);
            let said = command::run("git", spawn).ok()?;
            String::from_utf8(said).ok().map(|text| text.trim().to_owned())
        };
        let commit = git(&["rev-parse", "HEAD"])?;
        let status = [&["status", "--porcelain", "--"], sources].concat();
        Some((commit, !git(&status)?.is_empty()))
    }

    fn files(&self, within: &str) -> Result<Vec<PathBuf>, EvidenceError> {
        let top = self.root.join(within);
        if !top.exists() {
            return Err(EvidenceError::NoSource(top));
        }
        let (mut files, mut open) = (Vec::new(), vec![top]);
        while let Some(path) = open.pop() {
            if !path.is_dir() {
                files.push(path);
                continue;
            }
            let failed = |source| EvidenceError::File { path: path.clone(), source };
            for entry in std::fs::read_dir(&path).map_err(failed)? {
                let entry = entry.map_err(failed)?.path();
                let name = entry.file_name().unwrap_or_default().to_string_lossy();
                if name != "tests" && name != "tests.rs" && !name.starts_with('.') {
                    open.push(entry);
                }
            }
        }
        files.sort();
        Ok(files)
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, EvidenceError> {
    std::fs::read(path).map_err(|source| EvidenceError::File { path: path.to_owned(), source })
}

/// The time at which a file was written.
pub(super) fn written(path: &Path) -> Result<SystemTime, EvidenceError> {
    let time = std::fs::metadata(path).and_then(|about| about.modified());
    time.map_err(|source| EvidenceError::File { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree with two sources and a test.
    fn tree() -> (tempfile::TempDir, SourceTree) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("src/tests")).unwrap();
        for (name, text) in [("src/a.rs", "1"), ("src/b.rs", "2"), ("src/tests/c.rs", "3")] {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let tree = SourceTree::at(dir.path().to_owned());
        (dir, tree)
    }

    #[test]
    fn a_hash_tells_contents_and_names_apart_and_nothing_else() {
        let (dir, tree) = tree();
        let (all, one) = (tree.hash("src").unwrap(), tree.hash("src/b.rs").unwrap());
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("src/tests/c.rs"), "changed").unwrap();
        std::fs::write(at("src/tests.rs"), "new").unwrap();
        std::fs::write(at("src/a.rs"), "1").unwrap();
        assert_eq!(tree.hash("src").unwrap(), all);
        std::fs::rename(at("src/a.rs"), at("src/z.rs")).unwrap();
        assert_ne!(tree.hash("src").unwrap(), all);
        std::fs::rename(at("src/z.rs"), at("src/a.rs")).unwrap();
        std::fs::write(at("src/a.rs"), "2").unwrap();
        assert_ne!(tree.hash("src").unwrap(), all);
        assert_eq!(tree.hash("src/b.rs").unwrap(), one);
    }

    #[test]
    fn sources_that_do_not_exist_are_an_error() {
        let (_dir, tree) = tree();
        assert!(matches!(tree.hash("lib"), Err(EvidenceError::NoSource(_))));
    }
}
