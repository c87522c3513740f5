//! The granules of a VM: their numbers in the shim, and their indexes without gaps for the
//! algorithms.
//!
//! Page numbers run through all regions of guest RAM, but regions begin at multiples of
//! 512 pages, so there are gaps. The algorithms keep an entry per granule and choose among them
//! at random. So they use indexes without gaps, in the same order.

use model::Bytes;
use pages::working_set;
use protocol::Region;

/// The size of a page of the guest's memory, the only unit of the shim.
pub(super) const PAGE: u64 = 4096;
/// The most pages of a VM: 8 TiB. More is treated as an error.
const MOST_PAGES: u64 = (8 << 40) / PAGE;
/// The most memory of a VM, as a multiple of the host's memory. It bounds the state that is kept
/// for a VM, for any numbers from its shim.
const TIMES_HOST: u64 = 2;

/// The map between both numberings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Granules {
    granule_pages: u32,
    pages: u64,
    /// For each region: its first granule's number and index, and the number of its granules.
    spans: Vec<RegionSpan>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RegionSpan {
    number: u32,
    index: u32,
    count: u32,
}

/// The shim reports more memory than is possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the shim tells of {pages} pages of guest memory; on this host at most {most} are believed"
)]
pub struct TooLarge {
    pages: u64,
    most: u64,
}

impl Granules {
    /// The granules of these regions (as `Answer::decode` has checked them), of `granule_pages`
    /// pages; without it, of the size that suits the VM. `host` is the host's memory.
    pub(super) fn new(
        regions: &[Region],
        granule_pages: Option<u32>,
        host: Bytes,
    ) -> Result<Self, TooLarge> {
        let pages: u64 = regions.iter().map(|region| u64::from(region.pages)).sum();
        let last = regions
            .last()
            .map_or(0, |region| u64::from(region.first_page) + u64::from(region.pages));
        let most = (host.0.saturating_mul(TIMES_HOST) / PAGE).min(MOST_PAGES);
        if last > most {
            return Err(TooLarge { pages: last, most });
        }
        // By all the VM's memory: the working set can be as large, and a change would restart
        // tracking.
        let most = Bytes(pages.saturating_mul(PAGE));
        let granule_pages = granule_pages.unwrap_or_else(|| working_set::granule_pages(0, most));
        let mut index = 0;
        let spans = regions.iter().map(|region| {
            let count = region.pages.div_ceil(granule_pages);
            let span = RegionSpan { number: region.first_page / granule_pages, index, count };
            index += count;
            span
        });
        Ok(Self { granule_pages, pages, spans: spans.collect() })
    }

    /// Pages in a granule.
    pub(super) fn granule_pages(&self) -> u32 {
        self.granule_pages
    }

    /// Bytes in a granule.
    pub(super) fn granule_bytes(&self) -> u64 {
        u64::from(self.granule_pages) * PAGE
    }

    /// Bytes of guest memory.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes(self.pages * PAGE)
    }

    /// The number of granules.
    pub(super) fn count(&self) -> u32 {
        self.spans.last().map_or(0, |last| last.index + last.count)
    }

    /// The largest number plus one.
    pub(super) fn end(&self) -> u32 {
        self.spans.last().map_or(0, |last| last.number + last.count)
    }

    /// The shim's number of the granule at `index`.
    pub(super) fn number(&self, index: u32) -> u32 {
        let after = self.spans.partition_point(|span| span.index <= index);
        let span = after.checked_sub(1).map(|at| self.spans[at]);
        span.map_or(0, |span| span.number + (index - span.index))
    }

    /// The index of the granule that the shim calls `number`; `None`: it is in a gap.
    pub(super) fn index(&self, number: u32) -> Option<u32> {
        let after = self.spans.partition_point(|span| span.number <= number);
        let span = self.spans[after.checked_sub(1)?];
        let offset = number - span.number;
        (offset < span.count).then(|| span.index + offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: Bytes = Bytes::mib(2048);

    fn region(first_page: u32, pages: u32) -> Region {
        Region { first_page, pages, address: 0 }
    }

    #[test]
    fn both_numberings_lead_to_each_other_and_gaps_to_nothing() {
        let granules = Granules::new(&[region(0, 100), region(512, 64)], None, HOST).unwrap();
        assert_eq!((granules.count(), granules.end(), granules.granule_pages()), (6, 18, 32));
        let numbers: Vec<u32> = (0..6).map(|index| granules.number(index)).collect();
        assert_eq!(numbers, [0, 1, 2, 3, 16, 17]);
        for (index, number) in (0..).zip(numbers) {
            assert_eq!(granules.index(number), Some(index));
        }
        assert_eq!([4, 15, 18].map(|number| granules.index(number)), [None; 3]);
        assert_eq!(granules.bytes(), Bytes(164 * PAGE));
    }

    #[test]
    fn large_vms_are_tracked_in_huge_pages() {
        let large = Granules::new(&[region(0, 3 << 18)], None, HOST).unwrap();
        assert_eq!((large.granule_pages(), large.count()), (512, 1536));
        let asked = Granules::new(&[region(0, 3 << 18)], Some(64), HOST).unwrap();
        assert_eq!(asked.granule_pages(), 64);
    }

    #[test]
    fn no_regions_and_too_much_memory_do_no_harm() {
        let none = Granules::new(&[], None, HOST).unwrap();
        assert_eq!((none.count(), none.index(0), none.number(0)), (0, None, 0));
        let error = |first_page, host| {
            Granules::new(&[region(first_page, 512)], None, host).unwrap_err().to_string()
        };
        let believed = |error: &str| error.split("at most ").nth(1).map(str::to_owned);
        let last = u32::MAX / 512 * 512 - 512;
        let of_any = error(last, Bytes(u64::MAX));
        assert_eq!(believed(&of_any).unwrap(), "2147483648 are believed", "{of_any}");
        let of_this = error(4 << 18, HOST);
        assert_eq!(believed(&of_this).unwrap(), "1048576 are believed", "{of_this}");
        assert!(Granules::new(&[region((4 << 18) - 512, 512)], None, HOST).is_ok());
    }
}
