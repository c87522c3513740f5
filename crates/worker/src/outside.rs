//! A VM that is tracked from outside: an unmodified, running QEMU with nothing loaded into it.
//!
//! **Problem.** Traps need the shim in QEMU's process. A VM that is already running has none.
//!
//! **Idea.** Single pages, chosen at random by the same [`Strategy`] as with the shim, are paged
//! out ([`sys::outside`]); the kernel brings each back when the guest touches it, and the process's
//! `pagemap` shows when it is back. So a granule here is one page of the sample that stands for the
//! VM ([`PageSample`]). Nothing is registered with the kernel. A worker that dies leaves some
//! thousand pages in swap, each of which comes back at its touch.
//!
//! **Polling.** A page that is out is polled in every step at first, then after each [`LADDER`]-th
//! part of the time that it has been out. It counts as touched midway between the last poll that
//! found it out and the one that found it back. A page that has no content yet, or was given up by
//! the guest, needs no paging out: its next touch is seen in the same way.
//!
//! **Pages that stay.** Up to Linux 6.8 the kernel keeps a page that was touched since the last
//! request, and only clears its accessed bit. The page is requested again a step later, and its
//! time counts from the first request. From 6.9 on a page that stays was busy, and its time counts
//! from the second. A page that is still resident after the second request is hot.
//!
//! **Invariants.** No byte changes: the kernel pages out memory that it could page out at any time.
//! A VM is not tracked if its memory is locked or shared with other processes, or if the host's
//! swap is full or on disks, for which a guest would wait.
//!
//! **Leaves out.** No counter shows the flush of the guest's TLB entries at each page-out. On a
//! host that is itself virtualised some 60 µs were measured; [`FLUSH_NS`] charges that everywhere.
//!
//! Source: as for the probes (`pages::probe`); Waldspurger 2002 §5.2 for sampling.

mod sample;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::time::{Duration, Instant};

use model::tracking::TrackingCost;
use model::{Bytes, Reading, Time, Tracking};
use pages::curve::MissRatioCurve;
use sys::kernel_version::KernelVersion;
use sys::outside::{self, Outside as Memory, Piece, Place, page_at};
use sys::process::Identity;
use sys::userfaultfd::Range;

use super::clock::{now_us, own_cpu_ns, time};
use super::cost::{Before, CostMeter, WINDOW};
use super::granules::PAGE;
use super::link::ShimCounters;
use super::mode::Settings;
use super::pager::Pager;
use super::probes::ProbeStrategy;
use super::strategy::{Estimate, Strategy};
use sample::{PageSample, in_huge_pages};

/// A page is polled again after this part of the time that it has been out.
const LADDER: u64 = 12;
/// The interval of the first polls, in microseconds: a step.
const FIRST_LOOK_US: u64 = 95_000;
/// The cost of the guest's TLB flush at a page-out, in nanoseconds.
const FLUSH_NS: u64 = 60_000;
/// A VM of which this number of pages stayed, and none was paged out, cannot be paged out.
const ALL_STAY: u64 = 256;
/// The most tracked pages. With more, the probes of each would be too rare to show its use.
const MOST_TRACKED: u32 = 2048;
/// How often the fitness of the host, the guest's memory and the cost of a touch are checked.
const REVIEW_EVERY: Duration = Duration::from_secs(30);
/// The most pieces of guest RAM; no QEMU maps more.
const MOST_PIECES: usize = 1024;

