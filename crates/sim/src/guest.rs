//! A running fake guest: the places of its memory, second by second.
//!
//! ```text
//!   ram ├── balloon ──┼────────────── actual ──────────────┤
//!                     ├─ free ─┼─ cache ─┼─ resident ──────┤     wanted = resident + swapped
//! ```
//!
//! Each second the balloon moves towards its target, and the programs touch all the memory that
//! they want. The excess is swapped out, or kills a program where there is no swap. A guest
//! suffers in a second in which it reads pages back from swap.
//!
//! The host may page out memory that a tracked guest does not touch. Such a guest keeps all its
//! RAM, `actual` of which is resident. It waits for touches beyond that, and its curve is whole.

use std::collections::{BTreeMap, VecDeque};

use fastrand::Rng;
use model::{
    Bytes, Cold, GuestStats, Link, Means, Migration, Reading, Time, Tracking, VmName, VmView,
    tracking::CurvePoint,
    view::{Mechanism, MemoryLimit},
};

use crate::fake::{Fake, Lie, Nature};

/// Distance that an ordinary balloon moves in a second.
const BALLOON_PER_SECOND: Bytes = Bytes::mib(200);

/// Throughput of an ordinary swap disk in a second, in each direction.
const DISK_PER_SECOND: Bytes = Bytes::mib(20);

/// Size of a page in bytes.
const PAGE: u64 = 4096;

/// Piece of memory that is tracked and paged out as a whole.
const GRANULE: Bytes = Bytes::kib(128);

/// [`DISK_PER_SECOND`] in pages. A program waits for each of them.
const DISK_READS: f64 = (DISK_PER_SECOND.0 / PAGE) as f64;

/// Duration in seconds of a refault: a touch of a piece that the host has paged out.
const REFAULT: f64 = 1e-4;

/// Share of its time from which on a guest suffers when it waits for refaults.
const LONG_WAITS: f64 = 0.02;

/// Seconds for which the guest's past sizes are kept.
const REMEMBERED: usize = 60;

/// Swap-in in one second from which on the guest suffers.
const SUFFERING: Bytes = Bytes::mib(1);

/// QEMU's own memory, in addition to its guest's.
const OWN: Bytes = Bytes::mib(40);

/// Seconds until a killed program restarts.
const DEAD_FOR: u64 = 10;

/// A guest at one moment of a run.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its name on the host.
    pub name: VmName,
    /// Its description.
    pub fake: Fake,
    /// Number of this incarnation, counted from 1.
    pub incarnation: u64,
    /// Whether QEMU runs.
    pub is_alive: bool,
    /// Memory that the balloon leaves it; while it is paged, the most that is resident.
    pub actual: Bytes,
    /// Target for `actual`.
    pub target: Bytes,
    /// Memory that the balloon took in the last second.
    pub inflated: Bytes,
    /// Resident memory of the programs and the kernel.
    pub resident: Bytes,
    /// Memory in the guest's swap.
    pub swapped: Bytes,
    /// Page cache.
    pub cache: Bytes,
    /// Memory that the guest occupies on the host.
    pub used: Bytes,
    /// References that missed so far, if the guest has an access pattern.
    pub misses: f64,
    /// Programs killed for want of memory so far.
    pub kills: u64,
    /// Whether a migration is under way.
    pub is_migrating: bool,
    /// Whether the host pages out memory that it does not touch.
    pub is_paged: bool,
    /// Memory that it has touched so far.
    touched: Bytes,
    /// Memory that it wanted in each recent second, the latest first.
    wants: VecDeque<Bytes>,
    second: u64,
    wanted: Bytes,
    dead_until: u64,
    swap_in: Bytes,
    swap_out: Bytes,
    swap_in_now: Bytes,
    major_faults: u64,
    stats: Option<Reading<GuestStats>>,
}

