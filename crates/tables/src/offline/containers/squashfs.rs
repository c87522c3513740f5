//! Reads squashfs images of version 4, as Linux describes them in
//! `Documentation/filesystems/squashfs.rst` and `fs/squashfs/squashfs_fs.h`.
//!
//! Inodes and directories are in tables, which are compressed in blocks of 8 KiB. Files are in
//! blocks of up to 1 MiB; the ends of many files share one block, a *fragment*. Nothing is read
//! before it is needed. The reader keeps [`KEPT`] blocks of tables, and of files one block and
//! one fragment.
//!
//! All decompressed bytes count, also those of tables and repetitions: that bounds the cost of a
//! forged image. A directory that contains itself ends at the maximum depth. Left out: LZMA,
//! which Linux does not read, and LZO.

use std::{
    collections::VecDeque,
    ffi::OsString,
    io::{self, Read},
    os::unix::ffi::OsStringExt,
};

use super::{
    MOST_BYTES,
    cut::Contents,
    disk::{Disk, double, long, short},
    image::{Entry, Filesystem, Inside},
    limit::unpacks_too_much,
    unpack::{BlockCompression, unpack_block},
};

const SUPERBLOCK_LEN: usize = 96;
const VERSION: u16 = 4;
/// Maximum size of a table's block.
const TABLE_BLOCK_LEN: usize = 8 << 10;
/// Number of table blocks that are kept.
const KEPT: usize = 16;
/// Set in the length of a block that is not compressed.
const STORED_TABLE_BLOCK: u16 = 1 << 15;
const STORED_BLOCK: u32 = 1 << 24;
const NO_FRAGMENT: u32 = u32::MAX;
const FRAGMENTS_IN_BLOCK: u32 = 512;
const MOST_NAME: usize = 256;
const MOST_ENTRIES: u32 = 256;

/// An image.
pub(super) struct Squashfs {
    disk: Box<dyn Disk>,
    how: BlockCompression,
    block_len: usize,
    root: u64,
    inodes: u64,
    directories: u64,
    fragments: u64,
    fragment_count: u32,
    /// The blocks of tables that were decompressed last.
    tables: VecDeque<TableBlock>,
    /// The fragment that was decompressed last, and its place.
    fragment: (u64, Vec<u8>),
    packed: Vec<u8>,
    /// Bytes that may still be decompressed.
    left: u64,
}

struct TableBlock {
    place: u64,
    /// Place of the next block.
    next: u64,
    bytes: Vec<u8>,
}

/// A position in a table.
#[derive(Clone, Copy)]
struct Cursor {
    block: u64,
    at: usize,
}

/// A directory that is being read.
pub(super) struct Directory {
    cursor: Cursor,
    /// Remaining bytes of the directory.
    left: u32,
    /// Number of entries up to the next header, and the block of their inodes.
    entries: u32,
    inodes: u32,
}

/// The location of a file's contents.
struct FileLocation {
    size: u64,
    start: u64,
    /// Position of the lengths of its blocks.
    lengths: Cursor,
    /// The fragment with its end, and the offset in it.
    end: Option<(u32, u32)>,
}

