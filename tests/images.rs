//! Tables from images of other programs: squashfs of `mksquashfs`, kernels compressed by `lz4`,
//! qcow2 of `qemu-img` with backing files. Each must equal the table of its contents.
//!
//! The programs come from the distribution and are unpacked privately, like the lab's QEMU.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::process::Command;

use lab::packages::Unpacked;
use overbook_tests::{text, unpacked};
use pages::offline::{Sampling, Table};
use tables::offline::{BuildRequest, OfflineError, Work, build};

/// The programs that make the images.
struct ImagePrograms(Unpacked);

impl ImagePrograms {
    fn provide() -> Option<Self> {
        unpacked("image-makers", &["squashfs-tools", "lz4", "qemu-utils"]).map(Self)
    }

    /// Runs a program, which must succeed.
    fn run(&self, directory: &Path, program: &str, arguments: &[&str]) {
        let mut command = Command::new(self.0.program(program));
        command.env("LD_LIBRARY_PATH", self.0.libraries()).args(arguments).current_dir(directory);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{program} {arguments:?}:\n{}", text(&output));
    }
}

fn request(source: &Path) -> BuildRequest {
    let sources = vec![source.to_owned()];
    BuildRequest { sources, all_pages: true, sampling: Sampling::default(), backing_dir: None }
}

fn built(request: &BuildRequest) -> (Table, Work) {
    let (table, work) = build(request, |_, _| {}).unwrap();
    assert_eq!(work.left_out, 0, "{work:?}");
    (table, work)
}

/// A tree of programs, with more files than a directory's header counts, and files that are
/// empty, smaller than a block, of zeros, and with a hole.
fn make_tree(root: &Path) {
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    fs::create_dir_all(root.join("deep/er/still")).unwrap();
    for program in ["/bin/sh", "/bin/bash", "/usr/bin/env", "/usr/bin/dpkg", "/usr/bin/apt-get"] {
        let name = Path::new(program).file_name().unwrap();
        fs::copy(program, root.join("usr/bin").join(name)).unwrap();
    }
    for number in 0..600_u32 {
        let bytes = number.to_le_bytes().repeat(usize::try_from(number).unwrap() * 3);
        fs::write(root.join(format!("deep/er/{number}")), bytes).unwrap();
    }
    fs::write(root.join("deep/er/still/random"), random(3 << 20)).unwrap();
    fs::write(root.join("deep/zeros"), vec![0; 3 << 20]).unwrap();
    let holed = fs::File::create(root.join("deep/holed")).unwrap();
    holed.set_len(9 << 20).unwrap();
    holed.write_all_at(b"in the middle", 5 << 20).unwrap();
    symlink("/deep", root.join("deep/loop")).unwrap();
}

fn random(len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(1).fill(&mut bytes);
    bytes
}

#[test]
fn squashfs_of_every_kind_is_the_tree_in_it() {
    let Some(programs) = ImagePrograms::provide() else { return };
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    make_tree(&directory.join("root"));
    let plain = request(&directory.join("root"));
    let code =
        |request: &BuildRequest| built(&BuildRequest { all_pages: false, ..request.clone() }).0;
    let (all, code_of_all) = (built(&plain).0, code(&plain));
    for options in [
        &["-comp", "gzip"][..],
        &["-comp", "gzip", "-b", "4096"],
        &["-comp", "xz", "-b", "1M"],
        &["-comp", "xz", "-Xbcj", "x86", "-always-use-fragments"],
        &["-comp", "lz4", "-Xhc"],
        &["-comp", "zstd", "-no-fragments"],
        &["-comp", "zstd", "-noI", "-noD", "-noF", "-no-exports"],
    ] {
        let make = ["root", "image", "-noappend", "-quiet", "-no-progress"];
        programs.run(directory, "mksquashfs", &[&make[..], options].concat());
        let image = request(&directory.join("image"));
        let (table, found) = built(&image);
        assert!(table == all, "{options:?}: {found:?}");
        assert!(code(&image) == code_of_all, "{options:?}");

        // Damage gives an error, or files that are left out, and never ends the program.
        let whole = fs::read(&image.sources[0]).unwrap();
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..3 {
            let mut bytes = whole.clone();
            // The tables are at the end.
            let from = whole.len() - whole.len() / 10;
            (0..8).for_each(|_| bytes[random.usize(from..whole.len())] = random.u8(..));
            fs::write(&image.sources[0], &bytes).unwrap();
            let ending = build(&image, |_, _| {});
            assert!(!matches!(ending, Err(OfflineError::Panic)), "{options:?}");
        }
    }
}