impl Guest {
    /// Boots `fake` under `name`.
    #[must_use]
    pub fn boot(name: VmName, fake: Fake) -> Self {
        let actual = fake.balloon.unwrap_or(fake.ram);
        let used = if fake.preallocated { actual } else { Bytes::ZERO };
        Self {
            name,
            incarnation: 1,
            is_alive: true,
            actual,
            target: actual,
            inflated: Bytes::ZERO,
            resident: Bytes::ZERO,
            swapped: Bytes::ZERO,
            cache: Bytes::ZERO,
            misses: 0.0,
            used,
            kills: 0,
            is_migrating: false,
            is_paged: false,
            touched: used,
            wants: VecDeque::new(),
            second: 0,
            wanted: Bytes::ZERO,
            dead_until: 0,
            swap_in: Bytes::ZERO,
            swap_out: Bytes::ZERO,
            swap_in_now: Bytes::ZERO,
            major_faults: 0,
            stats: None,
            fake,
        }
    }

    /// Simulates `second`, which ends at `now`.
    pub(crate) fn live(&mut self, second: u64, now: Time, rng: &mut Rng) {
        self.come_and_go(second);
        self.second = second;
        if !self.is_alive {
            return;
        }
        self.is_migrating = self.any(|nature| {
            matches!(nature, Nature::Migrating { from, until } if (*from..*until).contains(&second))
        });
        self.move_balloon(second);
        self.work(second, rng);
        self.tell(second, now, rng);
    }

    /// Whether its programs wait noticeably for pages from swap, or for refaults.
    #[must_use]
    pub fn suffers(&self) -> bool {
        let waits = self.is_paged && self.awake() < 1.0 - LONG_WAITS;
        self.is_alive && (waits || self.swap_in_now >= SUFFERING)
    }

    /// Memory that the guest does not use.
    #[must_use]
    pub fn free(&self) -> Bytes {
        self.actual.minus(self.resident.plus(self.cache))
    }

    /// Whether it has a nature for which `is_it` holds.
    pub fn any(&self, is_it: impl Fn(&Nature) -> bool) -> bool {
        self.fake.natures.iter().any(is_it)
    }

    /// Takes a new target for its balloon, or for its resident memory.
    pub(crate) fn ask(&mut self, incarnation: u64, target: Bytes, by: Means) {
        if self.is_alive && self.incarnation == incarnation {
            self.target = target.min(self.fake.ram);
            self.is_paged = by == Means::Paging;
        }
    }

    /// The host's view of it; `None` while there is no such VM.
    pub(crate) fn view(&self, now: Time) -> Option<VmView> {
        let has_driver = !self.any(|nature| *nature == Nature::NoBalloonDriver);
        let mut limits = BTreeMap::new();
        if !has_driver {
            limits.insert(Mechanism::Balloon, "the guest has no balloon driver".to_owned());
        }
        let migration = if self.is_migrating { Migration::Active } else { Migration::None };
        self.is_alive.then(|| VmView {
            incarnation: self.incarnation,
            ram: self.fake.ram,
            balloon: has_driver.then(|| Reading::new(self.balloon(), now)),
            cold: self.cold().map(|cold| Reading::new(cold, now)),
            stats: self.stats.filter(|_| has_driver),
            used: Some(Reading::new(self.used, now)),
            migration,
            tracking: self.tracking().map(|tracking| Reading::new(tracking, now)),
            memory_limits: Some(Reading::new(self.memory_limits(), now)),
            limits,
            ..VmView::unknown(Link::Up)
        })
    }

    /// Memory that its QEMU occupies beyond the limit of its cgroup.
    #[must_use]
    pub fn beyond_limit(&self) -> Bytes {
        let limits = self.memory_limits().into_iter();
        limits.map(|limit| limit.used.minus(limit.limit)).max().unwrap_or_default()
    }

    fn memory_limits(&self) -> Vec<MemoryLimit> {
        let limits = self.fake.natures.iter().filter_map(|nature| match nature {
            Nature::Confined { limit } => Some(*limit),
            _ => None,
        });
        let of = |limit| MemoryLimit {
            cgroup: format!("/{}", self.name),
            file: "memory.max".to_owned(),
            limit,
            used: self.used.plus(OWN),
        };
        limits.map(of).collect()
    }

