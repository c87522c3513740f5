//! The paging of a VM that has the shim: from outside, as for any other VM ([`Pager`]).
//!
//! The shim moves revoked pages out of guest RAM, to *staging*. A page stays there until the guest
//! touches it, so staging holds what the guest uses least. The pager pages staging as well.

use std::time::{Duration, Instant};

use model::{Bytes, Cold, Reading};
use protocol::Region;
use sys::outside::{self, Outside as Memory};
use sys::process::Identity;
use sys::userfaultfd::Range;

use super::granules::PAGE;
use super::pager::{Pager, is_swapped};

/// How often the ability of the host to page VMs, and the cost of a refault, are checked.
const REVIEW_EVERY: Duration = Duration::from_secs(30);
/// No address of a process is larger.
const MOST_ADDRESS: u64 = 1 << 57;

/// The paging of one VM.
#[derive(Debug)]
pub(super) struct Paging {
    process: Identity,
    regions: Vec<Region>,
    granule_pages: u32,
    /// The address of each region's staging; empty: nothing is staged.
    staging: Vec<u64>,
    target: Option<Bytes>,
    own: Option<Bytes>,
    running: Option<Running>,
    why_not: Option<String>,
    review: Instant,
}

#[derive(Debug)]
struct Running {
    memory: Memory,
    pager: Pager,
    refault_ns: u64,
}

impl Paging {
    /// The paging of this QEMU process, whose guest RAM is in these regions. Nothing is paged
    /// without a target.
    pub(super) fn of(process: Identity, regions: &[Region], granule_pages: u32) -> Self {
        Self {
            process,
            regions: regions.to_vec(),
            granule_pages,
            staging: Vec::new(),
            target: None,
            own: None,
            running: None,
            why_not: None,
            review: Instant::now(),
        }
    }

    /// Sets the most that the VM is to have in memory, and the memory of QEMU besides the guest's.
    /// `None`: everything is read back.
    pub(super) fn order(&mut self, target: Option<Bytes>, own: Option<Bytes>) {
        (self.target, self.own) = (target, own);
        if let Some(Running { pager, .. }) = &mut self.running {
            pager.order(target, own);
        }
    }

    /// Sets the staging address of each region, from [`protocol::Status::staging`].
    pub(super) fn set_staging(&mut self, staging: Vec<u64>) {
        self.staging = staging;
        let ranges = self.staging_ranges();
        if let Some(Running { pager, .. }) = &mut self.running {
            pager.set_staging(&ranges);
        }
    }

    /// Does the work that is due. `ages`: the granules by number, each with the tenths of a second
    /// since its last touch if it is revoked.
    pub(super) fn step(&mut self, ages: impl FnOnce() -> Vec<(u32, Option<u32>)>) {
        if self.target.is_some() && Instant::now() >= self.review {
            self.review = Instant::now() + REVIEW_EVERY;
            let reviewed = outside::refault_ns_of_host().and_then(|ns| self.run(ns));
            self.why_not = reviewed.err();
            if self.why_not.is_some() {
                self.running = None;
            }
        }
        let Self { regions, staging, granule_pages, running: Some(running), .. } = self else {
            return;
        };
        if running.pager.is_looking() {
            let address = |(granule, age): (u32, Option<u32>)| {
                let page = granule.checked_mul(*granule_pages)?;
                Some((address_of(page, regions, staging, age.is_some())?, age))
            };
            running.pager.learn(ages().into_iter().filter_map(address));
        }
        if let Err(error) = running.pager.step(&running.memory, 0, running.refault_ns) {
            self.running = None;
            self.why_not = Some(format!("QEMU's memory cannot be paged: {error}"));
        }
    }

