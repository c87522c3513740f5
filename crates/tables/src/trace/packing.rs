//! Tells by a file's first bytes how it is compressed, or that it is not a trace.
//!
//! The name does not decide, because traces are passed on under any name and pipes have none. A
//! name of a compressed file is an error if the bytes are not compressed: the file may be damaged.

use std::{
    io::{BufReader, Read},
    path::Path,
};

use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;

use crate::offline::MOST_XZ_KIB;

/// Bytes read of a file's beginning; a tar archive has its mark at byte 257.
pub(super) const LOOK: usize = 512;

/// A compression that is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Packing {
    Gzip,
    Xz,
    Zstd,
}

/// A known format that cannot be read: the place of its magic bytes, the bytes, its name, and
/// another way.
type Sign = (usize, &'static [u8], &'static str, &'static str);

const NOT_READ: [Sign; 9] = [
    (4, b"1AY&SY", "compressed by bzip2", "`bzcat FILE | overbook mrc -` reads it"),
    (0, &[0x04, 0x22, 0x4d, 0x18], "compressed by lz4", "`lz4 -dc FILE | overbook mrc -` reads it"),
    (0, &[0x02, 0x21, 0x4c, 0x18], "compressed by lz4", "`lz4 -dc FILE | overbook mrc -` reads it"),
    (0, b"LZIP", "compressed by lzip", "`lzip -dc FILE | overbook mrc -` reads it"),
    (0, b"PK\x03\x04", "a zip archive", "`unzip -p FILE | overbook mrc -` reads what is in it"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "`7z x -so FILE | overbook mrc -` reads it"),
    (257, b"ustar", "a tar archive", "`tar -xOf FILE | overbook mrc -` reads what is in it"),
    (0, b"PAR1", "a Parquet file", "a csv of it can be read"),
    (0, b"SQLite format 3\0", "a SQLite database", "a csv of one of its tables can be read"),
];

/// File name extensions of compressed files.
const ENDINGS: [&str; 7] = [".zst", ".zstd", ".gz", ".xz", ".bz2", ".lz4", ".lz"];

impl Packing {
    /// The compression of a file with this beginning.
    pub(super) fn of(head: &[u8]) -> Option<Self> {
        match head {
            // The only method, no reserved flag, and one of three compression levels.
            [0x1f, 0x8b, 8, flags, _, _, _, _, 0 | 2 | 4, ..] if flags & 0xe0 == 0 => {
                Some(Self::Gzip)
            }
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Some(Self::Xz),
            // The second pattern is a skippable frame, as pzstd writes it.
            [0x28, 0xb5, 0x2f, 0xfd, ..] | [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Self::Zstd),
            _ => None,
        }
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Xz => "xz",
            Self::Zstd => "zstd",
        }
    }

    /// Decompresses all streams of the file, one after the other.
    pub(super) fn open(self, packed: impl Read + 'static) -> std::io::Result<Box<dyn Read>> {
        let packed = BufReader::new(packed);
        Ok(match self {
            Self::Gzip => Box::new(MultiGzDecoder::new(packed)),
            Self::Xz => Box::new(XzReader::new_mem_limit(packed, true, MOST_XZ_KIB)),
            Self::Zstd => Box::new(zstd::Decoder::with_buffer(packed)?),
        })
    }
}

/// The name of a format that cannot be read, and another way.
pub(super) fn not_read(head: &[u8]) -> Option<(&'static str, &'static str)> {
    let is = |(at, sign, ..): &&Sign| head.get(*at..).is_some_and(|rest| rest.starts_with(sign));
    NOT_READ.iter().find(is).map(|(.., what, way)| (*what, *way))
}

/// The extension, if it is one of a compressed file.
pub(super) fn ending(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_string_lossy().to_lowercase();
    ENDINGS.into_iter().find(|ending| name.ends_with(ending))
}

/// A name in lower case, without the extensions of compressed files.
pub(super) fn bare_name(path: &Path) -> Option<String> {
    let mut name = path.file_name()?.to_string_lossy().to_lowercase();
    while let Some(ending) = ENDINGS.into_iter().find(|ending| name.ends_with(ending)) {
        name.truncate(name.len() - ending.len());
    }
    Some(name)
}
