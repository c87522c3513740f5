use std::{os::unix::fs::symlink, process::Command};

use pages::offline::{Page, Record, TableRef, hash};

use super::{super::*, Left, image};

mod backing;
mod ext4;
mod nothing;
mod partitions;
mod squashfs;

fn request(sources: &[&Path]) -> BuildRequest {
    let sources = sources.iter().map(|path| path.to_path_buf()).collect();
    BuildRequest { sources, all_pages: false, sampling: Sampling::default(), backing_dir: None }
}

fn built(request: &BuildRequest) -> (Table, Work) {
    build(request, |_, _| {}).unwrap()
}

fn refused(request: &BuildRequest) -> String {
    build(request, |_, _| {}).unwrap_err().to_string()
}

/// A 64-bit executable: a page of headers, two of code, one more, and a tail of 100 bytes. The
/// segment has 10 bytes of the tail.
fn small_executable() -> Vec<u8> {
    let mut bytes = vec![0; 4 * 4096 + 100];
    bytes[..7].copy_from_slice(b"\x7fELF\x02\x01\x01");
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(16, &[2, 0, 62, 0, 1]);
    put(32, &[64]);
    put(52, &[64, 0, 56, 0, 2]);
    let mut segment = |at: usize, flags: u8, offset: u16, len: u16| {
        put(at, &[1, 0, 0, 0, flags]);
        put(at + 8, &offset.to_le_bytes());
        put(at + 32, &len.to_le_bytes());
    };
    segment(64, 4, 0, 4096);
    segment(120, 5, 4096 + 2000, 3 * 4096 - 1990);
    for (page, mark) in [(1, 1), (2, 2), (3, 3), (4, 4)] {
        bytes[page * 4096..][..100].fill(mark);
    }
    bytes
}

fn page(mark: u8) -> Page {
    let mut page = [0; 4096];
    page[..100].fill(mark);
    page
}

fn run(program: &str, arguments: &[&std::ffi::OsStr]) {
    let done = Command::new(program).args(arguments).output().unwrap();
    assert!(done.status.success(), "{program}: {}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn pages_with_code_are_taken_as_a_page_cache_has_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("small");
    fs::write(&path, small_executable()).unwrap();
    let (table, work) = built(&request(&[&path]));
    let mut hashes: Vec<u128> = table.records().iter().map(|record| record.hash).collect();
    let mut wanted: Vec<u128> = [1, 2, 3, 4].iter().map(|mark| hash(&page(*mark))).collect();
    hashes.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(hashes, wanted, "the tail's page is filled up with zeros");
    assert!(table.records().iter().all(|record| record.is_code && record.count == 1));
    assert_eq!((work.files, work.left_out), (1, 0));

    let (all, _) = built(&BuildRequest { all_pages: true, ..request(&[&path, &path]) });
    let [code, other] = [true, false].map(|is_code| {
        all.records().iter().filter(|record| record.is_code == is_code).collect::<Vec<_>>()
    });
    assert_eq!((code.len(), other.len()), (4, 1), "the headers are no code");
    assert!(all.records().iter().all(|record| record.count == 2));
}

#[test]
fn the_same_files_make_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let request = request(&["/bin/sh".as_ref(), "/usr/bin/env".as_ref()]);
    let write = |name: &str| {
        let path = directory.path().join(name);
        fs::create_dir(&path).unwrap();
        write(&built(&request).0, &path.join("t.spt")).unwrap();
        fs::read(path.join("t.spt")).unwrap()
    };
    let (first, second) = (write("a"), write("b"));
    assert!(first == second);
    let table = TableRef::parse(&first).unwrap();
    assert_eq!(table.name(), "t");
    assert!(table.len() > 10 && table.records().all(|record: Record| record.is_code));
    assert_eq!(fs::read_dir(directory.path().join("a")).unwrap().count(), 1, "nothing is left");
}

#[test]
fn a_table_that_cannot_be_written_leaves_the_old_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("small");
    fs::write(&path, small_executable()).unwrap();
    let (table, _) = built(&request(&[&path]));
    // A file cannot be renamed over a directory.
    let place = directory.path().join("t.spt");
    fs::create_dir(&place).unwrap();
    let error = write(&table, &place).unwrap_err().to_string();
    assert!(error.contains("t.spt"), "{error}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2, "nothing is left");
    let long = directory.path().join("x".repeat(65) + ".spt");
    let error = write(&table, &long).unwrap_err().to_string();
    assert!(error.contains("at most 64 bytes"), "{error}");
}

