//! The kernel's files through which the shim moves this process's pages, and sees them. Each is
//! opened once, guarded, and never closed.

use std::sync::OnceLock;

use sys::memory_map::Pagemap;
use sys::userfaultfd::{OpenError, Userfaultfd};

use crate::descriptors::{guard_for_ever, kept};

/// The process's userfaultfd.
///
/// # Errors
/// The kernel's; a later call tries again.
pub(crate) fn userfaultfd() -> Result<&'static Userfaultfd, OpenError> {
    static UFFD: OnceLock<Userfaultfd> = OnceLock::new();
    if let Some(uffd) = UFFD.get() {
        return Ok(uffd);
    }
    let uffd = Userfaultfd::open()?;
    let uffd = UFFD.get_or_init(|| uffd);
    guard_for_ever(uffd);
    Ok(uffd)
}

/// The process's page tables.
pub(crate) fn pagemap() -> Option<&'static Pagemap> {
    static PAGEMAP: OnceLock<Option<Pagemap>> = OnceLock::new();
    PAGEMAP.get_or_init(|| kept(Pagemap::open())).as_ref()
}
