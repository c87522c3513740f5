//! Opens disks' images, and the backing files of qcow2 images, which hold the clusters that an
//! image lacks.
//!
//! An image names its backing file, and its author may have named any file of the host. So a
//! backing file is opened only on request, and only within the directory that the operator names,
//! even if links lead out of it. The image must also state the format of its backing file. The
//! format is not guessed, because a guest that owns a raw disk could write another header to it.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};

use super::{
    disk::Disk,
    printable,
    qcow2::{Named, Qcow2},
    sources::QCOW2_MAGIC,
};

/// Maximum length of a backing chain. Each image takes up to 4 MiB in each thread.
const MOST_BEHIND: usize = 16;

/// Opens an image. `directory` is the directory in which backing files may be opened.
pub(super) fn open(path: &Path, directory: Option<&Path>) -> io::Result<Box<dyn Disk>> {
    let file = File::open(path)?;
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, 0)?;
    let (disk, _) = open_image(file, path, magic == QCOW2_MAGIC, directory, 0)?;
    Ok(disk)
}

/// The disk and its size.
fn open_image(
    file: File,
    path: &Path,
    is_qcow2: bool,
    directory: Option<&Path>,
    around: usize,
) -> io::Result<(Box<dyn Disk>, u64)> {
    if !is_qcow2 {
        let size = file.metadata()?.len();
        return Ok((Box::new(file), size));
    }
    let mut image = Qcow2::open(file)?;
    if let Some(Named { name, format }) = image.named()? {
        let shown = printable(&name.display().to_string());
        let unfit = |what: &str| io::Error::other(format!("its backing file {shown:?} {what}"));
        let Some(directory) = directory else {
            return Err(unfit(
                "is opened only on request; valid: --backing-dir with the directory that has it, \
                 or what `qemu-img convert` makes of the image",
            ));
        };
        if around == MOST_BEHIND {
            return Err(unfit("is one too many; valid: 16 images behind each other"));
        }
        let is_qcow2 = match format.as_deref() {
            Some(b"qcow2") => true,
            Some(b"raw") => false,
            Some(_) => return Err(unfit("has a format that is not supported; valid: qcow2, raw")),
            None => {
                let what = "has a format that the image does not tell; valid: what \
                            `qemu-img rebase -u -b FILE -F FORMAT` makes of the image";
                return Err(unfit(what));
            }
        };
        let wanted = path.parent().unwrap_or(path).join(&name);
        let (file, place) = within(directory, &wanted)
            .map_err(|error| unfit(&format!("cannot be opened: {error}")))?;
        let (behind, size) = open_image(file, &place, is_qcow2, Some(directory), around + 1)
            .map_err(|error| unfit(&format!("cannot be read: {error}")))?;
        image.put_behind(behind, size);
    }
    let size = image.size();
    Ok((Box::new(image), size))
}

/// Opens a file of this directory. Also returns its path without links.
fn within(directory: &Path, wanted: &Path) -> io::Result<(File, PathBuf)> {
    let directory = fs::canonicalize(directory)?;
    let place = fs::canonicalize(wanted)?;
    let Ok(inside) = place.strip_prefix(&directory) else {
        let shown = printable(&directory.display().to_string());
        let what = format!("it does not lie in {shown:?}, which --backing-dir names");
        return Err(io::Error::other(what));
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let around = openat(CWD, &directory, flags | OFlags::DIRECTORY, Mode::empty())?;
    // Links or a pipe that were put there meanwhile are not followed or waited for.
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let how = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    let file = File::from(openat2(around, inside, flags, Mode::empty(), how)?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    Ok((file, place))
}
