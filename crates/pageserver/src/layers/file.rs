//! `file`: content in a file or on a disk of this host.
//!
//! Content in the page cache is read at once; threads that may wait for the disk do everything
//! else. A write is done when the kernel has it: the death of a process loses no write. A guest
//! that swaps fast must not fill this host's memory with dirty pages, so at most [`MOST_DIRTY`]
//! bytes may be dirty; beyond that, writes wait for the disk. Pages that have been written back
//! leave the page cache: a host that is short of memory has none for copies of swap.
//!
//! A thread that writes cannot be stopped. So a write has ended when its future has, and not when
//! that is dropped ([`order`](crate::order)).
//!
//! The kernel reports a failed writeback once, and may drop the dirty pages. From then on the
//! file may hold old content, so all reads and writes fail.

use std::fs::File as Handle;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use rustix::fs::{Advice, FallocateFlags, SeekFrom};
use rustix::io::ReadWriteFlags;
use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

use crate::layer::{Answer, Layer, Read, Zeros};
use crate::nbd::Errno;
use crate::nbd::reply::Extent;

/// Dirty bytes after which the disk is synced.
const MOST_DIRTY: u64 = 64 << 20;
/// Maximum number of extents in one answer.
const MOST_EXTENTS: usize = 1024;

/// Content in a file.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
    size: u64,
    open: Arc<Open>,
    /// A layer above caches reads, so read pages need not stay in the page cache.
    is_cached_above: bool,
    /// Held by the task that syncs the disk.
    catching_up: Mutex<()>,
}

#[derive(Debug)]
struct Open {
    handle: Handle,
    /// Bytes written since the last sync.
    dirty: AtomicU64,
    /// A sync has failed.
    failed: AtomicBool,
}

impl File {
    /// Opens a layer on a file or block device of `size` bytes, whose `handle` can be read and
    /// written; `path` is its name in messages.
    #[must_use]
    pub fn new(path: &Path, handle: Handle, size: u64) -> Self {
        let open = Open { handle, dirty: AtomicU64::new(0), failed: AtomicBool::new(false) };
        Self {
            path: path.to_owned(),
            size,
            open: Arc::new(open),
            is_cached_above: false,
            catching_up: Mutex::new(()),
        }
    }

    /// Drops read pages from the page cache at once, and switches readahead off. A layer above
    /// caches pages that are worth it, and the guest does its own readahead.
    #[must_use]
    pub fn cached_above(self) -> Self {
        // `fadvise` is only advice; if the kernel refuses it, memory is all that it costs.
        let _ = rustix::fs::fadvise(&self.open.handle, 0, None, Advice::Random);
        Self { is_cached_above: true, ..self }
    }

    /// Runs `what`, which may wait for the disk, on a blocking thread.
    async fn slowly<T: Send + 'static>(
        &self,
        what: impl FnOnce(&Open) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Errno> {
        let open = self.open.clone();
        let done = spawn_blocking(move || {
            open.usable()?;
            what(&open)
        });
        done.await.map_err(|_| Errno::Io)?.map_err(|error| errno(&error))
    }