#[test]
fn a_tree_is_walked_without_links_loops_and_doubles() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/b/small"), small_executable()).unwrap();
    fs::hard_link(root.join("a/b/small"), root.join("a/again")).unwrap();
    fs::write(root.join("a/text"), "no executable").unwrap();
    fs::write(root.join("broken"), b"\x7fELF\x02").unwrap();
    symlink(root, root.join("a/loop")).unwrap();
    symlink(root.join("a/b/small"), root.join("link")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("pipe"), 0o600.into()).unwrap();
    let (table, work) = built(&request(&[root]));
    assert_eq!(table.records().len(), 4);
    assert!(table.records().iter().all(|record| record.count == 1));
    assert_eq!((work.files, work.left_out), (1, 1), "{work:?}");
    assert!(work.told[0].contains("broken: not an executable"), "{work:?}");
}

#[test]
fn holes_are_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("dump");
    let file = File::create(&path).unwrap();
    file.set_len(1 << 40).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &page(7), 1 << 39).unwrap();
    let (table, work) = built(&BuildRequest { all_pages: true, ..request(&[&path]) });
    assert_eq!(table.records().len(), 1);
    assert!(work.bytes < 4 << 20, "{work:?}");

    // Holes count as zeros.
    let len = (1 << 20) + 100;
    file.set_len(0).unwrap();
    file.set_len(len).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &page(7), 1 << 18).unwrap();
    let (sparse, _) = built(&BuildRequest { all_pages: true, ..request(&[&path]) });
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    let (dense, _) = built(&BuildRequest { all_pages: true, ..request(&[&path]) });
    assert_eq!(sparse, dense);
}

#[test]
fn packages_are_unpacked() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    fs::create_dir_all(root.join("DEBIAN")).unwrap();
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    let control = "Package: small\nVersion: 1\nArchitecture: all\nMaintainer: nobody\n\
                   Description: small\n";
    fs::write(root.join("DEBIAN/control"), control).unwrap();
    // A name long enough to be an entry of its own.
    let long = "n".repeat(200);
    fs::write(root.join("usr/bin").join(&long), small_executable()).unwrap();
    fs::copy("/bin/sh", root.join("usr/bin/sh")).unwrap();
    fs::write(root.join("usr/bin/text"), "no executable").unwrap();
    let (plain, _) = built(&request(&[&root]));
    for compression in ["none", "gzip", "xz", "zstd"] {
        let package = directory.path().join(format!("{compression}.deb"));
        let option = format!("-Z{compression}");
        let arguments = ["-z1".as_ref(), option.as_ref(), "--build".as_ref()];
        let paths = [root.as_os_str(), package.as_os_str()];
        run("dpkg-deb", &[&arguments[..], &paths[..]].concat());
        let (table, work) = built(&request(&[&package]));
        assert!(table == plain, "{compression}: {work:?}");
        assert_eq!((work.files, work.left_out), (2, 0));

        let bytes = fs::read(&package).unwrap();
        fs::write(&package, &bytes[..bytes.len() / 2]).unwrap();
        let error = refused(&request(&[&package]));
        assert!(error.contains(&format!("{compression}.deb: ")), "{error}");
    }
}

/// A directory with 21 executables, and an ext4 image of it.
fn image_of(directory: &Path) -> (PathBuf, PathBuf) {
    let root = directory.join("root");
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    for number in 0..20 {
        let mut bytes = small_executable();
        bytes[4096] = number;
        fs::write(root.join(format!("usr/bin/{number}")), bytes).unwrap();
    }
    fs::copy("/bin/sh", root.join("sh")).unwrap();
    symlink("/usr/bin", root.join("usr/loop")).unwrap();
    let image = directory.join("image.ext4");
    let paths = [root.as_os_str(), image.as_os_str(), "16M".as_ref()];
    let options = ["-q", "-t", "ext4", "-d"].map(AsRef::as_ref);
    run("mke2fs", &[&options[..], &paths[..]].concat());
    (root, image)
}