impl Squashfs {
    /// Reads the superblock.
    pub(super) fn open(mut disk: Box<dyn Disk>) -> io::Result<Self> {
        let mut block = [0; SUPERBLOCK_LEN];
        disk.read_at(0, &mut block)?;
        let unfit = |what: String| Err(io::Error::other(what));
        let version = short(&block, 28);
        if version != VERSION {
            return unfit(format!("squashfs of version {version}; valid: {VERSION}"));
        }
        let how = match short(&block, 20) {
            1 => BlockCompression::Gzip,
            4 => BlockCompression::Xz,
            5 => BlockCompression::Lz4,
            6 => BlockCompression::Zstd,
            other => {
                let name = match other {
                    2 => "LZMA",
                    3 => "LZO",
                    _ => "an unknown one",
                };
                let what = "is not supported yet; valid: gzip, xz, lz4 and zstd, or what \
                            `unsquashfs` makes of it";
                return unfit(format!("its compression {other}, {name}, {what}"));
            }
        };
        let block_bits = short(&block, 22);
        if !(12..=20).contains(&block_bits) || long(&block, 12) != 1 << block_bits {
            return unfit(format!("blocks of 2^{block_bits} bytes; valid: 2^12 to 2^20"));
        }
        Ok(Self {
            disk,
            how,
            block_len: 1 << block_bits,
            root: double(&block, 32),
            inodes: double(&block, 64),
            directories: double(&block, 72),
            fragments: double(&block, 80),
            fragment_count: long(&block, 16),
            tables: VecDeque::new(),
            fragment: (0, Vec::new()),
            packed: Vec::new(),
            left: MOST_BYTES,
        })
    }

    /// Sets the number of bytes that may be decompressed.
    #[cfg(test)]
    pub(super) fn with_left(self, left: u64) -> Self {
        Self { left, ..self }
    }

    /// Decompresses `len` bytes into at most `most` bytes.
    fn unpack(
        &mut self,
        place: u64,
        len: usize,
        is_stored: bool,
        most: usize,
    ) -> io::Result<Vec<u8>> {
        self.left = self.left.checked_sub(most as u64).ok_or_else(unpacks_too_much)?;
        if len > most.max(self.block_len) {
            return Err(damaged());
        }
        self.packed.resize(len, 0);
        self.disk.read_at(place, &mut self.packed)?;
        if is_stored {
            return Ok(self.packed.clone());
        }
        unpack_block(self.how, &self.packed, most)
    }

    fn table_block(&mut self, place: u64) -> io::Result<&TableBlock> {
        if let Some(at) = self.tables.iter().position(|block| block.place == place) {
            return Ok(&self.tables[at]);
        }
        let mut header = [0; 2];
        self.disk.read_at(place, &mut header)?;
        let header = u16::from_le_bytes(header);
        let len = usize::from(header & !STORED_TABLE_BLOCK);
        let start = place.checked_add(2).ok_or_else(damaged)?;
        let is_stored = header & STORED_TABLE_BLOCK != 0;
        if len > TABLE_BLOCK_LEN {
            return Err(damaged());
        }
        let bytes = self.unpack(start, len, is_stored, TABLE_BLOCK_LEN)?;
        if bytes.is_empty() {
            return Err(damaged());
        }
        self.tables.truncate(KEPT - 1);
        self.tables.push_front(TableBlock { place, next: start + len as u64, bytes });
        Ok(&self.tables[0])
    }

