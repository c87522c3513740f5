//! Finds the executable in a kernel's boot image (`bzImage`), as Linux describes it in
//! `Documentation/arch/x86/boot.rst`: the setup code gives the place of the compressed `vmlinux`.

use std::{
    fs::File,
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};

use super::{
    OfflineError, Stream,
    cut::Cutter,
    limit::Left,
    unpack::{Compression, LEGACY_LZ4_MAGIC, Streams, Unpacked, unpack},
};

const SETUP_LEN: usize = 0x250;
const SECTOR: u64 = 512;
/// First version of the setup code that gives the place of the compressed kernel.
const LEAST_VERSION: u16 = 0x208;

/// Cuts the kernel in a boot image.
pub(super) fn cut(cutter: &mut Cutter<'_>, path: &Path) -> Result<(), OfflineError> {
    let kernel = kernel(path).map_err(|error| OfflineError::File { path: path.into(), error })?;
    cutter.cut(path, &mut Stream(kernel), &Left::new(path))
}

fn kernel(path: &Path) -> io::Result<Unpacked> {
    let mut file = File::open(path)?;
    let mut setup = [0; SETUP_LEN];
    file.read_exact(&mut setup)?;
    let long =
        |at: usize| u32::from_le_bytes([setup[at], setup[at + 1], setup[at + 2], setup[at + 3]]);
    let version = u16::from_le_bytes([setup[0x206], setup[0x207]]);
    if version < LEAST_VERSION {
        let what = "is too old to say where the kernel is; valid: 0x208 and above";
        return Err(io::Error::other(format!("boot protocol {version:#x} {what}")));
    }
    // By the boot protocol, 0 sectors means 4.
    let sectors = if setup[0x1f1] == 0 { 4 } else { u64::from(setup[0x1f1]) };
    let start = (sectors + 1) * SECTOR + u64::from(long(0x248));
    file.seek(SeekFrom::Start(start))?;
    let mut magic = [0; 6];
    file.read_exact(&mut magic)?;
    file.seek(SeekFrom::Start(start))?;
    let mut len = u64::from(long(0x24c));
    let how = match magic {
        _ if magic.starts_with(&LEGACY_LZ4_MAGIC) => {
            // Linux appends the kernel's length, which LZ4 would take for the length of a block.
            len = len.saturating_sub(4);
            Compression::Lz4
        }
        [0x1f, 0x8b, ..] => Compression::Gzip,
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Compression::Xz,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
        [0x7f, b'E', b'L', b'F', ..] => Compression::None,
        _ => {
            let what = "its compression is not supported yet; valid: gzip, xz, zstd, lz4 and none, or \
                        what Linux's `extract-vmlinux` makes of it";
            return Err(io::Error::other(what));
        }
    };
    // A length may follow the compressed data.
    unpack(how, Streams::First, file.take(len))
}
