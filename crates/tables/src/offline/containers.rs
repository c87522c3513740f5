//! Files in other files: in Debian packages, kernels' boot images and disks' images. Only the
//! feature `images` has them, with the parsers of foreign formats that they need.
//!
//! | part | what it does |
//! |-|-|
//! | `package.rs` | finds the files of a Debian package |
//! | `kernel.rs` | finds the executable in a kernel's boot image |
//! | `unpack.rs` | decompresses data |
//! | `image.rs` | finds the files of a disk's image |
//! | `ext4.rs`, `squashfs.rs` | read the filesystems in it |
//! | `superblock.rs` | tells which ext4 filesystems can be read |
//! | `backing.rs`, `qcow2.rs` | open disks' images, and read them |
//! | `disk.rs` | finds the partitions of a disk, and their contents |

mod backing;
mod disk;
mod ext4;
mod image;
mod kernel;
mod package;
mod qcow2;
mod squashfs;
mod superblock;
#[cfg(test)]
mod tests;
mod unpack;

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    CutJob, MOST_BYTES, MOST_DEPTH, MOST_XZ_KIB, OfflineError, Queue,
    cut::{self, Contents, Cutter},
    limit::{self, Left},
    printable,
    sources::{self, ContainerKind},
};

/// One thread's part of a container.
pub(super) enum ContainerPart {
    /// All files of a package.
    Package(PathBuf),
    /// The executable in a kernel's boot image.
    Kernel(PathBuf),
    /// Each `parts`-th file of an image.
    Image { path: PathBuf, part: u64, parts: u64, left: Arc<Left> },
}

impl ContainerPart {
    /// Cuts these files.
    pub(super) fn cut(self, cutter: &mut Cutter<'_>) -> Result<(), OfflineError> {
        match self {
            Self::Package(path) => package::cut(cutter, &path),
            Self::Kernel(path) => kernel::cut(cutter, &path),
            Self::Image { path, part, parts, left } => {
                image::cut(cutter, &path, part, parts, &left)
            }
        }
    }
}

/// Puts the parts of this source into the queue.
pub(super) fn put(queue: &mut Queue<'_>, path: &Path, kind: ContainerKind) {
    match kind {
        ContainerKind::Package => queue.put(CutJob::Container(ContainerPart::Package(path.into()))),
        ContainerKind::Kernel => queue.put(CutJob::Container(ContainerPart::Kernel(path.into()))),
        ContainerKind::Image => {
            let (parts, left) = (queue.parts, Arc::new(Left::new(path)));
            for part in 0..parts {
                let (path, left) = (path.into(), Arc::clone(&left));
                queue.put(CutJob::Container(ContainerPart::Image { path, part, parts, left }));
            }
        }
    }
}

/// Contents that can only be read, not seeked.
struct Stream<R>(R);

impl<R: Read> Read for Stream<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl<R: Read> Contents for Stream<R> {
    fn skip(&mut self, bytes: u64) -> io::Result<()> {
        io::copy(&mut (&mut self.0).take(bytes), &mut io::sink()).map(drop)
    }
}
