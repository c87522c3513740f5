//! A file's bytes in a buffer of constant size, decompressed if its first bytes say so.
//!
//! Data with a window of more than 128 MiB (zstd), or that takes more than 256 MiB to decompress
//! (xz), is refused, so that a small file cannot take all memory. The length of the output is not
//! limited.

use std::{
    fs::File,
    io::{self, Cursor, Read},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use super::{
    TraceError,
    packing::{self, LOOK, Packing},
};

const BUFFER: usize = 1 << 18;

/// A file that counts the bytes that are read of it.
struct Counted<R> {
    file: R,
    read: Arc<AtomicU64>,
}

impl<R: Read> Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.read.fetch_add(count as u64, Ordering::Relaxed);
        Ok(count)
    }
}

/// Bytes in order. Unused bytes stay at the front for the next call.
pub(super) struct TraceInput {
    path: PathBuf,
    packing: Option<Packing>,
    reader: Box<dyn Read>,
    read: Arc<AtomicU64>,
    file_bytes: u64,
    buffer: Vec<u8>,
    filled: usize,
}

impl TraceInput {
    /// Opens a file and reads its beginning; `-` is standard input.
    pub(super) fn open(path: &Path) -> Result<Self, TraceError> {
        let open = |error| TraceError::Open { path: path.into(), error };
        if path == Path::new("-") {
            return Self::of(path, io::stdin(), 0);
        }
        let file = File::open(path).map_err(open)?;
        let meta = file.metadata().map_err(open)?;
        if meta.is_dir() {
            return Err(open(io::ErrorKind::IsADirectory.into()));
        }
        Self::of(path, file, if meta.is_file() { meta.len() } else { 0 })
    }

    fn of(path: &Path, file: impl Read + 'static, file_bytes: u64) -> Result<Self, TraceError> {
        let read = Arc::new(AtomicU64::new(0));
        let mut counted = Counted { file, read: Arc::clone(&read) };
        let open = |error| TraceError::Open { path: path.into(), error };
        let head = head(&mut counted).map_err(open)?;
        let packing = Packing::of(&head);
        let whole = Cursor::new(head.clone()).chain(counted);
        let reader: Box<dyn Read> = match packing {
            Some(packing) => packing.open(whole).map_err(open)?,
            None => Box::new(whole),
        };
        let buffer = vec![0; BUFFER];
        let path = path.to_owned();
        let mut source = Self { path, packing, reader, read, file_bytes, buffer, filled: 0 };
        source.refuse(&head)?;
        if packing.is_some() {
            source.advance(0)?;
            let inside = source.head();
            source.refuse(inside)?;
            if let Some(again) = Packing::of(inside) {
                let what = format!("compressed twice, by {} inside", again.name());
                let way = "one of the two undone, it can be read";
                return Err(TraceError::NotRead { path: source.path, what, way });
            }
        } else if let Some(ending) = packing::ending(&source.path) {
            return Err(TraceError::Misnamed { path: source.path, ending });
        }
        Ok(source)
    }

    /// Returns an error if this is the beginning of a format that cannot be read.
    fn refuse(&self, head: &[u8]) -> Result<(), TraceError> {
        let Some((what, way)) = packing::not_read(head) else { return Ok(()) };
        let (path, what) = (self.path(), what.to_owned());
        Err(TraceError::NotRead { path, what, way })
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

    /// The first bytes of the buffer.
    pub(super) fn head(&self) -> &[u8] {
        &self.buffer[..self.filled.min(LOOK)]
    }

    /// The buffer's contents.
    pub(super) fn buffer(&self) -> &[u8] {
        &self.buffer[..self.filled]
    }

    /// Whether the buffer is full; otherwise it contains the file's end.
    pub(super) const fn is_full(&self) -> bool {
        self.filled == BUFFER
    }

    /// Drops the first `used` bytes of the buffer, then fills it. Returns its contents; no new
    /// bytes mean the end.
    pub(super) fn advance(&mut self, used: usize) -> Result<&[u8], TraceError> {
        self.buffer.copy_within(used..self.filled, 0);
        self.filled -= used;
        while self.filled < BUFFER {
            match self.reader.read(&mut self.buffer[self.filled..]) {
                Ok(0) => break,
                Ok(count) => self.filled += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.error(error)),
            }
        }
        Ok(self.buffer())
    }

    fn error(&self, error: io::Error) -> TraceError {
        let (path, at) = (self.path(), self.bytes_read());
        match self.packing {
            None => TraceError::Read { path, at, error },
            Some(packing) => TraceError::Compressed { path, packing: packing.name(), at, error },
        }
    }
}

/// The first bytes, or all of a shorter file.
fn head(file: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut head = Vec::new();
    file.take(LOOK as u64).read_to_end(&mut head)?;
    Ok(head)
}
