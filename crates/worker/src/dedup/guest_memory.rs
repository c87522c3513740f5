//! The memory of one VM as its worker reads it: page numbers, addresses and contents.

use protocol::Region;
use sys::memory_map::{Pagemap, Private, Range};
use sys::remote_memory::RemoteMemory;

use super::super::granules::PAGE;
use super::window::Window;

/// The regions of a VM, as its shim has reported them, and access to their pages.
#[derive(Debug)]
pub(super) struct GuestMemory {
    regions: Vec<Region>,
    memory: RemoteMemory,
    pagemap: Pagemap,
}

impl GuestMemory {
    /// The memory of this process; `None`: it must not be inspected.
    pub(super) fn of(pid: u32, regions: &[Region]) -> Option<Self> {
        let (memory, pagemap) = (RemoteMemory::of(pid).ok()?, Pagemap::of(pid).ok()?);
        Some(Self { regions: regions.to_vec(), memory, pagemap })
    }

    /// The upper bound of page numbers.
    pub(super) fn page_count(&self) -> u32 {
        page_count(&self.regions)
    }

    /// The addresses of all regions.
    pub(super) fn ranges(&self) -> Vec<Range> {
        let range = |region: &Region| {
            let len = u64::from(region.pages) * PAGE;
            Range { start: region.address, len }
        };
        self.regions.iter().map(range).collect()
    }

    /// Takes these regions over, if they are others. Returns the old ones.
    pub(super) fn renew(&mut self, regions: &[Region]) -> Option<Vec<Region>> {
        let is_other = self.regions != regions;
        is_other.then(|| std::mem::replace(&mut self.regions, regions.to_vec()))
    }

    /// The page at an address.
    pub(super) fn page_at(&self, address: u64) -> Option<u32> {
        let number = |region: &Region| {
            let at = address.checked_sub(region.address)? / PAGE;
            (at < region.pages.into()).then(|| region.first_page + u32::try_from(at).unwrap_or(0))
        };
        self.regions.iter().find_map(number)
    }

    /// The present number of a page that had this number in the old regions.
    pub(super) fn page_now(&self, old: &[Region], page: u32) -> Option<u32> {
        self.page_at(rest_of_region(old, page)?.0)
    }

    /// The window that begins with this page; `None`: there is no such page.
    pub(super) fn window_at(&self, cursor: u32) -> Option<Window> {
        let ends_later = |region: &&Region| region.first_page + region.pages > cursor;
        let region = self.regions.iter().find(ends_later)?;
        let first = cursor.max(region.first_page);
        let to_border = Window::PAGES - first % Window::PAGES;
        let count = to_border.min(region.first_page + region.pages - first);
        let address = region.address + u64::from(first - region.first_page) * PAGE;
        let wanted = vec![false; count as usize];
        let (is_huge, there, ours, foreign) = (false, 0, 0, 0);
        Some(Window { first, is_huge, there, ours, foreign, address, count, wanted })
    }

    /// The pages of a window that exist and are the guest's own. A process that has ended has no
    /// pages.
    pub(super) fn private(&self, window: &Window) -> Vec<Private> {
        let addresses = Range { start: window.address, len: u64::from(window.count) * PAGE };
        self.pagemap.private(addresses).unwrap_or_default()
    }

    /// Reads the word at each of these addresses, up to the first unreadable one.
    pub(super) fn read_words(&self, addresses: &[u64]) -> Vec<u64> {
        self.memory.read_words(addresses)
    }

    /// Reads pages; returns the number of bytes.
    pub(super) fn read(&self, page: u32, bytes: &mut [u8]) -> usize {
        let address = rest_of_region(&self.regions, page);
        address.map_or(0, |(address, _)| self.memory.read(address, bytes))
    }

    /// Reads this page and the existing ones after it; returns the number of bytes.
    pub(super) fn read_there(&self, page: u32, bytes: &mut [u8]) -> usize {
        let Some((start, pages)) = rest_of_region(&self.regions, page) else { return 0 };
        let most = bytes.len().min(usize::try_from(u64::from(pages) * PAGE).unwrap_or(usize::MAX));
        let bytes = &mut bytes[..most];
        // Reading a hole would fill it.
        let there = self.pagemap.private(Range { start, len: bytes.len() as u64 });
        let first = there.unwrap_or_default().first().map(|part| part.range);
        let len = first.filter(|first| first.start == start).map_or(0, |first| first.len);
        let len = usize::try_from(len).unwrap_or(0).min(bytes.len());
        // Content for the pool must equal the result, so it must not come from another program
        // that QEMU may have executed.
        self.memory.read_original(start, &mut bytes[..len])
    }
}

/// The upper bound of page numbers.
pub(super) fn page_count(regions: &[Region]) -> u32 {
    regions.last().map_or(0, |last| last.first_page.saturating_add(last.pages))
}

/// The address of a page, and the number of pages from there to the end of its region.
fn rest_of_region(regions: &[Region], page: u32) -> Option<(u64, u32)> {
    let rest = |region: &Region| {
        let at = page.checked_sub(region.first_page).filter(|&at| at < region.pages)?;
        Some((region.address + u64::from(at) * PAGE, region.pages - at))
    };
    regions.iter().find_map(rest)
}
