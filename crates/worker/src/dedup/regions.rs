//! Page numbers and addresses of a VM's regions, as reported by its shim.

use protocol::Region;
use sys::memory_map::Range;

use super::super::granules::PAGE;

/// The upper bound of page numbers.
pub(super) fn page_count(regions: &[Region]) -> u32 {
    regions.last().map_or(0, |last| last.first_page.saturating_add(last.pages))
}

/// The addresses of all regions.
pub(super) fn ranges(regions: &[Region]) -> Vec<Range> {
    let range = |region: &Region| {
        let len = u64::from(region.pages) * PAGE;
        Range { start: region.address, len }
    };
    regions.iter().map(range).collect()
}

/// The address of a page.
pub(super) fn address_of(regions: &[Region], page: u32) -> Option<u64> {
    rest_of_region(regions, page).map(|(address, _)| address)
}

/// The address of a page, and the number of pages from there to the end of its region.
pub(super) fn rest_of_region(regions: &[Region], page: u32) -> Option<(u64, u32)> {
    let rest = |region: &Region| {
        let at = page.checked_sub(region.first_page).filter(|&at| at < region.pages)?;
        Some((region.address + u64::from(at) * PAGE, region.pages - at))
    };
    regions.iter().find_map(rest)
}

/// The page at an address.
pub(super) fn page_at(regions: &[Region], address: u64) -> Option<u32> {
    let number = |region: &Region| {
        let at = address.checked_sub(region.address)? / PAGE;
        (at < region.pages.into()).then(|| region.first_page + u32::try_from(at).unwrap_or(0))
    };
    regions.iter().find_map(number)
}