    /// Memory that its balloon leaves it.
    const fn balloon(&self) -> Bytes {
        if self.is_paged { self.fake.ram } else { self.actual }
    }

    /// The places of its memory, if it is tracked.
    fn cold(&self) -> Option<Cold> {
        let refaults_per_s = self.misses_with(self.actual)?;
        let resident = self.touched.min(self.actual);
        let untouched = |seconds| {
            let wanted = self.wants.iter().take(seconds).copied().max().unwrap_or_default();
            self.touched.minus(wanted)
        };
        Some(Cold {
            resident,
            out: self.touched.minus(resident),
            target: self.is_paged.then_some(self.target),
            untouched: [untouched(10), untouched(REMEMBERED), Bytes::ZERO],
            refaults_per_s: if self.is_paged { refaults_per_s } else { 0.0 },
            refaulted_per_s: bytes(refaults_per_s * GRANULE.0 as f64),
            refault_ns: 100_000,
            ..Cold::default()
        })
    }

    fn come_and_go(&mut self, second: u64) {
        for nature in self.fake.natures.clone() {
            let Nature::VanishingVm { at, away } = nature else { continue };
            if second == at {
                self.is_alive = false;
                (self.used, self.resident, self.cache) = (Bytes::ZERO, Bytes::ZERO, Bytes::ZERO);
            } else if second == at + away {
                let (incarnation, kills) = (self.incarnation + 1, self.kills);
                *self = Self::boot(self.name.clone(), self.fake.clone());
                (self.incarnation, self.kills) = (incarnation, kills);
            }
        }
    }

    fn move_balloon(&mut self, second: u64) {
        let before = self.actual;
        let mut speed = BALLOON_PER_SECOND;
        for nature in &self.fake.natures {
            match nature {
                Nature::StuckBalloon { from } if *from <= second => speed = Bytes::ZERO,
                Nature::NoBalloonDriver => speed = Bytes::ZERO,
                Nature::SlowBalloon { per_second } => speed = speed.min(*per_second),
                _ => {}
            }
        }
        self.actual = if self.target < self.actual {
            self.target.max(self.actual.minus(speed))
        } else {
            self.target.min(self.actual.plus(speed))
        };
        // Paging out does not stall a guest, as inflating a balloon does.
        self.inflated = if self.is_paged { Bytes::ZERO } else { before.minus(self.actual) };
    }

    /// The programs touch all the memory that they want. The excess is swapped out, or kills a
    /// program.
    fn work(&mut self, second: u64, rng: &mut Rng) {
        let is_storm = self.any(|nature| *nature == Nature::SwapStorm);
        let programs = if is_storm {
            self.fake.ram.plus(self.fake.ram)
        } else if second < self.dead_until {
            Bytes::ZERO
        } else {
            self.fake.load.at(second)
        };
        let jitter = Bytes(rng.u64(0..=programs.0 / 100));
        let wanted = Fake::KERNEL.plus(programs).minus(jitter);
        // Memory that programs free leaves swap without I/O.
        self.swapped = self.swapped.minus(self.wanted.minus(wanted));
        self.wanted = wanted;
        self.wants.push_front(wanted);
        self.wants.truncate(REMEMBERED);
        self.swap_in_now = Bytes::ZERO;
        if self.is_paged {
            return self.work_paged(wanted);
        }
        let lacking = wanted.minus(self.actual);
        if !lacking.is_zero() && self.any(|nature| *nature == Nature::Swapless) {
            self.kills += 1;
            self.dead_until = second + DEAD_FOR;
            self.wanted = Fake::KERNEL;
        } else {
            self.swap(lacking);
        }
        self.resident = self.wanted.minus(self.swapped).min(self.actual);
        self.cache = self.fake.cache.min(self.actual.minus(self.resident));
        let in_use = self.resident.plus(self.cache);
        let is_pinned = self.any(|nature| *nature == Nature::PinnedMemory);
        let keeps = is_pinned || !self.fake.reports_free;
        self.used = if keeps { self.used.max(in_use) } else { in_use };
        if !is_pinned {
            self.used = self.used.min(self.actual);
        }
    }

