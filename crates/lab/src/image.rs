//! The boot files of a guest: the distribution's cloud kernel and an initramfs of our own.
//!
//! **Problem.** A guest must be a real Linux with a real balloon driver and real swap, be up in two
//! seconds under emulation, and waste none of its 128 MB.
//!
//! **Idea.** The kernel package is unpacked, not installed. The initramfs holds seven virtio
//! modules, one for guests with a root disk, busybox, the workload program and [`INIT`]; nothing
//! else. It is not compressed: copying is cheaper than decompressing in an emulated CPU. It is
//! cached under a hash of its content.
//!
//! **Cost.** About 2 MB of busybox and the workload program stay in the guest's memory (rootfs).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use sys::process::Spawn;

use crate::cache::{Cache, CacheError};
use crate::command::{self, CommandError};
use crate::cpio::Archive;
use crate::packages::{Apt, PackageError};

const INIT: &str = include_str!("init.sh");
pub(crate) const GUEST_PROGRAM: &str = "overbook-guest";
/// The cache's entry with the kernel and busybox.
pub(crate) const GUEST_KERNEL: &str = "guest-kernel";

/// The modules in the order of their dependencies.
pub(crate) const MODULES: [&str; 8] = [
    "drivers/virtio/virtio_ring",
    "drivers/virtio/virtio",
    "drivers/virtio/virtio_pci_modern_dev",
    "drivers/virtio/virtio_pci_legacy_dev",
    "drivers/virtio/virtio_pci",
    "drivers/block/virtio_blk",
    "drivers/virtio/virtio_balloon",
    "fs/overlayfs/overlay",
];

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The workload program is not built.
    #[error("no {GUEST_PROGRAM} found ({looked}): build it with `make build`")]
    NoGuestProgram {
        /// The paths that were searched.
        looked: String,
    },
    /// The unpacked kernel package lacks something.
    #[error(
        "the kernel package unpacked in {root} has no {what}; remove that directory to get it anew"
    )]
    Incomplete {
        /// The cache entry.
        root: PathBuf,
        /// The missing part.
        what: String,
    },
    /// A file operation failed.
    #[error("{path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The kernel could not be downloaded.
    #[error("getting the guest's kernel failed: {0}")]
    Package(#[from] PackageError),
    /// A helper program failed.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The cache failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A bootable pair of files.
#[derive(Debug, Clone)]
pub struct Image {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
}

impl Image {
    /// The kernel from the cache (or the distribution), and an initramfs built from the files at
    /// hand.
    pub fn provide(cache: &Cache) -> Result<Self, ImageError> {
        let guest = find_guest_program()?;
        let entry = GUEST_KERNEL;
        if cache.find(entry).is_none() {
            eprintln!("lab: unpacking a guest kernel into {}", cache.root().display());
        }
        let root = cache.directory(entry, |dir| -> Result<(), ImageError> {
            let apt = Apt::open(cache)?;
            let kernel = apt.dependency("linux-image-cloud-amd64", "linux-image-")?;
            Ok(apt.unpack(&[&kernel, "busybox-static"], dir)?)
        })?;
        let kernel = first_in(&root.join("boot"), "vmlinuz-", &root)?;
        let archive = build_initramfs(&root, &guest)?;
        let mut hasher = DefaultHasher::new();
        archive.hash(&mut hasher);
        let name = format!("initramfs-{:016x}.cpio", hasher.finish());
        Ok(Self { kernel, initramfs: cache.file(&name, &archive, false)? })
    }
}

fn build_initramfs(root: &Path, guest: &Path) -> Result<Vec<u8>, ImageError> {
    let busybox = root.join("bin/busybox");
    let release = first_in(&root.join("lib/modules"), "", root)?;
    let mut archive = Archive::default();
    archive.directory("bin");
    archive.file("bin/busybox", &read(&busybox)?);
    archive.directory("dev");
    archive.device("dev/console", 5, 1);
    archive.directory("modules");
    for (index, module) in MODULES.iter().enumerate() {
        let content = read_module(&release.join("kernel").join(module), &busybox)?;
        let name = module.rsplit('/').next().unwrap_or(module);
        archive.file(&format!("modules/{index}-{name}"), &content);
    }
    archive.file("init", INIT.as_bytes());
    archive.file(GUEST_PROGRAM, &read(guest)?);
    Ok(archive.finish())
}

/// Reads a kernel module, which the distribution may have compressed.
pub(crate) fn read_module(path: &Path, busybox: &Path) -> Result<Vec<u8>, ImageError> {
    let plain = path.with_extension("ko");
    if plain.exists() {
        return read(&plain);
    }
    let compressed = path.with_extension("ko.xz");
    Ok(command::run("busybox", Spawn::new(busybox).arg("xzcat").arg(compressed))?)
}

fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    std::fs::read(path).map_err(|source| ImageError::Io { path: path.to_owned(), source })
}

/// The first entry of `dir` whose name starts with `prefix`.
pub(crate) fn first_in(dir: &Path, prefix: &str, root: &Path) -> Result<PathBuf, ImageError> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut paths = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path());
    paths.next().ok_or_else(|| ImageError::Incomplete {
        root: root.to_owned(),
        what: dir.join(format!("{prefix}*")).display().to_string(),
    })
}

/// The workload program: among our own programs, or installed.
fn find_guest_program() -> Result<PathBuf, ImageError> {
    let beside = command::own_program(GUEST_PROGRAM).ok();
    let installed = PathBuf::from("/usr/lib/overbook").join(GUEST_PROGRAM);
    let candidates: Vec<PathBuf> = beside.into_iter().chain([installed]).collect();
    candidates.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let looked: Vec<String> = candidates.iter().map(|p| p.display().to_string()).collect();
        ImageError::NoGuestProgram { looked: looked.join(", ") }
    })
}
