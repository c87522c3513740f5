//! Backing files that are opened, and those that are not. Images made by `qemu-img` are in
//! `tests/images.rs` of the end-to-end tests.

use super::*;

/// An empty qcow2 image with that backing file.
fn in_front_of(name: &str, format: Option<&str>, size: usize) -> Vec<u8> {
    let mut image = qcow2(&vec![0; size], false);
    let mut put = |at: usize, bytes: &[u8]| image[at..at + bytes.len()].copy_from_slice(bytes);
    put(8, &2048_u64.to_be_bytes());
    put(16, &u32::try_from(name.len()).unwrap().to_be_bytes());
    put(2048, name.as_bytes());
    if let Some(format) = format {
        // After an extension of another type.
        put(112, &[&[1; 4][..], &3_u32.to_be_bytes()].concat());
        put(128, &0xe279_2aca_u32.to_be_bytes());
        put(132, &u32::try_from(format.len()).unwrap().to_be_bytes());
        put(136, format.as_bytes());
    }
    image
}

#[test]
fn backing_files_are_opened_only_on_request_and_only_where_they_may_be() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let (root, image) = image_of(here);
    let (plain, _) = built(&request(&[&root]));
    let raw = fs::read(&image).unwrap();
    for name in ["base", "other"] {
        fs::create_dir(here.join(name)).unwrap();
        fs::write(here.join(name).join("disk.raw"), &raw).unwrap();
        fs::write(here.join(name).join("disk.qcow2"), qcow2(&raw, true)).unwrap();
    }
    fs::create_dir(here.join("base/folder")).unwrap();
    symlink(here.join("other/disk.raw"), here.join("base/link")).unwrap();
    symlink(here.join("base/disk.raw"), here.join("base/within")).unwrap();
    let absolute = here.join("base/disk.raw").display().to_string();
    let top = here.join("top.qcow2");
    let built_on = |name: &str, format: Option<&str>, asked: bool| {
        fs::write(&top, in_front_of(name, format, raw.len())).unwrap();
        let backing_dir = asked.then(|| here.join("base"));
        build(&BuildRequest { backing_dir, ..request(&[&top]) }, |_, _| {})
    };
    for (name, format) in [
        ("base/disk.raw", "raw"),
        ("base/disk.qcow2", "qcow2"),
        ("other/../base/disk.raw", "raw"),
        ("base/within", "raw"),
        (&absolute, "raw"),
    ] {
        let (table, _) = built_on(name, Some(format), true).unwrap();
        assert!(table == plain, "{name}");
        let error = built_on(name, Some(format), false).unwrap_err().to_string();
        let what = format!("its backing file \"{name}\" is opened only on request");
        assert!(error.contains("top.qcow2: ") && error.contains(&what), "{error}");
    }
    for (name, format, what) in [
        ("other/disk.raw", Some("raw"), "cannot be opened: it does not lie in "),
        ("base/../other/disk.raw", Some("raw"), "cannot be opened: it does not lie in "),
        ("base/link", Some("raw"), "cannot be opened: it does not lie in "),
        ("/etc/passwd", Some("raw"), "cannot be opened: it does not lie in "),
        ("base/folder", Some("raw"), "cannot be opened: it is no regular file"),
        ("base/none", Some("raw"), "cannot be opened: No such file"),
        ("nbd://host/disk", Some("raw"), "cannot be opened: No such file"),
        ("base/disk.raw", None, "has a format that the image does not tell"),
        ("base/disk.raw", Some("vmdk"), "has a format that is not supported; valid: qcow2, raw"),
        ("base/disk.raw", Some("qcow2"), "cannot be read: no qcow2 image"),
        // A qcow2 file that is declared as raw is not read as qcow2.
        ("base/disk.qcow2", Some("raw"), "there is no ext4 filesystem"),
    ] {
        let error = built_on(name, format, true).unwrap_err().to_string();
        assert!(error.contains(what), "{name}: {error}");
        assert!(what.contains("ext4") || error.contains(&format!("{name:?}")), "{error}");
    }
}

#[test]
fn images_behind_each_other_end() {
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    let (root, image) = image_of(here);
    let raw = fs::read(&image).unwrap();
    // A smaller disk behind a larger one: the missing part reads as zeros.
    let top = |number: usize| here.join(format!("{number}.qcow2"));
    fs::write(top(0), qcow2(&raw, false)).unwrap();
    for number in 1..=17 {
        let behind = format!("{}.qcow2", number - 1);
        let image = in_front_of(&behind, Some("qcow2"), raw.len() + (number << 20));
        fs::write(top(number), image).unwrap();
    }
    let asked =
        |number| BuildRequest { backing_dir: Some(here.into()), ..request(&[&top(number)]) };
    assert!(built(&asked(16)).0 == built(&request(&[&root])).0);
    let error = refused(&asked(17));
    assert!(error.contains("\"0.qcow2\" is one too many; valid: 16"), "{error}");
    // An image that is its own backing file.
    fs::write(top(0), in_front_of("0.qcow2", Some("qcow2"), raw.len())).unwrap();
    let error = refused(&asked(0));
    assert!(error.contains("is one too many"), "{error}");
}
