//! Working-set probes: the miss-ratio curve of a guest at a cost that is fixed in advance.
//!
//! Problem: to see every reference of a guest, every reference must trap, and a guest with a
//! large random pattern stops. Sampling pages (Waldspurger 2002) is cheap, but yields only one
//! number, and that late.
//!
//! Idea: revoke granules at a rate that the [budget](crate::budget) bears, chosen at random from
//! the accessible ones, and time their next touch. Each revocation costs at most one trap. The
//! times give the chance to stay untouched for a given time (`life_table`). From that chance and
//! the record of each granule (its last trap, the time since its revocation) follow Denning's
//! working sets and the misses of each: the curve (`estimate`). So a probe serves three times: it
//! times a touch; while it stays revoked it proves idleness for free; and a touch after a long
//! time shows at once that the guest grows.
//!
//! **The estimate**, here and in the exact stack alike: time is cut into ticks of 100 ms
//! ([`TICK`]). A reference is a granule touched in a tick; its distance is the number of distinct
//! granules touched in the ticks after its last one up to this one (itself included). References
//! fade with one time constant, [`AGEING`]. The working set is the least memory whose aged miss
//! ratio is at most [`TOLERABLE_MISS_RATIO`].
//!
//! Constants. *5 %*: where curves are steep it hardly matters (at 2 % the mean error in
//! simulation is the same), but an idle guest's curve is flat below 5 %, and its error rises from
//! 8 to 11 %. *Ageing 0.4 s*: after a set shrinks `r`-fold, old distances hold more than 5 % of
//! the aged references for ln(20 r) time constants. So 0.4 s follows a halved set in 1.5 s; 5 s
//! would take 18 s. (1 s measures a guest with a miss ratio close to 5 % more reliably, but sees
//! a set that shrinks to an eighth 3 s later. Two alternatives were worse on recorded guests: a
//! window that forgets all at once, for guests that change often; and a working set that shrinks
//! only at 4 %, meant against jumps of guests close to 5 %.) Distances themselves look back
//! without limit, so slow sweeps are not lost. *Window of the life table 1 s*: some 150 to 300
//! probes at 1 % of a vCPU, quick enough to see a shrink before all of it has been revoked.
//! (1.5 s saw changes of recorded guests later; 0.75 s was no better.)
//!
//! Few probes: an expensive trap, or a burst of traps that must be paid for, may leave a budget
//! for less than [`FIRST_PROBES`] in a window. Then the last `FIRST_PROBES` probes count,
//! independent of their age. A reading has its moment ([`Reading::at`]): it is older than the
//! last tick by the difference between the age of its probes and that of the probes of a window.
//!
//! Some granules cannot be revoked: one that shares all of its pages with others, or whose pages
//! the guest has given up. Such a granule is not drawn again for ten seconds. It counts as not
//! touched since its last touch that was seen, unless it was hot: reads of a shared page are not
//! seen.
//!
//! Start-up: a first reading is available after [`FIRST_PROBES`] probes, within a second. Hazards
//! at ages that no probe has reached yet are taken from the last known age. So the working set is
//! rather over- than understated until the guest's slowest sweep has passed once.
//!
//! Cost: 20 bytes per tracked granule and one pass over them per tick. At most [`MAX_TRACKED`]
//! are tracked: the guest is divided into that number of equal parts, and one granule stands for
//! each. That gives 3 % of error at a working set of a tenth, and limits the burst when a
//! sleeping guest wakes up. Left out: the order of touches inside a tick; bursts, where many
//! granules are touched in one tick and none in the next (a factor for all hazards of a tick
//! improved recorded guests by 1 %, and made the smallest of known sets too large by 10 %);
//! guests whose vCPUs are all stopped, which simply idle.

use model::{Millis, Time};

use crate::{
    budget::Governor,
    curve::{MissRatioCurve, Point},
};

mod estimate;
mod granules;
mod life_table;
mod sentinel;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use estimate::{GRID, GranuleRecency, Touch};
use granules::{AccessState, Granules};
use life_table::{Hazards, IDLE, LifeTable};
pub use sentinel::Sentinels;

