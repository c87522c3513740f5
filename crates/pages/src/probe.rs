//! Working-set probes: the miss-ratio curve of a guest at a cost that is promised in advance.
//!
//! Problem: to see every reference of a guest, every reference must trap, and a guest with a large
//! random pattern stops. Sampling pages (Waldspurger 2002) is cheap, but tells one number only, and
//! that late.
//!
//! Idea: revoke granules at a rate that the [budget](crate::budget) bears, chosen at random from
//! those that are accessible, and time their next touch. Each revocation costs one trap at most.
//! From these times comes the chance to stay untouched for so long (`life_table`); from it and what
//! is known of each granule (when it last trapped, how long it has been revoked) Denning's working
//! sets and the misses of each: the curve (`estimate`). So a probe serves three times: it times a
//! touch; while it stays revoked it proves idleness for nothing; and when touched after long it
//! tells at once that the guest grows.
//!
//! **What is estimated**, here and by the exact stack alike: time is cut into ticks of 100 ms
//! ([`TICK`]). A reference is a granule touched in a tick; its distance is the number of distinct
//! granules touched in the ticks after its last one up to this one (itself included). References
//! fade with one time constant, [`AGEING`]; the working set is the least memory whose aged miss
//! ratio is at most [`TOLERABLE_MISS_RATIO`].
//!
//! Constants. *5 %*: where curves fall steeply it hardly matters (at 2 % the mean error in
//! simulation is the same), but an idle guest's curve is flat down there, and its error rises from
//! 8 to 11 %. *Ageing 0.4 s*: after a set shrinks `r`-fold, old distances hold more than 5 % of the
//! aged references for ln(20 r) time constants, so that 0.4 s follows a halved set in 1.5 s and 5 s
//! would take 18 s. (With 1 s a guest whose miss ratio lies close to 5 % is told from others more
//! surely, but a set that shrinks to an eighth is seen 3 s later. A window that forgets all at once
//! was tried, too: recorded guests that change often were seen worse. So was a working set that
//! shrinks at 4 % only, against jumps of guests close to 5 %: real guests were seen worse.)
//! Distances themselves look back as far as they must, so that slow sweeps are not lost. *Window of
//! the life table 1 s*: some 150 to 300 probes at 1 % of a vCPU, quick enough to see a shrink
//! before all of it has been revoked. (1.5 s saw changes of recorded guests later, 0.75 s was no
//! better.)
//!
//! Few probes: where the budget bears less than [`FIRST_PROBES`] in a window, because a trap is
//! dear or a burst of them has to be paid for, the last so many count, however long that took. A
//! reading says of when it is ([`Reading::at`]): it is older than the last tick by as much as its
//! probes are older than those of a window.
//!
//! What cannot be revoked: a granule that shares all of its pages with others, or whose pages the
//! guest has given up. It is not drawn again for ten seconds, and counts as not touched since it
//! was last seen to be, unless it was hot: who reads a shared page is not seen.
//!
//! Start-up: a first reading stands after [`FIRST_PROBES`] probes, within a second; hazards at ages
//! not yet lived through are taken from the last one known, so that the working set is rather over-
//! than understated until the guest's slowest sweep has passed once.
//!
//! Cost: 20 bytes per tracked granule and one pass over them per tick. At most [`MAX_TRACKED`] are
//! tracked, one from each of as many equal parts of the guest, and stand for all: 3 % of error at a
//! working set of a tenth, and a bound on the burst when a sleeping guest awakes. Left out: the
//! order of touches inside a tick; that many granules may be touched in one tick and none in the
//! next (a factor for all hazards of a tick was tried: recorded guests came out truer by 1 %, and
//! the smallest of known sets too large by 10 %); guests whose vCPUs are all stopped simply idle.

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

use estimate::{GRID, Known, Touch};
use granules::{Granules, State};
use life_table::{Hazards, IDLE, LifeTable};
pub use sentinel::Sentinels;

/// The unit of the reference stream.
pub const TICK: Millis = Millis(100);
/// The miss ratio that a working set may have.
pub const TOLERABLE_MISS_RATIO: f64 = 0.05;
/// Time constant with which references fade, in the tracker and in the exact curve.
pub const AGEING: Millis = Millis(400);
/// Most granules that are tracked of one VM: no more than may be out of reach at a time (1 GiB in
/// granules of 128 KiB).
pub const MAX_TRACKED: u32 = 1 << 13;
/// Probes that a first reading rests on.
pub const FIRST_PROBES: f64 = 50.0;
/// Time constant of the life table.
const WINDOW: Millis = Millis(1_000);
/// Who is touched after it was idle had been untouched for the longest of so many draws.
const DRAWS: u32 = 3;
/// What was asked for and not acknowledged within this time could not be revoked.
const PATIENCE: Millis = Millis(1_000);
/// When it is tried again to revoke what could not be, in ticks.
const AGAIN_TICKS: u32 = 100;
/// So many probes are not forgotten before there are newer ones.
const KEPT_PROBES: f64 = FIRST_PROBES + 1.0;

