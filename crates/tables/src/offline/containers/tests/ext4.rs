//! ext4 as `mke2fs` makes it: each layout is read, or refused with the name of its feature. None
//! is reported as damaged.

use super::*;

/// A tree with programs, and a directory that is large enough to be hashed.
fn tree(root: &Path) {
    fs::create_dir_all(root.join("many")).unwrap();
    for number in 0..300 {
        fs::write(root.join(format!("many/a-long-name-for-a-file-{number}")), "").unwrap();
    }
    for (number, name) in (0..).zip(["one", "many/Two", "many/three"]) {
        let mut bytes = small_executable();
        bytes[4096] = number;
        fs::write(root.join(name), bytes).unwrap();
    }
    fs::copy("/bin/sh", root.join("sh")).unwrap();
}

/// Makes an image of the tree; an error if this `mke2fs` cannot make it.
fn made(root: &Path, image: &Path, options: &str, size: &str) -> Result<(), String> {
    let _ = fs::remove_file(image);
    let mut mke2fs = Command::new("mke2fs");
    mke2fs.args(["-q", "-F", "-d"]).arg(root).args(options.split(' ')).arg(image).arg(size);
    let output = mke2fs.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    if output.status.success() { Ok(()) } else { Err(said) }
}

#[test]
fn layouts_of_mke2fs_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = (directory.path().join("root"), directory.path().join("image"));
    tree(&root);
    let (plain, _) = built(&request(&[&root]));
    for (options, size) in [
        ("-t ext4", "16M"),
        ("-t ext3", "16M"),
        ("-t ext2", "16M"),
        ("-t ext2 -I 128", "16M"),
        ("-t ext4 -b 1024", "16M"),
        ("-t ext2 -b 1024", "16001k"),
        ("-t ext4 -b 2048", "16M"),
        ("-t ext4 -b 8192", "32M"),
        ("-t ext2 -b 16384", "64M"),
        ("-t ext4 -b 32768 -N 1000", "64M"),
        ("-t ext4 -b 65536 -N 1000", "128M"),
        ("-t ext4 -I 128", "16M"),
        ("-t ext4 -I 512", "16M"),
        ("-t ext4 -O bigalloc", "16M"),
        ("-t ext4 -O bigalloc -b 1024", "16M"),
        ("-t ext4 -O ^64bit,^extent", "16M"),
        ("-t ext4 -O ^metadata_csum", "16M"),
        ("-t ext4 -O ^metadata_csum,uninit_bg", "16M"),
        ("-t ext4 -O metadata_csum_seed", "16M"),
        ("-t ext4 -O ^dir_index", "16M"),
        ("-t ext4 -O ^flex_bg,^resize_inode,^sparse_super", "16M"),
        ("-t ext4 -O sparse_super2", "16M"),
        ("-t ext4 -O encrypt,verity,quota,project,stable_inodes", "16M"),
        ("-t ext4 -O casefold", "16M"),
        ("-t ext4 -O mmp", "16M"),
        ("-t ext4 -O ea_inode", "16M"),
        ("-t ext4 -O large_dir", "16M"),
        ("-t ext4 -O fast_commit -J size=4", "32M"),
        ("-t ext4 -E desc_size=128", "16M"),
        // More groups than a block describes: several blocks of descriptors, each in a group.
        ("-t ext4 -O meta_bg,^resize_inode", "16M"),
        ("-t ext4 -b 1024 -g 256 -N 2000 -O meta_bg,^resize_inode", "20M"),
        ("-t ext4 -b 1024 -g 256 -N 2000 -O meta_bg,^resize_inode,^64bit,^metadata_csum", "20M"),
        ("-t ext4 -b 1024 -g 256 -N 2000 -O meta_bg,^resize_inode,^sparse_super", "20M"),
        ("-t ext4 -b 1024 -g 256 -N 2000 -O meta_bg,^resize_inode,sparse_super2", "20M"),
        ("-t ext4 -b 1024 -O meta_bg,^resize_inode,bigalloc", "16M"),
    ] {
        made(&root, &image, options, size).unwrap_or_else(|said| panic!("{options}: {said}"));
        let (table, work) = built(&request(&[&image]));
        assert_eq!((work.files, work.left_out), (4, 0), "{options}: {work:?}");
        assert!(table == plain, "{options}");
    }
}