    /// Touched memory is resident up to `actual`; the rest is paged out and refaults.
    fn work_paged(&mut self, wanted: Bytes) {
        self.touched = self.touched.max(wanted).min(self.fake.ram);
        if self.fake.reports_free {
            self.touched = wanted.min(self.fake.ram);
        }
        self.misses += self.misses_with(self.actual).unwrap_or_default();
        (self.swapped, self.cache) = (Bytes::ZERO, Bytes::ZERO);
        self.resident = self.wanted.min(self.actual);
        self.used = self.touched.min(self.actual);
    }

    /// Moves pages until `lacking` lies in swap. Programs that lack memory thrash, page by page.
    /// Other pages are read back with read-ahead.
    fn swap(&mut self, lacking: Bytes) {
        self.swap_out = self.swap_out.plus(lacking.minus(self.swapped));
        self.swapped = self.swapped.max(lacking);
        let back = self.swapped.minus(lacking).min(DISK_PER_SECOND);
        let thrashed = match self.misses_with(self.actual) {
            Some(misses) => {
                self.misses += misses;
                bytes(misses * PAGE as f64).min(DISK_PER_SECOND)
            }
            None => lacking.min(DISK_PER_SECOND),
        };
        self.swapped = self.swapped.minus(back);
        self.swap_in_now = back.plus(thrashed);
        self.major_faults += back.0 / policy::tuning::READ_AHEAD.0 + thrashed.0 / PAGE;
        self.swap_in = self.swap_in.plus(self.swap_in_now);
        self.swap_out = self.swap_out.plus(thrashed);
    }

    /// Misses of its programs per second with `memory`; `None` without an access pattern. Each
    /// miss waits for the disk or the refault, and meanwhile the programs make no other reference.
    #[must_use]
    pub fn misses_with(&self, memory: Bytes) -> Option<f64> {
        let access = self.fake.access(self.second)?;
        let misses = access.references_per_s * access.miss_ratio(self.share(memory));
        Some(misses / (1.0 + misses * self.miss_s()))
    }

    /// Duration of a miss in seconds.
    const fn miss_s(&self) -> f64 {
        if self.is_paged { REFAULT } else { 1.0 / DISK_READS }
    }

    /// The share of time in which its programs do not wait for misses.
    #[must_use]
    pub fn awake(&self) -> f64 {
        1.0 - self.misses_with(self.actual).unwrap_or_default() * self.miss_s()
    }

    /// Memory beyond the kernel's, as a share of the memory that its programs want. The share
    /// exceeds 1 where memory is left over.
    fn share(&self, memory: Bytes) -> f64 {
        let programs = self.wanted.minus(Fake::KERNEL);
        memory.minus(Fake::KERNEL).0 as f64 / programs.0.max(1) as f64
    }

    /// Tracking's report. The curve covers the memory that the balloon leaves the guest, or all
    /// that its programs want if that is less.
    fn tracking(&self) -> Option<Tracking> {
        let access = self.fake.access(self.second)?;
        let programs = self.wanted.minus(Fake::KERNEL).0 as f64;
        let end = self.share(self.balloon()).min(1.0);
        let inside = access.curve.iter().copied().take_while(|(share, _)| *share < end);
        let last = (end, access.miss_ratio(end));
        let kernel = CurvePoint { memory: Bytes::ZERO, miss_ratio: 1.0 };
        let point = |(share, miss_ratio)| CurvePoint {
            memory: Fake::KERNEL.plus(bytes(share * programs)),
            miss_ratio,
        };
        Some(Tracking {
            working_set: Some(self.wanted),
            swapped: self.swapped,
            curve: std::iter::once(kernel).chain(inside.chain([last]).map(point)).collect(),
            references_per_s: access.references_per_s * self.awake(),
            granule: GRANULE,
            ..Tracking::default()
        })
    }

