//! The shared-pages tables that a group names, read when they change.
//!
//! A table that cannot be read, or that is sampled at other places than the others, is a reason to
//! know nothing: identical pages are found all the same, later.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use pages::dedup::Known;
use pages::offline::{HEADER_LEN, MOST_PAGES, RECORD_LEN, Sampling, TableRef};

/// Which state of a file it is: its inode, its length, and when it was written.
type State = (u64, u64, i64, i64);

/// What is known of the guests' pages.
#[derive(Debug, Default)]
pub(super) struct Tables {
    named: Vec<(PathBuf, Option<State>)>,
    /// Pages in all of the tables.
    pub(super) pages: u64,
    /// Why nothing is known.
    pub(super) trouble: Option<String>,
}

impl Tables {
    /// Reads these files, if they are other ones than before or have changed; `None`: they have
    /// not.
    pub(super) fn read(&mut self, paths: &[PathBuf]) -> Option<Option<Known>> {
        let named = paths.iter().map(|path| (path.clone(), state(path))).collect();
        if named == self.named {
            return None;
        }
        self.named = named;
        let (known, trouble) = match known(paths) {
            Ok(known) => (known, None),
            Err(why) => (None, Some(why)),
        };
        self.pages = known.as_ref().map_or(0, |(_, pages)| *pages);
        self.trouble = trouble;
        Some(known.map(|(known, _)| known))
    }
}

fn state(path: &Path) -> Option<State> {
    let file = fs::metadata(path).ok()?;
    Some((file.ino(), file.len(), file.mtime(), file.mtime_nsec()))
}

/// What these files know, and of how many pages.
fn known(paths: &[PathBuf]) -> Result<Option<(Known, u64)>, String> {
    let all: u64 = paths.iter().filter_map(|path| state(path)).map(|(_, len, ..)| len).sum();
    let most = usize::try_from(all).unwrap_or(usize::MAX) / RECORD_LEN;
    let mut known: Option<Known> = None;
    let mut pages = 0;
    for path in paths {
        let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let bytes = content(path).map_err(|error| failed(&error))?;
        let table = TableRef::parse(&bytes).map_err(|error| failed(&error))?;
        let sampling = table.sampling();
        let known = known.get_or_insert_with(|| Known::new(sampling, most.min(MOST_PAGES)));
        if known.sampling() != sampling {
            let [here, before] = [sampling, known.sampling()].map(Sampling::offsets);
            let why = format!("it is sampled at {here:?}, and the tables before it at {before:?}");
            return Err(failed(&why));
        }
        for record in table.records() {
            known.add(&record.sampled);
        }
        pages += table.len() as u64;
    }
    Ok(known.map(|known| (known, pages)))
}

/// No more than the longest table has.
fn content(path: &Path) -> std::io::Result<Vec<u8>> {
    let most = (HEADER_LEN + MOST_PAGES * RECORD_LEN) as u64;
    let mut bytes = Vec::new();
    File::open(path)?.take(most + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
