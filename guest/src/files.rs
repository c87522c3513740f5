//! Reads the system's files once, like a nightly job. They stay in the guest's page cache until
//! something else needs the memory.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::error::WorkError;
use crate::memory::MB;
use crate::run::RunState;

/// The directory in which a distribution has most of its files.
pub(crate) const SYSTEM: &str = "/usr";
const AT_ONCE: usize = 256 * 1024;

/// Reads the files below `root` in the order of their names, up to `mb` MB.
pub(crate) fn read(root: &Path, mb: usize, shared: &RunState) -> Result<(), WorkError> {
    let mut left = mb * MB;
    let (mut found, mut buffer) = (vec![root.to_owned()], vec![0; AT_ONCE]);
    while let Some(path) = found.pop().filter(|_| left > 0 && !shared.stopping()) {
        let took = look(&path, &mut found, &mut buffer, left);
        left -= took.map_err(WorkError::file("read", &path))?;
    }
    Ok(())
}

/// Returns the bytes read of a file, `limit` at most; a directory's entries go to `found`, the
/// last one first.
fn look(
    path: &Path,
    found: &mut Vec<PathBuf>,
    buffer: &mut [u8],
    limit: usize,
) -> io::Result<usize> {
    let kind = path.symlink_metadata()?.file_type();
    if kind.is_dir() {
        let entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path()));
        let mut paths = entries.collect::<io::Result<Vec<PathBuf>>>()?;
        paths.sort_unstable_by(|one, other| other.cmp(one));
        found.append(&mut paths);
    }
    let mut took = 0;
    if kind.is_file() {
        let mut file = File::open(path)?;
        while took < limit {
            let most = buffer.len().min(limit - took);
            match file.read(&mut buffer[..most])? {
                0 => break,
                length => took += length,
            }
        }
    }
    Ok(took)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_in_order_and_no_more_than_wanted() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/one"), [1; 10]).unwrap();
        fs::write(dir.path().join("b"), [2; 30]).unwrap();
        let (mut found, mut buffer) = (Vec::new(), vec![0; 16]);
        assert_eq!(look(dir.path(), &mut found, &mut buffer, 100).unwrap(), 0);
        assert!(found[0].ends_with("b") && found[1].ends_with("a"));
        assert_eq!(look(&found[0], &mut Vec::new(), &mut buffer, 100).unwrap(), 30);
        assert_eq!(look(&found[0], &mut Vec::new(), &mut buffer, 20).unwrap(), 20);
        read(dir.path(), 1, &RunState::new()).unwrap();
        assert!(read(&dir.path().join("none"), 1, &RunState::new()).is_err());
    }
}
