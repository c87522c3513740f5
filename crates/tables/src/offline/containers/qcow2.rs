//! Reads qcow2 images, as QEMU describes them in `docs/interop/qcow2.rst`. Two levels of tables
//! give the place of each cluster in the file, compressed or not.
//!
//! The reader keeps one table and one decompressed cluster of at most 2 MiB each. It reports the
//! name of the backing file; `backing.rs` opens it. Left out: external data files, encryption,
//! subclusters, internal snapshots.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read},
    os::unix::{ffi::OsStringExt, fs::FileExt},
    path::PathBuf,
};

use flate2::read::DeflateDecoder;

use super::{cut::fill, disk::Disk, sources::QCOW2_MAGIC};

const HEADER_LEN: usize = 112;
/// Mask of the file offset in a table entry.
const PLACE: u64 = 0x00ff_ffff_ffff_fe00;
const COMPRESSED: u64 = 1 << 62;
const ZEROS: u64 = 1;
/// Features that do not matter to a reader: the file was not closed; another compression.
const HARMLESS: u64 = 1 << 0 | 1 << 3;

/// Type of the header extension with the backing file's format.
const BACKING_FORMAT: u32 = 0xe279_2aca;

/// A backing file as the image names it.
pub(super) struct Named {
    pub(super) name: PathBuf,
    pub(super) format: Option<Vec<u8>>,
}

/// An image.
pub(super) struct Qcow2 {
    file: File,
    header: [u8; HEADER_LEN],
    /// The backing disk, which has the missing clusters, and its size.
    behind: Option<(Box<dyn Disk>, u64)>,
    cluster_bits: u32,
    size: u64,
    is_zstd: bool,
    first_table: u64,
    first_entries: u64,
    /// The level-2 table that was used last, and its place.
    table: (u64, Vec<u8>),
    /// The cluster that was decompressed last, and its entry.
    unpacked: (u64, Vec<u8>),
}

impl Qcow2 {
    /// Reads the header.
    pub(super) fn open(file: File) -> io::Result<Self> {
        let mut header = [0; HEADER_LEN];
        file.read_exact_at(&mut header, 0)?;
        if !header.starts_with(&QCOW2_MAGIC) {
            return Err(io::Error::other("no qcow2 image"));
        }
        let (version, cluster_bits) = (long(&header, 4), long(&header, 20));
        let features = if version == 2 { 0 } else { double(&header, 72) };
        let unfit = |what: &str| Err(io::Error::other(what.to_owned()));
        if !(2..=3).contains(&version) {
            return unfit(&format!("qcow2 of version {version}; valid: 2 and 3"));
        }
        if !(9..=21).contains(&cluster_bits) {
            return unfit(&format!("clusters of 2^{cluster_bits} bytes; valid: 2^9 to 2^21"));
        }
        if long(&header, 32) != 0 {
            return unfit("it is encrypted; valid: what is not");
        }
        if features & !HARMLESS != 0 {
            let what = "are not supported yet; valid: what `qemu-img convert` makes of it";
            return unfit(&format!("its features {features:#x} {what}"));
        }
        Ok(Self {
            cluster_bits,
            size: double(&header, 24),
            is_zstd: version > 2 && features & 1 << 3 != 0 && header[104] == 1,
            first_table: double(&header, 40),
            first_entries: long(&header, 36).into(),
            table: (0, Vec::new()),
            unpacked: (0, Vec::new()),
            file,
            header,
            behind: None,
        })
    }

    pub(super) const fn size(&self) -> u64 {
        self.size
    }

    /// The backing file, if there is one.
    pub(super) fn named(&self) -> io::Result<Option<Named>> {
        const MOST_NAME: usize = 1023;
        const MOST_FORMAT: usize = 32;
        let (at, len) = (double(&self.header, 8), long(&self.header, 16));
        if at == 0 {
            return Ok(None);
        }
        let text = |at: u64, len: u32, most: usize| {
            let len = usize::try_from(len).ok().filter(|len| *len <= most);
            let mut text = vec![0; len.ok_or_else(damaged)?];
            self.file.read_exact_at(&mut text, at).map(|()| text)
        };
        let name = PathBuf::from(OsString::from_vec(text(at, len, MOST_NAME)?));
        // After the header, the first cluster has extensions with their types and lengths.
        let end = self.cluster_len() as u64;
        let mut place =
            if long(&self.header, 4) == 2 { 72 } else { u64::from(long(&self.header, 100)) };
        while place < end {
            let mut part = [0; 8];
            self.file.read_exact_at(&mut part, place)?;
            let (kind, len) = (long(&part, 0), long(&part, 4));
            place += 8;
            if kind == BACKING_FORMAT {
                return Ok(Some(Named { name, format: Some(text(place, len, MOST_FORMAT)?) }));
            }
            if kind == 0 {
                break;
            }
            place += u64::from(len).next_multiple_of(8);
        }
        Ok(Some(Named { name, format: None }))
    }

