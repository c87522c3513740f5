//! `balance`: memory goes where it saves the most misses (Wang 2016 §4).
//!
//! ```text
//! every 5 s:  need = max(min, working set, what lies in swap included)
//!     all needs fit:  everybody its need, and the rest in proportion to it
//!     else:           the sizes with the least misses in all that fit
//!     each VM goes there by at most 10 % down or 30 % up
//! ```
//!
//! The paper looks for the best sizes within those 10 and 30 %. A program that goes through all of
//! its data again and again misses the same until all of it fits (a cliff), so that no step of 30 %
//! seems worth taking; and where two such programs cannot both fit, memory would go to and fro
//! between them. So the best sizes of all are looked for, and the steps lead there.
//!
//! Sizes are counted by what they occupy: a VM of whose pages half are shared gets two for the
//! price of one. What shares out is [`crate::optimum`]; what a VM's memory is worth to it says
//! [`worth`].
//!
//! **Stability.** Taking memory is never free: what was taken is missed once if it was in use at
//! all. So a plan that takes must save more misses within [`tuning::PAYS_WITHIN`] than it may cost.
//! Who has what it needs gives nothing up for a bonus, and who suffers gives nothing up as long as
//! somebody else has more than it needs. What a VM lacks that thrashes is often only looked for,
//! and most such hopes are vain: they are paid for by those that suffer themselves, unless they
//! outweigh by far what others need; else memory would go round among many that suffer, and nobody
//! would have enough for long. [`crate::guard`] adds the rest: who was short after a take is left
//! alone, longer each time, but for what has lain idle for long since.
//!
//! A VM without a curve keeps what it has, and is given more while it swaps, as `demand` does.

pub(crate) mod worth;

use std::collections::BTreeMap;

use model::Bytes;

use self::worth::Worth;
use crate::{
    member::growth,
    optimum::{self, Choice},
    tuning,
};

/// What balancing needs to know of a member.
#[derive(Clone, Debug)]
pub(crate) struct Seat {
    /// What it may use now.
    pub(crate) held: Bytes,
    /// It can have from this …
    pub(crate) least: Bytes,
    /// … to this.
    pub(crate) most: Bytes,
    /// What it holds can change in this round to this at least …
    pub(crate) lowest: Bytes,
    /// … and this at most.
    pub(crate) highest: Bytes,
    /// What it is charged with, untouched grants included.
    pub(crate) charged: Bytes,
    /// What a byte that it has occupies, above 0 and at most 1: less where pages are shared.
    pub(crate) charge: f64,
    pub(crate) worth: Worth,
    /// What it holds beyond what it was seen to need.
    pub(crate) unneeded: Bytes,
    /// What it has had free for a while.
    pub(crate) idle: Bytes,
    /// What it has free now, if it is short: it was given that and has not filled it yet.
    pub(crate) unfilled: Bytes,
    /// It is short of memory now, and was given none that it has still to fill.
    pub(crate) suffers: bool,
    /// Times its misses.
    pub(crate) weight: u32,
    /// Higher ones are served first.
    pub(crate) priority: u8,
}

/// What a round is to bring about.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Round {
    /// What each member should have in the end, in their order.
    pub(crate) wanted: Vec<Bytes>,
    /// What it should have at the end of the round.
    pub(crate) sizes: Vec<Bytes>,
    /// Whether all needs fit.
    pub(crate) fits: bool,
}

impl Seat {
    fn need(&self) -> Bytes {
        self.worth.need.clamp(self.least, self.most)
    }

    /// What it occupies with `memory`: what it gives up frees its part, what it is given may all be
    /// used.
    fn occupied(&self, memory: Bytes) -> f64 {
        let kept = (memory.min(self.held).0 as f64 * self.charge).min(self.charged.0 as f64);
        kept + memory.minus(self.held).0 as f64
    }

    /// The memory with which it occupies so much.
    fn memory_for(&self, occupied: f64) -> f64 {
        let (held, all) = (self.held.0 as f64, self.occupied(self.held));
        if occupied >= all { held + (occupied - all) } else { occupied / self.charge }
    }

