//! The shared-pages tables that a group names, read when they change.
//!
//! A thread of their own reads them: a large one takes seconds, one on a network file system may
//! take for ever, and the shims must not wait for either. If a table cannot be read, or is
//! sampled at other offsets than the others, no table is used: identical pages are still found,
//! but later.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use pages::dedup::KnownPages;
use pages::offline::{MOST_PAGES, RECORD_LEN, Sampling};

use tables::offline;

/// How often the files are checked for changes.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// The version of a file: its inode, its length, and its times of modification and change.
type State = (u64, u64, (i64, i64), (i64, i64));

/// Files, each with its version; `None`: the file does not exist.
type Named = Vec<(PathBuf, Option<State>)>;

/// The files read, with their content; `None`: they have not changed.
type Found = Option<(Named, Result<Option<(KnownPages, u64)>, String>)>;

/// The known pages of the guests.
#[derive(Debug, Default)]
pub(super) struct Tables {
    wanted: Vec<PathBuf>,
    named: Named,
    reading: Option<JoinHandle<Found>>,
    looked: Option<Instant>,
    /// Pages in all of the tables.
    pub(super) pages: u64,
    /// The reason why nothing is known.
    pub(super) trouble: Option<String>,
}

impl Tables {
    /// Sets the files to read.
    pub(super) fn want(&mut self, paths: &[PathBuf]) {
        if self.wanted != paths {
            self.wanted = paths.to_vec();
            self.looked = None;
        }
    }

    /// The known pages, if they have changed. Never waits.
    pub(super) fn changed(&mut self) -> Option<Option<KnownPages>> {
        if let Some(reading) = self.reading.take_if(|reading| reading.is_finished()) {
            let found = reading.join().unwrap_or_else(|_| {
                let why = "the thread that read them has failed".to_owned();
                Some((Named::new(), Err(why)))
            });
            let (named, found) = found?;
            self.named = named;
            let (known, trouble) = match found {
                Ok(known) => (known, None),
                Err(why) => (None, Some(why)),
            };
            self.pages = known.as_ref().map_or(0, |(_, pages)| *pages);
            self.trouble = trouble;
            return Some(known.map(|(known, _)| known));
        }
        let is_due = self.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY);
        let is_of_use = !(self.wanted.is_empty() && self.named.is_empty());
        if self.reading.is_none() && is_due && is_of_use {
            let (wanted, before) = (self.wanted.clone(), self.named.clone());
            self.looked = Some(Instant::now());
            let read = thread::Builder::new().name("tables".to_owned());
            self.reading = read.spawn(move || read_anew(&wanted, &before)).ok();
        }
        None
    }
}

fn read_anew(paths: &[PathBuf], before: &Named) -> Found {
    let named: Named = paths.iter().map(|path| (path.clone(), state(path))).collect();
    (named != *before).then(|| {
        let found = known(paths);
        (named, found)
    })
}

fn state(path: &Path) -> Option<State> {
    let file = fs::metadata(path).ok()?;
    let (changed, inode) = ((file.mtime(), file.mtime_nsec()), (file.ctime(), file.ctime_nsec()));
    Some((file.ino(), file.len(), changed, inode))
}

/// Reads these files: the known pages, and their number.
fn known(paths: &[PathBuf]) -> Result<Option<(KnownPages, u64)>, String> {
    let all: u64 = paths.iter().filter_map(|path| state(path)).map(|(_, len, ..)| len).sum();
    let most = usize::try_from(all).unwrap_or(usize::MAX) / RECORD_LEN;
    let mut known: Option<KnownPages> = None;
    let mut pages = 0;
    for path in paths {
        let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", path.display());
        let bytes = offline::read(path).map_err(|error| error.to_string())?;
        let table = offline::parse(&bytes).map_err(|error| failed(&error))?;
        let sampling = table.sampling();
        let known = known.get_or_insert_with(|| KnownPages::new(sampling, most.min(MOST_PAGES)));
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

#[cfg(test)]
mod tests {
    use pages::offline::Builder;

    use super::*;

    /// Waits until something has changed.
    fn next(tables: &mut Tables) -> Option<KnownPages> {
        let end = Instant::now() + Duration::from_secs(30);
        loop {
            if let Some(known) = tables.changed() {
                return known;
            }
            assert!(Instant::now() < end, "nothing is read");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn tables_are_read_when_they_are_named_or_change_and_trouble_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("one.spt");
        let mut tables = Tables::default();
        assert!(tables.changed().is_none() && tables.reading.is_none(), "nothing is wanted");
        tables.want(std::slice::from_ref(&file));
        assert!(next(&mut tables).is_none());
        assert!(tables.trouble.as_ref().is_some_and(|why| why.contains("one.spt")));

        let mut builder = Builder::new(Sampling::default());
        builder.add(&[7; 4096], true).unwrap();
        offline::write(&builder.finish(), &file).unwrap();
        tables.looked = None;
        let known = next(&mut tables).unwrap();
        assert!(known.may_begin_with(u64::from_le_bytes([7; 8])));
        assert_eq!((tables.pages, &tables.trouble), (1, &None));
        tables.want(&[]);
        assert!(next(&mut tables).is_none());
        assert_eq!(tables.pages, 0);
    }
}
