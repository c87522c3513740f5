//! Reads the files of the filesystems in a disk's image, without mounting it. Several threads
//! walk the same image, each with its own view, and each takes its share of the files.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
};

use super::{
    MOST_DEPTH, OfflineError, backing,
    cut::{Contents, Cutter},
    disk,
    ext4::Ext,
    limit::{Left, count},
    sources::spare,
    squashfs::Squashfs,
};

/// Files that one thread takes together: squashfs compresses neighbours together.
const TOGETHER: u64 = 32;

/// Common operations of the filesystems.
pub(super) trait Filesystem {
    /// A directory that is being read.
    type Directory;
    /// The location of a file or directory.
    type Place;
    /// A file that is being read.
    type File<'a>: Contents
    where
        Self: 'a;

    fn root(&mut self) -> io::Result<Self::Directory>;
    fn next(&mut self, directory: &mut Self::Directory) -> Option<io::Result<Entry<Self::Place>>>;
    fn enter(&mut self, place: &Self::Place) -> io::Result<Self::Directory>;
    fn open(&mut self, place: &Self::Place) -> io::Result<Self::File<'_>>;
}

/// An entry of a directory.
pub(super) struct Entry<P> {
    pub(super) name: OsString,
    pub(super) inside: Inside,
    pub(super) place: P,
}

/// The kind of an entry.
pub(super) enum Inside {
    Directory,
    File,
    /// An entry without contents of its own; or `.` and `..`.
    Other,
}

/// Cuts each `parts`-th file of the image, from the `part`-th on. All parts share `left`, but
/// each counts the files by itself, because each encounters all of them.
pub(super) fn cut(
    cutter: &mut Cutter<'_>,
    path: &Path,
    part: u64,
    parts: u64,
    left: &Left,
) -> Result<(), OfflineError> {
    let fail = |error| left.unreadable(path, error);
    let behind = cutter.shared.backing_dir.as_deref();
    let mut disk = backing::open(path, behind).map_err(fail)?;
    let mut walk = Walk { path, part, parts, left, seen: 0 };
    let mut others = Vec::new();
    let mut is_any_read = false;
    for found in disk::parts(disk.as_mut()).map_err(fail)? {
        let name = found.number.map_or_else(String::new, |number| format!("partition {number}"));
        let opened = found.holds.map_err(io::Error::other).and_then(|kind| {
            let disk = disk::From { disk: backing::open(path, behind)?, place: found.place };
            Opened::open(disk, kind)
        });
        let done = match opened {
            Ok(Opened::Ext(mut image)) => walk.cut_files(cutter, &mut image),
            Ok(Opened::Squashfs(mut image)) => walk.cut_files(cutter, &mut image),
            Err(error) => Err(left.unreadable(path, error)),
        };
        match done {
            Ok(()) => is_any_read = true,
            Err(OfflineError::File { error, .. }) => others.push((name, error)),
            Err(limit) => return Err(limit),
        }
    }
    if is_any_read {
        let path = |name: &str| PathBuf::from(format!("{}: {name}", path.display()));
        return others
            .into_iter()
            .try_for_each(|(name, error)| walk.leave_out(cutter, &path(&name), error));
    }
    Err(nothing_read(path, others))
}

/// A filesystem that can be read.
enum Opened {
    Ext(Ext),
    Squashfs(Squashfs),
}

impl Opened {
    fn open(disk: disk::From, kind: disk::FilesystemKind) -> io::Result<Self> {
        match kind {
            disk::FilesystemKind::Ext => Ext::open(disk).map(Self::Ext),
            disk::FilesystemKind::Squashfs => Squashfs::open(Box::new(disk)).map(Self::Squashfs),
        }
    }
}

/// The error if nothing of an image was read; it says what was found.
fn nothing_read(path: &Path, mut others: Vec<(String, io::Error)>) -> OfflineError {
    /// Partitions that the error names.
    const NAMED: usize = 8;
    if others.first().is_some_and(|(name, _)| name.is_empty()) {
        return OfflineError::File { path: path.into(), error: others.remove(0).1 };
    }
    let number = others.len();
    let named = others.iter().take(NAMED).map(|(name, error)| format!("{name} is {error}"));
    let mut named: Vec<String> = named.collect();
    if number > NAMED {
        named.push(format!("and {} more", number - NAMED));
    }
    let found = if named.is_empty() { "no partition".to_owned() } else { named.join(", ") };
    let what = format!(
        "there is no ext4 filesystem and no squashfs that can be read, neither on all of it nor on a \
         partition: {found}"
    );
    OfflineError::Source { path: path.into(), what }
}

/// One part's walk through all filesystems of an image.
pub(super) struct Walk<'a> {
    pub(super) path: &'a Path,
    pub(super) part: u64,
    pub(super) parts: u64,
    pub(super) left: &'a Left,
    pub(super) seen: u64,
}

impl Walk<'_> {
    pub(super) fn cut_files(
        &mut self,
        cutter: &mut Cutter<'_>,
        image: &mut impl Filesystem,
    ) -> Result<(), OfflineError> {
        let Self { path, part, parts, left, .. } = *self;
        let root = image.root().map_err(|error| left.unreadable(path, error))?;
        let mut open: Vec<(PathBuf, _)> = vec![(path.into(), root)];
        while let Some((around, directory)) = open.last_mut() {
            let Some(entry) = image.next(directory) else {
                open.pop();
                continue;
            };
            count(&mut self.seen, path)?;
            if cutter.shared.has_failed() {
                break;
            }
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    self.leave_out(cutter, around, error)?;
                    open.pop();
                    continue;
                }
            };
            let name = around.join(&entry.name);
            match entry.inside {
                Inside::Directory if open.len() >= MOST_DEPTH => {
                    let why = io::Error::other("it lies deeper than is entered");
                    self.leave_out(cutter, &name, why)?;
                }
                Inside::Directory => match image.enter(&entry.place) {
                    Ok(entries) => open.push((name, entries)),
                    Err(error) => self.leave_out(cutter, &name, error)?,
                },
                Inside::File if self.seen / TOGETHER % parts == part => {
                    let done = match image.open(&entry.place) {
                        Ok(mut file) => cutter.cut(&name, &mut file, left),
                        Err(error) => Err(left.unreadable(&name, error)),
                    };
                    spare(cutter, &name, done)?;
                }
                Inside::File | Inside::Other => {}
            }
        }
        Ok(())
    }

    /// Reports a file that was left out. All threads encounter it, so only one reports it; a
    /// limit ends the work.
    fn leave_out(
        &self,
        cutter: &Cutter<'_>,
        path: &Path,
        error: io::Error,
    ) -> Result<(), OfflineError> {
        match self.left.unreadable(path, error) {
            OfflineError::File { .. } if self.part > 0 => Ok(()),
            error => spare(cutter, path, Err(error)),
        }
    }
}