    /// The least that it can have if it keeps what it needs, unless it suffers.
    fn least_if_content(&self) -> Bytes {
        if self.suffers { self.least } else { self.least.max(self.held.minus(self.unneeded)) }
    }

    /// What it frees by going down to `memory`.
    fn freed(&self, memory: Bytes) -> Bytes {
        bytes(self.occupied(self.held) - self.occupied(memory.min(self.held)))
    }

    /// Its weighted misses per second with `memory`.
    pub(crate) fn misses(&self, memory: Bytes) -> f64 {
        self.worth.misses(memory) * f64::from(self.weight)
    }

    /// What going down to `memory` may cost beside: what was needed of it is missed once, in reads
    /// per second.
    fn cost(&self, memory: Bytes) -> f64 {
        let needed = self.held.minus(self.unneeded).minus(memory);
        let missed_once = needed.0 as f64 / tuning::READ_AHEAD.0 as f64;
        missed_once * 1e3 / tuning::PAYS_WITHIN.0 as f64
    }
}

/// What there is beside what the members hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rest {
    /// Nobody has it.
    pub(crate) surplus: Bytes,
    /// The members have so much more than there is.
    pub(crate) overdrawn: Bytes,
    /// What the group's cache of its disks can use of it: it saves reads, and a bonus saves nothing
    /// that is known.
    pub(crate) cacheable: Bytes,
}

/// What each member should have: what is best; else, where that does not pay, what is best if only
/// those that suffer give what they need; else what is best if nobody gives anything.
pub(crate) fn round(seats: &[Seat], rest: Rest) -> Round {
    let bounded = |least: fn(&Seat) -> Bytes| {
        let bound = |seat: &Seat| Seat { least: least(seat), ..seat.clone() };
        let seats: Vec<Seat> = seats.iter().map(bound).collect();
        share_out(&seats, rest)
    };
    let mut round = share_out(seats, rest);
    if dearest(seats, &round.sizes).is_some() && !pays(seats, &round.sizes) {
        round = bounded(Seat::least_if_content);
    }
    if !pays(seats, &round.sizes) {
        round = bounded(|seat| seat.held);
    }
    // What is not needed goes first: until it is gone, nobody who suffers gives up anything.
    let is_cheap = |seat: &Seat| !seat.suffers && seat.unneeded >= tuning::UNIT;
    let gives = |(seat, size): (&Seat, &Bytes)| seat.suffers && *size < seat.held;
    let is_cheaper_left = seats.iter().any(is_cheap) && seats.iter().zip(&round.sizes).any(gives);
    for (seat, size) in seats.iter().zip(&mut round.sizes) {
        if is_cheaper_left && is_cheap(seat) {
            *size = (*size).min(seat.held.minus(seat.unneeded));
        }
        let is_spared = seat.suffers && is_cheaper_left;
        let lowest = if is_spared { seat.held } else { seat.lowest };
        *size = (*size).clamp(lowest, seat.highest);
    }
    spread_idle(seats, &mut round.sizes);
    round
}

/// Gives what has long been free to those who suffer, as much as they may grow, though nothing
/// shows how much that helps: first to whom the most misses would end per byte that it lacks.
fn spread_idle(seats: &[Seat], sizes: &mut [Bytes]) {
    let lacks = |i: usize, size: Bytes| {
        let seat = &seats[i];
        if seat.suffers { seat.highest.minus(seat.unfilled).minus(size) } else { Bytes::ZERO }
    };
    let mut lacking: Vec<usize> =
        (0..seats.len()).filter(|i| lacks(*i, sizes[*i]) >= tuning::UNIT).collect();
    let urgency = |i: &usize| {
        let (seat, size) = (&seats[*i], sizes[*i]);
        (seat.priority, seat.misses(size) / seat.need().minus(size).0.max(1) as f64)
    };
    lacking.sort_by(|one, other| {
        let (one, other) = (urgency(one), urgency(other));
        other.0.cmp(&one.0).then(other.1.total_cmp(&one.1))
    });
    let has_idle = |i: &usize| !seats[*i].suffers && seats[*i].idle >= tuning::UNIT;
    let givers: Vec<usize> = (0..seats.len()).filter(has_idle).collect();
    for i in lacking {
        for &giver in &givers {
            let seat = &seats[giver];
            let kept = seat.held.minus(seat.idle).max(seat.lowest);
            let given = sizes[giver].min(seat.held).minus(kept).min(lacks(i, sizes[i]));
            if given >= tuning::UNIT {
                let before = seat.freed(sizes[giver]);
                sizes[giver] = sizes[giver].min(seat.held).minus(given);
                sizes[i] = sizes[i].plus(seat.freed(sizes[giver]).minus(before));
            }
        }
    }
}

