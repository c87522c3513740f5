//! The files of ext4 filesystems in a disk's image, read without mounting it. Several threads walk
//! the same image, each with a view of its own, and each takes its part of the files.

use std::path::{Path, PathBuf};

use ext4_view::{Ext4, Ext4Error};

use super::{MOST_BYTES, MOST_DEPTH, MOST_FILES, OfflineError, cut::Cutter, disk, sources::spare};

/// Cuts each `parts`-th file of the image, from the `part`-th on.
pub(super) fn cut(
    cutter: &mut Cutter<'_>,
    path: &Path,
    part: u64,
    parts: u64,
) -> Result<(), OfflineError> {
    let fail = |error| OfflineError::File { path: path.into(), error };
    let mut disk = disk::open(path).map_err(fail)?;
    for place in disk::filesystems(disk.as_mut()).map_err(fail)? {
        let disk = disk::open(path).map_err(fail)?;
        let image = Ext4::load(Box::new(disk::From { disk, place }));
        let image = image.map_err(|error| fault(path, &error))?;
        cut_files(cutter, path, &image, part, parts)?;
    }
    Ok(())
}

fn cut_files(
    cutter: &mut Cutter<'_>,
    path: &Path,
    image: &Ext4,
    part: u64,
    parts: u64,
) -> Result<(), OfflineError> {
    let (mut seen, mut left) = (0, MOST_BYTES);
    let mut open = vec![image.read_dir("/").map_err(|error| fault(path, &error))?];
    while let Some(entries) = open.last_mut() {
        let Some(entry) = entries.next() else {
            open.pop();
            continue;
        };
        seen += 1;
        if seen > MOST_FILES {
            let what = format!("there are more than {MOST_FILES} files in it, the most read");
            return Err(OfflineError::Source { path: path.into(), what });
        }
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
            Ok(kind) if kind.is_regular_file() && seen % parts == part => {
                let name = shown(path, &inside);
                let done = match image.open(&inside) {
                    Ok(mut file) => cutter.cut(&name, &mut file, &mut left),
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