/// The unit of the reference stream.
pub const TICK: Millis = Millis(100);
/// The tolerable miss ratio of a working set.
pub const TOLERABLE_MISS_RATIO: f64 = 0.05;
/// Time constant of the fading of references, in the tracker and in the exact curve.
pub const AGEING: Millis = Millis(400);
/// The most granules that are tracked of one VM: no more may be inaccessible at a time (1 GiB in
/// granules of 128 KiB).
pub const MAX_TRACKED: u32 = 1 << 13;
/// Probes required for a first reading.
pub const FIRST_PROBES: f64 = 50.0;
/// Time constant of the life table.
const WINDOW: Millis = Millis(1_000);
/// The time untouched before the revocation of an idle granule that is touched is the longest of
/// this number of draws.
const DRAWS: u32 = 3;
/// A revocation that is not acknowledged within this time has failed.
const PATIENCE: Millis = Millis(1_000);
/// Ticks until a failed revocation is tried again.
const AGAIN_TICKS: u32 = 100;
/// Probes that are not forgotten before there are newer ones.
const KEPT_PROBES: f64 = FIRST_PROBES + 1.0;

/// The present estimates about a guest. Sizes are in granules.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The least memory with a tolerable miss ratio.
    pub working_set: f64,
    /// The miss ratio at every size.
    pub curve: MissRatioCurve,
    /// References per second; multiplied by a miss ratio they are misses per second.
    pub references_per_s: f64,
    /// Recent probes behind this reading.
    pub probes: f64,
    /// The moment that the reading describes.
    pub at: Time,
}

/// The probes of one VM.
#[derive(Clone, Debug)]
pub struct Tracker {
    granules: Granules,
    /// Revocations requested and not yet acknowledged, oldest first.
    pending: Vec<(u32, Time)>,
    asked: Vec<u32>,
    table: LifeTable,
    /// Hazards as of the last scan.
    hazards: Hazards,
    /// Aged misses per tick at each size of the grid; the first entry is the references.
    misses: Vec<f64>,
    /// Touches since the last scan.
    touched: Vec<Touch>,
    governor: Governor,
    scanned: Time,
    /// The probes that were kept at the last scan, and their mean age then.
    kept: (f64, Millis),
}

impl Tracker {
    /// Starts with every granule accessible. At most `most` are tracked, because no more may be
    /// revoked at a time. The same seed gives the same sequence of probes.
    #[must_use]
    pub fn new(granules: u32, most: u32, governor: Governor, seed: u64, now: Time) -> Self {
        let table = LifeTable::new();
        Self {
            granules: Granules::new(granules, most.min(MAX_TRACKED), seed, now),
            pending: Vec::new(),
            asked: Vec::new(),
            hazards: table.hazards(),
            table,
            misses: Vec::new(),
            touched: Vec::new(),
            governor,
            scanned: now,
            kept: (0.0, Millis(0)),
        }
    }

    /// The budget, which the caller informs about the cost of a trap.
    pub fn governor_mut(&mut self) -> &mut Governor {
        &mut self.governor
    }

    /// The budget.
    #[must_use]
    pub fn governor(&self) -> &Governor {
        &self.governor
    }

    /// The fuse for the shim, valid for at least the next minute.
    #[must_use]
    pub fn fuse(&self) -> u32 {
        self.governor.fuse(self.granules.tracked())
    }

    /// Granules that are revoked now, or requested to be.
    #[must_use]
    pub fn revoked_count(&self) -> u32 {
        self.granules.counted() - self.granules.accessible()
    }

    /// Leaves these granules alone: they are [`Sentinels`].
    pub fn exclude(&mut self, granules: &[u32]) {
        for &granule in granules {
            if let Some(index) = self.granules.find(granule) {
                self.granules.exclude(index);
            }
        }
    }

    /// Returns the granules to revoke now; to be called about every 100 ms. The caller reports
    /// the revoked ones with [`Self::revoked`] and need not report those that could not be
    /// (pinned by I/O).
    pub fn tick(&mut self, now: Time) -> &[u32] {
        self.expire(now);
        if now.since(self.scanned) >= TICK {
            self.scan(now);
        }
        self.asked.clear();
        let count = self.governor.allowance(now).min(self.granules.accessible());
        for _ in 0..count {
            let Some(index) = self.granules.draw(now) else { break };
            self.pending.push((index, now));
            self.asked.push(self.granules.id(index));
        }
        self.governor.revoked(count);
        &self.asked
    }

    /// Every tracked granule with the number of ticks since its last touch; `None`: it may be in
    /// use.
    pub fn ages(&mut self, now: Time) -> Vec<(u32, Option<u32>)> {
        let mut ages = Vec::new();
        for index in 0..self.granules.tracked() {
            let age = match self.granules.state(index) {
                AccessState::Excluded => continue,
                AccessState::Revoked => {
                    Some(self.granules.age(index, now) + self.granules.before(index))
                }
                AccessState::Accessible | AccessState::Pending | AccessState::Absent => None,
            };
            ages.push((self.granules.id(index), age));
        }
        ages
    }

