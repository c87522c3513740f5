//! Progress of an operation over a range of pages.

use rustix::io::Errno;
use sys::memory_map::PAGE_BYTES;
use sys::userfaultfd::Progress;

/// Progress over a range. When the operation stops, it is retried with one page before the error
/// counts: a range may span two mappings, which the kernel refuses as a whole.
pub(super) struct RangeProgress {
    len: u64,
    at: u64,
    one_page: bool,
}

impl RangeProgress {
    pub(super) fn new(len: u64) -> Self {
        Self { len, at: 0, one_page: false }
    }

    /// The next offset, and for how many bytes to try.
    pub(super) fn next(&self) -> Option<(u64, u64)> {
        let rest = self.len.checked_sub(self.at).filter(|&rest| rest > 0)?;
        Some((self.at, if self.one_page { PAGE_BYTES.min(rest) } else { rest }))
    }

    /// Records progress; returns the error that stopped a page tried alone.
    pub(super) fn went(&mut self, progress: Progress) -> Option<Errno> {
        self.at += progress.bytes;
        let errno = progress.stopped.filter(|_| progress.bytes == 0);
        let judged = errno.filter(|_| self.one_page);
        self.one_page = errno.is_some();
        judged
    }

    /// Skips a page.
    pub(super) fn skip(&mut self) {
        self.at += PAGE_BYTES;
        self.one_page = false;
    }
}