    /// Sets the backing disk and its size.
    pub(super) fn put_behind(&mut self, disk: Box<dyn Disk>, size: u64) {
        self.behind = Some((disk, size));
    }

    fn read_behind(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()> {
        let size = self.behind.as_ref().map_or(0, |(_, size)| *size);
        let has = usize::try_from(size.saturating_sub(place)).unwrap_or(usize::MAX);
        let (known, beyond) = buffer.split_at_mut(has.min(buffer.len()));
        beyond.fill(0);
        match &mut self.behind {
            Some((disk, _)) if !known.is_empty() => disk.read_at(place, known),
            _ => Ok(()),
        }
    }

    const fn cluster_len(&self) -> usize {
        1 << self.cluster_bits
    }

    /// The entry of a cluster in its level-2 table; 0 if there is none.
    fn entry(&mut self, cluster: u64) -> io::Result<u64> {
        let bits = self.cluster_bits - 3;
        let (first, second) = (cluster >> bits, cluster & ((1 << bits) - 1));
        if first >= self.first_entries {
            return Ok(0);
        }
        let mut entry = [0; 8];
        let place = self.first_table.checked_add(first * 8).ok_or_else(damaged)?;
        self.file.read_exact_at(&mut entry, place)?;
        let place = u64::from_be_bytes(entry) & PLACE;
        if place == 0 {
            return Ok(0);
        }
        if self.table.0 != place {
            self.table.0 = 0;
            self.table.1.resize(1 << self.cluster_bits, 0);
            self.file.read_exact_at(&mut self.table.1, place)?;
            self.table.0 = place;
        }
        let at = usize::try_from(second * 8).map_err(|_| damaged())?;
        Ok(double(&self.table.1, at))
    }

    /// Fills the buffer from within one cluster.
    fn read_in(&mut self, cluster: u64, from: usize, buffer: &mut [u8]) -> io::Result<()> {
        let entry = self.entry(cluster)?;
        if entry & COMPRESSED != 0 {
            if self.unpacked.0 != entry {
                self.unpacked.0 = 0;
                self.unpack(entry)?;
                self.unpacked.0 = entry;
            }
            let part = self.unpacked.1.get(from..from + buffer.len()).ok_or_else(damaged)?;
            buffer.copy_from_slice(part);
            return Ok(());
        }
        if entry & ZEROS != 0 {
            buffer.fill(0);
            return Ok(());
        }
        if entry & PLACE == 0 {
            return self.read_behind((cluster << self.cluster_bits) + from as u64, buffer);
        }
        // The file may end within its last cluster.
        let place = (entry & PLACE) + from as u64;
        let has = fill(&mut FileCursor { file: &self.file, place }, buffer)?;
        buffer[has..].fill(0);
        Ok(())
    }

    fn unpack(&mut self, entry: u64) -> io::Result<()> {
        const SECTOR: u64 = 512;
        let sectors_at = 62 - (self.cluster_bits - 8);
        let place = entry & ((1 << sectors_at) - 1);
        let more_sectors = (entry & (COMPRESSED - 1)) >> sectors_at;
        let len = (more_sectors + 1) * SECTOR - place % SECTOR;
        // At most a cluster and a few sectors: the field has no more bits.
        let mut packed = Vec::new();
        FileCursor { file: &self.file, place }.take(len).read_to_end(&mut packed)?;
        self.unpacked.1.resize(self.cluster_len(), 0);
        let unpacked = &mut self.unpacked.1[..];
        if self.is_zstd {
            zstd::Decoder::with_buffer(&packed[..])?.single_frame().read_exact(unpacked)
        } else {
            DeflateDecoder::new(&packed[..]).read_exact(unpacked)
        }
    }
}

impl Disk for Qcow2 {
    fn read_at(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()> {
        if place.checked_add(buffer.len() as u64).is_none_or(|end| end > self.size) {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut done = 0;
        while done < buffer.len() {
            let at = place + done as u64;
            let from = usize::try_from(at & (self.cluster_len() as u64 - 1));
            let from = from.map_err(|_| damaged())?;
            let len = (self.cluster_len() - from).min(buffer.len() - done);
            self.read_in(at >> self.cluster_bits, from, &mut buffer[done..done + len])?;
            done += len;
        }
        Ok(())
    }
}

/// A file from `place` on.
struct FileCursor<'a> {
    file: &'a File,
    place: u64,
}

impl Read for FileCursor<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let has = self.file.read_at(buffer, self.place)?;
        self.place += has as u64;
        Ok(has)
    }
}

fn damaged() -> io::Error {
    io::Error::other("its tables are damaged")
}

fn long(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..at + 4).and_then(|field| field.try_into().ok());
    field.map_or(0, u32::from_be_bytes)
}

fn double(bytes: &[u8], at: usize) -> u64 {
    u64::from(long(bytes, at)) << 32 | u64::from(long(bytes, at + 4))
}
