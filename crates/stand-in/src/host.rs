//! Pages out guest RAM as the host's kernel does when memory is short.
//!
//! The kernel involves neither QEMU nor the shim, so this is a raw system call. Without swap only
//! freed pages and merged pages can be dropped.

use std::io;
use std::time::Duration;

use crate::crew::Hand;
use crate::page::PAGE;
use crate::watch::WorkKind;

/// Most pages at a time.
const MOST: usize = 32;
/// The longest pause: a few MiB a second, which a disk can take. A thread that holds RAM while
/// pages are read back delays the others.
const REST: Duration = Duration::from_millis(40);

/// Pages out runs of pages until the end, regardless of their owners.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn page_out(hand: &mut Hand<'_>) -> io::Result<()> {
    while hand.rest(REST) {
        let Some(held) = hand.any_ram() else { continue };
        let pages = held.range().1 / PAGE;
        let first = hand.rng.below(pages);
        let count = (1 + hand.rng.below(MOST)).min(pages - first);
        let result = hand.time(WorkKind::PageOut, || {
            let (start, bytes) = (held.address(first), count * PAGE);
            // SAFETY: RAM that is held; its content stays.
            let done =
                unsafe { libc::syscall(libc::SYS_madvise, start, bytes, libc::MADV_PAGEOUT) };
            Some(if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) })
        });
        result.transpose()?;
    }
    Ok(())
}
