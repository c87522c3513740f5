//! Finds the files of a directory tree. Symbolic links are not followed, so there are no loops.
//! Other filesystems are not entered. A file with several names is taken once, as in the page
//! cache.

use std::{
    collections::HashSet,
    fs::{self, DirEntry, ReadDir},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use super::{CutJob, MOST_DEPTH, OfflineError, Queue, limit::count};

/// Puts all files below `root` into the queue.
pub(super) fn put(queue: &mut Queue<'_>, root: &Path) -> Result<(), OfflineError> {
    let fail = |error| OfflineError::File { path: root.into(), error };
    let device = fs::metadata(root).map_err(fail)?.dev();
    let mut tree = Tree { queue, device, linked: HashSet::new(), seen: 0 };
    // One open directory per level.
    let mut open = vec![(root.to_owned(), fs::read_dir(root).map_err(fail)?)];
    while let Some((directory, entries)) = open.last_mut() {
        if tree.queue.shared.has_failed() {
            break;
        }
        let Some(entry) = entries.next() else {
            open.pop();
            continue;
        };
        count(&mut tree.seen, root)?;
        let below = match entry {
            Ok(entry) => tree.look_at(&entry),
            Err(error) => {
                tree.queue.leave_out(directory, &error);
                None
            }
        };
        match below {
            Some((path, _)) if open.len() >= MOST_DEPTH => {
                let why = format!("{MOST_DEPTH} directories lie around it, the most entered");
                tree.queue.leave_out(&path, &why);
            }
            Some(below) => open.push(below),
            None => {}
        }
    }
    Ok(())
}

struct Tree<'a, 'b> {
    queue: &'a mut Queue<'b>,
    device: u64,
    /// Files with more than one name that were seen.
    linked: HashSet<u64>,
    seen: u64,
}

impl Tree<'_, '_> {
    /// Puts a file into the queue, or returns a directory to enter.
    fn look_at(&mut self, entry: &DirEntry) -> Option<(PathBuf, ReadDir)> {
        let path = entry.path();
        // Metadata of the link itself, if it is one.
        let metadata = match entry.metadata() {
            Ok(metadata) => metadata,
            Err(error) => {
                self.queue.leave_out(&path, &error);
                return None;
            }
        };
        if metadata.is_file() && metadata.len() > 0 {
            if metadata.nlink() == 1 || self.linked.insert(metadata.ino()) {
                self.queue.put(CutJob::File { path, is_named: false });
            }
            return None;
        }
        if !metadata.is_dir() || metadata.dev() != self.device {
            return None;
        }
        match fs::read_dir(&path) {
            Ok(entries) => Some((path, entries)),
            Err(error) => {
                self.queue.leave_out(&path, &error);
                None
            }
        }
    }
}
