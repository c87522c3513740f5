//! The cache: everything that the lab downloads or builds. Each entry is made once, and is
//! complete.
//!
//! **Idea.** An entry is a directory or file whose name states its content (package and version,
//! or a hash of the content). It is built under a temporary name in the cache and renamed when it
//! is complete, so an interrupted build leaves nothing that looks finished. Two labs may build
//! the same entry at once: the second one uses the entry of the first.

use std::io;
use std::path::{Path, PathBuf};

/// The environment variable that names the cache directory, instead of the user's own cache.
pub const CACHE_VARIABLE: &str = "OVERBOOK_LAB_CACHE";

/// Errors of the cache.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// Neither variable that could place the cache is set.
    #[error("no place for the cache: set {CACHE_VARIABLE}, XDG_CACHE_HOME or HOME")]
    NoPlace,
    /// A file operation failed.
    #[error("cache {path}: {source}")]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// The cache directory.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

impl Cache {
    /// The user's cache: `$OVERBOOK_LAB_CACHE`, `$XDG_CACHE_HOME/overbook` or `~/.cache/overbook`.
    pub fn open() -> Result<Self, CacheError> {
        let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let root = variable(CACHE_VARIABLE)
            .or_else(|| variable("XDG_CACHE_HOME").map(|dir| dir.join("overbook")))
            .or_else(|| variable("HOME").map(|dir| dir.join(".cache/overbook")))
            .ok_or(CacheError::NoPlace)?;
        Self::at(&root)
    }

    /// The cache in this directory, which is made when it is missing.
    pub fn at(root: &Path) -> Result<Self, CacheError> {
        let failed = |source| CacheError::Io { path: root.to_owned(), source };
        std::fs::create_dir_all(root).map_err(failed)?;
        let root = root.canonicalize().map_err(failed)?;
        Ok(Self { root })
    }

    /// The cache's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The path of the entry, if the entry exists.
    pub fn find(&self, name: &str) -> Option<PathBuf> {
        let path = self.root.join(name);
        path.exists().then_some(path)
    }

    /// The directory `name`. `fill` fills it if it does not exist.
    pub fn directory<E: From<CacheError>>(
        &self,
        name: &str,
        fill: impl FnOnce(&Path) -> Result<(), E>,
    ) -> Result<PathBuf, E> {
        if let Some(path) = self.find(name) {
            return Ok(path);
        }
        let temporary = self.scratch()?;
        fill(temporary.path())?;
        let path = self.root.join(name);
        match std::fs::rename(temporary.path(), &path) {
            Ok(()) => drop(temporary.keep()),
            // Another process finished it first; its entry is as good.
            Err(_) if path.is_dir() => {}
            Err(source) => return Err(CacheError::Io { path, source }.into()),
        }
        Ok(path)
    }

    /// The file `name`, written if it does not exist (or always, with `replace`).
    pub fn file(&self, name: &str, content: &[u8], replace: bool) -> Result<PathBuf, CacheError> {
        let path = self.root.join(name);
        if replace || !path.exists() {
            let failed = |source| CacheError::Io { path: path.clone(), source };
            let mut file = tempfile::NamedTempFile::new_in(&self.root).map_err(failed)?;
            io::Write::write_all(&mut file, content).map_err(failed)?;
            file.persist(&path).map_err(|error| failed(error.error))?;
        }
        Ok(path)
    }

    /// A directory inside the cache that is removed on drop.
    pub fn scratch(&self) -> Result<tempfile::TempDir, CacheError> {
        tempfile::Builder::new()
            .prefix("tmp-")
            .tempdir_in(&self.root)
            .map_err(|source| CacheError::Io { path: self.root.clone(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_that_fails_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let result = cache.directory("entry", |path| {
            std::fs::write(path.join("half"), "half").unwrap();
            Err(CacheError::NoPlace)
        });
        assert!(result.is_err());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_entry_is_built_only_once() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path()).unwrap();
        let first = cache.directory("entry", |_| Ok::<(), CacheError>(())).unwrap();
        let again = cache.directory("entry", |_| Err(CacheError::NoPlace)).unwrap();
        assert_eq!(first, again);
    }
}
