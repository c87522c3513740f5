//! The files of disks: found, made, and given room.
//!
//! A swap disk holds a guest's memory, so its owner alone may read it, and root alone leads the way
//! to it ([`Way`]). It is opened once; the process that serves it has the descriptor. All of it is
//! allocated, so that a full file system is found out now and not at a guest's write. That happens
//! only if it leaves room to others; a disk that cannot be finished is removed again.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::PathBuf;

use model::Bytes;
use model::spec::DiskSpec;
use rustix::fs::{FallocateFlags, FileType, OFlags, SeekFrom, Stat, fallocate, fstatvfs, seek};
use sys::trusted_path::{Way, WayError};

/// Room that stays free on a file system, in percent of it, and at most: others write there, too.
const RESERVE_PERCENT: u64 = 5;
const RESERVE_MOST: Bytes = Bytes::mib(1024);
/// The rights of all but the owner.
const OTHERS: u32 = 0o077;
/// The unit of `st_blocks`, in bytes.
const BLOCK: u64 = 512;

/// Why a disk's file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The way to it.
    #[error(transparent)]
    Way(#[from] WayError),
    /// It is no file and no disk.
    #[error("{} is neither a file nor a block device", .0.display())]
    Kind(PathBuf),
    /// A file is longer than the disk, or a block device shorter.
    #[error("{} has {has}, and `size` is {size}", .path.display())]
    Size {
        /// Which.
        path: PathBuf,
        /// So large it is.
        has: Bytes,
        /// So large it should be.
        size: Bytes,
    },
    /// There is no room for it.
    #[error(
        "`size` {size} takes {lacks} more of the file system of {}: {free} are free there, and \
         {reserve} of these stay free for others", .directory.display()
    )]
    Room {
        /// Where it lies.
        directory: PathBuf,
        /// Its size.
        size: Bytes,
        /// So much is not allocated yet.
        lacks: Bytes,
        /// So much is free.
        free: Bytes,
        /// So much stays free.
        reserve: Bytes,
    },
    /// The kernel says so.
    #[error("{}: {error}", .path.display())]
    Io {
        /// Which.
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
    /// Sentences for the log.
    pub(super) news: Vec<String>,
}

/// Room that a disk's file takes of its file system.
pub(super) struct Takes {
    /// Which file system.
    pub(super) device: u64,
    /// So much of the disk is not allocated yet.
    pub(super) lacks: Bytes,
    free: Bytes,
    reserve: Bytes,
    directory: PathBuf,
    /// The file was of this size before: a guest may have its swap there, allocated or not.
    pub(super) was_there: bool,
}

/// Opens a disk's file, or makes it, and allocates all of it. A disk that was there before is
/// served also where there is no more room.
pub(super) fn open(spec: &DiskSpec) -> Result<Ready, FileError> {
    let failed = |error: io::Error| FileError::Io { path: spec.file.clone(), error };
    let way = Way::walk(&spec.file)?;
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
                // The file stays as it was before.
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

/// The room that [`open`] would take; nothing changes.
pub(super) fn look(spec: &DiskSpec) -> Result<Takes, FileError> {
    let way = Way::walk(&spec.file)?;
    room(&way, spec)
}

fn room(way: &Way, spec: &DiskSpec) -> Result<Takes, FileError> {
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
        // Nothing is cut off.
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
    /// Whether it leaves others what they need, where other disks of ours take `others` before.
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
