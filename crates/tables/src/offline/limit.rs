//! Limits the amount that is read of one source.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{MOST_BYTES, MOST_FILES, OfflineError};

const MOST: &str = ", the most that are read";

/// Bytes that all threads together may still read of a source.
#[derive(Debug)]
pub(super) struct Left {
    source: PathBuf,
    bytes: AtomicU64,
}

impl Left {
    pub(super) fn new(source: &Path) -> Self {
        Self::with(source, MOST_BYTES)
    }

    pub(super) fn with(source: &Path, bytes: u64) -> Self {
        Self { source: source.into(), bytes: AtomicU64::new(bytes) }
    }

    /// Counts `bytes` bytes as read.
    pub(super) fn spend(&self, bytes: u64) -> Result<(), OfflineError> {
        let before = self.bytes.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(bytes));
        before.map(drop).map_err(|_| {
            let what = format!("there are more than {} GiB to read in it", MOST_BYTES >> 30);
            OfflineError::Limit { path: self.source.clone(), what: what + MOST }
        })
    }

    /// The error of a file of the source that could not be read: a limit, or an error of its own.
    pub(super) fn unreadable(&self, path: &Path, error: io::Error) -> OfflineError {
        match error.get_ref().and_then(|inner| inner.downcast_ref::<Met>()) {
            Some(Met(what)) => {
                OfflineError::Limit { path: self.source.clone(), what: what.clone() }
            }
            None => OfflineError::File { path: path.into(), error },
        }
    }
}

/// Counts another file or directory of this source.
pub(super) fn count(seen: &mut u64, source: &Path) -> Result<(), OfflineError> {
    *seen += 1;
    if *seen > MOST_FILES {
        let what = format!("there are more than {MOST_FILES} files in it{MOST}");
        return Err(OfflineError::Limit { path: source.into(), what });
    }
    Ok(())
}

/// A limit that a reader has hit, carried in an [`io::Error`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Met(String);

/// The error of a reader whose output exceeds the limit.
#[cfg(feature = "images")]
pub(super) fn unpacks_too_much() -> io::Error {
    io::Error::other(Met(format!("it unpacks to more than {} GiB{MOST}", MOST_BYTES >> 30)))
}
