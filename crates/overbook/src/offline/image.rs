//! The files of ext4 filesystems in a disk's image, read without mounting it. Several threads walk
//! the same image, each with a view of its own, and each takes its part of the files.

use std::path::{Path, PathBuf};

use ext4_view::{Ext4, Ext4Error};

use super::{
    MOST_DEPTH, OfflineError,
    cut::Cutter,
    disk,
    limit::{Left, count},
    sources::spare,
};

/// Cuts each `parts`-th file of the image, from the `part`-th on. `left` is all parts' together;
/// the files each part counts by itself, for each meets all of them.
pub(super) fn cut(
    cutter: &mut Cutter<'_>,
    path: &Path,
    part: u64,
    parts: u64,
    left: &Left,
) -> Result<(), OfflineError> {
    let fail = |error| OfflineError::File { path: path.into(), error };
    let mut disk = disk::open(path).map_err(fail)?;
    let mut walk = Walk { path, part, parts, left, seen: 0 };
    for place in disk::filesystems(disk.as_mut()).map_err(fail)? {
        let disk = disk::open(path).map_err(fail)?;
        let image = Ext4::load(Box::new(disk::From { disk, place }));
        let image = image.map_err(|error| fault(path, &error))?;
        walk.cut_files(cutter, &image)?;
    }
    Ok(())
}

/// One part's way through all filesystems of an image.
struct Walk<'a> {
    path: &'a Path,
    part: u64,
    parts: u64,
    left: &'a Left,
    seen: u64,
}

impl Walk<'_> {
    fn cut_files(&mut self, cutter: &mut Cutter<'_>, image: &Ext4) -> Result<(), OfflineError> {
        let Self { path, part, parts, left, .. } = *self;
        let mut open = vec![image.read_dir("/").map_err(|error| fault(path, &error))?];
        while let Some(entries) = open.last_mut() {
            let Some(entry) = entries.next() else {
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
                    open.pop();
                    leave_out(cutter, path, part, &error);
                    continue;
                }
            };
            if [b".".as_slice(), b".."].contains(&entry.file_name().as_ref()) {
                continue;
            }
            let inside = entry.path();
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && open.len() >= MOST_DEPTH => {
                    let why = "it lies deeper than is entered";
                    leave_out(cutter, &shown(path, &inside), part, &why);
                }
                Ok(kind) if kind.is_dir() => match image.read_dir(&inside) {
                    Ok(entries) => open.push(entries),
                    Err(error) => leave_out(cutter, &shown(path, &inside), part, &error),
                },
                Ok(kind) if kind.is_regular_file() && self.seen % parts == part => {
                    let name = shown(path, &inside);
                    let done = match image.open(&inside) {
                        Ok(mut file) => cutter.cut(&name, &mut file, left),
                        Err(error) => Err(fault(&name, &error)),
                    };
                    spare(cutter, &name, done)?;
                }
                Ok(_) => {}
                Err(error) => leave_out(cutter, &shown(path, &inside), part, &error),
            }
        }
        Ok(())
    }
}

/// What all threads meet, one tells of.
fn leave_out(cutter: &Cutter<'_>, path: &Path, part: u64, why: &dyn std::fmt::Display) {
    if part == 0 {
        cutter.shared.leave_out(path, why);
    }
}

fn fault(path: &Path, error: &Ext4Error) -> OfflineError {
    OfflineError::Source { path: path.into(), what: error.to_string() }
}

fn shown(image: &Path, inside: &ext4_view::PathBuf) -> PathBuf {
    image.join(inside.display().to_string().trim_start_matches('/'))
}