#[test]
fn a_kernel_that_lz4_has_compressed_is_the_kernel() {
    let Some(programs) = ImagePrograms::provide() else { return };
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    // An executable, and more than two of LZ4's blocks, with compressible and incompressible data.
    let mut kernel = fs::read("/bin/bash").unwrap();
    kernel.resize(9 << 20, 3);
    kernel.extend(random(9 << 20));
    fs::write(directory.join("vmlinux"), &kernel).unwrap();
    programs.run(directory, "lz4", &["-l", "-9", "-q", "vmlinux", "packed"]);
    let packed = fs::read(directory.join("packed")).unwrap();
    // Linux's wrapping: a setup of one sector, and the kernel's length after it.
    let mut image = vec![0; 2 * 512];
    image[0x1f1] = 1;
    image[0x202..0x208].copy_from_slice(b"HdrS\x0f\x02");
    let len = u32::try_from(packed.len() + 4).unwrap();
    image[0x24c..0x250].copy_from_slice(&len.to_le_bytes());
    image.extend(packed);
    image.extend(u32::try_from(kernel.len()).unwrap().to_le_bytes());
    fs::write(directory.join("vmlinuz"), image).unwrap();
    let [plain, found] = ["vmlinux", "vmlinuz"].map(|name| request(&directory.join(name)));
    assert!(built(&plain).0 == built(&found).0);
}

#[test]
fn an_image_is_what_it_has_and_what_its_backing_files_have() {
    let Some(programs) = ImagePrograms::provide() else { return };
    let directory = tempfile::tempdir().unwrap();
    let here = directory.path();
    make_tree(&here.join("root"));
    let make = ["-q", "-t", "ext4", "-d", "root"];
    programs.run(here, "mke2fs", &[&make[..], &["first", "64M"]].concat());
    fs::copy("/usr/bin/dpkg-deb", here.join("root/usr/bin/more")).unwrap();
    fs::remove_file(here.join("root/usr/bin/bash")).unwrap();
    programs.run(here, "mke2fs", &[&make[..], &["second", "80M"]].concat());
    // The second image is a difference to the first one, which is in another directory.
    fs::create_dir(here.join("base")).unwrap();
    programs.run(here, "qemu-img", &["convert", "-O", "qcow2", "-c", "first", "base/first.qcow2"]);
    programs.run(here, "qemu-img", &["resize", "-q", "base/first.qcow2", "80M"]);
    let on_first = ["-O", "qcow2", "-B", "base/first.qcow2", "-F", "qcow2"];
    programs.run(here, "qemu-img", &[&["convert"], &on_first[..], &["second", "top"]].concat());
    let on_top = ["create", "-q", "-f", "qcow2", "-b", "top", "-F", "qcow2", "above", "96M"];
    programs.run(here, "qemu-img", &on_top);
    let within = |name: &str, dir: &Path| BuildRequest {
        all_pages: false,
        backing_dir: Some(dir.into()),
        ..request(&here.join(name))
    };
    let (plain, _) = built(&within("second", here));
    assert!(fs::metadata(here.join("top")).unwrap().len() < 20 << 20, "it has only what differs");
    for name in ["top", "above"] {
        assert!(built(&within(name, here)).0 == plain, "{name}");
    }
    assert!(built(&within("top", &here.join("base"))).0 == plain);
    let error = build(&within("above", &here.join("base")), |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("its backing file \"top\" cannot be opened"), "{error}");
}