    /// Fills the buffer from a table, and advances the cursor.
    fn read(&mut self, cursor: &mut Cursor, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            let block = self.table_block(cursor.block)?;
            let rest = block.bytes.get(cursor.at..).ok_or_else(damaged)?;
            let len = rest.len().min(buffer.len() - done);
            buffer[done..done + len].copy_from_slice(&rest[..len]);
            done += len;
            cursor.at += len;
            if len == rest.len() {
                *cursor = Cursor { block: block.next, at: 0 };
            }
        }
        Ok(())
    }

    /// An inode's kind, and the position of the data after the common header.
    fn inode(&mut self, inode: u64) -> io::Result<(u16, Cursor)> {
        let mut cursor = cursor(self.inodes, inode >> 16, inode)?;
        let mut common = [0; 16];
        self.read(&mut cursor, &mut common)?;
        Ok((short(&common, 0), cursor))
    }

    fn directory(&mut self, inode: u64) -> io::Result<Directory> {
        let (kind, mut place) = self.inode(inode)?;
        let mut inode = [0; 24];
        let (block, size, at) = match kind {
            1 => {
                self.read(&mut place, &mut inode[..16])?;
                (long(&inode, 0), short(&inode, 8).into(), short(&inode, 10))
            }
            8 => {
                self.read(&mut place, &mut inode)?;
                (long(&inode, 8), long(&inode, 4), short(&inode, 18))
            }
            _ => return Err(damaged()),
        };
        // Linux counts three more bytes, for `.` and `..`.
        let left = size.saturating_sub(3);
        let cursor = cursor(self.directories, block.into(), at.into())?;
        Ok(Directory { cursor, left, entries: 0, inodes: 0 })
    }

    fn file(&mut self, inode: u64) -> io::Result<FileLocation> {
        let (kind, mut lengths) = self.inode(inode)?;
        let mut inode = [0; 40];
        let (start, size, fragment, at) = match kind {
            2 => {
                self.read(&mut lengths, &mut inode[..16])?;
                let [start, fragment, at, size] = [0, 4, 8, 12].map(|at| long(&inode, at));
                (start.into(), size.into(), fragment, at)
            }
            9 => {
                self.read(&mut lengths, &mut inode)?;
                (double(&inode, 0), double(&inode, 8), long(&inode, 28), long(&inode, 32))
            }
            _ => return Err(damaged()),
        };
        let end = (fragment != NO_FRAGMENT).then_some((fragment, at));
        Ok(FileLocation { size, start, lengths, end })
    }

    fn next_entry(&mut self, directory: &mut Directory) -> io::Result<Option<Entry<u64>>> {
        const HEADER_LEN: usize = 12;
        const ENTRY_LEN: usize = 8;
        if directory.left == 0 {
            return Ok(None);
        }
        if directory.entries == 0 {
            let mut header = [0; HEADER_LEN];
            self.read(&mut directory.cursor, &mut header)?;
            directory.spend(HEADER_LEN)?;
            directory.inodes = long(&header, 4);
            directory.entries = long(&header, 0).saturating_add(1);
            if directory.entries > MOST_ENTRIES {
                return Err(damaged());
            }
        }
        let mut entry = [0; ENTRY_LEN];
        self.read(&mut directory.cursor, &mut entry)?;
        let mut name = vec![0; usize::from(short(&entry, 6)) + 1];
        if name.len() > MOST_NAME {
            return Err(damaged());
        }
        self.read(&mut directory.cursor, &mut name)?;
        directory.spend(ENTRY_LEN + name.len())?;
        directory.entries -= 1;
        if name.contains(&b'/') {
            return Err(damaged());
        }
        let inside = match short(&entry, 4) {
            1 => Inside::Directory,
            2 => Inside::File,
            _ => Inside::Other,
        };
        let place = u64::from(directory.inodes) << 16 | u64::from(short(&entry, 0));
        Ok(Some(Entry { name: OsString::from_vec(name), inside, place }))
    }

    /// A block with the ends of files.
    fn fragment(&mut self, index: u32) -> io::Result<&[u8]> {
        if index >= self.fragment_count {
            return Err(damaged());
        }
        let block = u64::from(index / FRAGMENTS_IN_BLOCK);
        let mut place = [0; 8];
        self.disk.read_at(self.fragments.saturating_add(block * 8), &mut place)?;
        let at = u64::from(index % FRAGMENTS_IN_BLOCK) * 16;
        let mut fragment = [0; 16];
        self.read(&mut cursor(u64::from_le_bytes(place), 0, at)?, &mut fragment)?;
        let (start, len) = (double(&fragment, 0), long(&fragment, 8));
        if self.fragment.0 != start {
            self.fragment.0 = 0;
            let bytes = self.unpack(start, packed_len(len), is_stored(len), self.block_len)?;
            self.fragment = (start, bytes);
        }
        Ok(&self.fragment.1)
    }
}

impl Directory {
    fn spend(&mut self, bytes: usize) -> io::Result<()> {
        let bytes = u32::try_from(bytes).map_err(|_| damaged())?;
        self.left = self.left.checked_sub(bytes).ok_or_else(damaged)?;
        Ok(())
    }
}

