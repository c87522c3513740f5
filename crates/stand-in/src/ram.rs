//! Guest RAM made as by QEMU: the same calls in the same order, so that the shim finds it.
//!
//! QEMU (`qemu_anon_ram_alloc`, `ram_block_add`) reserves an inaccessible range with room to
//! align, and maps the RAM into it with `MAP_FIXED`. It unmaps the rest of the range except one
//! guard page behind the RAM. It then gives advice: the RAM may be merged, should have huge
//! pages, and is not inherited by forks. A piece that is unplugged is unmapped together with its
//! guard page.
//!
//! Calls go to the symbols of the C library that QEMU itself uses (`mmap64`), because a preloaded
//! library interposes no others.

use std::io;
use std::ptr::NonNull;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, TryLockError};

use crate::machine::{Machine, RAM_BEGINS};
use crate::page::{Content, Owned, PAGE, PageEntry, Words};

/// QEMU aligns guest RAM to huge pages.
const ALIGN: usize = 2 << 20;
/// In the guest, pieces begin at multiples of this.
const GUEST_ALIGN: u64 = 1 << 30;
/// Since Linux 5.18.
const MADV_DONTNEED_LOCKED: libc::c_int = 24;

/// One mapping of guest RAM.
#[derive(Debug)]
struct RamMapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to no thread; its content is accessed through atomics only.
unsafe impl Send for RamMapping {}
// SAFETY: as above.
unsafe impl Sync for RamMapping {}

impl RamMapping {
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

impl Drop for RamMapping {
    fn drop(&mut self) {
        if let Err(error) = unmap(self.start.as_ptr(), self.bytes + PAGE) {
            eprintln!("overbook-stand-in: munmap: {error}");
        }
    }
}

/// Maps memory, at `at` if the flags include `MAP_FIXED`.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn map(at: *mut u8, bytes: usize, access: i32, flags: i32) -> io::Result<*mut u8> {
    // SAFETY: without `MAP_FIXED` the kernel chooses the place; with it, `at` is in the caller's
    // own reservation.
    let start = unsafe { libc::mmap64(at.cast(), bytes, access, flags, -1, 0) };
    if start == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(start.cast()) }
}

/// Unmaps memory.
///
/// # Errors
/// When the kernel refuses.
pub(crate) fn unmap(at: *mut u8, bytes: usize) -> io::Result<()> {
    // SAFETY: a part of the caller's own reservation that is not in use.
    checked(unsafe { libc::munmap(at.cast(), bytes) })
}

fn advise(at: *mut u8, bytes: usize, advice: i32) -> io::Result<()> {
    // SAFETY: a mapping of this module. Only discards change content, and their caller owns the
    // pages.
    checked(unsafe { libc::madvise(at.cast(), bytes, advice) })
}

fn checked(result: i32) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A place for a piece of guest RAM, plugged or not, and the table of its pages.
#[derive(Debug)]
pub(crate) struct Slot {
    number: u32,
    /// Its guest-physical address.
    guest: u64,
    mapping: RwLock<Option<RamMapping>>,
    entries: Box<[PageEntry]>,
}

impl Slot {
    /// Slots of these sizes in pages, one after the other in the guest, without RAM yet.
    pub(crate) fn row(sizes: impl IntoIterator<Item = usize>) -> Vec<Self> {
        let mut end = RAM_BEGINS;
        let slot = |(number, pages): (u32, usize)| {
            let entries = (0..pages).map(|_| PageEntry::default()).collect();
            let guest = end.next_multiple_of(GUEST_ALIGN);
            let slot = Self { number, guest, mapping: RwLock::default(), entries };
            end = slot.guest_end();
            slot
        };
        (0..).zip(sizes).map(slot).collect()
    }

    /// The guest-physical address of its end.
    pub(crate) fn guest_end(&self) -> u64 {
        self.guest_address(self.pages())
    }

    /// The guest-physical address of a page.
    pub(crate) fn guest_address(&self, page: usize) -> u64 {
        self.guest + (page * PAGE) as u64
    }

    /// Number of pages when it is plugged.
    pub(crate) fn pages(&self) -> usize {
        self.entries.len()
    }