#[test]
fn what_is_not_supported_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = (directory.path().join("root"), directory.path().join("image"));
    tree(&root);
    for (options, what) in [
        ("-t ext4 -O inline_data", "ext4 with inline_data, which is not supported yet"),
        ("-t ext4 -O ^filetype", "ext4 without filetype, which is not supported yet"),
        ("-t ext2 -r 0", "ext4 without filetype, which is not supported yet"),
    ] {
        made(&root, &image, options, "16M").unwrap();
        let error = refused(&request(&[&image]));
        assert!(error.ends_with(&format!("image: {what}")), "{options}: {error}");
    }
    made(&root, &image, "-t ext2 -b 65536 -N 1000", "128M").unwrap();
    let error = refused(&request(&[&image]));
    assert!(error.contains("blocks of 64 KiB without metadata_csum, which is not"), "{error}");
    let mut journal = Command::new("mke2fs");
    journal.args(["-q", "-F", "-O", "journal_dev"]).arg(&image).arg("16M");
    assert!(journal.status().unwrap().success());
    assert!(refused(&request(&[&image])).contains("ext4 with journal_dev"));

    // Features and sizes that no `mke2fs` makes.
    made(&root, &image, "-t ext4 -O ^metadata_csum", "16M").unwrap();
    let whole = fs::read(&image).unwrap();
    for (at, bytes, what) in [
        (0x60, &0x8000_0042_u32.to_le_bytes()[..], "ext4 with FEATURE_I31, which is not supported"),
        (0x60, &0x1043_u32.to_le_bytes(), "ext4 with compression, dirdata, which is"),
        (0x18, &21_u32.to_le_bytes(), "ext4 with blocks of 2^31 bytes; valid: 2^10 to 2^16"),
        (0x20, &1_u32.to_le_bytes(), ""),
        (0x150, &0x1000_u32.to_le_bytes(), "block groups; valid: up to 1048576"),
    ] {
        let mut bytes_of = whole.clone();
        bytes_of[1024 + at..][..bytes.len()].copy_from_slice(bytes);
        fs::write(&image, &bytes_of).unwrap();
        let ending = build(&request(&[&image]), |_, _| {}).map(|(_, work)| work.left_out);
        let is_told = ending
            .as_ref()
            .map_or_else(|error| error.to_string().contains(what), |_| what.is_empty());
        assert!(is_told, "{what}: {ending:?}");
    }
    // The journal is elsewhere, and was not replayed.
    let mut bytes = whole;
    bytes[1024 + 0xe0..][..4].fill(0);
    bytes[1024 + 0x60] |= 4;
    fs::write(&image, bytes).unwrap();
    assert!(refused(&request(&[&image])).contains("whose journal lies on another disk"));
}

#[test]
fn a_damaged_superblock_is_not_mended() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = (directory.path().join("root"), directory.path().join("image"));
    tree(&root);
    made(&root, &image, "-t ext4 -O mmp,metadata_csum", "16M").unwrap();
    let mut bytes = fs::read(&image).unwrap();
    bytes[1024 + 0x88] ^= 1;
    fs::write(&image, bytes).unwrap();
    let error = refused(&request(&[&image]));
    assert!(
        error.ends_with("image: ext4 whose superblock is damaged: its checksum is wrong"),
        "{error}"
    );
}

#[test]
fn a_partition_that_is_refused_leaves_the_others() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = (directory.path().join("root"), directory.path().join("image"));
    tree(&root);
    let (plain, _) = built(&request(&[&root]));
    let part = |options: &str| {
        made(&root, &image, options, "16M").unwrap();
        fs::read(&image).unwrap()
    };
    let parts = [part("-t ext4"), part("-t ext4 -O inline_data"), vec![0; 1 << 20]];
    let disk = directory.path().join("disk");
    for has_gpt in [true, false] {
        fs::write(&disk, partitions::disk_of(&parts, has_gpt, 512)).unwrap();
        let (table, work) = built(&request(&[&disk]));
        assert!(table == plain, "{work:?}");
        let told = [
            format!(
                "{}: partition 2: ext4 with inline_data, which is not supported yet",
                disk.display()
            ),
            format!("{}: partition 3: nothing that is known", disk.display()),
        ];
        assert_eq!((work.left_out, &work.told[..]), (2, &told[..]));
        // Without any other partition, the result is an error.
        fs::write(&disk, partitions::disk_of(&parts[1..], has_gpt, 512)).unwrap();
        let error = refused(&request(&[&disk]));
        let wanted = "nor on a partition: partition 1 is ext4 with inline_data, which is not \
                      supported yet, partition 2 is nothing that is known";
        assert!(error.ends_with(wanted), "{error}");
    }
}
