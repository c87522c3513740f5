//! How far a range of pages is done.

use rustix::io::Errno;
use sys::memory_map::PAGE_BYTES;
use sys::userfaultfd::Progress;

/// How far a range is done. What stops is tried as one page before it is judged: a range may span
/// two mappings, which the kernel refuses as a whole.
pub(super) struct Way {
    len: u64,
    at: u64,
    one_page: bool,
}

impl Way {
    pub(super) fn new(len: u64) -> Self {
        Self { len, at: 0, one_page: false }
    }

    /// Where to go on, and for how many bytes.
    pub(super) fn next(&self) -> Option<(u64, u64)> {
        let rest = self.len.checked_sub(self.at).filter(|&rest| rest > 0)?;
        Some((self.at, if self.one_page { PAGE_BYTES.min(rest) } else { rest }))
    }

    /// Notes how far it went; answers what stopped a page that was tried alone.
    pub(super) fn went(&mut self, progress: Progress) -> Option<Errno> {
        self.at += progress.bytes;
        let errno = progress.stopped.filter(|_| progress.bytes == 0);
        let judged = errno.filter(|_| self.one_page);
        self.one_page = errno.is_some();
        judged
    }

    /// Leaves a page as it is.
    pub(super) fn skip(&mut self) {
        self.at += PAGE_BYTES;
        self.one_page = false;
    }
}
