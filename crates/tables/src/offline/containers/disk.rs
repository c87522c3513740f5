//! Disks: their bytes, their partitions, and the filesystems that can be read.
//!
//! Partitions come from a GPT (sectors of 512 or 4096 bytes) or from an MBR with all logical
//! partitions. Every partition that is left out is reported.

use std::{collections::HashSet, fs::File, io, os::unix::fs::FileExt};

use super::sources::{EXT_MAGIC, EXT_MAGIC_AT, GPT_MAGIC, SQUASHFS_MAGIC};

const SECTOR_LEN: usize = 512;
const SECTOR: u64 = SECTOR_LEN as u64;
/// Sector sizes; a GPT begins in the second sector.
const SECTORS: [u64; 2] = [SECTOR, 4096];
/// Maximum number of partitions that are examined. Linux supports at most 256 per disk.
const MOST_PARTITIONS: u32 = 1024;

/// Known contents of a disk or a partition that cannot be read: the place of their magic bytes,
/// the bytes, and the name.
const OTHERS: [(u64, &[u8], &str); 17] = [
    (0, b"XFSB", "an XFS filesystem"),
    (0x1_0040, b"_BHRfS_M", "a btrfs filesystem"),
    (1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS filesystem"),
    (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS filesystem"),
    (0x8001, b"CD001", "an ISO 9660 filesystem"),
    (3, b"NTFS    ", "an NTFS filesystem"),
    (3, b"EXFAT   ", "an exFAT filesystem"),
    (82, b"FAT32   ", "a FAT filesystem"),
    (54, b"FAT16   ", "a FAT filesystem"),
    (54, b"FAT12   ", "a FAT filesystem"),
    (54, b"FAT     ", "a FAT filesystem"),
    (0, b"LUKS\xba\xbe", "an encrypted volume (LUKS)"),
    (0, b"LABELONE", "a volume of LVM"),
    (512, b"LABELONE", "a volume of LVM"),
    (4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a part of a RAID (md)"),
    (4086, b"SWAPSPACE2", "swap"),
    (4086, b"SWAP-SPACE", "swap"),
];

/// A device that can be read at any place.
pub(super) trait Disk {
    /// Fills the buffer; returns an error if the disk ends before that.
    fn read_at(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl Disk for File {
    fn read_at(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buffer, place)
    }
}

/// Filesystems that can be read.
#[derive(Clone, Copy)]
pub(super) enum FilesystemKind {
    Ext,
    Squashfs,
}

/// A partition, or the whole disk.
pub(super) struct Part {
    /// Its beginning, in bytes.
    pub(super) place: u64,
    /// The kernel's number of the partition; `None` on a disk without partitions.
    pub(super) number: Option<u64>,
    /// The filesystem, or a description of the other contents.
    pub(super) holds: Result<FilesystemKind, String>,
}

/// Everything on the disk: one filesystem, or partitions.
pub(super) fn parts(disk: &mut dyn Disk) -> io::Result<Vec<Part>> {
    let whole = holds(disk, 0);
    let number = None;
    if let Ok(Some(kind)) = whole {
        return Ok(vec![Part { place: 0, number, holds: Ok(kind) }]);
    }
    let mut met = HashSet::new();
    // A place that several entries name is read once.
    let parts = partitions(disk).map(|mut parts| {
        parts.retain(|part| met.insert(part.place));
        parts
    });
    match whole {
        // Such contents may have bytes that look like a partition table.
        Err(what) if !parts.iter().flatten().any(|part| part.holds.is_ok()) => {
            let holds = Err(format!("{what}, which is not read; valid: ext4, squashfs"));
            Ok(vec![Part { place: 0, number, holds }])
        }
        _ => parts,
    }
}

fn partitions(disk: &mut dyn Disk) -> io::Result<Vec<Part>> {
    for sector in SECTORS {
        let mut header = [0; SECTOR_LEN];
        // A disk that ends before this sector has no GPT.
        if disk.read_at(sector, &mut header).is_ok() && header.starts_with(GPT_MAGIC) {
            return in_gpt(disk, &header, sector);
        }
    }
    in_mbr(disk)
}

/// The filesystem at this place, if there is one. An error names one that cannot be read.
fn holds(disk: &mut dyn Disk, place: u64) -> Result<Option<FilesystemKind>, String> {
    let mut has = |at: u64, magic: &[u8]| {
        let mut found = vec![0; magic.len()];
        disk.read_at(place.saturating_add(at), &mut found).is_ok() && found == magic
    };
    if has(0, SQUASHFS_MAGIC) {
        return Ok(Some(FilesystemKind::Squashfs));
    }
    if has(EXT_MAGIC_AT as u64, EXT_MAGIC) {
        return Ok(Some(FilesystemKind::Ext));
    }
    match OTHERS.iter().find(|(at, magic, _)| has(*at, magic)) {
        Some((.., what)) => Err((*what).to_owned()),
        None => Ok(None),
    }
}

fn part(disk: &mut dyn Disk, number: u64, sector: u64, first: u64) -> Part {
    let place = sector.saturating_mul(first);
    let unknown = || "nothing that is known".to_owned();
    let holds = holds(disk, place).and_then(|kind| kind.ok_or_else(unknown));
    Part { place, number: Some(number), holds }
}

/// Partitions of a GPT: <https://uefi.org/specs/UEFI/2.10/05_GUID_Partition_Table_Format.html>.
fn in_gpt(disk: &mut dyn Disk, header: &[u8], sector: u64) -> io::Result<Vec<Part>> {
    const LEAST_ENTRY: u32 = 128;
    const MOST_ENTRY: u32 = 4096;
    let (table, number, len) = (double(header, 72), long(header, 80), long(header, 84));
    if !(LEAST_ENTRY..=MOST_ENTRY).contains(&len) {
        let what = "bytes; valid: 128 to 4096";
        return Err(io::Error::other(format!("a partition's entry has {len} {what}")));
    }
    if number > MOST_PARTITIONS {
        return Err(too_many(u64::from(number)));
    }
    let mut parts = Vec::new();
    for index in 0..u64::from(number) {
        let place = table.saturating_mul(sector).saturating_add(index * u64::from(len));
        let mut entry = [0; LEAST_ENTRY as usize];
        disk.read_at(place, &mut entry)?;
        match double(&entry, 32) {
            0 => {}
            first => parts.push(part(disk, index + 1, sector, first)),
        }
    }
    Ok(parts)
}

/// Partitions of an MBR: four entries, some of which may be extended partitions.
fn in_mbr(disk: &mut dyn Disk) -> io::Result<Vec<Part>> {
    const PROTECTIVE: u8 = 0xee;
    let Some(table) = Entries::read(disk, 0)? else { return Ok(Vec::new()) };
    let mut parts = Vec::new();
    let mut logical = Vec::new();
    for (number, entry) in (1..).zip(table.entries()) {
        let unreadable = |what: String| {
            let place = SECTOR.saturating_mul(entry.first);
            Part { place, number: Some(number), holds: Err(what) }
        };
        if entry.kind == PROTECTIVE {
            parts.push(unreadable("a GPT that cannot be read".to_owned()));
        } else if entry.is_extended() {
            let next = 5 + logical.len() as u64;
            if let Err(what) = in_extended(disk, entry.first, next, &mut logical) {
                parts.push(unreadable(format!("an extended partition whose table {what}")));
            }
        } else if entry.first > 0 {
            parts.push(part(disk, number, SECTOR, entry.first));
        }
    }
    parts.append(&mut logical);
    Ok(parts)
}

/// Logical partitions: a chain of tables. Each has one partition, relative to its own place, and
/// the place of the next table, relative to the beginning of the extended partition.
fn in_extended(
    disk: &mut dyn Disk,
    start: u64,
    mut number: u64,
    parts: &mut Vec<Part>,
) -> Result<(), String> {
    let mut at = start;
    for _ in 0..MOST_PARTITIONS {
        let table = Entries::read(disk, SECTOR.saturating_mul(at))
            .map_err(|error| format!("at sector {at} cannot be read: {error}"))?
            .ok_or_else(|| format!("is not at sector {at}, where it should be"))?;
        for entry in table.entries().filter(|entry| !entry.is_extended() && entry.first > 0) {
            parts.push(part(disk, number, SECTOR, at.saturating_add(entry.first)));
            number += 1;
        }
        match table.entries().find(MbrEntry::is_extended) {
            Some(next) if next.first > 0 => at = start.saturating_add(next.first),
            _ => return Ok(()),
        }
    }
    Err(format!("is longer than {MOST_PARTITIONS} partitions"))
}

fn too_many(partitions: u64) -> io::Error {
    let what = format!("its table has {partitions} partitions; valid: up to {MOST_PARTITIONS}");
    io::Error::other(what)
}

/// A sector with an MBR partition table.
struct Entries([u8; SECTOR_LEN]);

/// A partition in it, in sectors.
struct MbrEntry {
    kind: u8,
    first: u64,
}

impl Entries {
    /// Reads the table; `None` if there is none.
    fn read(disk: &mut dyn Disk, place: u64) -> io::Result<Option<Self>> {
        let mut table = [0; SECTOR_LEN];
        disk.read_at(place, &mut table)?;
        Ok(table.ends_with(b"\x55\xaa").then_some(Self(table)))
    }

    fn entries(&self) -> impl Iterator<Item = MbrEntry> {
        let entry = |entry: &[u8]| MbrEntry { kind: entry[4], first: u64::from(long(entry, 8)) };
        self.0[446..510].chunks_exact(16).map(entry)
    }
}

impl MbrEntry {
    const fn is_extended(&self) -> bool {
        matches!(self.kind, 0x05 | 0x0f | 0x85)
    }
}

/// The disk from `place` on.
pub(super) struct From {
    pub(super) disk: Box<dyn Disk>,
    pub(super) place: u64,
}

impl Disk for From {
    fn read_at(&mut self, place: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.disk.read_at(self.place.saturating_add(place), buffer)
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