impl Filesystem for Squashfs {
    type Directory = Directory;
    type Place = u64;
    type File<'a> = File<'a>;

    fn root(&mut self) -> io::Result<Directory> {
        self.directory(self.root)
    }

    fn next(&mut self, directory: &mut Directory) -> Option<io::Result<Entry<u64>>> {
        self.next_entry(directory).transpose()
    }

    fn enter(&mut self, place: &u64) -> io::Result<Directory> {
        self.directory(*place)
    }

    fn open(&mut self, place: &u64) -> io::Result<File<'_>> {
        let place = self.file(*place)?;
        let (lengths, start) = (place.lengths, place.start);
        let next = Next { block: 0, start, lengths };
        Ok(File { image: self, place, at: 0, next, block: (u64::MAX, Vec::new()) })
    }
}

/// A file that is read from its beginning.
pub(super) struct File<'a> {
    image: &'a mut Squashfs,
    place: FileLocation,
    at: u64,
    next: Next,
    /// The block that was unpacked last, and its number.
    block: (u64, Vec<u8>),
}

/// The first block whose length was not read yet.
struct Next {
    block: u64,
    start: u64,
    lengths: Cursor,
}

impl File<'_> {
    fn unpack(&mut self, block: u64) -> io::Result<Vec<u8>> {
        let block_len = self.image.block_len as u64;
        let len = (self.place.size - block * block_len).min(block_len);
        let len = usize::try_from(len).map_err(|_| damaged())?;
        if let Some((fragment, from)) = self.place.end
            && block == self.place.size / block_len
        {
            let from = usize::try_from(from).map_err(|_| damaged())?;
            let part = self.image.fragment(fragment)?.get(from..from + len);
            return part.map(<[u8]>::to_vec).ok_or_else(damaged);
        }
        let (start, word) = loop {
            let mut word = [0; 4];
            self.image.read(&mut self.next.lengths, &mut word)?;
            let (start, word) = (self.next.start, u32::from_le_bytes(word));
            self.next.start = start.checked_add(packed_len(word) as u64).ok_or_else(damaged)?;
            self.next.block += 1;
            if self.next.block > block {
                break (start, word);
            }
        };
        if packed_len(word) == 0 {
            return Ok(vec![0; len]);
        }
        let bytes = self.image.unpack(start, packed_len(word), is_stored(word), len)?;
        if bytes.len() == len { Ok(bytes) } else { Err(damaged()) }
    }
}

impl Read for File<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.at >= self.place.size || buffer.is_empty() {
            return Ok(0);
        }
        let block_len = self.image.block_len as u64;
        let block = self.at / block_len;
        if self.block.0 != block {
            self.block = (block, self.unpack(block)?);
        }
        let from = usize::try_from(self.at % block_len).map_err(|_| damaged())?;
        let rest = self.block.1.get(from..).ok_or_else(damaged)?;
        let len = rest.len().min(buffer.len());
        buffer[..len].copy_from_slice(&rest[..len]);
        self.at += len as u64;
        Ok(len)
    }
}

impl Contents for File<'_> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        self.at = self.at.saturating_add(bytes);
        Ok(())
    }
}

/// The position that a reference into a table points to; its lower 16 bits are an offset in the
/// block.
fn cursor(table: u64, block: u64, at: u64) -> io::Result<Cursor> {
    let block = table.checked_add(block).ok_or_else(damaged)?;
    let at = usize::try_from(at & 0xffff).map_err(|_| damaged())?;
    Ok(Cursor { block, at })
}

const fn packed_len(word: u32) -> usize {
    (word & !STORED_BLOCK) as usize
}

const fn is_stored(word: u32) -> bool {
    word & STORED_BLOCK != 0
}

fn damaged() -> io::Error {
    io::Error::other("the squashfs is damaged")
}
