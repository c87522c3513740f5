//! What a VM does not touch: which of it is paged out, and when it comes back.
//!
//! **Problem.** The kernel pages out what it finds unused in its own lists, which know nothing of a
//! guest; a balloon takes what the guest finds unused, and never comes back quickly. **Idea.**
//! Tracking knows of each granule that is out of reach for how long it has not been touched. While
//! the VM has more in memory than its target, those that were not touched for longest are paged
//! out. Where too few are out of reach, more are revoked, and whoever is not touched until the next
//! step follows: a clock with a second chance.
//!
//! **Coming back.** A touch brings its granule within reach by itself, and the kernel reads the
//! page; the others follow as they are touched. Who touches many granules in one step has woken:
//! what was touched last before it slept is read in bulk, as far as the target allows, and nothing
//! is paged out until the policy has heard of it ([`AWAKE`]). Without a target everything comes
//! back.
//!
//! **Invariants.** Nothing here waits. What is paged out is only what the shim has out of reach, so
//! nothing that is shared, freed or pinned. What a request came to is taken from the page states.
//!
//! **Leaves out.** How much: the policy's. What the kernel swaps out beside that: it counts in what
//! is out, and comes back at a touch that nobody sees. So do the pages of a granule after its first
//! touch, which is what a refault counts.
//!
//! Source: Waldspurger 2002 §3.4 (idle memory); Lagar-Cavilla 2019 and Weiner 2022 (TMO) for
//! refaults as the measure.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use model::cold::UNTOUCHED_FOR;
use model::{Bytes, Cold as Reading, Reading as At, Time};
use protocol::MAX_REVOKE;
use sys::clock::boot_now;
use sys::meminfo::MemInfo;
use sys::memory_of::Counters;
use sys::process::Identity;

use super::granules::Granules;
use super::holdings::Holdings;
use super::link::{Link, LinkError};
use super::strategy::Strategy;

/// So much is paged out by one request, and read back.
const BATCH: Bytes = Bytes::mib(64);
/// A VM that touches so many granules in one step that are out has woken.
const WAKES: u32 = 16;
/// For so long it is looked all the time what it touches next.
const WAKING: Duration = Duration::from_millis(500);
/// For so long nothing of it is paged out then: the policy hears of it within two seconds …
const AWAKE: Duration = Duration::from_secs(3);
/// … and how soon that may be so again: a VM that has too little touches what is out all the time.
const AWAKE_AGAIN: Duration = Duration::from_secs(30);
/// What is touched at once is read back so many times over.
const READ_AHEAD: u64 = 16;
/// How fast a rate of refaults follows: the share of the latest second.
const SMOOTHING: f64 = 0.3;
/// With less of it free the host's swap is full.
const LEAST_SWAP: Bytes = Bytes::mib(2);
/// How long nothing is paged out then.
const REST: Duration = Duration::from_secs(2);
/// How often rates and ages are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// Of so many measurements of a refault the median counts.
const MEASURES: usize = 9;
/// A tick of the strategy's ages, in milliseconds.
const TICK_MS: u64 = 100;

/// What of a VM is out.
#[derive(Debug)]
pub(super) struct Cold {
    process: Identity,
    /// What it is to have in memory at most; `None`: all is to come back.
    target: Option<Bytes>,
    /// What QEMU has beside; `None`: not known yet.
    own: Option<Bytes>,
    holdings: Holdings,
    /// Per granule, by index.
    places: Vec<Place>,
    out_count: u32,
    /// Touches of granules that are out: since the last step, …
    in_step: u32,
    /// … since the last look, …
    in_look: u32,
    /// … and those that tracking's cost has not been told of.
    untold: u64,
    per_s: f64,
    looked: Instant,
    woke: Option<Instant>,
    paged_out: u64,
    returned: u64,
    untouched: [Bytes; 3],
    /// What touches of pages that are out took, the latest first.
    refaults_ns: VecDeque<u64>,
    /// Until when nothing is paged out, for the host's swap is full.
    rests: Option<Instant>,
}

/// Where a granule is, as far as paging goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In memory.
    Here,
    /// Paged out, and not touched since.
    Out,
    /// It was to be paged out, and had no content. It gets some by a touch.
    Stayed,
}

impl Cold {
    /// Of a VM with this number of granules, of this QEMU process.
    pub(super) fn of(process: Identity, granules: u32) -> Self {
        Self {
            process,
            target: None,
            own: None,
            holdings: Holdings::default(),
            places: vec![Place::Here; granules as usize],
            out_count: 0,
            in_step: 0,
            in_look: 0,
            untold: 0,
            per_s: 0.0,
            looked: Instant::now(),
            woke: None,
            paged_out: 0,
            returned: 0,
            untouched: [Bytes::ZERO; 3],
            refaults_ns: VecDeque::new(),
            rests: None,
        }
    }