#[test]
fn images_are_read_without_mounting() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = image_of(directory.path());
    let (table, work) = built(&request(&[&image]));
    let (plain, _) = built(&request(&[&root]));
    assert!(table == plain, "{work:?}");
    assert_eq!((work.files, work.left_out), (21, 0));

    let file = File::options().write(true).open(&image).unwrap();
    file.set_len(100 << 10).unwrap();
    // A cut-off image gives an error, or files that are left out and reported.
    if let Ok((_, work)) = build(&request(&[&image]), |_, _| {}) {
        assert!(work.left_out > 0, "{work:?}");
    }
}

/// A disk with that filesystem as its second partition.
fn partitioned(filesystem: &[u8], has_gpt: bool) -> Vec<u8> {
    const START: u32 = 2048;
    let mut disk = vec![0; START as usize * 512];
    disk[510..512].copy_from_slice(b"\x55\xaa");
    if has_gpt {
        disk[512..520].copy_from_slice(b"EFI PART");
        disk[512 + 72] = 2;
        disk[512 + 80] = 128;
        disk[512 + 84] = 128;
        disk[1024 + 128 + 32..][..4].copy_from_slice(&START.to_le_bytes());
    } else {
        disk[446 + 16 + 8..][..4].copy_from_slice(&START.to_le_bytes());
    }
    disk.extend(filesystem);
    disk
}

/// A qcow2 image with clusters of 4 KiB: each third one is compressed, and clusters of zeros are
/// left out.
fn qcow2(disk: &[u8], is_zstd: bool) -> Vec<u8> {
    const CLUSTER: usize = 4096;
    let clusters: Vec<_> = disk.chunks(CLUSTER).collect();
    let tables = clusters.len().div_ceil(CLUSTER / 8);
    assert!(tables <= CLUSTER / 8);
    let mut image = vec![0; (2 + tables) * CLUSTER];
    let put = |image: &mut Vec<u8>, at: usize, value: u64| {
        image[at..at + 8].copy_from_slice(&value.to_be_bytes());
    };
    image[..4].copy_from_slice(b"QFI\xfb");
    image[7] = 3;
    image[23] = 12;
    put(&mut image, 24, disk.len() as u64);
    image[36..40].copy_from_slice(&u32::try_from(tables).unwrap().to_be_bytes());
    put(&mut image, 40, CLUSTER as u64);
    image[79] = u8::from(is_zstd) << 3;
    image[103] = 112;
    image[104] = u8::from(is_zstd);
    for table in 0..tables {
        put(&mut image, CLUSTER + 8 * table, ((2 + table) * CLUSTER) as u64 | 1 << 63);
    }
    for (index, cluster) in clusters.iter().enumerate() {
        if cluster.iter().all(|byte| *byte == 0) {
            continue;
        }
        let mut packed = Vec::new();
        let is_packed = index % 3 == 0 && {
            packed = if is_zstd {
                zstd::encode_all(*cluster, 1).unwrap()
            } else {
                let mut encoder =
                    flate2::write::DeflateEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(cluster).unwrap();
                encoder.finish().unwrap()
            };
            packed.len() < CLUSTER - 512
        };
        let place = image.len() as u64;
        let entry = if is_packed {
            let more_sectors = (place % 512 + packed.len() as u64 - 1) / 512;
            image.extend(&packed);
            1 << 62 | more_sectors << (62 - 4) | place
        } else {
            image.resize(image.len().next_multiple_of(CLUSTER), 0);
            let place = image.len() as u64;
            image.extend(*cluster);
            place | 1 << 63
        };
        put(&mut image, 2 * CLUSTER + 8 * index, entry);
    }
    image
}

