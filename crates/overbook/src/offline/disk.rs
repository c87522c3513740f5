//! Disks: their bytes, and where on them filesystems are that are read.

use std::{error::Error, fs::File, io, os::unix::fs::FileExt};

use ext4_view::Ext4Read;

use super::squashfs;

const SECTOR: usize = 512;
/// Where in an ext4 filesystem its magic number is.
const EXT_MAGIC_AT: u64 = 1080;
pub(super) const EXT_MAGIC: &[u8] = b"\x53\xef";
pub(super) const GPT_MAGIC: &[u8] = b"EFI PART";
/// Partitions that are looked at; a table has 128.
const MOST_PARTITIONS: u64 = 256;

/// What can be read at any place.
pub(super) trait Disk {
    /// Fills the buffer; an error where the disk ends before.
    fn read_at(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Disk for File {
    fn read_at(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buffer, place)
    }
}

/// Filesystems that are read.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    Ext,
    Squashfs,
}

/// Where filesystems begin: the whole disk is one, or some of its partitions are.
pub(super) fn filesystems(disk: &mut dyn Disk) -> io::Result<Vec<(u64, Kind)>> {
    if let Some(kind) = kind_at(disk, 0) {
        return Ok(vec![(0, kind)]);
    }
    let mut first = [0; 2 * SECTOR];
    disk.read_at(0, &mut first)?;
    let (mbr, gpt) = first.split_at(SECTOR);
    let mut starts = if gpt.starts_with(GPT_MAGIC) {
        in_gpt(disk, gpt)?
    } else {
        mbr[446..510].chunks(16).map(|entry| u64::from(long(entry, 8))).collect()
    };
    starts.sort_unstable();
    starts.dedup();
    let places = starts.into_iter().filter_map(|start| start.checked_mul(SECTOR as u64));
    let places = places.filter(|place| *place > 0);
    let found: Vec<_> =
        places.filter_map(|place| kind_at(disk, place).map(|kind| (place, kind))).collect();
    if found.is_empty() {
        let what = "there is no ext4 filesystem and no squashfs, neither on all of it nor on a \
                    partition; others, encrypted volumes and LVM are not supported yet";
        return Err(io::Error::other(what));
    }
    Ok(found)
}

/// First sectors of all partitions.
fn in_gpt(disk: &mut dyn Disk, header: &[u8]) -> io::Result<Vec<u64>> {
    const LEAST_ENTRY: u32 = 128;
    const MOST_ENTRY: u32 = 4096;
    let (table, number, len) = (double(header, 72), long(header, 80), long(header, 84));
    if !(LEAST_ENTRY..=MOST_ENTRY).contains(&len) {
        let what = "bytes; valid: 128 to 4096";
        return Err(io::Error::other(format!("a partition's entry has {len} {what}")));
    }
    let entry = |index: u64| {
        let place = table.saturating_mul(SECTOR as u64).saturating_add(index * u64::from(len));
        let mut entry = [0; LEAST_ENTRY as usize];
        disk.read_at(place, &mut entry).map(|()| double(&entry, 32))
    };
    (0..u64::from(number).min(MOST_PARTITIONS)).map(entry).collect()
}

fn kind_at(disk: &mut dyn Disk, place: u64) -> Option<Kind> {
    let mut has = |at: u64, magic: &[u8]| {
        let mut found = vec![0; magic.len()];
        disk.read_at(place.saturating_add(at), &mut found).is_ok() && found == magic
    };
    if has(0, squashfs::MAGIC) {
        return Some(Kind::Squashfs);
    }
    has(EXT_MAGIC_AT, EXT_MAGIC).then_some(Kind::Ext)
}

/// The disk from some place on.
pub(super) struct From {
    pub(super) disk: Box<dyn Disk>,
    pub(super) place: u64,
}

impl Disk for From {
    fn read_at(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(self.place.saturating_add(place), buffer)
    }
}

impl Ext4Read for From {
    fn read(
        &mut self,
        start: u64,
        buffer: &mut [u8],
    ) -> Result<(), Box<dyn Error + Send + Sync + 'static>> {
        Ok(self.read_at(start, buffer)?)
    }
}

pub(super) fn short(bytes: &[u8], at: usize) -> u16 {
    let field = bytes.get(at..at + 2).and_then(|field| field.try_into().ok());
    field.map_or(0, u16::from_le_bytes)
}

pub(super) fn long(bytes: &[u8], at: usize) -> u32 {
    let field = bytes.get(at..at + 4).and_then(|field| field.try_into().ok());
    field.map_or(0, u32::from_le_bytes)
}

pub(super) fn double(bytes: &[u8], at: usize) -> u64 {
    u64::from(long(bytes, at)) | u64::from(long(bytes, at + 4)) << 32
}