    /// Its RAM, which stays plugged while held. `None` while a thread waits to change it: another
    /// thread may hold it already.
    pub(crate) fn hold(&self) -> Option<HeldPages<'_>> {
        let guard = match self.mapping.try_read() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(guard)) => guard.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        guard.is_some().then_some(HeldPages { guard, slot: self })
    }

    /// Unplugs its RAM, or plugs new RAM, which is all zeros. The machines have the slot while it
    /// is plugged.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn replug(&self, machines: &[Machine]) -> io::Result<()> {
        let mut mapping = self.mapping.write().unwrap_or_else(PoisonError::into_inner);
        if mapping.is_some() {
            machines.iter().try_for_each(|machine| machine.unplug(self.number))?;
            *mapping = None;
            return Ok(());
        }
        for owned in self.entries.iter().filter_map(PageEntry::own) {
            owned.set(Content::ZERO);
        }
        let new = mapping.insert(RamMapping::new(self.pages() * PAGE)?);
        machines.iter().try_for_each(|machine| {
            machine.plug(self.number, self.guest, new.start.as_ptr(), new.bytes)
        })
    }

    /// Removes its RAM from the machines and adds it again, as when a guest's memory map changes.
    /// No thread touches the RAM meanwhile.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn remap(&self, machines: &[Machine]) -> io::Result<()> {
        let mapping = self.mapping.write().unwrap_or_else(PoisonError::into_inner);
        let Some(RamMapping { start, bytes }) = &*mapping else { return Ok(()) };
        machines.iter().try_for_each(|machine| {
            machine.unplug(self.number)?;
            machine.plug(self.number, self.guest, start.as_ptr(), *bytes)
        })
    }
}

/// RAM that is plugged and held.
pub(crate) struct HeldPages<'a> {
    guard: RwLockReadGuard<'a, Option<RamMapping>>,
    slot: &'a Slot,
}

impl<'a> HeldPages<'a> {
    /// The address of the RAM, and the number of bytes.
    pub(crate) fn range(&self) -> (*mut u8, usize) {
        // RAM is held only while it is plugged.
        let mapping = self.guard.as_ref();
        mapping.map_or((std::ptr::null_mut(), 0), |mapping| (mapping.start.as_ptr(), mapping.bytes))
    }

    /// The entry of a page.
    pub(crate) fn entry(&self, page: usize) -> &'a PageEntry {
        &self.slot.entries[page]
    }

    /// The address of a page.
    pub(crate) fn address(&self, page: usize) -> *mut u8 {
        let (start, bytes) = self.range();
        assert!(page < bytes / PAGE, "page {page} of {}", bytes / PAGE);
        start.wrapping_add(page * PAGE)
    }

    /// The guest-physical address of a page.
    pub(crate) fn guest_address(&self, page: usize) -> u64 {
        self.slot.guest_address(page)
    }

    /// The words of a page.
    pub(crate) fn words(&self, page: usize) -> &Words {
        // SAFETY: in the mapping (`address` checks), which stays as long as the guard lives;
        // aligned to a page; every bit pattern is a word; all code in this process accesses it
        // through atomics.
        unsafe { &*self.address(page).cast::<Words>() }
    }

    /// Owns up to `count` adjacent pages from `first` on, and stops at a page that has an owner.
    pub(crate) fn own_run(&self, first: usize, count: usize) -> Vec<Owned<'a>> {
        self.slot.entries[first..].iter().take(count).map_while(PageEntry::own).collect()
    }

    /// Discards the pages of a run: they read as zeros afterwards. A report of more than one page
    /// does not guarantee that: such pages may keep their content.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub(crate) fn discard(
        &self,
        first: usize,
        run: &[Owned<'_>],
        is_report: bool,
    ) -> io::Result<()> {
        // `MADV_DONTNEED_LOCKED` is always a discard.
        let advice = if is_report { libc::MADV_DONTNEED } else { MADV_DONTNEED_LOCKED };
        advise(self.address(first), run.len() * PAGE, advice)?;
        for page in run {
            let is_kept = is_report && run.len() > 1;
            page.set(if is_kept { page.content().freed() } else { Content::ZERO });
        }
        Ok(())
    }
}