#[test]
fn disks_are_read_with_partitions_and_as_qcow2() {
    let directory = tempfile::tempdir().unwrap();
    let (root, image) = image_of(directory.path());
    let (plain, _) = built(&request(&[&root]));
    let image = fs::read(image).unwrap();
    let path = directory.path().join("disk");
    for has_gpt in [true, false] {
        let disk = partitioned(&image, has_gpt);
        for bytes in [qcow2(&disk, false), qcow2(&disk, true), disk] {
            fs::write(&path, &bytes).unwrap();
            let (table, work) = built(&request(&[&path]));
            assert!(table == plain, "{work:?}");
            assert_eq!((work.files, work.left_out), (21, 0));
        }
    }
    let whole = qcow2(&image, false);
    let change = |at: usize, byte: u8| {
        let mut bytes = whole.clone();
        bytes[at] = byte;
        fs::write(&path, &bytes).unwrap();
        refused(&request(&[&path]))
    };
    for (at, byte, what) in [
        (7, 4, "qcow2 of version 4; valid: 2 and 3"),
        (23, 30, "clusters of 2^30 bytes"),
        (35, 2, "it is encrypted"),
        (79, 4, "its features 0x4 are not supported yet"),
        // No table: all clusters are zeros.
        (39, 0, "there is no ext4 filesystem"),
    ] {
        let error = change(at, byte);
        assert!(error.contains(what), "{error}");
    }
}

/// A kernel's boot image, as Linux makes it, with the length after the compressed data.
fn boot_image(packed: &[u8]) -> Vec<u8> {
    let mut image = vec![0; 3 * 512];
    image[0x1f1] = 1;
    image[0x1fe..0x200].copy_from_slice(b"\x55\xaa");
    image[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
    image[0x248..0x24a].copy_from_slice(&512_u16.to_le_bytes());
    let len = u32::try_from(packed.len() + 4).unwrap();
    image[0x24c..0x250].copy_from_slice(&len.to_le_bytes());
    image.extend(packed);
    image.extend(16484_u32.to_le_bytes());
    image
}

/// Compresses as `lz4 -l` does, in blocks of 8 MiB.
fn legacy_lz4(bytes: &[u8]) -> Vec<u8> {
    let mut packed = vec![0x02, 0x21, 0x4c, 0x18];
    for block in bytes.chunks(8 << 20) {
        let block = lz4_flex::block::compress(block);
        packed.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
        packed.extend(block);
    }
    packed
}

#[test]
fn a_kernel_is_found_in_its_boot_image() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kernel");
    // Larger than a block of LZ4.
    let mut kernel = small_executable();
    kernel.resize(20 << 20, 3);
    fs::write(&path, &kernel).unwrap();
    let all_pages = BuildRequest { all_pages: true, ..request(&[&path]) };
    let (plain, _) = built(&all_pages);
    for packed in [zstd::encode_all(&kernel[..], 1).unwrap(), legacy_lz4(&kernel)] {
        let mut image = boot_image(&packed);
        fs::write(&path, &image).unwrap();
        assert_eq!(built(&all_pages).0, plain);
        fs::write(&path, &image[..image.len() - 100]).unwrap();
        let error = refused(&all_pages);
        assert!(error.contains("kernel: "), "{error}");
        image[3 * 512] = 0;
        fs::write(&path, &image).unwrap();
        let error = refused(&all_pages);
        assert!(error.contains("its compression is not supported yet"), "{error}");
    }
    let mut forged = legacy_lz4(&kernel);
    for len in [0, u32::MAX] {
        forged[4..8].copy_from_slice(&len.to_le_bytes());
        fs::write(&path, boot_image(&forged)).unwrap();
        let error = refused(&all_pages);
        assert!(error.contains(&format!("a block of LZ4 with {len} bytes")), "{error}");
    }
}

#[test]
fn damage_is_an_error_or_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let (_, image) = image_of(directory.path());
    let image = fs::read(image).unwrap();
    let path = directory.path().join("damaged");
    let mut random = fastrand::Rng::with_seed(3);
    // Most of the filesystem's structures are at its beginning.
    for (whole, hit) in [(&image, 1 << 20), (&qcow2(&image, false), 8 << 12)] {
        for _ in 0..60 {
            let mut bytes = whole.clone();
            for _ in 0..random.usize(1..8) {
                bytes[random.usize(..hit)] = random.u8(..);
            }
            fs::write(&path, &bytes).unwrap();
            let request = BuildRequest { all_pages: random.bool(), ..request(&[&path]) };
            let ending = build(&request, |_, _| {}).map(|_| ());
            assert!(!matches!(ending, Err(OfflineError::Panic)));
        }
    }
}

