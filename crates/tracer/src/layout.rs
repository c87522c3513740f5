//! Translates guest-physical addresses to page numbers.
//!
//! A page's number is its offset in the guest's RAM block, in pages. The shim, which sees the
//! block as one mapping, counts the same way. QEMU's `q35` machine shows the block to the guest
//! in two pieces when it would extend into the hole for PCI devices: 2 GiB below the hole, the
//! rest from 4 GiB on.
//!
//! Leaves out: hot-plugged RAM, which is a block of its own, and the few pages between 640 KiB
//! and 1 MiB where the guest at times sees firmware or a device instead of RAM.

/// Bytes per page.
pub(crate) const PAGE_BYTES: u64 = 4096;

const GIB: u64 = 1 << 30;
/// Less RAM than this lies in one piece (`pc_q35_init`).
const SPLIT_FROM: u64 = 0xb000_0000;
const LOW_WHEN_SPLIT: u64 = 2 * GIB;
const HIGH_START: u64 = 4 * GIB;

/// Where the guest sees its RAM.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    low_pages: u64,
    pages: u64,
}

impl Layout {
    /// The layout of a `q35` machine with `ram_bytes`.
    pub(crate) fn q35(ram_bytes: u64) -> Self {
        let low = if ram_bytes >= SPLIT_FROM { LOW_WHEN_SPLIT } else { ram_bytes };
        Self { low_pages: low / PAGE_BYTES, pages: ram_bytes / PAGE_BYTES }
    }

    /// Number of pages in all.
    pub(crate) fn pages(self) -> u64 {
        self.pages
    }

    /// The number of the page at this guest-physical address; `None`: not RAM.
    pub(crate) fn page_of(self, physical: u64) -> Option<usize> {
        let page = physical / PAGE_BYTES;
        let page = if page < self.low_pages {
            page
        } else {
            let high = page.checked_sub(HIGH_START / PAGE_BYTES)? + self.low_pages;
            (high < self.pages).then_some(high)?
        };
        usize::try_from(page).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn little_ram_lies_in_one_piece() {
        let layout = Layout::q35(400 << 20);
        assert_eq!(layout.page_of(0x1fff), Some(1));
        assert_eq!(layout.page_of((400 << 20) - 1), Some((100 << 10) - 1));
        assert_eq!(layout.page_of(400 << 20), None);
        assert_eq!(layout.page_of(0xfee0_0000), None);
    }

    #[test]
    fn much_ram_goes_on_above_the_pci_hole() {
        let layout = Layout::q35(3 * GIB);
        let low_pages = 512 << 10;
        assert_eq!(layout.page_of(2 * GIB - 1), Some(low_pages - 1));
        assert_eq!(layout.page_of(2 * GIB), None);
        assert_eq!(layout.page_of(4 * GIB), Some(low_pages));
        assert_eq!(layout.page_of(5 * GIB), None);
    }
}
