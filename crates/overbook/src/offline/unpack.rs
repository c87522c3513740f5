//! Unpacks what is compressed, while it is read, with bounds on the memory that this takes and on
//! what comes out.

use std::io::{self, Read};

use flate2::read::MultiGzDecoder;
use lzma_rust2::XzReader;

use super::{MOST_BYTES, limit::unpacks_too_much};

/// Memory for what xz looks back at; `dpkg-deb` and Linux use 64 MiB and 128 MiB at most. Zstd
/// takes 128 MiB at most by itself.
const MOST_XZ_KIB: u32 = 256 << 10;

/// How something is compressed.
#[derive(Clone, Copy, Debug)]
pub(super) enum Compression {
    None,
    Gzip,
    Xz,
    /// One frame: what stands behind it is not looked at.
    Zstd,
}

/// Reads the contents.
pub(super) fn unpack(how: Compression, packed: impl Read + 'static) -> io::Result<Unpacked> {
    let contents: Box<dyn Read> = match how {
        Compression::None => Box::new(packed),
        Compression::Gzip => Box::new(MultiGzDecoder::new(packed)),
        Compression::Xz => Box::new(XzReader::new_mem_limit(packed, false, MOST_XZ_KIB)),
        Compression::Zstd => Box::new(zstd::Decoder::new(packed)?.single_frame()),
    };
    Ok(Unpacked { contents, left: MOST_BYTES })
}

/// Contents that end with an error where they are more than is read out of one source.
pub(super) struct Unpacked {
    contents: Box<dyn Read>,
    left: u64,
}

impl Read for Unpacked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let has = self.contents.read(buffer)?;
        self.left = self.left.checked_sub(has as u64).ok_or_else(unpacks_too_much)?;
        Ok(has)
    }
}
