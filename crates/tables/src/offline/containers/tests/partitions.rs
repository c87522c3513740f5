//! Partitions: every one is read or reported.

use super::*;

/// A disk with these partitions, one after the other.
pub(super) fn disk_of(parts: &[Vec<u8>], has_gpt: bool, sector: usize) -> Vec<u8> {
    let mut disk = vec![0; 64 * sector];
    disk[510..512].copy_from_slice(b"\x55\xaa");
    for (index, part) in parts.iter().enumerate() {
        let first = u32::try_from(disk.len() / sector).unwrap().to_le_bytes();
        if has_gpt {
            disk[2 * sector + 128 * index + 32..][..4].copy_from_slice(&first);
        } else {
            put_entry(&mut disk, 0, index, 0x83, &first);
        }
        disk.extend(part);
        disk.resize(disk.len().next_multiple_of(sector), 0);
    }
    if has_gpt {
        disk[sector..sector + 8].copy_from_slice(b"EFI PART");
        disk[sector + 72] = 2;
        disk[sector + 80] = 8;
        disk[sector + 84] = 128;
        put_entry(&mut disk, 0, 0, 0xee, &[1, 0, 0, 0]);
    }
    disk
}

/// Writes an entry of an MBR, or of the table of a logical partition.
fn put_entry(disk: &mut [u8], table: usize, index: usize, kind: u8, first: &[u8; 4]) {
    disk[table + 510..][..2].copy_from_slice(b"\x55\xaa");
    disk[table + 446 + 16 * index + 4] = kind;
    disk[table + 446 + 16 * index + 8..][..4].copy_from_slice(first);
}

/// A disk with one primary partition, and logical ones in an extended partition.
fn with_logical(primary: &[u8], logical: &[Vec<u8>], kind: u8) -> (Vec<u8>, usize) {
    let sectors = |bytes: usize| u32::try_from(bytes / 512).unwrap().to_le_bytes();
    let mut disk = disk_of(&[primary.to_vec()], false, 512);
    let start = disk.len();
    put_entry(&mut disk, 0, 1, kind, &sectors(start));
    for (index, part) in logical.iter().enumerate() {
        let table = disk.len();
        if index > 0 {
            let before = disk.len() - 512 - logical[index - 1].len();
            put_entry(&mut disk, before, 1, 5, &sectors(table - start));
        }
        disk.resize(table + 512, 0);
        put_entry(&mut disk, table, 0, 0x83, &sectors(512));
        disk.extend(part);
    }
    (disk, start)
}

#[test]
fn logical_partitions_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = image_of(directory.path());
    let image = fs::read(image).unwrap();
    let (plain, _) = built(&request(&[&root, &root, &root]));
    let path = directory.path().join("disk");
    for kind in [0x05, 0x0f, 0x85] {
        let (disk, _) = with_logical(&image, &[image.clone(), image.clone()], kind);
        fs::write(&path, disk).unwrap();
        let (table, work) = built(&request(&[&path]));
        assert_eq!((work.files, work.left_out), (63, 0), "{work:?}");
        assert!(table == plain);
    }
    // Only logical partitions have a filesystem.
    let swap = [&[0; 4086][..], b"SWAPSPACE2", &[0; 4096]].concat();
    let swap = &swap[..8192];
    let (disk, start) = with_logical(swap, std::slice::from_ref(&image), 5);
    fs::write(&path, &disk).unwrap();
    let (_, work) = built(&request(&[&path]));
    assert_eq!((work.files, work.left_out), (21, 1));
    assert!(work.told[0].ends_with("disk: partition 1: swap"), "{work:?}");

    // A broken chain, and a circular one.
    let (whole, start_of) = with_logical(&image, &[image.clone(), image.clone()], 5);
    let mut bytes = whole.clone();
    bytes[start_of + 512 + image.len() + 510] = 0;
    fs::write(&path, &bytes).unwrap();
    let (_, work) = built(&request(&[&path]));
    assert_eq!((work.files, work.left_out), (42, 1));
    let what = "disk: partition 2: an extended partition whose table is not at sector ";
    assert!(work.told[0].contains(what), "{work:?}");
    let mut bytes = disk;
    put_entry(&mut bytes, start, 1, 5, &0_u32.to_le_bytes());
    bytes[start + 446 + 16 + 8] = 0;
    fs::write(&path, &bytes).unwrap();
    assert_eq!(built(&request(&[&path])).1.files, 21, "a chain that ends where it begins");
    // Each of two tables names the other as the next; their partitions are read once.
    let (mut bytes, start) = with_logical(swap, &[image.clone(), image.clone()], 5);
    let second = start + 512 + image.len();
    put_entry(
        &mut bytes,
        second,
        1,
        5,
        &u32::try_from((second - start) / 512).unwrap().to_le_bytes(),
    );
    fs::write(&path, &bytes).unwrap();
    let (_, work) = built(&request(&[&path]));
    assert_eq!((work.files, work.left_out), (42, 2), "{work:?}");
}

