//! A data disk: a file, or a whole block device without a file system.
//!
//! A lab guest's data disk is raw, so workloads that need several files use regions of one disk.
//! Input and output go through the guest's page cache. **The content of a block device is
//! overwritten.**

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Take, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use crate::error::WorkError;
use crate::memory::MB;
use crate::rng::Rng;
use crate::run::RunState;

/// An open data file or disk.
#[derive(Debug)]
pub(crate) struct BlockDevice {
    pub(crate) file: File,
    pub(crate) path: PathBuf,
}

impl BlockDevice {
    /// Opens `path` for writing, as `regions` regions of `mb` MB each. A file is created or
    /// emptied.
    pub(crate) fn for_writing(path: &Path, regions: usize, mb: usize) -> Result<Self, WorkError> {
        let failed = WorkError::file("open", path);
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(true);
        let disk = Self { file: options.open(path).map_err(failed)?, path: path.to_owned() };
        if disk.is_block_device()? {
            disk.check_size(mb, mb_bytes(regions * mb))?;
        }
        Ok(disk)
    }

    /// Opens `path` for reading its first `mb` MB. A file that does not exist is created and
    /// filled.
    pub(crate) fn for_reading(
        path: &Path,
        mb: usize,
        seed: u64,
        shared: &RunState,
    ) -> Result<Self, WorkError> {
        match File::open(path) {
            Ok(file) => {
                let disk = Self { file, path: path.to_owned() };
                disk.check_size(mb, mb_bytes(mb))?;
                Ok(disk)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let disk = Self::for_writing(path, 1, mb)?;
                disk.fill(mb, seed, shared).map_err(WorkError::file("fill", path))?;
                Ok(disk)
            }
            Err(error) => Err(WorkError::file("open", path)(error)),
        }
    }

    /// A reader and writer that starts at byte `at`.
    pub(crate) fn cursor(&self, at: u64) -> Cursor<'_> {
        Cursor { file: &self.file, at }
    }

    /// A failure of `action` on this disk.
    pub(crate) fn failed(&self, action: &'static str) -> impl FnOnce(io::Error) -> WorkError {
        WorkError::file(action, &self.path)
    }

    fn is_block_device(&self) -> Result<bool, WorkError> {
        let metadata = self.file.metadata().map_err(self.failed("examine"))?;
        Ok(metadata.file_type().is_block_device())
    }

    /// Seeking to the end gives the size of files and block devices alike.
    fn check_size(&self, mb: usize, need_bytes: u64) -> Result<(), WorkError> {
        let have_bytes = (&self.file).seek(SeekFrom::End(0)).map_err(self.failed("examine"))?;
        if have_bytes >= need_bytes {
            return Ok(());
        }
        Err(WorkError::TooShort { path: self.path.clone(), have_bytes, need_bytes, mb })
    }

    fn fill(&self, mb: usize, seed: u64, shared: &RunState) -> io::Result<()> {
        let mut out = BufWriter::with_capacity(64 * 1024, self.cursor(0));
        let mut rng = Rng::new(seed);
        for _ in 0..mb * MB / 8 {
            if shared.stopping() {
                break;
            }
            out.write_all(&rng.next_u64().to_le_bytes())?;
        }
        out.flush()
    }
}

/// `mb` MB in bytes.
pub(crate) fn mb_bytes(mb: usize) -> u64 {
    (mb * MB) as u64
}

/// Sequential access from a given place on; several cursors may be in use at once.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    file: &'a File,
    at: u64,
}

impl<'a> Cursor<'a> {
    /// A reader of the next `bytes` bytes.
    pub(crate) fn up_to(self, bytes: u64) -> Take<Cursor<'a>> {
        self.take(bytes)
    }
}

impl Read for Cursor<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.file.read_at(buffer, self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Write for Cursor<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.file.write_at(bytes, self.at)?;
        self.at += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_is_created_and_a_short_one_refused_with_both_sizes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data");
        let shared = RunState::new();
        BlockDevice::for_reading(&path, 1, 1, &shared).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 1 << 20);
        let error = BlockDevice::for_reading(&path, 2, 1, &shared).unwrap_err().to_string();
        assert!(error.contains("1048576") && error.contains("2097152"), "{error}");
    }

    #[test]
    fn regions_do_not_overlap() {
        let dir = tempfile::tempdir().unwrap();
        let disk = BlockDevice::for_writing(&dir.path().join("data"), 2, 1).unwrap();
        disk.cursor(mb_bytes(1)).write_all(b"second").unwrap();
        disk.cursor(0).write_all(b"first").unwrap();
        let mut read = [0; 6];
        disk.cursor(mb_bytes(1)).read_exact(&mut read).unwrap();
        assert_eq!(&read, b"second");
    }

    #[test]
    fn an_unusable_path_is_named_in_the_error() {
        let error =
            BlockDevice::for_writing(Path::new("/proc/no/such"), 1, 1).unwrap_err().to_string();
        assert!(error.contains("cannot open /proc/no/such"), "{error}");
    }
}