    /// What it is to have in memory at most, and what QEMU has beside.
    pub(super) fn order(&mut self, target: Option<Bytes>, own: Option<Bytes>) {
        (self.target, self.own) = (target, own);
    }

    /// A granule was touched; whether it was out.
    pub(super) fn touched(&mut self, granule: u32) -> bool {
        let was_out = self.is_back(granule);
        if was_out {
            self.in_step += 1;
            self.in_look += 1;
            self.untold += 1;
        }
        was_out
    }

    /// How many of these touches there were since the last call: they are not tracking's cost.
    pub(super) fn take_untold(&mut self) -> u64 {
        std::mem::take(&mut self.untold)
    }

    /// A granule is within reach.
    fn is_back(&mut self, granule: u32) -> bool {
        let Some(place) = self.places.get_mut(granule as usize) else { return false };
        let was_out = std::mem::replace(place, Place::Here) == Place::Out;
        self.out_count -= u32::from(was_out);
        self.returned += u64::from(was_out);
        was_out
    }

    /// Nothing is out of reach any more. What is in swap comes back by touches, or is found to be
    /// there already when it is to be paged out.
    pub(super) fn forget(&mut self) {
        self.places.fill(Place::Here);
        self.out_count = 0;
    }

    /// These granules are within reach again.
    pub(super) fn recalled(&mut self, granules: &[u32]) {
        for granule in granules {
            self.is_back(*granule);
        }
    }

    /// These granules were to be paged out; whether each is, or else whether it is still out of
    /// reach.
    pub(super) fn paged_out(&mut self, granules: &[(u32, bool, bool)]) {
        let mut went = 0;
        let is_any_out = granules.iter().any(|(_, is_out, _)| *is_out);
        if !is_any_out && MemInfo::read().is_ok_and(|host| host.swap_free < LEAST_SWAP) {
            self.rests = Some(Instant::now() + REST);
            return;
        }
        for &(granule, is_out, is_staged) in granules {
            let Some(place) = self.places.get_mut(granule as usize) else { continue };
            match (is_out, is_staged) {
                (true, _) if *place != Place::Out => {
                    *place = Place::Out;
                    went += 1;
                }
                (true, _) => {}
                (false, true) => *place = Place::Stayed,
                // It was touched meanwhile.
                (false, false) => {}
            }
        }
        self.out_count += went;
        self.paged_out += u64::from(went);
    }