    /// Renews its statistics, unless the answer is late in this second.
    fn tell(&mut self, second: u64, now: Time, rng: &mut Rng) {
        let is_late = rng.u8(0..8) == 0;
        let is_frozen = |n: &Nature| matches!(n, Nature::FrozenStats { from } if *from <= second);
        if is_late || self.any(is_frozen) {
            return;
        }
        let mut stats = GuestStats {
            total: Some(self.actual),
            free: Some(self.free()),
            available: Some(self.free().plus(self.cache)),
            disk_caches: Some(self.cache),
            swap_in: Some(self.swap_in),
            swap_out: Some(self.swap_out),
            major_faults: Some(self.major_faults),
            minor_faults: Some(second * 100),
            oom_kills: self.any(|nature| *nature == Nature::CountsKills).then_some(self.kills),
        };
        for nature in &self.fake.natures {
            if let Nature::LyingStats(lie) = nature {
                falsify(&mut stats, *lie, self.actual, second);
            }
        }
        self.stats = Some(Reading::new(stats, now));
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
fn bytes(size: f64) -> Bytes {
    Bytes(size as u64)
}

fn falsify(stats: &mut GuestStats, lie: Lie, actual: Bytes, second: u64) {
    match lie {
        Lie::Idle => {
            stats.free = Some(actual.percent(90));
            stats.available = stats.free;
            (stats.swap_in, stats.swap_out) = (Some(Bytes::ZERO), Some(Bytes::ZERO));
        }
        Lie::Hungry => {
            (stats.free, stats.available) = (Some(Bytes::ZERO), Some(Bytes::ZERO));
            stats.swap_in = Some(Bytes::mib(10 * second));
            stats.swap_out = stats.swap_in;
        }
        Lie::Impossible => {
            stats.free = Some(Bytes(u64::MAX / 2));
            stats.available = stats.free;
            (stats.swap_in, stats.swap_out) = (None, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lived(fake: Fake, seconds: u64) -> Guest {
        let mut guest = Guest::boot("a".into(), fake);
        let mut rng = Rng::with_seed(1);
        for second in 0..seconds {
            guest.live(second, Time(second * 1000), &mut rng);
        }
        guest
    }

    #[test]
    fn a_guest_that_wants_more_than_it_has_swaps_and_suffers() {
        let guest = lived(Fake::busy("a", 200).standing_at(128), 5);
        assert!(guest.suffers());
        assert_eq!(guest.resident, guest.actual);
        assert_eq!(guest.resident.plus(guest.swapped), guest.wanted);
        assert!(guest.swap_out > Bytes::ZERO && guest.kills == 0);
    }

    #[test]
    fn without_swap_the_same_kills_its_program() {
        let guest = lived(Fake::busy("a", 200).standing_at(128).that(Nature::Swapless), 5);
        assert_eq!((guest.kills, guest.swapped), (1, Bytes::ZERO));
        assert!(!guest.suffers());
    }

    #[test]
    fn freed_memory_stays_on_the_host_only_with_a_hoarder() {
        let load = Fake::busy("a", 200).then(3, 10);
        assert!(lived(load.clone(), 6).used < Bytes::mib(50));
        assert!(lived(load.hoarding(), 6).used > Bytes::mib(200));
    }

    #[test]
    fn a_stuck_balloon_stays_and_a_slow_one_crawls() {
        let moved = |nature| {
            let mut guest = Guest::boot("a".into(), Fake::idle("a").that(nature));
            guest.ask(1, Bytes::mib(100), Means::Balloon);
            guest.live(0, Time(0), &mut Rng::with_seed(1));
            guest.inflated
        };
        assert_eq!(moved(Nature::StuckBalloon { from: 0 }), Bytes::ZERO);
        assert_eq!(moved(Nature::SlowBalloon { per_second: Bytes::mib(2) }), Bytes::mib(2));
        assert_eq!(moved(Nature::Swapless), Bytes::mib(200));
    }

    #[test]
    fn what_was_asked_of_the_dead_is_not_done_to_the_newborn() {
        let mut guest = lived(Fake::idle("a").that(Nature::VanishingVm { at: 2, away: 2 }), 6);
        assert_eq!(guest.incarnation, 2);
        guest.ask(1, Bytes::mib(64), Means::Balloon);
        assert_eq!(guest.target, guest.fake.ram);
    }
}
