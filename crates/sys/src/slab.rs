//! A piece of private memory that only this value of this process uses.
//!
//! Problem: memory that holds other hosts' pages must be given back page by page. It must not go
//! to this host's swap or into its dumps. An allocator guarantees none of that. Idea: each slab
//! has a mapping of its own. It is handed out as a plain slice, because it has no other user.
//!
//! Cost: a page exists from its first write on; reading a page that was never written maps the
//! kernel's page of zeros. Left out: which pages are in use; the owner knows that.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Memory that reads as zeros where nothing was written.
#[derive(Debug)]
pub struct Slab {
    base: NonNull<c_void>,
    length: usize,
}

// SAFETY: the mapping belongs to this value alone, in any thread.
unsafe impl Send for Slab {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Slab {}

impl Slab {
    /// A slab of `length` bytes, a multiple of the page size and not 0.
    ///
    /// # Errors
    ///
    /// The kernel's: there are no more mappings or addresses available.
    pub fn new(length: usize) -> Result<Self, Errno> {
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
        // SAFETY: a new mapping at a place that the kernel chooses touches nothing.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, flags)? };
        let base = NonNull::new(base).ok_or(Errno::NOMEM)?;
        let slab = Self { base, length };
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork] {
            slab.advise(0..length, advice)?;
        }
        Ok(slab)
    }

    /// Asks for huge pages where nothing is written yet: they are allocated and freed in a
    /// hundredth of the time. A kernel without them, or with them disabled, gives small pages.
    pub fn prefer_huge(&mut self) {
        let _is_a_wish = self.advise(0..self.length, Advice::LinuxHugepage);
    }

    /// Locks all of it in memory: none of it is written to swap, and all of it is resident from
    /// now on.
    ///
    /// # Errors
    ///
    /// `NOMEM`: it is more than the process may lock (`RLIMIT_MEMLOCK`), or than there is.
    /// `PERM`: the process may lock nothing.
    pub fn lock(&mut self) -> Result<(), Errno> {
        // SAFETY: the range is our own mapping.
        unsafe { rustix::mm::mlock(self.base.as_ptr(), self.length) }
    }

    /// Its content.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the mapping is readable, as long as the value lives, and only `&mut` writes it.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.length) }
    }

    /// Its content, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the mapping is writable, as long as the value lives, and `&mut` is the only way.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().cast(), self.length) }
    }

    /// Gives these whole pages back to the kernel; from now on they read as zeros.
    ///
    /// # Errors
    ///
    /// `INVAL`: the range is not of whole pages of this slab, or the slab is locked.
    pub fn discard(&mut self, range: Range<usize>) -> Result<(), Errno> {
        if range.start > range.end || range.end > self.length {
            return Err(Errno::INVAL);
        }
        self.advise(range, Advice::LinuxDontNeed)
    }

    fn advise(&self, range: Range<usize>, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is in our own mapping; only `discard`, which has exclusive access,
        // passes an advice that changes the content.
        unsafe {
            rustix::mm::madvise(self.base.as_ptr().byte_add(range.start), range.len(), advice)
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: there is no reference into a value that is dropped.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr(), self.length) };
        debug_assert!(unmapped.is_ok(), "our own mapping cannot be unmapped");
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_there_until_it_is_discarded() {
        let mut slab = Slab::new(3 * 4096).unwrap();
        assert!(slab.bytes().iter().all(|byte| *byte == 0));
        slab.bytes_mut().fill(7);
        slab.discard(4096..8192).unwrap();
        assert!(slab.bytes()[..4096].iter().all(|byte| *byte == 7));
        assert!(slab.bytes()[4096..8192].iter().all(|byte| *byte == 0));
        assert!(slab.bytes()[8192..].iter().all(|byte| *byte == 7));
    }

    #[test]
    fn a_range_that_is_not_its_own_is_refused() {
        let mut slab = Slab::new(4096).unwrap();
        assert_eq!(slab.discard(0..8192), Err(Errno::INVAL));
        assert_eq!(slab.discard(1..4096), Err(Errno::INVAL));
        assert_eq!(Slab::new(0).unwrap_err(), Errno::INVAL);
    }
}
