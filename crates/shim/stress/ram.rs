//! Guest RAM as QEMU has it: the same calls in the same order, so that the shim finds it.
//!
//! QEMU (`qemu_anon_ram_alloc`, `ram_block_add`) reserves an inaccessible range with room to align, maps
//! the RAM into it with `MAP_FIXED`, unmaps what is left over except one guard page behind it, and says
//! how it is to be treated: may be merged, shall have huge pages, shall not be inherited by forks. A piece
//! that is unplugged is unmapped together with its guard page.
//!
//! Calls go to the C library's symbols that QEMU itself uses (`mmap64`), for a preloaded library sees no
//! others.

use std::io;
use std::ptr::NonNull;
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use crate::page::{Content, Entry, Owned, PAGE, Words};

/// QEMU aligns guest RAM to huge pages.
const ALIGN: usize = 2 << 20;

/// One mapping of guest RAM.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; its content is reached through atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> io::Result<Self> {
        let reserved = bytes + ALIGN;
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let base = map(std::ptr::null_mut(), reserved, libc::PROT_NONE, anonymous)?;
        let lead = base.align_offset(ALIGN);
        let start = base.wrapping_add(lead);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        map(start, bytes, access, anonymous | libc::MAP_FIXED)?;
        if lead > 0 {
            unmap(base, lead)?;
        }
        let behind = reserved - lead - bytes;
        if behind > PAGE {
            unmap(start.wrapping_add(bytes + PAGE), behind - PAGE)?;
        }
        for advice in [libc::MADV_MERGEABLE, libc::MADV_HUGEPAGE, libc::MADV_DONTFORK] {
            advise(start, bytes, advice)?;
        }
        let start = NonNull::new(start).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { start, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Err(error) = unmap(self.start.as_ptr(), self.bytes + PAGE) {
            eprintln!("overbook-stand-in: munmap: {error}");
        }
    }
}

fn map(at: *mut u8, bytes: usize, access: i32, flags: i32) -> io::Result<*mut u8> {
    // SAFETY: without MAP_FIXED the kernel chooses the place; with it, `at` lies in our own reservation.
    let start = unsafe { libc::mmap64(at.cast(), bytes, access, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start.cast()) }
}

fn unmap(at: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: a part of our own reservation that nobody uses.
    checked(unsafe { libc::munmap(at.cast(), bytes) })
}

fn advise(at: *mut u8, bytes: usize, advice: i32) -> io::Result<()> {
    // SAFETY: our own mapping. Only MADV_DONTNEED changes content, and its caller owns the pages.
    checked(unsafe { libc::madvise(at.cast(), bytes, advice) })
}

fn checked(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A place for a piece of guest RAM, which may be plugged or not, and the table of its pages.
#[derive(Debug)]
pub(crate) struct Slot {
    mapping: RwLock<Option<Mapping>>,
    entries: Box<[Entry]>,
}

impl Slot {
    /// Without RAM yet.
    pub(crate) fn new(pages: usize) -> Self {
        Self { mapping: RwLock::default(), entries: (0..pages).map(|_| Entry::default()).collect() }
    }

    /// How many pages it has when it is plugged.
    pub(crate) fn pages(&self) -> usize {
        self.entries.len()
    }

    /// Its RAM, which stays plugged meanwhile.
    pub(crate) fn hold(&self) -> Option<Held<'_>> {
        let guard = self.mapping.read().unwrap_or_else(PoisonError::into_inner);
        guard.is_some().then_some(Held { guard, entries: &self.entries })
    }

    /// Unplugs its RAM, or plugs new one, which is all zeros.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn replug(&self) -> io::Result<()> {
        let mut mapping = self.mapping.write().unwrap_or_else(PoisonError::into_inner);
        if mapping.take().is_some() {
            return Ok(());
        }
        for owned in self.entries.iter().filter_map(Entry::own) {
            owned.set(Content::ZERO);
        }
        *mapping = Some(Mapping::new(self.pages() * PAGE)?);
        Ok(())
    }
}

/// RAM that is plugged.
pub(crate) struct Held<'a> {
    guard: RwLockReadGuard<'a, Option<Mapping>>,
    entries: &'a [Entry],
}

impl<'a> Held<'a> {
    /// Where it stands, and how many bytes it has.
    pub(crate) fn range(&self) -> (*mut u8, usize) {
        // It is held because it is there.
        let mapping = self.guard.as_ref();
        mapping.map_or((std::ptr::null_mut(), 0), |mapping| (mapping.start.as_ptr(), mapping.bytes))
    }

    /// The entry of a page.
    pub(crate) fn entry(&self, page: usize) -> &'a Entry {
        &self.entries[page]
    }

    /// Where a page stands.
    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        let (start, bytes) = self.range();
        assert!(page < bytes / PAGE, "page {page} of {}", bytes / PAGE);
        start.wrapping_add(page * PAGE)
    }

    /// The words of a page.
    pub(crate) fn words(&self, page: usize) -> &Words {
        // SAFETY: in the mapping (`address` checks), which stays as long as the guard lives; aligned to a
        // page; every bit pattern is a word; everybody in this process reaches it through atomics.
        unsafe { &*self.address(page).cast::<Words>() }
    }

    /// Owns up to `count` pages in a row, from `first` on; as many as nobody else owns.
    pub(crate) fn own_run(&self, first: usize, count: usize) -> Vec<Owned<'a>> {
        self.entries[first..].iter().take(count).map_while(Entry::own).collect()
    }

    /// Gives the pages of a run back to the host, as a balloon does: they read as zeros afterwards.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn discard(&self, first: usize, run: &[Owned<'_>]) -> io::Result<()> {
        advise(self.address(first), run.len() * PAGE, libc::MADV_DONTNEED)?;
        run.iter().for_each(|page| page.set(Content::ZERO));
        Ok(())
    }
}
