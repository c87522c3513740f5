//! The files of disks: finds, creates and allocates them.
//!
//! A swap disk holds a guest's memory, so only its owner may read it, and only root may control its
//! path ([`TrustedPath`]). It is opened once; the process that serves it gets the descriptor. It is
//! fully allocated, so that a full file system is detected now and not at a guest's write. It is
//! only allocated if enough space remains for others; a disk that cannot be completed is removed
//! again.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use model::Bytes;
use model::spec::DiskSpec;
use rustix::fs::{FallocateFlags, FileType, OFlags, SeekFrom, Stat, fallocate, fstatvfs, seek};
use sys::trusted_path::{TrustedPath, TrustedPathError};

/// Space that stays free on a file system, in percent of it, and its maximum: others write there,
/// too.
const RESERVE_PERCENT: u64 = 5;
const RESERVE_MOST: Bytes = Bytes::mib(1024);
/// Permissions of all users except the owner.
const OTHERS: u32 = 0o077;
/// The unit of `st_blocks`, in bytes.
const BLOCK: u64 = 512;

/// Why a disk's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Its path cannot be used.
    #[error(transparent)]
    Way(#[from] TrustedPathError),
    /// It is neither a file nor a block device.
    #[error("{} is neither a file nor a block device", .0.display())]
    Kind(PathBuf),
    /// A file is longer than the disk, or a block device is shorter.
    #[error("{} has {has}, and `size` is {size}", .path.display())]
    Size {
        /// The path.
        path: PathBuf,
        /// Its present size.
        has: Bytes,
        /// The configured size.
        size: Bytes,
    },
    /// The file system lacks the space for it.
    #[error(
        "`size` {size} takes {lacks} more of the file system of {}: {free} are free there, and \
         {reserve} of these stay free for others", .directory.display()
    )]
    Room {
        /// Its directory.
        directory: PathBuf,
        /// Its size.
        size: Bytes,
        /// Size of the part that is not allocated yet.
        lacks: Bytes,
        /// Free space.
        free: Bytes,
        /// Space that stays free for others.
        reserve: Bytes,
    },
    /// The kernel reports an error.
    #[error("{}: {error}", .path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The kernel's error.
        error: io::Error,
    },
}

/// A disk's file, ready to be served.
pub(super) struct Ready {
    pub(super) handle: fs::File,
    /// User and group.
    pub(super) owner: (u32, u32),
    /// Messages for the log.
    pub(super) news: Vec<String>,
}

/// Space that a disk's file takes of its file system.
pub(super) struct Takes {
    /// The device of the file system.
    pub(super) device: u64,
    /// Size of the part of the disk that is not allocated yet.
    pub(super) lacks: Bytes,
    free: Bytes,
    reserve: Bytes,
    directory: PathBuf,
    /// Whether the file had the configured size before: a guest may have its swap there,
    /// allocated or not.
    pub(super) was_there: bool,
}

/// Opens a disk's file, or creates it, and allocates all of it. A disk that existed before is
/// served even if there is not enough space.
pub(super) fn open(spec: &DiskSpec) -> Result<Ready, FileError> {
    let failed = |error: io::Error| FileError::Io { path: spec.file.clone(), error };
    let way = TrustedPath::walk(&spec.file)?;
    let takes = room(&way, spec)?;
    let has_room = takes.leaves_enough(spec, Bytes::ZERO);
    let mut news = Vec::new();
    let has_room = match has_room {
        Err(why) if takes.was_there => {
            news.push(format!("writes may fail: {why}"));
            false
        }
        checked => checked.map(|()| true)?,
    };
    let handle = match way.found() {
        Some(_) => way.open(OFlags::RDWR).map_err(failed)?,
        None => way.create().map_err(failed)?,
    };
    let had = handle.metadata().map_err(failed)?;
    if had.is_file() && has_room {
        match allocate(&handle, spec.size) {
            Err(error) if takes.was_there => news.push(format!("writes may fail: {error}")),
            Err(error) => {
                // The file is left as it was before.
                let undone = match way.found() {
                    Some(_) => handle.set_len(had.len()),
                    None => way.remove(),
                };
                undone.map_err(failed)?;
                return Err(failed(error));
            }
            Ok(()) => {}
        }
    }
    let mode = had.mode() & 0o7777;
    if had.is_file() && mode & OTHERS != 0 {
        let only_owner = mode & !OTHERS;
        handle.set_permissions(fs::Permissions::from_mode(only_owner)).map_err(failed)?;
        news.push(format!(
            "{} had mode {mode:04o}, so that others could read the guest's memory; it is \
             {only_owner:04o} now",
            spec.file.display()
        ));
    }
    Ok(Ready { handle, owner: (had.uid(), had.gid()), news })
}