    /// The granule was revoked.
    pub fn revoked(&mut self, granule: u32, at: Time) {
        let Some(index) = self.granules.find(granule) else { return };
        let (class, seen) = (self.granules.class(index, at), self.granules.seen(index, at));
        let before = self.drawn(class).min(seen);
        self.granules.revoke(index, at, before);
    }

    /// The granule was requested to be revoked but cannot be now: all of its pages are shared, or
    /// the guest has given them up.
    pub fn cannot_be_revoked(&mut self, granule: u32, at: Time, is_given_up: bool) {
        if let Some(index) = self.granules.find(granule) {
            self.granules.lose(index, at, is_given_up);
        }
    }

    /// Ticks for which a granule had not been touched, drawn at random from the life table.
    fn drawn(&mut self, class: u8) -> u32 {
        self.table.outlived(&self.hazards[usize::from(class)], self.granules.chance())
    }

    /// A trap: the granule was touched, and is accessible again.
    pub fn touched(&mut self, granule: u32, at: Time) {
        self.governor.trapped(1);
        let Some(index) = self.granules.find(granule) else { return };
        match self.granules.state(index) {
            AccessState::Pending | AccessState::Revoked => {}
            AccessState::Absent => return self.granules.admit(index),
            AccessState::Accessible | AccessState::Excluded => return,
        }
        let age = self.granules.age(index, at);
        let class = self.granules.class(index, at);
        self.table.survived(class, self.granules.age(index, self.scanned), age);
        self.table.died(class, age);
        let before = self.before(index, class, at);
        self.granules.admit(index);
        let weight = self.granules.saw(index, at);
        self.touched.push(Touch { untouched: age + before, weight });
        self.granules.classify(index, age);
    }

    /// Ticks for which a granule that is touched now had not been touched when it was revoked.
    ///
    /// Idle granules differ: data that is read in the order in which it was written comes back
    /// when it has been untouched for longest. So the longest of several draws counts; recorded
    /// and simulated guests agree with that.
    fn before(&mut self, index: u32, class: u8, at: Time) -> u32 {
        let before = self.granules.before(index);
        if class < IDLE {
            return before;
        }
        let most = self.granules.seen(index, at).saturating_sub(self.granules.age(index, at));
        (1..DRAWS).fold(before, |longest, _| longest.max(self.drawn(class).min(most)))
    }

    /// Resynchronizes after lost traps (the ring was full): `is_revoked` gives the shim's page
    /// states. A granule that is accessible although no trap was seen counts as touched now.
    pub fn resync(&mut self, now: Time, mut is_revoked: impl FnMut(u32) -> bool) {
        for index in 0..self.granules.tracked() {
            let granule = self.granules.id(index);
            match (self.granules.state(index), is_revoked(granule)) {
                (AccessState::Revoked, false) => self.touched(granule, now),
                (AccessState::Pending, true) => self.revoked(granule, now),
                _ => {}
            }
        }
    }

    /// The shim gave everything back: all revoked granules are accessible, without a touch.
    pub fn given_back(&mut self, now: Time) {
        self.scan(now);
        self.pending.clear();
        for index in 0..self.granules.tracked() {
            if matches!(
                self.granules.state(index),
                AccessState::Pending | AccessState::Revoked | AccessState::Absent
            ) {
                self.granules.admit(index);
            }
        }
    }

    /// The granule is accessible again, and the guest has not touched it.
    pub fn called_back(&mut self, granule: u32, at: Time) {
        let Some(index) = self.granules.find(granule) else { return };
        match self.granules.state(index) {
            AccessState::Pending | AccessState::Absent => self.granules.admit(index),
            AccessState::Revoked => {
                let class = self.granules.class(index, at);
                let age = self.granules.age(index, at);
                self.table.survived(class, self.granules.age(index, self.scanned), age);
                self.granules.admit(index);
            }
            AccessState::Accessible | AccessState::Excluded => {}
        }
    }

    /// The present estimate; `None` before enough probes were answered or half of the guest was
    /// found idle.
    #[must_use]
    pub fn reading(&self) -> Option<Reading> {
        let answered = self.table.probes() >= FIRST_PROBES;
        let references = *self.misses.first()?;
        let is_found_idle = self.revoked_count() >= self.granules.counted().div_ceil(2);
        if !answered && !is_found_idle {
            return None;
        }
        // Granules known to be idle are confirmed in every tick.
        let late =
            if is_found_idle { Millis(0) } else { Millis(self.kept.1.0.saturating_sub(WINDOW.0)) };
        let curve = self.curve(references);
        let working_set = curve.least_size(TOLERABLE_MISS_RATIO).unwrap_or(curve.end());
        Some(Reading {
            working_set,
            curve,
            references_per_s: references * self.granules.scale() * 1e3 / TICK.0 as f64,
            probes: self.table.probes(),
            at: Time(self.scanned.0.saturating_sub(late.0)),
        })
    }

