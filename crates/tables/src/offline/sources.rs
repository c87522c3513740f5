//! Tells the kind of a source by its first bytes.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::fs::OFlags;

use super::{OfflineError, cut::Cutter, elf, limit::Left};

/// The kind of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SourceKind {
    /// A directory to search for files.
    Tree,
    /// A file with files in it.
    Container(ContainerKind),
    /// A file to cut.
    File,
}

/// The kind of a file with files in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContainerKind {
    /// A package to unpack.
    Package,
    /// A boot image with an executable.
    Kernel,
    /// A disk image to search for files.
    Image,
}

/// The place of a file's magic bytes, the bytes, and a text.
type Sign = (usize, &'static [u8], &'static str);

/// Known formats that cannot be read.
const NOT_YET: [Sign; 6] = [
    (0, b"LUKS\xba\xbe", "an encrypted volume cannot be read; valid: what is opened of it"),
    (0, b"XFSB", "an XFS image is not supported yet; valid: an ext4 image, or a directory"),
    (0, b"KDMV", "a VMDK image is not supported; valid: what `qemu-img convert -O qcow2` makes"),
    (0, b"vhdxfile", "a VHDX image is not supported; valid: what `qemu-img convert` makes of it"),
    (0, b"!<arch>\ndebian-split", "a part of a package; valid: what `dpkg-split --join` makes"),
    (0x1_0040, b"_BHRfS_M", "a btrfs image is not supported yet; valid: an ext4 image"),
];
/// Compressed files, with the command that decompresses them. No guest has their own pages in
/// memory as code.
const COMPRESSED: [Sign; 4] = [
    (0, &[0x1f, 0x8b, 8], "gzip -d"),
    (0, b"\xfd7zXZ\0", "xz -d"),
    (0, &[0x28, 0xb5, 0x2f, 0xfd], "zstd -d"),
    (4, b"1AY&SY", "bzip2 -d"),
];
/// The place of an ext4 filesystem's magic bytes.
pub(super) const EXT_MAGIC_AT: usize = 1080;
pub(super) const EXT_MAGIC: &[u8] = b"\x53\xef";
pub(super) const GPT_MAGIC: &[u8] = b"EFI PART";
pub(super) const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";
pub(super) const SQUASHFS_MAGIC: &[u8] = b"hsqs";
const KERNEL: Sign = (0x202, b"HdrS", "");
const PACKAGE: Sign = (0, b"!<arch>\ndebian-binary", "");
/// An ext4 filesystem; squashfs; qcow2; disks with a GPT or an MBR. The MBR's signature also
/// occurs in other boot sectors and in kernels, so these are checked first.
const IMAGES: [Sign; 6] = [
    (EXT_MAGIC_AT, EXT_MAGIC, ""),
    (0, SQUASHFS_MAGIC, ""),
    (0, &QCOW2_MAGIC, ""),
    (512, GPT_MAGIC, ""),
    (4096, GPT_MAGIC, ""),
    (510, b"\x55\xaa", ""),
];
const SIGNS_LEN: u64 = 0x1_0040 + 8;

/// The kind of this source. If all pages are wanted, an unknown file is cut as it is.
pub(super) fn kind(path: &Path, all_pages: bool) -> Result<SourceKind, OfflineError> {
    let fail = |error| OfflineError::File { path: path.into(), error };
    let unfit = |what: &str| OfflineError::Source { path: path.into(), what: what.into() };
    let metadata = fs::metadata(path).map_err(fail)?;
    if metadata.is_dir() {
        return Ok(SourceKind::Tree);
    }
    if !metadata.is_file() {
        return Err(unfit("neither a file nor a directory"));
    }
    let mut head = Vec::new();
    open(path, OFlags::empty())
        .and_then(|file| file.take(SIGNS_LEN).read_to_end(&mut head))
        .map_err(fail)?;
    let has = |(at, sign, _): &Sign| head.get(*at..).is_some_and(|rest| rest.starts_with(sign));
    if head.starts_with(elf::MAGIC) {
        return Ok(SourceKind::File);
    }
    if has(&PACKAGE) {
        return Ok(SourceKind::Container(ContainerKind::Package));
    }
    if has(&KERNEL) {
        return Ok(SourceKind::Container(ContainerKind::Kernel));
    }
    if let Some((_, _, what)) = NOT_YET.iter().find(|sign| has(sign)) {
        return Err(unfit(what));
    }
    if IMAGES.iter().any(has) {
        return Ok(SourceKind::Container(ContainerKind::Image));
    }
    if all_pages {
        return Ok(SourceKind::File);
    }
    if let Some((_, _, way)) = COMPRESSED.iter().find(|sign| has(sign)) {
        return Err(unfit(&format!("it is compressed; valid: what `{way}` makes of it")));
    }
    if head.is_empty() {
        return Err(unfit("it is empty"));
    }
    Err(unfit(
        "neither an executable nor a package nor an image that is known; valid: ELF, .deb, ext4, \
         squashfs, qcow2, bzImage, a directory; --all-pages takes any file as it stands, such as a \
         raw memory dump",
    ))
}

/// Cuts a file of the host.
pub(super) fn cut_file(
    cutter: &mut Cutter<'_>,
    path: &Path,
    is_named: bool,
) -> Result<(), OfflineError> {
    let flags = if is_named { OFlags::empty() } else { OFlags::NOFOLLOW };
    let done = match open(path, flags) {
        Ok(mut file) => cutter.cut(path, &mut file, &Left::new(path)),
        Err(error) => Err(OfflineError::File { path: path.into(), error }),
    };
    if is_named { done } else { spare(cutter, path, done) }
}

/// Leaves out a file that cannot be read, unless it was named itself. A limit of the source ends
/// the work.
pub(super) fn spare(
    cutter: &Cutter<'_>,
    path: &Path,
    done: Result<(), OfflineError>,
) -> Result<(), OfflineError> {
    match done {
        Err(OfflineError::File { error, .. }) => cutter.leave_out(path, &error),
        Err(OfflineError::Source { what, .. }) => cutter.leave_out(path, &what),
        done => return done,
    }
    Ok(())
}

/// Opens a regular file. It does not block on a path that has meanwhile become a pipe.
pub(super) fn open(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY;
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("no longer a regular file"));
    }
    Ok(file)
}
