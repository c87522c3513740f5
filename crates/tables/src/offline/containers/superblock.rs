//! Adapts an ext4 superblock to `ext4-view`.
//!
//! `ext4-view` has three limits. It refuses features that do not matter to a reader of files. It
//! finds inodes of 128 bytes damaged if the filesystem has checksums. It does not know the place
//! of the group descriptors with `meta_bg`. So it gets a superblock without these features, and
//! finds the descriptors where it looks for them. A feature that it cannot read is refused here,
//! by its name in `mke2fs`. Layout: Linux's `Documentation/filesystems/ext4/super.rst`.

use std::{error::Error, io};

use ext4_view::Ext4Read;

use super::disk::{self, Disk as _, long, short};

const PLACE: u64 = 1024;
const LEN: usize = 1024;

const LOG_BLOCK_SIZE: usize = 0x18;
const INODE_SIZE: usize = 0x58;
const COMPATIBLE: usize = 0x5c;
const INCOMPATIBLE: usize = 0x60;
const READ_ONLY: usize = 0x64;
const CHECKSUM: usize = 0x3fc;

const HAS_JOURNAL: u32 = 0x4;
const SPARSE_SUPER2: u32 = 0x200;

const FILETYPE: u32 = 0x2;
const RECOVER: u32 = 0x4;
const JOURNAL_DEV: u32 = 0x8;
const META_BG: u32 = 0x10;
const BITS_64: u32 = 0x80;

const SPARSE_SUPER: u32 = 0x1;
const METADATA_CSUM: u32 = 0x400;

/// Features that are read: extent, 64bit, flex_bg, metadata_csum_seed, encrypt; and those above.
const READ: u32 = FILETYPE | RECOVER | 0x40 | BITS_64 | 0x200 | 0x2000 | 0x1_0000;
/// Harmless features that are hidden from `ext4-view`: mmp, ea_inode, large_dir, casefold.
const HIDDEN: u32 = META_BG | 0x100 | 0x400 | 0x4000 | 0x2_0000;
/// Names of features that are refused.
const REFUSED: [(u32, &str); 4] = [
    (0x1, "compression"),
    (JOURNAL_DEV, "journal_dev"),
    (0x1000, "dirdata"),
    (0x8000, "inline_data"),
];

/// Linux's largest blocks: 64 KiB.
const MOST_LOG_BLOCK_SIZE: u32 = 6;
/// Maximum number of block groups, all kept in memory: 128 TiB with groups of the usual size.
const MOST_GROUPS: u64 = 1 << 20;

/// A filesystem as `ext4-view` sees it.
pub(super) struct Ext4Disk {
    disk: disk::From,
    superblock: [u8; LEN],
    is_superblock_read: bool,
    descriptors: Option<MetaBlockGroups>,
}

impl Ext4Disk {
    /// Reads the superblock. An error names an unsupported feature.
    pub(super) fn open(mut disk: disk::From) -> io::Result<Self> {
        let mut superblock = [0; LEN];
        disk.read_at(PLACE, &mut superblock)?;
        check(&superblock).map_err(io::Error::other)?;
        let descriptors = MetaBlockGroups::of(&superblock);
        show(&mut superblock);
        Ok(Self { disk, superblock, is_superblock_read: false, descriptors })
    }
}

impl Ext4Read for Ext4Disk {
    fn read(
        &mut self,
        start: u64,
        buffer: &mut [u8],
    ) -> Result<(), Box<dyn Error + Send + Sync + 'static>> {
        if start == PLACE && buffer.len() == LEN && !self.is_superblock_read {
            self.is_superblock_read = true;
            buffer.copy_from_slice(&self.superblock);
            return Ok(());
        }
        // Descriptors are read one by one, everything else in blocks.
        let place = match &self.descriptors {
            Some(groups) if buffer.len() < LEN => groups.place(start).ok_or("no such group")?,
            _ => start,
        };
        Ok(self.disk.read_at(place, buffer)?)
    }
}