/// What the probes say about a guest now. Sizes are in granules.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The least memory with a tolerable miss ratio.
    pub working_set: f64,
    /// The miss ratio at every size.
    pub curve: MissRatioCurve,
    /// References per second; times a miss ratio these are misses per second.
    pub references_per_s: f64,
    /// Recent probes that this rests on.
    pub probes: f64,
    /// The moment that it tells of.
    pub at: Time,
}

/// The probes of one VM.
#[derive(Clone, Debug)]
pub struct Tracker {
    granules: Granules,
    /// Asked to be revoked and not yet acknowledged, oldest first.
    pending: Vec<(u32, Time)>,
    asked: Vec<u32>,
    table: LifeTable,
    /// As they stood at the last scan.
    hazards: Hazards,
    /// Aged misses per tick at each size of the grid; the first are the references.
    misses: Vec<f64>,
    /// Since the last scan.
    touched: Vec<Touch>,
    governor: Governor,
    scanned: Time,
    /// Probes that were kept at the last scan, and their mean age then.
    kept: (f64, Millis),
}

impl Tracker {
    /// Starts with every granule accessible. At most `most` are tracked, for no more may be revoked
    /// at a time. One seed gives one sequence of probes.
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

    /// The budget, to tell it what a trap costs.
    pub fn governor_mut(&mut self) -> &mut Governor {
        &mut self.governor
    }

    /// The budget.
    #[must_use]
    pub fn governor(&self) -> &Governor {
        &self.governor
    }

    /// The fuse for the shim, good for the next minute at least.
    #[must_use]
    pub fn fuse(&self) -> u32 {
        self.governor.fuse(self.granules.tracked())
    }

    /// Granules that are revoked now, or asked to be.
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

    /// To be called every 100 ms or so: which granules to revoke now. Tell with [`Self::revoked`]
    /// which of them were; those that could not be (pinned by I/O) need no word.
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

    /// So many granules more, as far as there are, beyond what the budget bears: whoever pages out
    /// wants to know which of them are idle.
    pub fn tick_more(&mut self, now: Time, count: u32) -> &[u32] {
        self.asked.clear();
        for _ in 0..count {
            let Some(index) = self.granules.draw(now) else { break };
            self.pending.push((index, now));
            self.asked.push(self.granules.id(index));
        }
        &self.asked
    }

    /// The granules that are revoked, and for how many ticks each has not been touched, as far as
    /// that is known.
    pub fn idle(&mut self, now: Time) -> Vec<(u32, u32)> {
        let mut idle = Vec::new();
        for index in 0..self.granules.tracked() {
            if self.granules.state(index) == State::Revoked {
                let ticks = self.granules.age(index, now) + self.granules.before(index);
                idle.push((self.granules.id(index), ticks));
            }
        }
        idle
    }