    /// Changes the content, once few enough bytes are dirty.
    fn change(&self, what: impl FnOnce(&Open) -> io::Result<()> + Send + 'static) -> Answer<'_> {
        Answer::Later(Box::pin(async move {
            self.catch_up(MOST_DIRTY).await?;
            self.slowly(what).await
        }))
    }

    /// Syncs the disk if more than `most` bytes are dirty.
    async fn catch_up(&self, most: u64) -> Result<(), Errno> {
        if self.open.dirty.load(Ordering::Relaxed) <= most {
            return Ok(());
        }
        let _one_at_a_time = self.catching_up.lock().await;
        if self.open.dirty.load(Ordering::Relaxed) <= most {
            return Ok(());
        }
        self.slowly(Open::sync).await
    }
}

impl Open {
    fn usable(&self) -> io::Result<()> {
        if self.failed.load(Ordering::Relaxed) {
            return Err(io::Error::other("the disk has failed before"));
        }
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let dirty = self.dirty.load(Ordering::Relaxed);
        self.handle.sync_data().inspect_err(|_| self.failed.store(true, Ordering::Relaxed))?;
        self.dirty.fetch_sub(dirty, Ordering::Relaxed);
        // `fadvise` is only advice; if the kernel refuses it, memory is all that it costs.
        let _ = rustix::fs::fadvise(&self.handle, 0, None, Advice::DontNeed);
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.dirty.fetch_add(data.len() as u64, Ordering::Relaxed);
        self.handle.write_all_at(data, offset)
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> io::Result<()> {
        let flags = match zeros {
            Zeros::Trim => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Zeros::Write => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        match rustix::fs::fallocate(&self.handle, flags, offset, length) {
            Err(rustix::io::Errno::OPNOTSUPP) if zeros == Zeros::Trim => Ok(()),
            Err(rustix::io::Errno::OPNOTSUPP) => self.write_zeros(offset, length),
            done => Ok(done?),
        }
    }

    fn write_zeros(&self, offset: u64, length: u64) -> io::Result<()> {
        let zeros = [0; 64 << 10];
        let mut at = 0;
        while at < length {
            let n = (length - at).min(zeros.len() as u64);
            self.write(offset + at, &zeros[..usize::try_from(n).unwrap_or(zeros.len())])?;
            at += n;
        }
        Ok(())
    }
}

fn errno(error: &io::Error) -> Errno {
    match error.raw_os_error().map(rustix::io::Errno::from_raw_os_error) {
        Some(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) => Errno::NoSpace,
        Some(rustix::io::Errno::NOMEM) => Errno::NoMemory,
        _ => Errno::Io,
    }
}

impl Layer for File {
    fn size(&self) -> u64 {
        self.size
    }

    fn describe(&self) -> String {
        format!("file {}", self.path.display())
    }

    fn read<'a>(&'a self, offset: u64, into: &mut [u8]) -> Read<'a> {
        if self.open.usable().is_err() {
            return Read::Now(Err(Errno::Io));
        }
        let length = into.len();
        let handle = self.open.handle.as_fd();
        let slice = &mut [io::IoSliceMut::new(into)];
        if rustix::io::preadv2(handle, slice, offset, ReadWriteFlags::NOWAIT) == Ok(length) {
            return Read::Now(Ok(()));
        }
        let forget = self.is_cached_above;
        Read::Later(Box::pin(async move {
            self.slowly(move |open| {
                let mut data = vec![0; length];
                open.handle.read_exact_at(&mut data, offset)?;
                if let Some(length) = NonZeroU64::new(length as u64).filter(|_| forget) {
                    let _ =
                        rustix::fs::fadvise(&open.handle, offset, Some(length), Advice::DontNeed);
                }
                Ok(data)
            })
            .await
        }))
    }

    fn write(&self, offset: u64, data: Bytes) -> Answer<'_> {
        self.change(move |open| open.write(offset, &data))
    }

    fn zero(&self, offset: u64, length: u64, zeros: Zeros) -> Answer<'_> {
        self.change(move |open| open.zero(offset, length, zeros))
    }

    fn flush(&self) -> Answer<'_> {
        Answer::Later(Box::pin(async {
            let _one_at_a_time = self.catching_up.lock().await;
            self.slowly(Open::sync).await
        }))
    }

    fn extents(&self, offset: u64, length: u32) -> Vec<Extent> {
        let mut extents = Vec::new();
        let end = offset + u64::from(length);
        let mut at = offset;
        while at < end && extents.len() < MOST_EXTENTS {
            let data = rustix::fs::seek(&self.open.handle, SeekFrom::Data(at));
            let (is_hole, until) = match data {
                Ok(data) if data > at => (true, data),
                Ok(_) => {
                    let hole = rustix::fs::seek(&self.open.handle, SeekFrom::Hole(at));
                    (false, hole.unwrap_or(end))
                }
                Err(rustix::io::Errno::NXIO) => (true, end),
                Err(_) => (false, end),
            };
            let until = until.clamp(at + 1, end);
            extents.push(Extent { length: u32::try_from(until - at).unwrap_or(length), is_hole });
            at = until;
        }
        extents
    }
}