/// The highest class of members that do not suffer and give something that they need.
fn dearest(seats: &[Seat], sizes: &[Bytes]) -> Option<u8> {
    let is_dear = |(seat, size): &(&Seat, &Bytes)| **size < seat.least_if_content();
    seats.iter().zip(sizes).filter(is_dear).map(|(seat, _)| seat.priority).max()
}

/// What a plan saves some of the highest class of members to which it makes a difference, and what
/// it costs others of that class, in misses per second. What is only hoped for is discounted where
/// somebody of that class or a higher one gives what it is known to need.
fn saved(seats: &[Seat], sizes: &[Bytes]) -> (f64, f64) {
    let dearest = dearest(seats, sizes);
    let mut classes: BTreeMap<u8, (f64, f64)> = BTreeMap::new();
    for (seat, size) in seats.iter().zip(sizes) {
        let saved = seat.misses(seat.held) - seat.misses(*size);
        let is_hope = saved > 0.0 && seat.worth.is_guess && Some(seat.priority) <= dearest;
        let saved = if is_hope { saved / tuning::HOPE_DISCOUNT } else { saved };
        let (gains, losses) = classes.entry(seat.priority).or_default();
        *(if saved > 0.0 { gains } else { losses }) += saved.abs();
    }
    let makes_a_difference = |(gains, losses): &(f64, f64)| (gains - losses).abs() >= 1.0;
    classes.into_values().rev().find(makes_a_difference).unwrap_or_default()
}

/// Whether a plan saves more than its takes may cost, and so much more than others lose that it is
/// not for the curves' noise.
fn pays(seats: &[Seat], sizes: &[Bytes]) -> bool {
    let takes_none = seats.iter().zip(sizes).all(|(seat, size)| *size >= seat.held);
    let costs: f64 = seats.iter().zip(sizes).map(|(seat, size)| seat.cost(*size)).sum();
    let (gains, losses) = saved(seats, sizes);
    let is_clear = gains * 100.0 >= losses * tuning::CLEAR_GAIN_PERCENT as f64;
    takes_none || is_clear && gains > losses + costs
}

fn share_out(seats: &[Seat], rest: Rest) -> Round {
    let Rest { surplus, overdrawn, .. } = rest;
    let occupied: f64 = seats.iter().map(|seat| seat.occupied(seat.held)).sum();
    let pool = occupied + surplus.0 as f64 - overdrawn.0 as f64;
    let needed: f64 = seats.iter().map(|seat| seat.occupied(seat.need())).sum();
    let fits = needed <= pool;
    let wanted = if fits { with_bonus(seats, pool, rest) } else { least_misses(seats, pool) };
    Round { sizes: wanted.clone(), wanted, fits }
}

