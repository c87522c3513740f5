//! squashfs images made here: valid, forged and damaged ones. Images made by `mksquashfs` are in
//! `tests/images.rs` of the end-to-end tests.

use super::{super::squashfs::Squashfs, *};

const BLOCK: usize = 4096;
const STORED: u32 = 1 << 24;

type Pack = fn(&[u8]) -> Vec<u8>;

/// Compressions, with their numbers in a superblock.
fn compressions() -> [(u16, Pack); 3] {
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let lz4 = |bytes: &[u8]| lz4_flex::block::compress(bytes);
    [(1, gzip), (5, lz4), (6, |bytes| zstd::bulk::compress(bytes, 1).unwrap())]
}

/// Appends a block and returns its length as squashfs writes it: an incompressible block is
/// stored, and zeros are left out.
fn put_block(image: &mut Vec<u8>, bytes: &[u8], pack: Pack) -> u32 {
    let packed = pack(bytes);
    if bytes.iter().all(|byte| *byte == 0) {
        return 0;
    }
    let (kept, flag) = if packed.len() < bytes.len() { (&packed[..], 0) } else { (bytes, STORED) };
    image.extend(kept);
    u32::try_from(kept.len()).unwrap() | flag
}

/// Appends an uncompressed block of a table.
fn put_table(image: &mut Vec<u8>, bytes: &[u8]) -> u64 {
    let (place, len) = (image.len() as u64, u16::try_from(bytes.len()).unwrap());
    assert!(len <= 8192);
    image.extend((len | 1 << 15).to_le_bytes());
    image.extend(bytes);
    place
}

fn halves(values: &[u16]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn words(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// An image with these files in its root; on request, the root also contains itself as `loop`.
fn squashfs(files: &[Vec<u8>], (how, pack): (u16, Pack), has_loop: bool) -> Vec<u8> {
    let mut image = vec![0; 96];
    let [mut inodes, mut entries, mut ends, mut fragments] = [const { Vec::new() }; 4];
    let mut entry = |inode: usize, kind: u16, name: &str| {
        let inode = u16::try_from(inode).unwrap();
        entries.extend(halves(&[inode, 0, kind, u16::try_from(name.len()).unwrap() - 1]));
        entries.extend(name.as_bytes());
    };
    for (number, file) in files.iter().enumerate() {
        let (whole, end) = file.split_at(file.len() / BLOCK * BLOCK);
        if ends.len() + end.len() > BLOCK {
            put_fragment(&mut image, &mut fragments, &mut ends, pack);
        }
        let start = u32::try_from(image.len()).unwrap();
        let lengths: Vec<u32> =
            whole.chunks(BLOCK).map(|block| put_block(&mut image, block, pack)).collect();
        let fragment = u32::try_from(fragments.len() / 16).unwrap();
        let fragment = if end.is_empty() { u32::MAX } else { fragment };
        let [at, size] = [ends.len(), file.len()].map(|len| u32::try_from(len).unwrap());
        entry(inodes.len(), 2, &number.to_string());
        inodes.extend(halves(&[2, 0o755, 0, 0, 0, 0, 1, 0]));
        inodes.extend(words(&[start, fragment, at, size]));
        inodes.extend(words(&lengths));
        ends.extend(end);
    }
    put_fragment(&mut image, &mut fragments, &mut ends, pack);
    let root = inodes.len();
    if has_loop {
        entry(root, 1, "loop");
    }
    let number = u32::try_from(files.len() + usize::from(has_loop)).unwrap();
    let listing = [words(&[number - 1, 0, 1]), entries].concat();
    inodes.extend(halves(&[1, 0o755, 0, 0, 0, 0, 1, 0]));
    inodes.extend(words(&[0, 2]));
    inodes.extend(halves(&[u16::try_from(listing.len() + 3).unwrap(), 0, 1, 0]));
    let [inodes, listing, table] =
        [&inodes, &listing, &fragments].map(|bytes| put_table(&mut image, bytes));
    let lookup = image.len() as u64;
    image.extend(table.to_le_bytes());

    let count = u32::try_from(fragments.len() / 16).unwrap();
    let mut block = [b"hsqs".to_vec(), words(&[number + 1, 0, 4096, count])].concat();
    block.extend(halves(&[how, 12, 0, 1, 4, 0]));
    let places = [root as u64, image.len() as u64, lookup, u64::MAX, inodes, listing, lookup];
    block.extend(places.iter().flat_map(|place| place.to_le_bytes()));
    image[..block.len()].copy_from_slice(&block);
    image
}

fn put_fragment(image: &mut Vec<u8>, fragments: &mut Vec<u8>, ends: &mut Vec<u8>, pack: Pack) {
    let place = u32::try_from(image.len()).unwrap();
    let len = put_block(image, ends, pack);
    fragments.extend(words(&[place, 0, len, 0]));
    ends.clear();
}

/// The files of these images: many small executables, a large one, and one with a hole.
fn files() -> Vec<Vec<u8>> {
    let mut files: Vec<_> = (0..70)
        .map(|number| {
            let mut bytes = small_executable();
            bytes[4096] = number;
            bytes
        })
        .collect();
    files.push(fs::read("/bin/sh").unwrap());
    let mut holed = small_executable();
    holed[2 * 4096..4 * 4096].fill(0);
    files.push(holed);
    files
}

#[test]
fn squashfs_is_read_as_the_files_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    fs::create_dir(&root).unwrap();
    for (number, file) in files().iter().enumerate() {
        fs::write(root.join(number.to_string()), file).unwrap();
    }
    let image = directory.path().join("image");
    for compression in compressions() {
        let whole = squashfs(&files(), compression, false);
        for disk in [partitioned(&whole, true), whole] {
            fs::write(&image, disk).unwrap();
            for all_pages in [false, true] {
                let (plain, _) = built(&BuildRequest { all_pages, ..request(&[&root]) });
                let (table, work) = built(&BuildRequest { all_pages, ..request(&[&image]) });
                assert!(table == plain, "{work:?}");
                assert_eq!((work.files, work.left_out), (72, 0));
            }
        }
    }
}

#[test]
fn a_directory_within_itself_ends() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    fs::write(&path, squashfs(&[small_executable()], compressions()[0], true)).unwrap();
    let (table, work) = built(&request(&[&path]));
    assert_eq!((work.files, work.left_out), (MOST_DEPTH as u64, 1));
    assert!(work.told[0].ends_with("/loop/loop: it lies deeper than is entered"), "{work:?}");
    assert_eq!(table.records().len(), 4);
}

