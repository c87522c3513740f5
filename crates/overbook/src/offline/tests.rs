use std::{os::unix::fs::symlink, process::Command};

use pages::offline::{Page, Record, TableRef, hash};

use super::*;

fn request(sources: &[&Path]) -> Request {
    let sources = sources.iter().map(|path| path.to_path_buf()).collect();
    Request { sources, all_pages: false, sampling: Sampling::default() }
}

fn built(request: &Request) -> (Table, Work) {
    build(request, |_, _| {}).unwrap()
}

fn refused(request: &Request) -> String {
    build(request, |_, _| {}).unwrap_err().to_string()
}

/// This test's own program: an executable of some size, with code.
fn own() -> PathBuf {
    std::env::current_exe().unwrap()
}

/// An executable of 64 bits: a page of headers, two of code, one more and a tail of 100 bytes, of
/// which the segment has 10.
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

    let (all, _) = built(&Request { all_pages: true, ..request(&[&path, &path]) });
    let [code, other] = [true, false].map(|is_code| {
        all.records().iter().filter(|record| record.is_code == is_code).collect::<Vec<_>>()
    });
    assert_eq!((code.len(), other.len()), (4, 1), "the headers are no code");
    assert!(all.records().iter().all(|record| record.count == 2));
}

#[test]
fn the_same_files_make_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let sources = [own(), "/bin/sh".into()];
    let request = Request { sources: sources.to_vec(), ..request(&[]) };
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
    assert!(table.len() > 100 && table.records().all(|record: Record| record.is_code));
    assert_eq!(fs::read_dir(directory.path().join("a")).unwrap().count(), 1, "nothing is left");
}

#[test]
fn a_table_that_cannot_be_written_leaves_the_old_one() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("small");
    fs::write(&path, small_executable()).unwrap();
    let (table, _) = built(&request(&[&path]));
    // A directory in its place cannot be renamed over.
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
    let (table, work) = built(&Request { all_pages: true, ..request(&[&path]) });
    assert_eq!(table.records().len(), 1);
    assert!(work.bytes < 4 << 20, "{work:?}");
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
    // A name that takes an entry of its own.
    let long = "n".repeat(200);
    fs::write(root.join("usr/bin").join(&long), small_executable()).unwrap();
    fs::copy(own(), root.join("usr/bin/own")).unwrap();
    fs::write(root.join("usr/bin/text"), "no executable").unwrap();
    fs::remove_dir_all(directory.path().join("none")).unwrap_or_default();
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

#[test]
fn images_are_read_without_mounting() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    for number in 0..20 {
        let mut bytes = small_executable();
        bytes[4096] = number;
        fs::write(root.join(format!("usr/bin/{number}")), bytes).unwrap();
    }
    fs::copy(own(), root.join("own")).unwrap();
    symlink("/usr/bin", root.join("usr/loop")).unwrap();
    let image = directory.path().join("image.ext4");
    let len = fs::metadata(own()).unwrap().len() / 1024 + (16 << 10);
    let paths =
        [root.as_os_str(), image.as_os_str(), len.to_string().as_ref()].map(ToOwned::to_owned);
    let options = ["-q", "-t", "ext4", "-d"].map(AsRef::as_ref);
    let paths: Vec<_> = paths.iter().map(AsRef::as_ref).collect();
    run("mke2fs", &[&options[..], &paths[..]].concat());
    let (table, work) = built(&request(&[&image]));
    let (plain, _) = built(&request(&[&root]));
    assert!(table == plain, "{work:?}");
    assert_eq!((work.files, work.left_out), (21, 0));

    let file = File::options().write(true).open(&image).unwrap();
    file.set_len(100 << 10).unwrap();
    // What is cut off is an error, or files that are left out and told of.
    if let Ok((_, work)) = build(&request(&[&image]), |_, _| {}) {
        assert!(work.left_out > 0, "{work:?}");
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
        (b"hsqs", "squashfs image is not supported yet"),
        (b"QFI\xfb", "qcow2 image is not supported yet"),
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