/// The space that [`open`] would take; nothing changes.
pub(super) fn look(spec: &DiskSpec) -> Result<Takes, FileError> {
    let way = TrustedPath::walk(&spec.file)?;
    room(&way, spec)
}

fn room(way: &TrustedPath, spec: &DiskSpec) -> Result<Takes, FileError> {
    let failed = |error: io::Error| FileError::Io { path: spec.file.clone(), error };
    let directory = way.directory_handle();
    let takes = |device, lacks: u64, was_there| {
        let system = fstatvfs(directory.as_fd()).map_err(|error| failed(error.into()))?;
        let bytes = |blocks: u64| Bytes(blocks.saturating_mul(system.f_frsize));
        let reserve = bytes(system.f_blocks).percent(RESERVE_PERCENT).min(RESERVE_MOST);
        let (free, directory) = (bytes(system.f_bavail), way.directory().to_owned());
        Ok(Takes { device, lacks: Bytes(lacks), free, reserve, directory, was_there })
    };
    let misfit = |has| {
        let (path, has, size) = (spec.file.clone(), Bytes(has), spec.size);
        Err(FileError::Size { path, has, size })
    };
    let Some(found) = way.found() else {
        let at = rustix::fs::fstat(directory.as_fd()).map_err(|error| failed(error.into()))?;
        return takes(at.st_dev, spec.size.0, false);
    };
    match FileType::from_raw_mode(found.st_mode) {
        // A file is never truncated.
        FileType::RegularFile if size_of(found) > spec.size.0 => misfit(size_of(found)),
        FileType::RegularFile => {
            let lacks = spec.size.0.saturating_sub(allocated(found));
            takes(found.st_dev, lacks, size_of(found) == spec.size.0)
        }
        FileType::BlockDevice => {
            let device = way.open(OFlags::RDONLY).map_err(failed)?;
            let has = seek(&device, SeekFrom::End(0)).map_err(|error| failed(error.into()))?;
            if has < spec.size.0 { misfit(has) } else { takes(found.st_rdev, 0, true) }
        }
        _ => Err(FileError::Kind(spec.file.clone())),
    }
}

fn size_of(found: &Stat) -> u64 {
    u64::try_from(found.st_size).unwrap_or(0)
}

fn allocated(found: &Stat) -> u64 {
    u64::try_from(found.st_blocks).unwrap_or(0).saturating_mul(BLOCK)
}

fn allocate(handle: &fs::File, size: Bytes) -> io::Result<()> {
    handle.set_len(size.0)?;
    Ok(fallocate(handle, FallocateFlags::empty(), 0, size.0)?)
}

impl Takes {
    /// Whether it leaves enough space to others, if other disks of ours take `others` first.
    pub(super) fn leaves_enough(&self, spec: &DiskSpec, others: Bytes) -> Result<(), FileError> {
        let Self { lacks, free, reserve, directory, .. } = self;
        let free = free.minus(others);
        if lacks.is_zero() || lacks.plus(*reserve) <= free {
            return Ok(());
        }
        Err(FileError::Room {
            directory: directory.clone(),
            size: spec.size,
            lacks: *lacks,
            free,
            reserve: *reserve,
        })
    }
}