/// Everybody its need, who is short as much more as it hopes for, the group's cache what it can
/// use, and all a bonus in proportion to their needs. Nobody gives up anything unless somebody
/// lacks what it claims so, and then only as much as those lack.
fn with_bonus(seats: &[Seat], pool: f64, rest: Rest) -> Vec<Bytes> {
    let Rest { surplus, overdrawn, cacheable } = rest;
    let claims = claims(seats, pool);
    let shares = in_proportion(seats, &claims, pool);
    let wants: Vec<Bytes> =
        seats.iter().zip(&claims).map(|(seat, claim)| claim.minus(seat.held)).collect();
    let wanted: Bytes = wants.iter().copied().sum();
    // What is overdrawn is missing only to those that want something.
    let lacking = if wanted.is_zero() { wanted } else { wanted.plus(overdrawn).minus(surplus) };
    let spare: Bytes = seats.iter().zip(&shares).map(|(seat, share)| seat.freed(*share)).sum();
    let mut left = surplus.minus(wanted).minus(cacheable);
    let one = |((seat, share), needed): ((&Seat, &Bytes), Bytes)| {
        let given = seat.freed(*share).share(lacking.min(spare).0, spare.0);
        if !given.is_zero() {
            return bytes(seat.memory_for(seat.occupied(seat.held) - given.0 as f64));
        }
        let bonus = share.minus(seat.held.plus(needed)).min(left);
        // Needs move all the time, and a bonus need not follow each of their moves.
        let is_worth_it = bonus >= tuning::UNIT.max(seat.held.percent(tuning::STEP_PERCENT));
        let bonus = if is_worth_it { bonus } else { Bytes::ZERO };
        left = left.minus(bonus);
        seat.held.plus(needed).plus(bonus)
    };
    seats.iter().zip(&shares).zip(wants).map(one).collect()
}

/// What each needs, and of what else those that are short hope for as much as nobody needs.
fn claims(seats: &[Seat], pool: f64) -> Vec<Bytes> {
    let hoped = |seat: &Seat| {
        let hope = seat.held.plus(growth(seat.held)).min(seat.most);
        if seat.suffers { hope.minus(seat.need()) } else { Bytes::ZERO }
    };
    let needed: f64 = seats.iter().map(|seat| seat.occupied(seat.need())).sum();
    let all: Bytes = seats.iter().map(hoped).sum();
    let part = ((pool - needed) / all.0.max(1) as f64).clamp(0.0, 1.0);
    seats.iter().map(|seat| seat.need().plus(bytes(hoped(seat).0 as f64 * part))).collect()
}

/// `pool` in proportion to claims; what is beyond a member's maximum goes to the others.
fn in_proportion(seats: &[Seat], claims: &[Bytes], pool: f64) -> Vec<Bytes> {
    let mut sizes: Vec<Bytes> = seats.iter().map(|seat| seat.most).collect();
    let mut is_full = vec![false; seats.len()];
    // Each round fills at least one member up, or ends.
    loop {
        let (mut full, mut claimed) = (0.0, 0.0);
        for ((seat, claim), is_full) in seats.iter().zip(claims).zip(&is_full) {
            if *is_full {
                full += seat.occupied(seat.most);
            } else {
                claimed += seat.occupied(*claim);
            }
        }
        let factor = ((pool - full) / claimed.max(1.0)).max(1.0);
        let mut has_ended = true;
        let open = seats.iter().zip(claims).zip(is_full.iter_mut().zip(&mut sizes));
        for ((seat, claim), (is_full, size)) in open.filter(|(_, (is_full, _))| !**is_full) {
            *size = bytes(seat.memory_for(seat.occupied(*claim) * factor)).min(seat.most);
            *is_full = *size == seat.most;
            has_ended &= !*is_full;
        }
        if has_ended {
            return sizes;
        }
    }
}

