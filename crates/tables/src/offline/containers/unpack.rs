//! Decompresses data while it is read, with bounds on the memory for it and on its output.

use std::io::{self, Read};

use flate2::read::{GzDecoder, MultiGzDecoder, ZlibDecoder};
use lzma_rust2::XzReader;

use super::{MOST_BYTES, MOST_XZ_KIB, cut::fill, limit::unpacks_too_much};

/// The compression of some data.
#[derive(Clone, Copy, Debug)]
pub(super) enum Compression {
    None,
    Gzip,
    Xz,
    Zstd,
    /// Linux's format for its kernel: `lz4 -l`.
    Lz4,
}

/// The number of compressed streams.
#[derive(Clone, Copy, Debug)]
pub(super) enum Streams {
    /// One; data after it is ignored.
    First,
    /// Any number of them, one after the other, up to the end. Anything else is an error.
    All,
}

/// Reads the contents.
pub(super) fn unpack(
    how: Compression,
    streams: Streams,
    packed: impl Read + 'static,
) -> io::Result<Unpacked> {
    let all = matches!(streams, Streams::All);
    let contents: Box<dyn Read> = match how {
        Compression::None => Box::new(packed),
        Compression::Gzip if all => Box::new(MultiGzDecoder::new(packed)),
        Compression::Gzip => Box::new(GzDecoder::new(packed)),
        Compression::Xz => Box::new(XzReader::new_mem_limit(packed, all, MOST_XZ_KIB)),
        Compression::Zstd if all => Box::new(zstd::Decoder::new(packed)?),
        Compression::Zstd => Box::new(zstd::Decoder::new(packed)?.single_frame()),
        Compression::Lz4 => Box::new(LegacyLz4::open(packed)?),
    };
    Ok(Unpacked { contents, left: MOST_BYTES, read: 0 })
}

/// Contents that end with an error when they exceed the limit of one source.
pub(super) struct Unpacked {
    contents: Box<dyn Read>,
    left: u64,
    read: u64,
}

impl Unpacked {
    /// Number of bytes of output so far.
    pub(super) const fn read_so_far(&self) -> u64 {
        self.read
    }
}

impl Read for Unpacked {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let has = self.contents.read(buffer)?;
        self.read += has as u64;
        self.left = self.left.checked_sub(has as u64).ok_or_else(unpacks_too_much)?;
        Ok(has)
    }
}

/// LZ4's legacy format, which has no end mark: blocks with their lengths, of 8 MiB each when
/// decompressed. The reader keeps one block.
struct LegacyLz4<R> {
    packed: R,
    block: Vec<u8>,
    at: usize,
}

/// The first bytes of LZ4's legacy format.
pub(super) const LEGACY_LZ4_MAGIC: [u8; 4] = [0x02, 0x21, 0x4c, 0x18];

impl<R: Read> LegacyLz4<R> {
    fn open(mut packed: R) -> io::Result<Self> {
        let mut magic = LEGACY_LZ4_MAGIC;
        packed.read_exact(&mut magic)?;
        Ok(Self { packed, block: Vec::new(), at: 0 })
    }

    /// Reads the next block; an empty one at the end.
    fn next(&mut self) -> io::Result<()> {
        const BLOCK_LEN: usize = 8 << 20;
        /// An incompressible block grows by this much.
        const MOST_PACKED: usize = BLOCK_LEN + BLOCK_LEN / 255 + 16;
        self.block.clear();
        self.at = 0;
        let mut word = [0; 4];
        match fill(&mut self.packed, &mut word)? {
            0 => return Ok(()),
            4 => {}
            _ => return Err(io::ErrorKind::UnexpectedEof.into()),
        }
        let len = usize::try_from(u32::from_le_bytes(word)).map_err(io::Error::other)?;
        if !(1..=MOST_PACKED).contains(&len) {
            return Err(io::Error::other(format!("a block of LZ4 with {len} bytes")));
        }
        let mut packed = vec![0; len];
        self.packed.read_exact(&mut packed)?;
        self.block.resize(BLOCK_LEN, 0);
        let has = lz4_flex::block::decompress_into(&packed, &mut self.block);
        self.block.truncate(has.map_err(io::Error::other)?);
        Ok(())
    }
}

impl<R: Read> Read for LegacyLz4<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at == self.block.len() {
            self.next()?;
        }
        let rest = &self.block[self.at..];
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        self.at += len;
        Ok(len)
    }
}

/// The compression of a filesystem's blocks.
#[derive(Clone, Copy, Debug)]
pub(super) enum BlockCompression {
    /// In zlib's format.
    Gzip,
    Xz,
    Lz4,
    Zstd,
}

/// Decompresses a block into at most `most` bytes.
pub(super) fn unpack_block(
    how: BlockCompression,
    packed: &[u8],
    most: usize,
) -> io::Result<Vec<u8>> {
    /// The window of xz is a block, of at most 1 MiB, and xz needs some memory for itself.
    const MOST_XZ_KIB: u32 = 2 << 10;
    match how {
        BlockCompression::Gzip => all(&mut ZlibDecoder::new(packed), most),
        BlockCompression::Xz => all(&mut XzReader::new_mem_limit(packed, false, MOST_XZ_KIB), most),
        BlockCompression::Lz4 => {
            let mut block = vec![0; most];
            let has = lz4_flex::block::decompress_into(packed, &mut block);
            block.truncate(has.map_err(io::Error::other)?);
            Ok(block)
        }
        BlockCompression::Zstd => zstd::bulk::decompress(packed, most),
    }
}

/// All contents, which must be at most `most` bytes.
fn all(contents: &mut impl Read, most: usize) -> io::Result<Vec<u8>> {
    let mut block = vec![0; most];
    let has = fill(contents, &mut block)?;
    block.truncate(has);
    // At its end xz compares the checksum.
    if fill(contents, &mut [0])? > 0 {
        return Err(io::Error::other("a block unpacks to more than it may"));
    }
    Ok(block)
}