#[test]
fn a_chain_without_an_end_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (_, image) = image_of(directory.path());
    let image = fs::read(image).unwrap();
    let path = directory.path().join("disk");
    // The second table names itself as the next, and no partition.
    let (mut disk, start) = with_logical(&image, &[vec![0; 512], vec![0; 512]], 5);
    let second = start + 1024;
    disk[second + 446..][..64].fill(0);
    put_entry(&mut disk, second, 1, 5, &2_u32.to_le_bytes());
    fs::write(&path, &disk).unwrap();
    let (_, work) = built(&request(&[&path]));
    assert_eq!(work.files, 21);
    let what = "partition 2: an extended partition whose table is longer than 1024 partitions";
    assert!(work.told.concat().contains(what), "{work:?}");
}

#[test]
fn partitions_of_large_sectors_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = image_of(directory.path());
    let (plain, _) = built(&request(&[&root]));
    let path = directory.path().join("disk");
    fs::write(&path, disk_of(&[fs::read(image).unwrap()], true, 4096)).unwrap();
    let (table, work) = built(&request(&[&path]));
    assert!(table == plain, "{work:?}");
    assert_eq!(work.left_out, 0);
}

#[test]
fn what_else_is_on_a_partition_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (_, image) = image_of(directory.path());
    let image = fs::read(image).unwrap();
    let path = directory.path().join("disk");
    let of = |at: usize, magic: &[u8]| {
        let mut part = vec![0; 1 << 17];
        part[at..at + magic.len()].copy_from_slice(magic);
        part
    };
    for (part, what) in [
        (of(0, b"XFSB"), "an XFS filesystem"),
        (of(0x1_0040, b"_BHRfS_M"), "a btrfs filesystem"),
        (of(0, b"LUKS\xba\xbe"), "an encrypted volume (LUKS)"),
        (of(512, b"LABELONE"), "a volume of LVM"),
        (of(82, b"FAT32   "), "a FAT filesystem"),
        (of(3, b"NTFS    "), "an NTFS filesystem"),
        (of(4096, &[0xfc, 0x4e, 0x2b, 0xa9]), "a part of a RAID (md)"),
    ] {
        fs::write(&path, disk_of(&[image.clone(), part.clone()], true, 512)).unwrap();
        let (_, work) = built(&request(&[&path]));
        assert_eq!((work.files, work.left_out), (21, 1));
        assert!(work.told[0].ends_with(&format!("partition 2: {what}")), "{work:?}");
    }
    // Also alone, though a boot sector looks like a partition table.
    let mut fat = of(82, b"FAT32   ");
    fat[510..512].copy_from_slice(b"\x55\xaa");
    fat[450..].iter_mut().take(40).for_each(|byte| *byte = 0x5a);
    fs::write(&path, fat).unwrap();
    let error = refused(&request(&[&path]));
    assert!(
        error.ends_with("disk: a FAT filesystem, which is not read; valid: ext4, squashfs"),
        "{error}"
    );
    // An unreadable table does not count as empty.
    let mut disk = disk_of(&[image], true, 512);
    disk[512] = 0;
    fs::write(&path, disk).unwrap();
    assert!(refused(&request(&[&path])).contains("partition 1 is a GPT that cannot be read"));
}