#[test]
fn what_is_of_no_use_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("x");
    let error = refused(&request(&[&path]));
    assert!(error.contains("x: No such file"), "{error}");
    let error = refused(&request(&["/dev/null".as_ref()]));
    assert!(error.contains("neither a file nor a directory"), "{error}");
    for (bytes, what) in [
        (&b"some text"[..], "--all-pages takes any file"),
        (b"XFSB", "an XFS image is not supported yet"),
        (b"\x7fELF\x02\x01\x01", "not an executable that can be read"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = refused(&request(&[&path]));
        assert!(error.contains(what), "{error}");
    }
    let mut core = small_executable();
    core[16] = 4;
    fs::write(&path, core).unwrap();
    let error = refused(&request(&[&path]));
    assert!(error.contains("a core file is not supported yet"), "{error}");
}

#[test]
fn all_threads_share_what_may_be_read_of_an_image() {
    let directory = tempfile::tempdir().unwrap();
    let (_, image) = image_of(directory.path());
    let image = fs::read(image).unwrap();
    let path = directory.path().join("disk");
    // The same filesystem on two partitions.
    let mut disk = partitioned(&image, false);
    let second = u32::try_from(disk.len() / 512).unwrap();
    disk[446 + 8..][..4].copy_from_slice(&second.to_le_bytes());
    disk.extend(&image);
    fs::write(&path, &disk).unwrap();
    let request = request(&[&path]);
    let cut = |bytes: u64| {
        let (shared, left) = (BuildState::new(&request), Left::with(&path, bytes));
        let done = (0..2).try_for_each(|part| {
            let mut cutter = Cutter::new(&shared, request.sampling);
            image::cut(&mut cutter, &path, part, 2, &left)
        });
        (done, shared.files.into_inner(), shared.left_out.into_inner())
    };
    let (done, files, _) = cut(MOST_BYTES);
    done.unwrap();
    assert_eq!(files, 42);
    // Enough bytes for one filesystem, but not for both.
    let (done, _, left_out) = cut(files * small_executable().len() as u64 * 2 / 3);
    let error = done.unwrap_err();
    assert!(matches!(error, OfflineError::Limit { .. }), "{error:?}");
    assert!(error.to_string().contains("disk: there are more than 128 GiB"), "{error}");
    assert_eq!(left_out, 0, "a limit leaves no file out");
}

#[test]
fn names_out_of_images_and_packages_are_fit_for_a_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    fs::create_dir(&root).unwrap();
    let name = "it's\x1b]0;bad\x07\r\n\u{202e}\\";
    fs::write(root.join(name), b"\x7fELF\x02").unwrap();
    fs::write(root.join("other"), small_executable()).unwrap();
    let image = directory.path().join("image.ext4");
    let paths = [root.as_os_str(), image.as_os_str(), "16M".as_ref()];
    let options = ["-q", "-t", "ext4", "-d"].map(AsRef::as_ref);
    run("mke2fs", &[&options[..], &paths[..]].concat());
    for source in [&root, &image] {
        let (_, work) = built(&request(&[source]));
        let shown = r"/it's\u{1b}]0;bad\u{7}\r\n\u{202e}\\: not an executable";
        assert!(work.told.concat().contains(shown), "{work:?}");
    }

    // The name of the compression comes from the package.
    let package = directory.path().join("small.deb");
    let member = format!("{:<48}{:<10}`\n", "data.tar.\x1b[2J", 0);
    fs::write(&package, format!("!<arch>\n{:<48}{:<10}`\n{member}", "debian-binary", 0)).unwrap();
    let error = refused(&request(&[&package]));
    assert!(error.contains(r"data.tar with .\u{1b}[2J is not supported"), "{error}");
}

#[test]
fn a_limit_is_passed_on_where_a_file_would_be_left_out() {
    let request = request(&[]);
    let (shared, left) = (BuildState::new(&request), Left::new("source".as_ref()));
    let cutter = Cutter::new(&shared, request.sampling);
    let spare = |error| {
        let path = "source/file".as_ref();
        sources::spare(&cutter, path, Err(left.unreadable(path, error)))
    };
    spare(io::Error::other("damaged")).unwrap();
    let error = spare(limit::unpacks_too_much()).unwrap_err();
    assert!(error.to_string().starts_with("source: it unpacks to more than 128 GiB"), "{error}");
    assert_eq!(shared.left_out.load(Relaxed), 1);
}
