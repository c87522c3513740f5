//! What the host's kernel does to guest RAM when memory is short: it pages out what it likes.
//!
//! It asks neither QEMU nor the shim, so the call goes to the kernel directly. Without swap only
//! what the guest has freed, and what was merged, can go.

use std::io;
use std::time::Duration;

use crate::crew::Hand;
use crate::page::PAGE;
use crate::watch::Kind;

/// Most pages at a time.
const MOST: usize = 32;
/// Longest in between: a few MiB a second, for which a disk has room. Whoever holds RAM while it
/// comes back holds up the others.
const REST: Duration = Duration::from_millis(40);

/// Pages runs of pages out until the end, whoever owns them.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn page_out(hand: &mut Hand<'_>) -> io::Result<()> {
    while hand.rest(REST) {
        let Some(held) = hand.any_ram() else { continue };
        let pages = held.range().1 / PAGE;
        let first = hand.rng.below(pages);
        let count = (1 + hand.rng.below(MOST)).min(pages - first);
        let result = hand.time(Kind::PageOut, || {
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