    /// Why nothing is paged out just now, although it is to be.
    pub(super) fn why_not(&self) -> Option<&'static str> {
        let rests = self.rests.is_some_and(|until| Instant::now() < until);
        (rests && self.target.is_some()).then_some("the host has no swap, or it is full")
    }

    /// Whether anything is out: also what a worker before this one has paged out.
    pub(super) fn has_out(&self) -> bool {
        let is_swapped = || Counters::of(self.process.pid).is_ok_and(|now| !now.swapped.is_zero());
        self.out_count > 0 || is_swapped()
    }

    /// Whether more is to be paged out, or read, than one step's.
    pub(super) fn is_busy(&self, link: &Link) -> bool {
        let is_waking = self.woke.is_some_and(|woke| woke.elapsed() < WAKING);
        let comes_back = self.out_count > 0 && (self.target.is_none() || is_waking);
        link.is_paging_out() || comes_back
    }

    /// Asks for what is due; answers how many granules more are to be revoked.
    pub(super) fn step(
        &mut self,
        link: &mut Link,
        granules: &Granules,
        strategy: &mut dyn Strategy,
        now: Time,
    ) -> Result<u32, LinkError> {
        let in_step = std::mem::take(&mut self.in_step);
        if self.target.is_none() && self.out_count == 0 {
            return Ok(0);
        }
        // Without QEMU's own part it is not known what the guest has: nothing is taken then.
        let holdings = self.own.and_then(|own| Holdings::of(self.process, own));
        self.holdings = holdings.unwrap_or_default();
        let bytes = granules.granule_bytes();
        self.look(bytes, strategy, now);
        let moment = Instant::now();
        if in_step >= WAKES && self.woke.is_none_or(|woke| moment - woke > AWAKE_AGAIN) {
            self.woke = Some(moment);
        }
        let is_awake = self.woke.is_some_and(|woke| moment - woke < AWAKE);
        let rests = self.rests.is_some_and(|until| moment < until);
        let resident = self.holdings.resident;
        let room = self.target.map_or(Bytes(u64::MAX), |target| target.minus(resident));
        let wanted = match self.target {
            None => BATCH,
            Some(_) if is_awake => Bytes(u64::from(in_step) * READ_AHEAD * bytes).min(BATCH),
            Some(_) => Bytes::ZERO,
        };
        let back = wanted.min(room).0 / bytes;
        if back > 0 && self.out_count > 0 && !link.is_recalling() {
            self.read_back(back, link, granules, strategy, now)?;
        }
        let excess = self.target.map_or(Bytes::ZERO, |target| resident.minus(target));
        let count = excess.min(BATCH).0 / bytes;
        if holdings.is_none() || is_awake || rests || count == 0 || link.is_paging_out() {
            return Ok(0);
        }
        self.page_out(count, link, granules, strategy, now)
    }

    /// What was not touched for longest goes out.
    fn page_out(
        &mut self,
        count: u64,
        link: &mut Link,
        granules: &Granules,
        strategy: &mut dyn Strategy,
        now: Time,
    ) -> Result<u32, LinkError> {
        let mut idle = strategy.idle(now);
        // Who is not touched for one step has had his chance.
        idle.retain(|(granule, ticks)| *ticks > 0 && self.place(*granule) == Place::Here);
        idle.sort_unstable_by_key(|(_, ticks)| std::cmp::Reverse(*ticks));
        let (numbers, indexes) = first(count, idle, granules);
        let lacking = count.saturating_sub(indexes.len() as u64);
        if !indexes.is_empty() {
            link.page_out(numbers, indexes)?;
        }
        Ok(u32::try_from(lacking).unwrap_or(u32::MAX))
    }

    /// What was touched last is read.
    fn read_back(
        &mut self,
        count: u64,
        link: &mut Link,
        granules: &Granules,
        strategy: &mut dyn Strategy,
        now: Time,
    ) -> Result<(), LinkError> {
        let mut idle = strategy.idle(now);
        idle.retain(|(granule, _)| self.place(*granule) == Place::Out);
        idle.sort_unstable_by_key(|(_, ticks)| *ticks);
        let (numbers, indexes) = first(count, idle, granules);
        if indexes.is_empty() {
            // What the strategy does not know of any more is back.
            self.forget();
            return Ok(());
        }
        link.recall(numbers, indexes)
    }

    fn place(&self, granule: u32) -> Place {
        self.places.get(granule as usize).copied().unwrap_or(Place::Stayed)
    }

    /// Rates and ages, once in a second.
    fn look(&mut self, bytes: u64, strategy: &mut dyn Strategy, now: Time) {
        let passed = self.looked.elapsed();
        if passed < LOOK {
            return;
        }
        self.looked = Instant::now();
        let latest = f64::from(std::mem::take(&mut self.in_look)) / passed.as_secs_f64();
        self.per_s += SMOOTHING * (latest - self.per_s);
        let idle = strategy.idle(now);
        let content = self.holdings.resident.plus(self.holdings.swapped);
        self.untouched = UNTOUCHED_FOR.map(|length| {
            let untouched = idle.iter().filter(|(_, t)| u64::from(*t) * TICK_MS >= length.0);
            // What never had any content is not touched either.
            let touched = self.places.len().saturating_sub(untouched.count());
            content.minus(Bytes(touched as u64 * bytes))
        });
    }

    /// Takes in what the shim has measured of a touch of a page that is out; 0: nothing.
    pub(super) fn note_refault(&mut self, ns: u64) {
        if ns > 0 && self.refaults_ns.front() != Some(&ns) {
            self.refaults_ns.push_front(ns);
            self.refaults_ns.truncate(MEASURES);
        }
    }

    /// What such a touch takes as a rule, in nanoseconds; 0: not measured. One that was preempted
    /// says nothing.
    fn refault_ns(&self) -> u64 {
        let mut all: Vec<u64> = self.refaults_ns.iter().copied().collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    }

    /// Where the VM's memory is; `None`: nothing is to be paged out, or that is not known.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is positive, and a VM's"
    )]
    pub(super) fn reading(&self, bytes: u64) -> Option<At<Reading>> {
        self.target?;
        self.own?;
        let reading = Reading {
            resident: self.holdings.resident,
            out: self.holdings.swapped,
            target: self.target,
            untouched: self.untouched,
            refaulted_per_s: Bytes((self.per_s * bytes as f64) as u64),
            refaults_per_s: self.per_s,
            refault_ns: self.refault_ns(),
            paged_out: Bytes(self.paged_out.saturating_mul(bytes)),
            returned: Bytes(self.returned.saturating_mul(bytes)),
        };
        Some(At::new(reading, boot_now()))
    }
}

/// The numbers and the indexes of so many of these granules, the first ones.
fn first(count: u64, mut of: Vec<(u32, u32)>, granules: &Granules) -> (Vec<u32>, Vec<u32>) {
    of.truncate(usize::try_from(count).unwrap_or(usize::MAX).min(MAX_REVOKE));
    let indexes: Vec<u32> = of.into_iter().map(|(granule, _)| granule).collect();
    (indexes.iter().map(|index| granules.number(*index)).collect(), indexes)
}