/// Checks that the filesystem can be read.
fn check(superblock: &[u8]) -> Result<(), String> {
    let has_checksums = long(superblock, READ_ONLY) & METADATA_CSUM > 0;
    if has_checksums && long(superblock, CHECKSUM) != crc32c(&superblock[..CHECKSUM]) {
        return Err("ext4 whose superblock is damaged: its checksum is wrong".to_owned());
    }
    let incompatible = long(superblock, INCOMPATIBLE);
    let unknown = incompatible & !(READ | HIDDEN);
    if unknown > 0 {
        let name = |bit: u32| {
            let known = REFUSED.iter().find(|(feature, _)| *feature == 1 << bit);
            known.map_or_else(|| format!("FEATURE_I{bit}"), |(_, name)| (*name).to_owned())
        };
        let bits = (0..u32::BITS).filter(|bit| unknown & (1 << bit) > 0);
        let names = bits.map(name).collect::<Vec<_>>().join(", ");
        return Err(format!("ext4 with {names}, which is not supported yet"));
    }
    if incompatible & FILETYPE == 0 {
        return Err("ext4 without filetype, which is not supported yet".to_owned());
    }
    let has_journal = long(superblock, COMPATIBLE) & HAS_JOURNAL > 0;
    if has_journal && incompatible & RECOVER > 0 && long(superblock, 0xe0) == 0 {
        let what = "ext4 whose journal lies on another disk and is still to be replayed";
        return Err(what.to_owned());
    }
    let log = long(superblock, LOG_BLOCK_SIZE);
    if log > MOST_LOG_BLOCK_SIZE {
        return Err(format!(
            "ext4 with blocks of 2^{} bytes; valid: 2^10 to 2^16",
            u64::from(log) + 10
        ));
    }
    // Without a checksum at its end, an empty block of a directory has a length that does not fit
    // in 16 bits, and that `ext4-view` does not know.
    if log == MOST_LOG_BLOCK_SIZE && !has_checksums {
        let what = "ext4 with blocks of 64 KiB without metadata_csum, which is not supported yet";
        return Err(what.to_owned());
    }
    let groups = blocks(superblock).div_ceil(u64::from(long(superblock, 0x20)).max(1));
    if groups > MOST_GROUPS {
        return Err(format!("ext4 with {groups} block groups; valid: up to {MOST_GROUPS}"));
    }
    Ok(())
}

fn blocks(superblock: &[u8]) -> u64 {
    let high =
        if long(superblock, INCOMPATIBLE) & BITS_64 > 0 { long(superblock, 0x150) } else { 0 };
    u64::from(long(superblock, 0x4)) | u64::from(high) << 32
}

/// Removes features that do not matter to a reader.
fn show(superblock: &mut [u8; LEN]) {
    hide(superblock, INCOMPATIBLE, HIDDEN);
    if short(superblock, INODE_SIZE) == 128 {
        // Such an inode has room for only half a checksum.
        hide(superblock, READ_ONLY, METADATA_CSUM);
    }
    let checksum = crc32c(&superblock[..CHECKSUM]);
    superblock[CHECKSUM..].copy_from_slice(&checksum.to_le_bytes());
}

fn hide(superblock: &mut [u8; LEN], at: usize, features: u32) {
    let shown = long(superblock, at) & !features;
    superblock[at..at + 4].copy_from_slice(&shown.to_le_bytes());
}

/// The CRC of ext4: CRC-32C without the last inversion.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 > 0 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}

/// The places of group descriptors with `meta_bg`: each block of them is in the first of the
/// groups that it describes.
struct MetaBlockGroups {
    block_len: u64,
    /// Descriptors per block.
    per_block: u64,
    /// Blocks of descriptors that lie together at the beginning, as without `meta_bg`.
    first: u64,
    first_data_block: u64,
    blocks_per_group: u64,
    is_sparse: bool,
    /// The groups with the only copies of the superblock, with `sparse_super2`.
    copies: Option<[u64; 2]>,
}

impl MetaBlockGroups {
    fn of(superblock: &[u8]) -> Option<Self> {
        let [compatible, incompatible, read_only] =
            [COMPATIBLE, INCOMPATIBLE, READ_ONLY].map(|at| long(superblock, at));
        if incompatible & META_BG == 0 {
            return None;
        }
        let block_len = 1024 << long(superblock, LOG_BLOCK_SIZE);
        let wide = u64::from(short(superblock, 0xfe)).max(1);
        let descriptor_len = if incompatible & BITS_64 > 0 { wide } else { 32 };
        let copies = [0x24c, 0x250].map(|at| long(superblock, at).into());
        Some(Self {
            block_len,
            per_block: (block_len / descriptor_len).max(1),
            first: long(superblock, 0x104).into(),
            first_data_block: long(superblock, 0x14).into(),
            blocks_per_group: long(superblock, 0x20).into(),
            is_sparse: read_only & SPARSE_SUPER > 0,
            copies: (compatible & SPARSE_SUPER2 > 0).then_some(copies),
        })
    }

    /// The real place of the bytes that would be at `start` without `meta_bg`.
    fn place(&self, start: u64) -> Option<u64> {
        let table = if self.block_len == 1024 { 2 } else { 1 };
        let at = start.checked_sub(table * self.block_len)?;
        let block = at / self.block_len;
        if block < self.first {
            return Some(start);
        }
        let group = block.checked_mul(self.per_block)?;
        let mut number =
            self.blocks_per_group.checked_mul(group)?.checked_add(self.first_data_block)?;
        number += u64::from(self.has_superblock(group));
        // With blocks of 1 KiB and clusters, the first block has no number.
        number += u64::from(group == 0 && self.block_len == 1024 && self.first_data_block == 0);
        number.checked_mul(self.block_len)?.checked_add(at % self.block_len)
    }

    fn has_superblock(&self, group: u64) -> bool {
        let is_power = |base: u64| {
            let powers = std::iter::successors(Some(base), |power| power.checked_mul(base));
            powers.take_while(|power| *power <= group).any(|power| power == group)
        };
        match self.copies {
            _ if group == 0 => true,
            Some(copies) => copies.contains(&group),
            None => !self.is_sparse || group == 1 || [3, 5, 7].into_iter().any(is_power),
        }
    }
}