/// The sizes with the least misses that fit, the higher priorities first.
fn least_misses(seats: &[Seat], pool: f64) -> Vec<Bytes> {
    let unit = unit(seats).0 as f64;
    let least: f64 = seats.iter().map(|seat| seat.occupied(seat.least)).sum();
    let mut units = units((pool - least) / unit);
    let mut classes: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
    for (index, seat) in seats.iter().enumerate() {
        classes.entry(seat.priority).or_default().push(index);
    }
    let mut sizes = vec![Bytes::ZERO; seats.len()];
    for class in classes.values().rev() {
        let grid = |seat: &Seat, at: u32| {
            let occupied = seat.occupied(seat.least) + f64::from(at) * unit;
            bytes(seat.memory_for(occupied)).clamp(seat.least, seat.most)
        };
        let choice = |index: &usize| {
            let seat = &seats[*index];
            let steps = (seat.occupied(seat.most) - seat.occupied(seat.least)) / unit;
            let most = u32::try_from(self::units(steps.ceil())).unwrap_or(u32::MAX);
            let misses = |size| seat.misses(size) + seat.cost(size);
            let misses = (0..=most).map(|at| misses(grid(seat, at))).collect();
            Choice { least: 0, misses }
        };
        let choices: Vec<Choice> = class.iter().map(choice).collect();
        let placed = optimum::place(&choices, units);
        for (index, at) in class.iter().zip(placed.units) {
            units -= u64::from(at);
            sizes[*index] = grid(&seats[*index], at);
        }
    }
    sizes
}

/// Sizes are tried in steps of this: eight granules, which are huge pages in large VMs (Wang 2016
/// §4), and more where that makes too many.
fn unit(seats: &[Seat]) -> Bytes {
    let is_large = |seat: &Seat| seat.held > tuning::LARGE_VM;
    let step = if seats.iter().any(is_large) { tuning::LARGE_STEP } else { tuning::SMALL_STEP };
    let widest = seats.iter().map(|seat| seat.most.minus(seat.least)).max().unwrap_or_default();
    step.max(widest.share(1, tuning::MOST_SIZES))
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates, and is a size"
)]
fn bytes(size: f64) -> Bytes {
    Bytes(size as u64)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "saturates, and is a count"
)]
fn units(count: f64) -> u64 {
    count as u64
}

#[cfg(test)]
mod tests {
    use model::{Tracking, tracking::CurvePoint};

    use super::{worth::Condition, *};
    use crate::{experience::Experience, reads::Reads};

    fn seat(held: u64, need: u64, charged: u64) -> Seat {
        let condition = Condition { held: Bytes::mib(held), ..Condition::default() };
        let mut worth = Worth::of(None, &condition);
        worth.need = Bytes::mib(need);
        let (least, most) = (Bytes::mib(64), Bytes::mib(512));
        Seat {
            held: Bytes::mib(held),
            least,
            most,
            lowest: least,
            highest: most,
            unneeded: Bytes::ZERO,
            suffers: false,
            idle: Bytes::ZERO,
            unfilled: Bytes::ZERO,
            charged: Bytes::mib(charged),
            charge: 1.0,
            worth,
            weight: 1,
            priority: 0,
        }
    }

    fn mib(sizes: &[Bytes]) -> Vec<u64> {
        sizes.iter().map(|size| size.0 >> 20).collect()
    }

    #[test]
    fn what_is_not_touched_is_not_taken_for_its_own_sake() {
        let seats = [seat(256, 100, 90), seat(256, 300, 256)];
        let round = round(&seats, Rest::default());
        assert!(round.sizes[0] == seats[0].held || round.sizes[0] < seats[0].charged, "{round:?}");
        assert!(
            (seats[0].memory_for(seats[0].occupied(seats[0].held)) - 256.0 * 1048576.0).abs() < 1.0
        );
    }

    #[test]
    fn what_lies_idle_goes_to_who_suffers_though_no_curve_says_that_it_helps() {
        let idle = Seat { idle: Bytes::mib(150), lowest: Bytes::mib(225), ..seat(300, 290, 300) };
        let spread = |highest, unfilled| {
            let (highest, unfilled) = (Bytes::mib(highest), Bytes::mib(unfilled));
            let lacking = Seat { suffers: true, highest, unfilled, ..seat(100, 100, 100) };
            let mut sizes = [Bytes::mib(300), Bytes::mib(100)];
            spread_idle(&[idle.clone(), lacking], &mut sizes);
            mib(&sizes)
        };
        assert_eq!(spread(500, 0), [225, 175], "as much as can go in a round");
        assert_eq!(spread(140, 0), [260, 140], "as much as it may grow");
        assert_eq!(spread(140, 15), [275, 125], "but for what it was given and has not filled");
        assert_eq!(spread(105, 0), [300, 100], "no small change");
    }