/// The reason why a VM is not tracked from outside.
#[derive(Debug, thiserror::Error)]
pub(super) enum OutsideError {
    /// The VM as it was started, or this host, does not permit it.
    #[error("{0}")]
    Unfit(String),
    /// The process has ended, or the kernel does not permit its inspection.
    #[error("QEMU's memory cannot be looked at: {0}")]
    Io(#[from] io::Error),
}

/// A page that was out at its last poll.
#[derive(Clone, Copy, Debug)]
struct Watched {
    granule: u32,
    since_us: u64,
    /// When it was last seen to be out.
    seen_us: u64,
    next_us: u64,
    /// It is in swap, and not merely without content.
    is_out: bool,
}

/// A VM that is tracked from outside.
#[derive(Debug)]
pub(super) struct Outside {
    process: Identity,
    ram: Bytes,
    memory: Memory,
    /// The address ranges of its RAM.
    ranges: Vec<Range>,
    sample: PageSample,
    strategy: ProbeStrategy,
    watched: Vec<Watched>,
    /// Pages that are still resident after one request, with its time.
    again: Vec<(u32, Time)>,
    has_second_chance: bool,
    pager: Pager,
    /// All memory is read back, and no page is probed any more.
    is_leaving: bool,
    /// Probes that came back and were not yet reported to the pager.
    probed: u64,
    /// Probes whose pages were paged out, and probes whose pages stayed after two requests.
    has_left: u64,
    has_stayed: u64,
    /// CPU time of paging since the last [`Self::spent`]; it is not a cost of tracking.
    paging_ns: u64,
    cost: CostMeter,
    counters: ShimCounters,
    review: Instant,
}

impl Outside {
    /// Tracks the VM of this process, which has this RAM.
    ///
    /// # Errors
    /// The VM cannot be tracked from outside, or has ended.
    pub(super) fn of(
        process: Identity,
        ram: Bytes,
        settings: &Settings,
        before: Option<Before>,
    ) -> Result<Self, OutsideError> {
        let refault_ns = fit_host()?;
        let pieces = fit(process, ram)?;
        let sample = PageSample::of(&pieces, &mut fastrand::Rng::with_seed(same_for(process)));
        let now = now_us();
        let mut strategy = settings.probes(sample.pages(), MOST_TRACKED, time(now));
        if let Some(before) = before {
            let ago = Duration::from_micros(now.saturating_sub(before.until_us));
            strategy.begin_after(before.share, WINDOW.saturating_sub(ago));
        }
        let counters = ShimCounters {
            traps: 0,
            trap_ns: 0,
            round_trip_ns: refault_ns.saturating_add(FLUSH_NS),
            control_ns: 0,
            given_back: 0,
        };
        Ok(Self {
            process,
            ram,
            memory: Memory::of(process)?,
            pager: Pager::of(process, ranges(&pieces), in_huge_pages(&pieces)),
            is_leaving: false,
            probed: 0,
            has_left: 0,
            has_stayed: 0,
            paging_ns: 0,
            ranges: ranges(&pieces),
            sample,
            strategy,
            watched: Vec::new(),
            again: Vec::new(),
            has_second_chance: KernelVersion::of_host().has_second_chance(),
            cost: CostMeter::new(counters, now, before),
            counters,
            review: Instant::now() + REVIEW_EVERY,
        })
    }

    /// Polls the pages that are out, pages out the probes that are due, and steps the pager.
    pub(super) fn step(&mut self) -> Result<(), OutsideError> {
        if Instant::now() >= self.review {
            self.review = Instant::now() + REVIEW_EVERY;
            self.pager.review();
            self.counters.round_trip_ns = fit_host()?.saturating_add(FLUSH_NS);
            // After memory was plugged, tracking starts anew.
            let ranges = outside::guest_ranges(self.process.pid, self.ram);
            let ranges = ranges.map_err(|error| OutsideError::Unfit(error.to_string()))?;
            if self.process.still(ranges)? != self.ranges {
                return Err(OutsideError::Unfit("its memory has changed".to_owned()));
            }
        }
        let now = now_us();
        self.look(now)?;
        if let Some(taken) = self.cost.look(self.counters, now, || 0) {
            self.strategy.observe(time(now), self.cost.trap_ns(), taken);
        }
        if !self.is_leaving {
            self.page_out(now)?;
        }
        let began = own_cpu_ns();
        if self.pager.is_looking() {
            let Self { sample, strategy, pager, .. } = self;
            let ages = strategy.ages(time(now));
            pager.learn(ages.into_iter().map(|(page, age)| (sample.address(page), age)));
        }
        let probed = std::mem::take(&mut self.probed);
        let refault_ns = self.counters.round_trip_ns.saturating_sub(FLUSH_NS);
        self.pager.step(&self.memory, probed, refault_ns)?;
        if self.pager.take_has_read() {
            self.forget_read(now_us())?;
        }
        self.paging_ns += own_cpu_ns().saturating_sub(began);
        Ok(())
    }