    /// Every tracked granule, and for how many ticks it has not been touched; `None`: it may be in
    /// use.
    pub fn ages(&mut self, now: Time) -> Vec<(u32, Option<u32>)> {
        let mut ages = Vec::new();
        for index in 0..self.granules.tracked() {
            let age = match self.granules.state(index) {
                State::Excluded => continue,
                State::Revoked => Some(self.granules.age(index, now) + self.granules.before(index)),
                State::Accessible | State::Pending | State::Absent => None,
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

    /// The granule, which was to be revoked, cannot be now: all of its pages are shared, or given
    /// up by the guest.
    pub fn cannot_be_revoked(&mut self, granule: u32, at: Time, is_given_up: bool) {
        if let Some(index) = self.granules.find(granule) {
            self.granules.lose(index, at, is_given_up);
        }
    }

    /// For how many ticks a granule had not been touched, as chance and the life table will have
    /// it.
    fn drawn(&mut self, class: u8) -> u32 {
        self.table.outlived(&self.hazards[usize::from(class)], self.granules.chance())
    }

    /// A trap: the granule was touched, and is accessible again.
    pub fn touched(&mut self, granule: u32, at: Time) {
        self.governor.trapped(1);
        self.refaulted(granule, at);
    }

    /// The same of a granule that was paged out: what that costs is not tracking's.
    pub fn refaulted(&mut self, granule: u32, at: Time) {
        let Some(index) = self.granules.find(granule) else { return };
        match self.granules.state(index) {
            State::Pending | State::Revoked => {}
            State::Absent => return self.granules.admit(index),
            State::Accessible | State::Excluded => return,
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

    /// For how many ticks a granule that is touched now had not been touched when it was revoked.
    ///
    /// Idle granules are not alike: what is read in the order in which it was written comes back
    /// when it has been untouched for longest. So it is the longest of several draws that counts,
    /// which recorded guests and simulated ones agree on.
    fn before(&mut self, index: u32, class: u8, at: Time) -> u32 {
        let before = self.granules.before(index);
        if class < IDLE {
            return before;
        }
        let most = self.granules.seen(index, at).saturating_sub(self.granules.age(index, at));
        (1..DRAWS).fold(before, |longest, _| longest.max(self.drawn(class).min(most)))
    }

    /// Traps were lost (the ring was full): `is_revoked` says how the shim's page states stand.
    /// What is accessible although no trap was seen counts as touched now.
    pub fn resync(&mut self, now: Time, mut is_revoked: impl FnMut(u32) -> bool) {
        for index in 0..self.granules.tracked() {
            let granule = self.granules.id(index);
            match (self.granules.state(index), is_revoked(granule)) {
                (State::Revoked, false) => self.touched(granule, now),
                (State::Pending, true) => self.revoked(granule, now),
                _ => {}
            }
        }
    }

    /// The shim gave everything back: what was revoked is accessible, and nobody touched it.
    pub fn given_back(&mut self, now: Time) {
        self.scan(now);
        self.pending.clear();
        for index in 0..self.granules.tracked() {
            if matches!(self.granules.state(index), State::Pending | State::Revoked | State::Absent)
            {
                self.granules.admit(index);
            }
        }
    }

    /// The granule is accessible again, and the guest has not touched it.
    pub fn called_back(&mut self, granule: u32, at: Time) {
        let Some(index) = self.granules.find(granule) else { return };
        match self.granules.state(index) {
            State::Pending | State::Absent => self.granules.admit(index),
            State::Revoked => {
                let class = self.granules.class(index, at);
                let age = self.granules.age(index, at);
                self.table.survived(class, self.granules.age(index, self.scanned), age);
                self.granules.admit(index);
            }
            State::Accessible | State::Excluded => {}
        }
    }

    /// What the probes say; nothing before enough of them were answered, or half of the guest was
    /// found idle.
    #[must_use]
    pub fn reading(&self) -> Option<Reading> {
        let answered = self.table.probes() >= FIRST_PROBES;
        let references = *self.misses.first()?;
        let is_found_idle = self.revoked_count() >= self.granules.counted().div_ceil(2);
        if !answered && !is_found_idle {
            return None;
        }
        // What is known to be idle is known anew in every tick.
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

    /// Takes back what was asked for in vain.
    fn expire(&mut self, now: Time) {
        let Self { pending, granules, .. } = self;
        pending.retain(|&(index, since)| {
            let waiting = granules.state(index) == State::Pending;
            if waiting && now.since(since) >= PATIENCE {
                granules.admit(index);
            }
            waiting && now.since(since) < PATIENCE
        });
    }

    /// Forgets what lies back, but not the last probes that there are.
    fn fade(&mut self, elapsed: Millis) {
        let share = decay(elapsed, WINDOW);
        let probes = self.table.probes();
        let young = share.max((KEPT_PROBES / probes.max(KEPT_PROBES)).min(1.0));
        let (kept, age) = self.kept;
        // New ones are as old as nothing.
        let age =
            age.0.saturating_add(elapsed.0) as f64 * (kept / probes.max(kept)).clamp(0.0, 1.0);
        self.table.fade(share, young);
        self.kept = (self.table.probes(), whole_ms(age));
    }

    /// Counts what was lived through since the last scan, and renews the curve.
    fn scan(&mut self, now: Time) {
        let elapsed = now.since(self.scanned);
        self.fade(elapsed);
        let mut population = Vec::with_capacity(self.granules.tracked() as usize);
        for index in 0..self.granules.tracked() {
            let class = self.granules.class(index, now);
            match self.granules.state(index) {
                State::Accessible | State::Pending => {
                    let seen = self.granules.seen(index, now);
                    population.push(Known::Accessible { class, seen });
                }
                State::Absent => {
                    let seen = self.granules.seen(index, now);
                    let is_hot = class < IDLE;
                    population.push(if is_hot {
                        Known::Accessible { class, seen }
                    } else {
                        Known::Revoked { untouched: seen }
                    });
                    if self.granules.age(index, now) >= AGAIN_TICKS {
                        self.granules.admit(index);
                    }
                }
                State::Excluded => {}
                State::Revoked => {
                    let age = self.granules.age(index, now);
                    self.table.survived(class, self.granules.age(index, self.scanned), age);
                    let untouched = age + self.granules.before(index);
                    population.push(Known::Revoked { untouched });
                }
            }
        }
        self.scanned = self.scanned.max(now);
        self.hazards = self.table.hazards();
        if elapsed > Millis(0) {
            self.renew(&population, elapsed);
        }
    }

    /// Takes what was seen in the time since the last scan into the aged curve.
    fn renew(&mut self, population: &[Known], elapsed: Millis) {
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

/// What is left after `elapsed` of something that fades.
fn decay(elapsed: Millis, time_constant: Millis) -> f64 {
    (-(elapsed.0 as f64) / time_constant.0 as f64).exp()
}
