//! The buffer for the pages of a turn: those that are compared, and copies of those that are
//! replaced.

use std::sync::OnceLock;

use sys::memory_map::{Advice, HUGE_PAGE_BYTES, PAGE_BYTES, Range, Reserved};
use sys::userfaultfd::Userfaultfd;

/// Most pages in a turn: well below a millisecond. A turn that prepares slots elsewhere may end
/// with fewer.
pub(crate) const AT_ONCE: u32 = 64;
pub(crate) const TURN_BYTES: u64 = AT_ONCE as u64 * PAGE_BYTES;

/// The buffer: memory of the shim, registered for ever, that holds a turn's pages. It has the
/// size of a huge page.
pub(crate) fn buffer(uffd: &'static Userfaultfd) -> Option<Range> {
    static BUFFER: OnceLock<Option<Reserved>> = OnceLock::new();
    let make = || {
        let place = Reserved::new(HUGE_PAGE_BYTES).ok()?;
        for advice in [Advice::LinuxNoHugepage, Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: fresh memory. A kernel without huge pages refuses that advice, and needs
            // none.
            let _ = unsafe { place.advise(advice) };
        }
        // SAFETY: no thread touches a missing page: `judge` checks first.
        unsafe { uffd.register(place.range()) }.ok()?;
        Some(place)
    };
    BUFFER.get_or_init(make).as_ref().map(Reserved::range)
}
