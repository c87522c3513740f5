//! A file's bytes, decompressed where its name says so, in a buffer of constant size.
//!
//! zstd data that wants a window above 128 MiB is refused by the library, so that a small file
//! cannot take all memory; how much it decompresses to does not matter.

use std::{
    fs::File,
    io::{self, BufReader, Read},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::TraceError;

const BUFFER: usize = 1 << 18;

/// A file that counts what is read of it.
struct Counted {
    file: File,
    read: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

enum Reader {
    Plain(Counted),
    Zstd(Box<zstd::Decoder<'static, BufReader<Counted>>>),
}

/// Bytes in order. What was not used up stays at the front for the next time.
pub(super) struct Source {
    path: PathBuf,
    reader: Reader,
    read: Arc<AtomicU64>,
    file_bytes: u64,
    buffer: Vec<u8>,
    filled: usize,
}

impl Source {
    pub(super) fn open(path: &Path) -> Result<Self, TraceError> {
        let open = |error| TraceError::Open { path: path.into(), error };
        let file = File::open(path).map_err(open)?;
        let meta = file.metadata().map_err(open)?;
        if meta.is_dir() {
            return Err(open(io::ErrorKind::IsADirectory.into()));
        }
        let read = Arc::new(AtomicU64::new(0));
        let counted = Counted { file, read: Arc::clone(&read) };
        let is_zstd = path.extension().is_some_and(|end| end == "zst" || end == "zstd");
        let reader = if is_zstd {
            Reader::Zstd(Box::new(zstd::Decoder::new(counted).map_err(open)?))
        } else {
            Reader::Plain(counted)
        };
        let (path, file_bytes) = (path.into(), if meta.is_file() { meta.len() } else { 0 });
        Ok(Self { path, reader, read, file_bytes, buffer: vec![0; BUFFER], filled: 0 })
    }

    pub(super) fn path(&self) -> PathBuf {
        self.path.clone()
    }

    pub(super) const fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    pub(super) fn bytes_read(&self) -> u64 {
        self.read.load(Ordering::Relaxed)
    }

    /// Whether the buffer has no room left.
    pub(super) const fn is_full(&self) -> bool {
        self.filled == BUFFER
    }

    /// Drops the first bytes of the buffer, then fills it; answers what is in it. Nothing new in it
    /// means the end.
    pub(super) fn advance(&mut self, used: usize) -> Result<&[u8], TraceError> {
        self.buffer.copy_within(used..self.filled, 0);
        self.filled -= used;
        while self.filled < BUFFER {
            let space = &mut self.buffer[self.filled..];
            let read = match &mut self.reader {
                Reader::Plain(file) => file.read(space),
                Reader::Zstd(decoder) => decoder.read(space),
            };
            match read {
                Ok(0) => break,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.error(error)),
            }
        }
        Ok(&self.buffer[..self.filled])
    }

    fn error(&self, error: io::Error) -> TraceError {
        let (path, at) = (self.path(), self.bytes_read());
        match self.reader {
            Reader::Plain(_) => TraceError::Read { path, at, error },
            Reader::Zstd(_) => TraceError::Compressed { path, at, error },
        }
    }
}
