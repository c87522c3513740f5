//! ext4 filesystems, read by `ext4-view`.

use std::{ffi::OsString, io, os::unix::ffi::OsStringExt};

use ext4_view::{Ext4, Ext4Error, PathBuf, ReadDir};

use super::{
    cut::{Contents, skip_by_seeking},
    disk,
    image::{Entry, Filesystem, Inside},
    superblock::Ext4Disk,
};

impl Contents for ext4_view::File {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        skip_by_seeking(self, bytes)
    }
}

/// A filesystem.
pub(super) struct Ext(Ext4);

impl Ext {
    /// Reads the superblock.
    pub(super) fn open(disk: disk::From) -> io::Result<Self> {
        let shown = Ext4Disk::open(disk)?;
        Ext4::load(Box::new(shown)).map(Self).map_err(|error| fault(&error))
    }
}

impl Filesystem for Ext {
    type Directory = ReadDir;
    type Place = PathBuf;
    type File<'a> = ext4_view::File;

    fn root(&mut self) -> io::Result<ReadDir> {
        self.0.read_dir("/").map_err(|error| fault(&error))
    }

    fn next(&mut self, directory: &mut ReadDir) -> Option<io::Result<Entry<PathBuf>>> {
        let entry = match directory.next()? {
            Ok(entry) => entry,
            Err(error) => return Some(Err(fault(&error))),
        };
        let name = entry.file_name();
        let inside = match entry.file_type() {
            Ok(_) if [b".".as_slice(), b".."].contains(&name.as_ref()) => Inside::Other,
            Ok(kind) if kind.is_dir() => Inside::Directory,
            Ok(kind) if kind.is_regular_file() => Inside::File,
            Ok(_) => Inside::Other,
            // An unknown kind counts as a file; opening it reports the reason.
            Err(_) => Inside::File,
        };
        let name = OsString::from_vec(name.as_ref().to_vec());
        Some(Ok(Entry { name, inside, place: entry.path() }))
    }

    fn enter(&mut self, place: &PathBuf) -> io::Result<ReadDir> {
        self.0.read_dir(place).map_err(|error| fault(&error))
    }

    fn open(&mut self, place: &PathBuf) -> io::Result<ext4_view::File> {
        self.0.open(place).map_err(|error| fault(&error))
    }
}

fn fault(error: &Ext4Error) -> io::Error {
    io::Error::other(error.to_string())
}