    fn curve(&self, references: f64) -> MissRatioCurve {
        if references <= 0.0 {
            return MissRatioCurve::unknown();
        }
        let step = f64::from(self.granules.all()) / (GRID - 1) as f64;
        let mut ratio = 1.0_f64;
        let points = self.misses.iter().enumerate().map(|(i, misses)| {
            ratio = ratio.min(misses / references).max(0.0);
            Point { size: i as f64 * step, ratio }
        });
        MissRatioCurve::new(points.collect()).unwrap_or_else(|_| MissRatioCurve::unknown())
    }

    /// Ends revocation requests that were not acknowledged in time.
    fn expire(&mut self, now: Time) {
        let Self { pending, granules, .. } = self;
        pending.retain(|&(index, since)| {
            let waiting = granules.state(index) == AccessState::Pending;
            if waiting && now.since(since) >= PATIENCE {
                granules.admit(index);
            }
            waiting && now.since(since) < PATIENCE
        });
    }

    /// Forgets old probes, but keeps the last `KEPT_PROBES`.
    fn fade(&mut self, elapsed: Millis) {
        let share = decay(elapsed, WINDOW);
        let probes = self.table.probes();
        let young = share.max((KEPT_PROBES / probes.max(KEPT_PROBES)).min(1.0));
        let (kept, age) = self.kept;
        // New probes have age 0.
        let age =
            age.0.saturating_add(elapsed.0) as f64 * (kept / probes.max(kept)).clamp(0.0, 1.0);
        self.table.fade(share, young);
        self.kept = (self.table.probes(), whole_ms(age));
    }

    /// Counts the ages passed since the last scan, and renews the curve.
    fn scan(&mut self, now: Time) {
        let elapsed = now.since(self.scanned);
        self.fade(elapsed);
        let mut population = Vec::with_capacity(self.granules.tracked() as usize);
        for index in 0..self.granules.tracked() {
            let class = self.granules.class(index, now);
            match self.granules.state(index) {
                AccessState::Accessible | AccessState::Pending => {
                    let seen = self.granules.seen(index, now);
                    population.push(GranuleRecency::Accessible { class, seen });
                }
                AccessState::Absent => {
                    let seen = self.granules.seen(index, now);
                    let is_hot = class < IDLE;
                    population.push(if is_hot {
                        GranuleRecency::Accessible { class, seen }
                    } else {
                        GranuleRecency::Revoked { untouched: seen }
                    });
                    if self.granules.age(index, now) >= AGAIN_TICKS {
                        self.granules.admit(index);
                    }
                }
                AccessState::Excluded => {}
                AccessState::Revoked => {
                    let age = self.granules.age(index, now);
                    self.table.survived(class, self.granules.age(index, self.scanned), age);
                    let untouched = age + self.granules.before(index);
                    population.push(GranuleRecency::Revoked { untouched });
                }
            }
        }
        self.scanned = self.scanned.max(now);
        self.hazards = self.table.hazards();
        if elapsed > Millis(0) {
            self.renew(&population, elapsed);
        }
    }

    /// Adds the observations since the last scan to the aged curve.
    fn renew(&mut self, population: &[GranuleRecency], elapsed: Millis) {
        let ticks = elapsed.0 as f64 / TICK.0 as f64;
        let windows =
            estimate::windows(&self.table, &self.hazards, population, &self.touched, ticks);
        self.touched.clear();
        let granules = f64::from(self.granules.counted());
        let misses = estimate::misses_per_tick(granules, self.table.starts(), &windows);
        if self.misses.is_empty() {
            self.misses = misses;
        } else {
            let keep = decay(elapsed, AGEING);
            for (aged, new) in self.misses.iter_mut().zip(misses) {
                *aged = *aged * keep + new * (1.0 - keep);
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "not negative")]
fn whole_ms(ms: f64) -> Millis {
    Millis(ms as u64)
}

/// The share that is left after `elapsed` of a quantity that fades.
fn decay(elapsed: Millis, time_constant: Millis) -> f64 {
    (-(elapsed.0 as f64) / time_constant.0 as f64).exp()
}
