//! Sources without pages, and incomplete ones.

use super::*;

/// A file like a kernel module: ELF without executable segments.
fn module() -> Vec<u8> {
    let mut bytes = small_executable();
    bytes[32..40].fill(0);
    bytes[56] = 0;
    bytes
}

#[test]
fn a_source_that_gives_no_page_is_an_error_that_says_what_was_there() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let whole = here.join("whole");
    fs::write(&whole, small_executable()).unwrap();
    for name in ["empty", "texts", "modules", "unreadable"] {
        fs::create_dir(here.join(name)).unwrap();
    }
    fs::write(here.join("texts/a"), "text").unwrap();
    fs::write(here.join("texts/b"), "text").unwrap();
    fs::write(here.join("modules/a.ko"), module()).unwrap();
    fs::write(here.join("modules/vmlinuz-6.1"), "a boot image").unwrap();
    fs::write(here.join("unreadable/a"), b"\x7fELF\x02").unwrap();
    fs::write(here.join("a.ko"), module()).unwrap();
    for (name, what) in [
        ("empty", "no page came of it: it has no file with content"),
        ("texts", "of 2 files none is an executable; --all-pages takes any file"),
        (
            "modules",
            "of 2 files 1 are ELF, and none has code that is mapped to run, as object files",
        ),
        ("modules", "modules/vmlinuz-6.1 is taken where it is named itself"),
        ("unreadable", "; 1 could not be read, for example "),
        ("a.ko", "of 1 files 1 are ELF, and none has code that is mapped to run"),
    ] {
        let path = here.join(name);
        // Another source does not hide the error.
        for sources in [&[path.as_path()][..], &[&whole, &path]] {
            let error = refused(&request(sources));
            assert!(error.contains(what) && error.contains(&format!("/{name}: ")), "{error}");
        }
    }
    let zeros = here.join("zeros");
    fs::write(&zeros, vec![0; 1 << 20]).unwrap();
    let error = refused(&BuildRequest { all_pages: true, ..request(&[&zeros]) });
    assert!(error.contains("all pages of the sources are zeros"), "{error}");
}

#[test]
fn a_kernel_package_says_what_is_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    fs::create_dir_all(root.join("boot")).unwrap();
    fs::write(root.join("boot/vmlinuz-6.1"), "a boot image").unwrap();
    fs::write(root.join("a.ko"), module()).unwrap();
    let package = package_of(&root, "xz");
    let error = refused(&request(&[&package]));
    let what = "of 2 files 1 are ELF, and none has code";
    assert!(error.contains(what) && error.contains("vmlinuz-6.1 is taken where it is"), "{error}");
}

#[test]
fn an_executable_that_is_cut_off_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("root");
    fs::create_dir(&root).unwrap();
    let bytes = small_executable();
    let path = root.join("cut");
    for len in [200, 4096, 5000, 8192, 16394] {
        fs::write(&path, &bytes[..len.min(bytes.len())]).unwrap();
        // The code ends 10 bytes into the fifth page, so the file has all of it.
        let is_whole = len == 16394;
        let ending = build(&request(&[&path]), |_, _| {});
        let told = "cut: it is cut off: its code ends at byte 16394, and the file before";
        match ending {
            Ok(_) => assert!(is_whole, "{len}"),
            Err(error) => assert!(!is_whole && error.to_string().contains(told), "{error}"),
        }
        fs::write(root.join("other"), &bytes).unwrap();
        let (_, work) = built(&request(&[&root]));
        assert_eq!(work.left_out, u64::from(!is_whole), "{work:?}");
    }
}

/// A package of that tree.
fn package_of(root: &Path, compression: &str) -> PathBuf {
    fs::create_dir_all(root.join("DEBIAN")).unwrap();
    let control = "Package: small\nVersion: 1\nArchitecture: all\nMaintainer: nobody\n\
                   Description: small\n";
    fs::write(root.join("DEBIAN/control"), control).unwrap();
    let package = root.with_extension(format!("{compression}.deb"));
    let option = format!("-Z{compression}");
    let arguments = ["-z1".as_ref(), option.as_ref(), "--build".as_ref()];
    run("dpkg-deb", &[&arguments[..], &[root.as_os_str(), package.as_os_str()]].concat());
    package
}

/// A package with these members after its first one.
fn package(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = format!("!<arch>\n{:<48}{:<10}`\n", "debian-binary", 0).into_bytes();
    for (name, content) in members {
        bytes.extend(format!("{name:<48}{:<10}`\n", content.len()).into_bytes());
        bytes.extend(*content);
        bytes.resize(bytes.len().next_multiple_of(2), 0);
    }
    bytes
}

/// An archive of these files, with its end.
fn archive(files: &[&str]) -> Vec<u8> {
    let mut archive = tar::Builder::new(Vec::new());
    for name in files {
        let bytes = small_executable();
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o755);
        archive.append_data(&mut header, name, &bytes[..]).unwrap();
    }
    archive.into_inner().unwrap()
}

#[test]
fn archives_of_several_streams_are_read_to_their_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.deb");
    let tar = archive(&["one", "two", "three"]);
    // Cut between two files, where a single stream would look like a whole archive.
    let cut = 512 + small_executable().len().next_multiple_of(512);
    let zstd = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap()
    };
    let xz = |bytes: &[u8]| {
        let mut child = Command::new("xz");
        child.arg("-c").stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
        let mut child = child.spawn().unwrap();
        child.stdin.take().unwrap().write_all(bytes).unwrap();
        child.wait_with_output().unwrap().stdout
    };
    type Pack = dyn Fn(&[u8]) -> Vec<u8>;
    for (ending, pack) in [(".zst", &zstd as &Pack), (".gz", &gzip), (".xz", &xz)] {
        let name = format!("data.tar{ending}");
        let ends = |data: &[u8]| {
            fs::write(&path, package(&[(&name, data)])).unwrap();
            build(&request(&[&path]), |_, _| {}).map(|(_, work)| (work.files, work.left_out))
        };
        let both = [pack(&tar[..cut]), pack(&tar[cut..])].concat();
        assert_eq!(ends(&both).unwrap(), (3, 0), "{name}");
        // Each part alone is an error, and so is a stream after the archive that is not part of it.
        let error = ends(&pack(&tar[..cut])).unwrap_err().to_string();
        assert!(error.contains("a.deb: its archive of files is cut off behind a file"), "{error}");
        let twice = [pack(&tar), pack(&tar)].concat();
        let error = ends(&twice).unwrap_err().to_string();
        assert!(error.contains("its archive of files is followed by something else"), "{error}");
        assert!(ends(&[pack(&tar), b"something".to_vec()].concat()).is_err(), "{name}");
        assert!(ends(&both[..both.len() - 9]).is_err(), "{name}");
    }
}

#[test]
fn packages_in_parts_are_errors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.deb");
    let tar = archive(&["one", "two"]);
    let error = |bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        refused(&request(&[&path]))
    };
    let several = error(&package(&[("data.tar", &tar), ("data.tar.gz", &tar)]));
    assert!(several.contains("it has several archives of files; valid: one"), "{several}");
    let whole = package(&[("data.tar", &tar), ("_gpgorigin", b"a signature")]);
    fs::write(&path, &whole).unwrap();
    assert_eq!(built(&request(&[&path])).1.files, 2);
    let cut = error(&whole[..whole.len() - 100]);
    assert!(cut.contains("a.deb: the package is cut off"), "{cut}");
    let part = error(b"!<arch>\ndebian-split   0           0     0     100644  4         `\n2.1\n");
    assert!(part.contains("a part of a package; valid: what `dpkg-split --join` makes"), "{part}");
}