#[test]
fn what_a_forged_squashfs_claims_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let whole = squashfs(&[small_executable()], compressions()[0], false);
    let [inodes, listing] =
        [64, 72].map(|at| usize::from(whole[at]) + (usize::from(whole[at + 1]) << 8));
    for (at, bytes, what) in [
        (28, &[3][..], "squashfs of version 3; valid: 4"),
        (20, &[3], "its compression 3, LZO, is not supported yet"),
        (22, &[30], "blocks of 2^30 bytes"),
        (22, &[13], "blocks of 2^13 bytes"),
        // Tables and files beyond the image's end, of an unknown kind, or longer than they are.
        (64, &[0xff; 7], "failed to fill whole buffer"),
        (inodes, &[0xff, 0xff], "the squashfs is damaged"),
        (32, &[1], "the squashfs is damaged"),
        (listing + 2, &[0xff; 4], "the squashfs is damaged"),
        (listing + 2 + 12 + 6, &[0xff; 2], "the squashfs is damaged"),
        (listing + 2 + 12 + 8, b"/", "the squashfs is damaged"),
        (inodes + 2 + 16, &[0xff; 4], "failed to fill whole buffer"),
        (inodes + 2 + 20, &[5], "the squashfs is damaged"),
        (inodes + 2 + 24, &[0xff; 4], "the squashfs is damaged"),
        (inodes + 2 + 32, &[0xff, 0xff, 0xff, 1], "the squashfs is damaged"),
    ] {
        let mut forged = whole.clone();
        forged[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&path, &forged).unwrap();
        let said = match build(&request(&[&path]), |_, _| {}) {
            Ok((_, work)) => work.told.concat(),
            Err(error) => error.to_string(),
        };
        assert!(said.contains(what), "{what} at {at}: {said}");
    }
}

#[test]
fn damage_to_a_squashfs_is_an_error_or_left_out() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("damaged");
    let mut random = fastrand::Rng::with_seed(5);
    for compression in compressions() {
        let whole = squashfs(&files(), compression, false);
        let tables = whole.len() - (10 << 10);
        for _ in 0..40 {
            let mut bytes = whole.clone();
            for _ in 0..random.usize(1..8) {
                let part = if random.bool() { 0..96 } else { tables..whole.len() };
                bytes[random.usize(part)] = random.u8(..);
            }
            fs::write(&path, &bytes).unwrap();
            let ending = build(&request(&[&path]), |_, _| {}).map(|_| ());
            assert!(!matches!(ending, Err(OfflineError::Panic)));
        }
    }
}

#[test]
fn all_that_a_squashfs_unpacks_counts() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    fs::write(&path, squashfs(&files(), compressions()[0], false)).unwrap();
    let (request, left) = (request(&[&path]), Left::new(&path));
    let shared = BuildState::new(&request);
    let mut cutter = Cutter::new(&shared, request.sampling);
    let mut cut = |most: u64| {
        let disk = Box::new(File::open(&path).unwrap());
        let mut image = Squashfs::open(disk).unwrap().with_left(most);
        let mut walk = image::Walk { path: &path, part: 0, parts: 1, left: &left, seen: 0 };
        walk.cut_files(&mut cutter, &mut image)
    };
    cut(4 << 20).unwrap();
    let error = cut(1 << 18).unwrap_err();
    assert!(matches!(error, OfflineError::Limit { .. }), "{error:?}");
}