    /// Sets the most that the VM may have in memory, and the memory that QEMU has besides.
    pub(super) fn set_resident(&mut self, target: Option<Bytes>, own: Option<Bytes>) {
        self.pager.order(target, own);
    }

    /// Sets the size of its RAM, as QEMU reports it now.
    pub(super) fn set_ram(&mut self, ram: Bytes) {
        self.ram = ram;
    }

    /// The pager of its memory.
    pub(super) fn pager(&self) -> &Pager {
        &self.pager
    }

    /// Stops the probes, and reads back all memory.
    pub(super) fn recall(&mut self) {
        self.is_leaving = true;
        self.pager.recall();
    }

    /// Polls the watched pages that are due.
    fn look(&mut self, now: u64) -> Result<(), OutsideError> {
        let Self { memory, sample, strategy, counters, probed, .. } = self;
        let mut failed = None;
        self.watched.retain_mut(|watched| {
            if watched.next_us > now || failed.is_some() {
                return true;
            }
            match memory.place(sample.address(watched.granule)) {
                Ok(Place::Out | Place::Nowhere) => {
                    let age = now.saturating_sub(watched.since_us);
                    watched.seen_us = now;
                    watched.next_us = now + (age / LADDER).max(FIRST_LOOK_US);
                    return true;
                }
                Ok(Place::Here | Place::Shared) => {
                    counters.traps += 1;
                    *probed += u64::from(watched.is_out);
                    let middle = u64::midpoint(watched.seen_us, now);
                    strategy.touched(watched.granule, time(middle));
                }
                Err(error) => {
                    failed = Some(error);
                    return true;
                }
            }
            false
        });
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn page_out(&mut self, now_us: u64) -> Result<(), OutsideError> {
        let now = time(now_us);
        let mut asked: Vec<(u32, Option<Time>)> =
            std::mem::take(&mut self.again).into_iter().map(|(it, at)| (it, Some(at))).collect();
        for granule in self.strategy.revoke(now) {
            match self.place(granule)? {
                Place::Here => asked.push((granule, None)),
                // The kernel has paged it out, or the guest has never touched it, or has given it
                // up: its next touch is seen in the same way.
                place @ (Place::Out | Place::Nowhere) => self.watch(granule, now, place),
                Place::Shared => self.strategy.cannot_be_revoked(granule, now, false),
            }
        }
        if asked.is_empty() {
            return Ok(());
        }
        let pages: Vec<Range> =
            asked.iter().map(|(granule, _)| page_at(self.address(*granule))).collect();
        self.memory.page_out(&pages).map_err(io::Error::from)?;
        for (granule, first) in asked {
            let since = first.filter(|_| self.has_second_chance).unwrap_or(now);
            match (self.place(granule)?, first) {
                (place @ (Place::Out | Place::Nowhere), _) => {
                    self.has_left += 1;
                    self.watch(granule, since, place);
                }
                (Place::Shared, _) => self.strategy.cannot_be_revoked(granule, now, false),
                (Place::Here, None) => self.again.push((granule, now)),
                (Place::Here, Some(_)) => {
                    self.has_stayed += 1;
                    self.counters.traps += 1;
                    self.strategy.revoked(granule, since);
                    self.strategy.touched(granule, now);
                }
            }
        }
        if self.has_left == 0 && self.has_stayed >= ALL_STAY {
            let why = "the kernel pages out none of its memory: it is pinned, or its cgroup forbids \
                       swap (MemorySwapMax=0)";
            return Err(OutsideError::Unfit(why.to_owned()));
        }
        Ok(())
    }

    /// Cancels probes whose pages were read back: no touch of the guest is known.
    fn forget_read(&mut self, now: u64) -> Result<(), OutsideError> {
        let Self { memory, sample, strategy, watched, .. } = self;
        let mut failed = None;
        watched.retain(|it| match memory.place(sample.address(it.granule)) {
            Ok(Place::Here | Place::Shared) => {
                strategy.called_back(it.granule, time(now));
                false
            }
            Ok(Place::Out | Place::Nowhere) => true,
            Err(error) => {
                failed = Some(error);
                true
            }
        });
        failed.map_or(Ok(()), |error| Err(error.into()))
    }

    fn watch(&mut self, granule: u32, since: Time, place: Place) {
        self.strategy.revoked(granule, since);
        let since_us = since.0 * 1_000;
        let next_us = since_us + FIRST_LOOK_US;
        let is_out = place == Place::Out;
        self.watched.push(Watched { granule, since_us, seen_us: since_us, next_us, is_out });
    }

    fn place(&self, granule: u32) -> Result<Place, OutsideError> {
        Ok(self.memory.place(self.address(granule))?)
    }

    fn address(&self, granule: u32) -> u64 {
        self.sample.address(granule)
    }

    /// Adds the CPU time `ns` of the last step, less its part for paging.
    pub(super) fn spent(&mut self, ns: u64) {
        self.cost.spent(ns.saturating_sub(std::mem::take(&mut self.paging_ns)));
    }

    /// The cost of tracking, as of the last step.
    pub(super) fn cost(&self) -> TrackingCost {
        self.cost.cost()
    }

    /// Guest RAM.
    pub(super) fn ram(&self) -> Bytes {
        self.sample.ram()
    }

    /// The whole curve, sizes in bytes.
    pub(super) fn curve(&self) -> Option<MissRatioCurve> {
        let estimate = self.strategy.estimate(time(now_us()))?;
        Some(estimate.curve.scaled(self.bytes_per_page()))
    }

    /// The reading, if enough is known.
    pub(super) fn reading(&self) -> Option<Reading<Tracking>> {
        let estimate: Estimate = self.strategy.estimate(time(now_us()))?;
        let seen = Bytes(u64::from(self.sample.pages()) * PAGE);
        Some(estimate.reading(self.bytes_per_page(), Bytes(PAGE), Some(seen), self.cost()))
    }

    /// The amount of VM memory for which each page of the sample stands.
    #[expect(clippy::cast_precision_loss, reason = "4096")]
    fn bytes_per_page(&self) -> f64 {
        self.sample.scale() * PAGE as f64
    }
}

/// The time of a touch of a paged-out page, in nanoseconds, if this host can page out VMs.
fn fit_host() -> Result<u64, OutsideError> {
    outside::refault_ns_of_host().map_err(OutsideError::Unfit)
}

/// The pieces of the VM's memory, if it can be tracked from outside.
fn fit(process: Identity, ram: Bytes) -> Result<Vec<Piece>, OutsideError> {
    let unfit = |why: String| Err(OutsideError::Unfit(why));
    let pieces = outside::guest_ram(process.pid, ram);
    let pieces = process.still(pieces)?.map_err(|error| OutsideError::Unfit(error.to_string()))?;
    let Some(pieces) = pieces.filter(|pieces| pieces.len() <= MOST_PIECES) else {
        return unfit(format!(
            "no private memory of QEMU is as large as its RAM of {ram}: it is shared with other \
             processes, or in hugetlbfs"
        ));
    };
    if pieces.iter().any(|piece| piece.is_locked) {
        return unfit("its memory is locked".to_owned());
    }
    if outside::passes_devices_through(process.pid) {
        return unfit("a device is passed through to it, which pins its memory".to_owned());
    }
    Ok(pieces)
}

/// A seed that is constant for a process, and that no guest knows: the blocks that stand for a VM
/// stay the same when a worker restarts.
fn same_for(process: Identity) -> u64 {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut hasher = DefaultHasher::new();
    (boot, process.pid, process.start_ticks).hash(&mut hasher);
    hasher.finish()
}

fn ranges(pieces: &[Piece]) -> Vec<Range> {
    pieces.iter().map(|piece| piece.range).collect()
}