    /// Starts the pager, or reviews the running one, with this cost of a refault.
    fn run(&mut self, refault_ns: u64) -> Result<(), String> {
        if let Some(running) = &mut self.running {
            running.pager.review();
            running.refault_ns = refault_ns;
            return Ok(());
        }
        let ranges: Option<Vec<Range>> =
            self.regions.iter().map(|region| range_of(region, region.address)).collect();
        let ranges = ranges.ok_or("the shim tells of guest RAM at an impossible address")?;
        let memory = Memory::of(self.process).map_err(|error| error.to_string())?;
        // The kernel collapses split huge pages again by itself (khugepaged).
        let mut pager = Pager::of(self.process, ranges, false);
        pager.set_staging(&self.staging_ranges());
        pager.order(self.target, self.own);
        self.running = Some(Running { memory, pager, refault_ns });
        Ok(())
    }

    fn staging_ranges(&self) -> Vec<Range> {
        let range = |(region, start): (&Region, &u64)| range_of(region, *start);
        self.regions.iter().zip(&self.staging).filter_map(range).collect()
    }

    /// Whether part of QEMU's memory is in swap.
    pub(super) fn has_out(&self) -> bool {
        is_swapped(self.process)
    }

    /// Reads everything back from now on, including memory that an earlier worker paged out.
    pub(super) fn recall(&mut self) {
        self.target = None;
        if self.running.is_none() {
            // A process that cannot be inspected has ended.
            let _ = self.run(0);
        }
        if let Some(Running { pager, .. }) = &mut self.running {
            pager.recall();
        }
    }

    /// Whether everything is being read back.
    pub(super) fn is_busy(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.pager.is_busy())
    }

    /// The reason why nothing is paged out, although there is a target.
    pub(super) fn why_not(&self) -> Option<&str> {
        self.target?;
        let of_pager = || self.running.as_ref()?.pager.why_not();
        self.why_not.as_deref().or_else(of_pager)
    }

    /// The state of the VM's memory; `None`: there is no target, or it is not known.
    pub(super) fn reading(&self) -> Option<Reading<Cold>> {
        self.running.as_ref()?.pager.reading()
    }
}

/// A range of a region's size; `None`: no process has memory there.
fn range_of(region: &Region, start: u64) -> Option<Range> {
    let len = u64::from(region.pages) * PAGE;
    start.checked_add(len).filter(|end| *end <= MOST_ADDRESS).map(|_| Range { start, len })
}

/// The address of a page of guest RAM, or of its place in staging.
fn address_of(page: u32, regions: &[Region], staging: &[u64], is_staged: bool) -> Option<u64> {
    let after = regions.partition_point(|region| region.first_page <= page);
    let at = after.checked_sub(1)?;
    let start = if is_staged { *staging.get(at)? } else { regions[at].address };
    start.checked_add(u64::from(page - regions[at].first_page) * PAGE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGIONS: [Region; 2] = [
        Region { first_page: 0, pages: 600, address: 0x10_0000 },
        Region { first_page: 1024, pages: 512, address: 0x80_0000 },
    ];

    #[test]
    fn a_revoked_page_is_in_staging_and_any_other_in_its_place() {
        let staging = [0x1000_0000, 0x2000_0000];
        let at = |page, is_staged| address_of(page, &REGIONS, &staging, is_staged);
        assert_eq!(at(1, false), Some(0x10_1000));
        assert_eq!(at(1, true), Some(0x1000_1000));
        assert_eq!(at(1030, false), Some(0x80_6000));
        assert_eq!(at(1030, true), Some(0x2000_6000));
        assert_eq!(address_of(1030, &REGIONS, &[], true), None, "nothing is staged");
    }

    #[test]
    fn a_shim_that_names_impossible_addresses_is_not_paged() {
        let regions = [Region { address: u64::MAX - PAGE, ..REGIONS[0] }];
        let mut paging = Paging::of(Identity::own().unwrap(), &regions, 32);
        assert!(paging.run(0).unwrap_err().contains("impossible address"));
        let mut paging = Paging::of(Identity::own().unwrap(), &REGIONS, 32);
        paging.set_staging(vec![u64::MAX, 0x2000_0000]);
        assert_eq!(paging.staging_ranges(), [Range { start: 0x2000_0000, len: 512 * PAGE }]);
    }
}
