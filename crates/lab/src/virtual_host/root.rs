//! The root file system of a virtual host: an initramfs in which the lab and Overbook run as they
//! do on this machine.
//!
//! **Idea.** Programs come with the libraries that this machine's loader gives them (`ldd`). The
//! lab's cache lies in root's home directory. It holds a QEMU, a guest's kernel and a busybox:
//! all that the lab asks its cache for. The accelerator of its guests is probed inside the host.
//!
//! **Leaves out.** apt, and everything that only apt could fetch: a Debian for guests, etcd.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use sys::process::Spawn;

use super::HostError;
use super::kernel::Kernel;
use crate::cache::Cache;
use crate::command::{self, CommandError};
use crate::cpio::Archive;
use crate::image::{self, GUEST_KERNEL, GUEST_PROGRAM};
use crate::inside::{self, SHIM, SHIM_WITH_HOT_SET, TRACER};
use crate::lab::Provisions;
use crate::packages::Unpacked;

const INIT: &str = include_str!("init.sh");
/// The directory in which [`Cache::open`] looks inside the host.
const CACHE: &str = "root/.cache/overbook";
/// Overbook's own programs, without which a virtual host is of no use.
const PROGRAMS: [&str; 6] = [
    "overbook",
    "overbook-lab",
    GUEST_PROGRAM,
    "overbook-stand-in",
    "overbook-shim-stand-in",
    SHIM,
];
/// Programs and libraries that are not always built.
const FURTHER: [&str; 2] = [TRACER, SHIM_WITH_HOT_SET];
/// Programs of the system where busybox lacks a feature: its `swapon` sets no priority.
const SYSTEM_PROGRAMS: [&str; 1] = ["swapon"];
const SYSTEM_DIRS: [&str; 4] = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
/// One directory for all, where they find each other.
const PROGRAMS_DIR: &str = "usr/local/bin";
/// A directory that the loader inside searches by default.
const LIBRARIES_DIR: &str = "lib/x86_64-linux-gnu";
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
/// Guests on x86 need no larger file.
const FIRMWARE_LIMIT: u64 = 512 << 10;

/// The parts of the initramfs.
#[derive(Debug)]
pub(super) struct FileContent<'a> {
    /// The lab's cache on this machine.
    pub(super) cache: &'a Cache,
    /// QEMU and a guest's kernel.
    pub(super) provisions: &'a Provisions,
    /// The host's kernel.
    pub(super) kernel: &'a Kernel,
    /// The caller's files.
    pub(super) files: &'a [PathBuf],
    /// The script.
    pub(super) script: &'a [u8],
    /// The mark before the exit code of the script.
    pub(super) mark: &'a str,
}

impl FileContent<'_> {
    /// The initramfs.
    pub(super) fn to_archive(&self) -> Result<Vec<u8>, HostError> {
        let mut tree = RootTree::default();
        let guest_kernel = self.cache.root().join(GUEST_KERNEL);
        tree.add("bin/busybox", &guest_kernel.join("bin/busybox"));
        for module in &self.kernel.modules {
            tree.add(&format!("modules/{}", file_name(module)), module);
        }
        tree.add_guest_kernel(&guest_kernel, &self.provisions.image.kernel)?;
        tree.add_qemu(self.provisions)?;
        for name in PROGRAMS {
            let program =
                inside::built(name).map_err(|error| HostError::NotBuilt(error.to_string()))?;
            tree.add_program(PROGRAMS_DIR, &program, None)?;
        }
        for program in FURTHER.iter().filter_map(|name| inside::built(name).ok()) {
            tree.add_program(PROGRAMS_DIR, &program, None)?;
        }
        for name in SYSTEM_PROGRAMS {
            let mut places = SYSTEM_DIRS.iter().map(|dir| Path::new(dir).join(name));
            let program = places.find(|path| path.is_file());
            let program = program.ok_or_else(|| HostError::NoProgram(name.to_owned()))?;
            tree.add_program("usr/bin", &program, None)?;
        }
        for file in self.files {
            tree.add_program("files", file, None)?;
        }
        let mut archive = Archive::default();
        for (name, path) in &tree.files {
            let content = std::fs::read(path)
                .map_err(|source| HostError::Io { path: path.clone(), source })?;
            archive.file_with_parents(name, &content);
        }
        archive.directory("dev");
        archive.device("dev/console", 5, 1);
        archive.file("init", INIT.as_bytes());
        archive.file("script", self.script);
        archive.file("mark", self.mark.as_bytes());
        Ok(archive.finish())
    }
}

/// The files inside, with their paths on this machine.
#[derive(Debug, Default)]
struct RootTree {
    files: BTreeMap<String, PathBuf>,
}

impl RootTree {
    fn add(&mut self, name: &str, path: &Path) {
        self.files.insert(name.to_owned(), path.to_owned());
    }