    #[test]
    fn what_many_hope_for_is_not_taken_from_who_is_known_to_need_it() {
        let disk = Reads { faults: 1_000.0, bytes: 32e6 };
        let curve = [(0, 1.0), (100, 0.0)]
            .map(|(mib, miss_ratio)| CurvePoint { memory: Bytes::mib(mib), miss_ratio });
        let tracking = Tracking {
            working_set: Some(Bytes::mib(100)),
            curve: curve.to_vec(),
            references_per_s: 100.0,
            ..Tracking::default()
        };
        let worth = |condition| Worth::of(Some(&tracking), &condition);
        let (held, experience) = (Bytes::mib(232), Experience::seen(Bytes::mib(224), 300.0));
        let content = Condition { held, experience, disk, ..Condition::default() };
        let content = Seat { worth: worth(content), ..seat(232, 0, 232) };
        let (held, lacking) = (Bytes::mib(250), Bytes::mib(10));
        let short =
            Condition { held, lacking, disk, is_short: true, waits: 0.3, ..Condition::default() };
        let mut hopeful = Seat { suffers: true, worth: worth(short), ..seat(250, 0, 250) };
        hopeful.least = hopeful.held;
        let mut given_by_the_content = |is_guess| {
            hopeful.worth.is_guess = is_guess;
            let seats = [vec![content.clone()], vec![hopeful.clone(); 5]].concat();
            232 - mib(&round(&seats, Rest::default()).sizes)[0]
        };
        assert_eq!(given_by_the_content(true), 0);
        assert!(given_by_the_content(false) >= 50, "were they known to lack so little");
    }

    #[test]
    fn what_a_lower_priority_needs_is_given_for_the_hopes_of_a_higher_one() {
        let disk = Reads { faults: 1_000.0, bytes: 32e6 };
        let content = Seat { worth: Worth::of(None, &Condition::default()), ..seat(250, 250, 250) };
        let short = Condition {
            held: Bytes::mib(100),
            is_short: true,
            waits: 0.05,
            disk,
            ..Condition::default()
        };
        let hopeful = Seat {
            suffers: true,
            priority: 1,
            worth: Worth::of(None, &short),
            ..seat(100, 0, 100)
        };
        let given = |priority| {
            let seats = [content.clone(), Seat { priority, ..hopeful.clone() }];
            mib(&round(&seats, Rest::default()).sizes)[1] - 100
        };
        assert_eq!((given(0), given(1)), (0, 30));
    }

    #[test]
    fn shared_pages_cost_their_share() {
        let shared = Seat { charge: 0.5, charged: Bytes::mib(128), ..seat(256, 100, 128) };
        assert_eq!(shared.freed(Bytes::mib(156)), Bytes::mib(50));
        assert!((shared.occupied(Bytes::mib(300)) - 172.0 * 1048576.0).abs() < 1.0);
        assert!((shared.memory_for(64.0 * 1048576.0) - 128.0 * 1048576.0).abs() < 1.0);
    }

    #[test]
    fn a_bonus_is_in_proportion_to_needs_and_takes_from_nobody() {
        let seats = [seat(100, 100, 100), seat(200, 200, 200)];
        let round = round(&seats, Rest { surplus: Bytes::mib(90), ..Rest::default() });
        assert_eq!((mib(&round.sizes), round.fits), (vec![130, 260], true));
        // A cache that can use it comes first.
        let rest = Rest { surplus: Bytes::mib(90), cacheable: Bytes::mib(60), ..Rest::default() };
        let round = super::round(&seats, rest);
        assert_eq!(mib(&round.sizes).iter().sum::<u64>(), 330);
        let rich = [seat(300, 100, 300), seat(100, 100, 100)];
        assert_eq!(mib(&super::round(&rich, Rest::default()).sizes), [300, 100]);
    }
}
