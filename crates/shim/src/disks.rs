//! Disks whose reads into guest RAM the shim cannot detect.
//!
//! **Problem.** A page may move to the buffer while a disk reads into it, and be dropped there
//! because it equals another page. The data from the disk is then lost. The kernel refuses to
//! move pages that I/O has *pinned* (`FOLL_PIN`). But direct I/O of some filesystems, NFS and
//! Ceph among them, holds pages by a plain reference (`FOLL_GET`), which `UFFDIO_MOVE` does not
//! check.
//!
//! **Idea.** A VM is merged only if every file that its QEMU has open for direct I/O is on a
//! filesystem that is known to pin. A file may become open for direct I/O because QEMU opens it,
//! changes its flags, or receives it. Each such file is checked before anything more is merged:
//! QEMU gets it only after the current turn ([`has_opened`]). The shim also checks again every
//! [`LOOK`]. Files that QEMU registers with io_uring can be read by a number that no interposed
//! call shows: from then on nothing is merged. Tracking needs none of this, because the same page
//! moves back from staging.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use rustix::fs::{FileType, OFlags, fcntl_getfl, fstat, fstatfs};
use rustix::io::Errno;

use crate::time::{Nanos, now};
use crate::turns::Turn;

/// How long a check of the open files stays valid.
const LOOK: Duration = Duration::from_millis(5);

/// Filesystems whose direct I/O uses `iomap` or block I/O, which pins (since Linux 6.5), or which
/// have no direct I/O of their own (tmpfs).
const PINNING: [(u64, &str); 6] = [
    (0xEF53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683E, "btrfs"),
    (0xF2F5_2010, "f2fs"),
    (0xCA45_1A4E, "bcachefs"),
    (0x0102_1994, "tmpfs"),
];

/// Number of times that QEMU has got a file that may be open for direct I/O, modulo 2^32.
static OPENED: AtomicU32 = AtomicU32::new(0);
/// QEMU has registered files with io_uring.
static REGISTERED: AtomicBool = AtomicBool::new(false);

/// QEMU has got a file that may be open for direct I/O. To be called under the engine's lock,
/// before QEMU can use the file.
pub(crate) fn has_opened<T>(_: &Turn<'_, T>) {
    OPENED.fetch_add(1, Ordering::AcqRel);
}

/// QEMU is about to register files with io_uring. To be called under the engine's lock.
pub(crate) fn registers_files<T>(turn: &Turn<'_, T>) {
    REGISTERED.store(true, Ordering::Release);
    has_opened(turn);
}

/// The number of times that QEMU has got such a file.
pub(crate) fn opened() -> u32 {
    OPENED.load(Ordering::Acquire)
}

/// The last check of QEMU's open files.
pub(crate) struct DiskCheck {
    looked: Option<(Nanos, u32)>,
    objection: Option<String>,
}

impl DiskCheck {
    pub(crate) const fn new() -> Self {
        Self { looked: None, objection: None }
    }

    /// Why nothing of this VM can be merged now, after QEMU has got `opened` files.
    pub(crate) fn objection(&mut self, opened: u32) -> Option<&str> {
        if REGISTERED.load(Ordering::Acquire) {
            return Some(
                "QEMU registers files with io_uring: what it reads from there is not seen",
            );
        }
        let is_known =
            self.looked.is_some_and(|(at, then)| then == opened && now().since(at) < LOOK);
        if !is_known {
            self.looked = Some((now(), opened));
            // Nothing is merged when the files cannot be checked.
            let unseen = |error| Some(format!("QEMU's open files are not to be seen: {error}"));
            self.objection = first_unpinned().map_or_else(unseen, |found| found.map(words));
        }
        self.objection.as_deref()
    }
}

/// The first file that is open for direct I/O and may not pin.
fn first_unpinned() -> std::io::Result<Option<i32>> {
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let number = entry?.file_name().to_str().and_then(|name| name.parse().ok());
        if let Some(number) = number.filter(|&number| !does_pin(number)) {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

fn does_pin(number: i32) -> bool {
    // SAFETY: a descriptor of this process. If it has been closed or reused since, the result
    // describes the new file.
    let fd = unsafe { BorrowedFd::borrow_raw(number) };
    match fcntl_getfl(fd) {
        Ok(flags) if !flags.contains(OFlags::DIRECT) => return true,
        // Closed since, like the directory itself.
        Err(Errno::BADF) => return true,
        _ => {}
    }
    match fstat(fd).map(|file| FileType::from_raw_mode(file.st_mode)) {
        Ok(FileType::RegularFile) => fstatfs(fd).is_ok_and(|filesystem| {
            let magic = filesystem.f_type.cast_unsigned();
            PINNING.iter().any(|(known, _)| *known == magic)
        }),
        // Block devices pin. For a pipe `O_DIRECT` means packet mode.
        Ok(_) | Err(Errno::BADF) => true,
        Err(_) => false,
    }
}

fn words(number: i32) -> String {
    let file = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap_or_default();
    let known = PINNING.map(|(_, name)| name).join(", ");
    format!(
        "{} is open for direct I/O (cache=none, cache=directsync) on a filesystem that is not known to pin pages ({known} are): \
         use another cache mode for this disk",
        file.display()
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use std::ffi::CString;
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::OpenOptionsExt;
    use std::path::Path;

    use requires::{Requirement, requires};

    use super::*;

    fn open_direct(path: &Path) -> std::io::Result<File> {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .custom_flags(libc::O_DIRECT)
            .open(path)
    }

    /// Mounts an overlay in a mount namespace of this thread's own.
    fn mount_overlay(dir: &Path) -> std::io::Result<()> {
        let inside = |name: &str| dir.join(name).display().to_string();
        for name in ["lower", "upper", "work", "overlay"] {
            std::fs::create_dir(dir.join(name))?;
        }
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            inside("lower"),
            inside("upper"),
            inside("work")
        );
        let [target, options] =
            [inside("overlay"), options].map(|text| CString::new(text).unwrap());
        let (kind, root) = (c"overlay".as_ptr(), c"/".as_ptr());
        // SAFETY: all names end with a zero byte. The mount is visible to this thread only, and
        // ends with it.
        let failed = unsafe {
            libc::unshare(libc::CLONE_NEWNS) != 0
                || libc::mount(kind, root, kind, libc::MS_REC | libc::MS_PRIVATE, std::ptr::null())
                    != 0
                || libc::mount(kind, target.as_ptr(), kind, 0, options.as_ptr().cast()) != 0
        };
        if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
    }

    #[test]
    fn direct_io_is_looked_at_where_it_goes() {
        let dir = Path::new("/dev/shm").join(format!("overbook-disks-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let of_tmpfs = open_direct(&dir.join("disk"));
        if let Ok(file) = &of_tmpfs {
            assert!(does_pin(file.as_raw_fd()));
        }
        assert!(does_pin(File::open("/proc/self/status").unwrap().as_raw_fd()), "not direct");
        let objection = || DiskCheck::new().objection(opened()).map(str::to_owned);
        assert_eq!(objection(), None);
        let look = || {
            mount_overlay(&dir)?;
            let file = open_direct(&dir.join("overlay/disk"))?;
            assert!(!does_pin(file.as_raw_fd()));
            std::io::Result::Ok(objection().unwrap())
        };
        let words = std::thread::scope(|scope| scope.spawn(look).join().unwrap());
        if let Some(words) = requires(Requirement::Overlay, words) {
            assert!(words.contains("overlay/disk is open for direct I/O"), "{words}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(objection(), None);
    }
}