    /// Adds the part of the entry that [`image::Image::provide`] reads.
    fn add_guest_kernel(&mut self, root: &Path, kernel: &Path) -> Result<(), HostError> {
        let entry = format!("{CACHE}/{GUEST_KERNEL}");
        self.add(&format!("{entry}/boot/{}", file_name(kernel)), kernel);
        self.add(&format!("{entry}/bin/busybox"), &root.join("bin/busybox"));
        let release = image::first_in(&root.join("lib/modules"), "", root)?;
        for module in image::MODULES {
            let names = ["ko", "ko.xz"].map(|end| format!("kernel/{module}.{end}"));
            let found = names.iter().find(|name| release.join(name).is_file());
            let name = found.ok_or_else(|| HostError::Incomplete {
                name: root.display().to_string(),
                what: names[0].clone(),
            })?;
            let there = format!("{entry}/lib/modules/{}/{name}", file_name(&release));
            self.add(&there, &release.join(name));
        }
        Ok(())
    }

    /// Adds QEMU, its libraries and its firmware where [`crate::qemu::Qemu::provide`] finds them:
    /// unpacked as on this machine, or as the system's.
    fn add_qemu(&mut self, provisions: &Provisions) -> Result<(), HostError> {
        let qemu = &provisions.qemu;
        let (root, prefix) = match qemu.unpacked() {
            Some(root) => (root.to_owned(), format!("{CACHE}/{}/", file_name(root))),
            None => (PathBuf::from("/"), String::new()),
        };
        self.add_program(&format!("{prefix}usr/bin"), &qemu.program, qemu.unpacked())?;
        for dir in FIRMWARE {
            let path = root.join(dir);
            for entry in std::fs::read_dir(&path).into_iter().flatten().flatten() {
                let file = entry.path();
                let is_firmware = file.extension().is_some_and(|end| end == "bin" || end == "rom");
                let is_small = file.metadata().is_ok_and(|data| data.len() <= FIRMWARE_LIMIT);
                if is_firmware && is_small {
                    self.add(&format!("{prefix}{dir}/{}", file_name(&file)), &file);
                }
            }
        }
        Ok(())
    }

    /// Adds a file in the directory `dir`, and the libraries that it needs. `unpacked` is the
    /// root below which some of these lie.
    fn add_program(
        &mut self,
        dir: &str,
        program: &Path,
        unpacked: Option<&Path>,
    ) -> Result<(), HostError> {
        self.add(&format!("{dir}/{}", file_name(program)), program);
        for library in libraries(program, unpacked)? {
            let below = unpacked.and_then(|root| Some((root, library.strip_prefix(root).ok()?)));
            let name = match below {
                Some((root, below)) => format!("{CACHE}/{}/{}", file_name(root), below.display()),
                // Programs name the loader by its path.
                None if file_name(&library).starts_with("ld-linux") => {
                    library.display().to_string().trim_start_matches('/').to_owned()
                }
                None => format!("{LIBRARIES_DIR}/{}", file_name(&library)),
            };
            self.add(&name, &library);
        }
        Ok(())
    }
}

/// The libraries that the loader gives this file; none when it is not dynamically linked.
fn libraries(program: &Path, unpacked: Option<&Path>) -> Result<BTreeSet<PathBuf>, HostError> {
    let mut ldd = Spawn::new("ldd").env("LC_ALL", "C").arg(program);
    if let Some(root) = unpacked {
        ldd = ldd.env("LD_LIBRARY_PATH", Unpacked::at(root).libraries());
    }
    let listed = match command::run("ldd", ldd) {
        Ok(listed) => String::from_utf8_lossy(&listed).into_owned(),
        Err(CommandError::Failed { output, .. }) if output.contains("not a dynamic") => {
            return Ok(BTreeSet::new());
        }
        Err(error) => return Err(error.into()),
    };
    parse_libraries(&listed)
        .map_err(|library| HostError::NoLibrary { program: program.to_owned(), library })
}

/// The paths in the output of `ldd`, or the name of a library that is missing.
fn parse_libraries(listed: &str) -> Result<BTreeSet<PathBuf>, String> {
    let mut paths = BTreeSet::new();
    for line in listed.lines().map(str::trim) {
        if let Some((name, _)) = line.split_once(" => not found") {
            return Err(name.to_owned());
        }
        let file = line.split_once(" => ").map_or(line, |(_, file)| file);
        let file = file.split_once(" (").map_or(file, |(file, _)| file);
        if file.starts_with('/') {
            paths.insert(PathBuf::from(file));
        }
    }
    Ok(paths)
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_those_with_a_path_and_the_loader() {
        let listed = "\tlinux-vdso.so.1 (0x0000)\n\tlibc.so.6 => /lib/libc.so.6 (0x0001)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x0002)\n\tstatically linked\n";
        let paths: Vec<PathBuf> = parse_libraries(listed).unwrap().into_iter().collect();
        assert_eq!(paths, ["/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"].map(PathBuf::from));
    }

    #[test]
    fn a_library_that_is_not_here_is_named() {
        assert_eq!(parse_libraries("\tlibx.so.1 => not found\n").unwrap_err(), "libx.so.1");
    }
}
