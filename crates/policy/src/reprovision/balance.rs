//! `balance`: memory goes where it saves the most waiting (Wang 2016 §4).
//!
//! ```text
//! every 5 s:  minimise  Σ weightᵢ · (waitsᵢ(sizeᵢ) + movingᵢ(sizeᵢ)),   Σ sizeᵢ ≤ all memory
//!             each VM moves there: up at once; down by its untouched memory, or by a tenth if more
//! ```
//!
//! The paper counts misses, and searches for the best sizes within −10 and +30 % of each VM's
//! memory. Here a miss counts by its duration, so that VMs with other disks and other page sizes
//! compare. The search covers all sizes, because a program that scans its data in a loop misses
//! the same until all of the data fits. [`worth`] gives the waits, and [`crate::optimum`] finds
//! the sizes; higher priorities are served first.
//!
//! **Moving** has a one-time cost for touched memory: it is paged out in one VM, and read back in
//! another. The cost is spread over [`tuning::WATCH`], the time for which a move should last.
//!
//! **Stability.** A VM's loss counts half as much again ([`tuning::CLEAR_GAIN_PERCENT`]), so that
//! about equal sizes stay as they are. A move that saves no VM anything is not made.
//!
//! **Fairness.** A VM's waits count more, the more it has waited recently. If equal VMs do not
//! all fit, one has enough and one waits, where all would wait otherwise; and they take turns.
//!
//! Sizes are counted by the memory that they occupy: a VM that shares half of its pages occupies
//! less per byte, and paged-out memory leaves a part in compressed memory.

pub(crate) mod worth;

use std::collections::BTreeMap;

use model::Bytes;

use self::worth::Worth;
use crate::{
    optimum::{self, Choice},
    tuning,
};

/// The data about a member that balancing needs.
#[derive(Clone, Debug)]
pub(crate) struct BalanceInput {
    /// Memory that the VM may use now.
    pub(crate) held: Bytes,
    /// The smallest possible size …
    pub(crate) least: Bytes,
    /// … and the largest.
    pub(crate) most: Bytes,
    /// The part of `held` that was not touched for a while.
    pub(crate) untouched: Bytes,
    /// Memory that is paged out.
    pub(crate) out: Bytes,
    /// The unit of paging out and reading back.
    pub(crate) granule: Bytes,
    /// Memory that the VM is charged with, untouched grants included.
    pub(crate) charged: Bytes,
    /// Bytes freed per byte given up: above 0 and at most 1.
    pub(crate) frees: f64,
    pub(crate) worth: Worth,
    /// The factor of the VM's waits.
    pub(crate) weight: f64,
    /// Whether the VM waits for memory now.
    pub(crate) suffers: bool,
    /// Higher priorities are served first.
    pub(crate) priority: u8,
}

/// The goal of a round.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Round {
    /// Each member's final size, in the order of the members.
    pub(crate) wanted: Vec<Bytes>,
    /// Each member's size at the end of the round.
    pub(crate) sizes: Vec<Bytes>,
}

impl BalanceInput {
    /// Bytes that the VM occupies with `memory`. Memory that it gives up frees only its part;
    /// memory that it gains may all be used.
    fn occupied(&self, memory: Bytes) -> f64 {
        let given_up = self.held.minus(memory).0 as f64 * self.frees;
        (self.charged.0 as f64 - given_up).max(0.0) + memory.minus(self.held).0 as f64
    }

    /// The inverse of [`BalanceInput::occupied`]: the memory with which the VM occupies `occupied`
    /// bytes.
    fn memory_for(&self, occupied: f64) -> Bytes {
        let more = occupied - self.charged.0 as f64;
        let more = if more < 0.0 { more / self.frees } else { more };
        bytes(self.held.0 as f64 + more)
    }

    /// The cost of `memory`, in weighted shares of the VM's time.
    fn cost(&self, memory: Bytes) -> f64 {
        let here = self.worth.waits(self.held);
        let more = self.worth.waits(memory) - here;
        let is_loss = memory < self.held;
        let clear = if is_loss { tuning::CLEAR_GAIN_PERCENT as f64 / 100.0 } else { 1.0 };
        (here + more * clear + self.moving(memory)) * self.weight
    }

    /// The share of the VM's time that the move to `memory` takes.
    fn moving(&self, memory: Bytes) -> f64 {
        let paged_out = self.held.minus(self.untouched).minus(memory);
        let read_back = memory.minus(self.held).min(self.out);
        let pieces = paged_out.plus(read_back).0 as f64 / self.granule.0.max(1) as f64;
        pieces * self.worth.miss_s() * 1e3 / tuning::WATCH.0 as f64
    }

    /// The smallest size at the end of the round.
    fn lowest(&self) -> Bytes {
        let tenth = self.held.percent(tuning::SHRINK_PERCENT).max(tuning::UNIT);
        self.held.minus(tenth.max(self.untouched)).max(self.least)
    }
}

/// Computes each member's size. `surplus` is free for all members; `overdrawn` is the amount by
/// which they exceed the pool.
pub(crate) fn round(seats: &[BalanceInput], surplus: Bytes, overdrawn: Bytes) -> Round {
    let pool: f64 = seats.iter().map(|seat| seat.occupied(seat.held)).sum::<f64>()
        + surplus.0 as f64
        - overdrawn.0 as f64;
    let mut wanted = least_waits(seats, pool);
    leave_the_rest(seats, &mut wanted, pool);
    // Untouched memory goes first: while there is some, no VM that suffers gives up memory.
    let touched = |seat: &BalanceInput| seat.held.minus(seat.untouched).max(seat.least);
    let is_cheap = |seat: &BalanceInput| {
        let much = seat.held.percent(tuning::STEP_PERCENT).max(tuning::UNIT);
        !seat.suffers && seat.held.minus(touched(seat)) >= much
    };
    let gives = |(seat, wanted): (&BalanceInput, &Bytes)| seat.suffers && *wanted < seat.held;
    let is_cheaper_left = seats.iter().any(is_cheap) && seats.iter().zip(&wanted).any(gives);
    let size = |(seat, wanted): (&BalanceInput, &Bytes)| {
        if is_cheaper_left && seat.suffers {
            (*wanted).max(seat.held)
        } else if is_cheaper_left && is_cheap(seat) {
            (*wanted).min(touched(seat)).max(seat.lowest())
        } else {
            (*wanted).max(seat.lowest())
        }
    };
    let sizes = seats.iter().zip(&wanted).map(size).collect();
    Round { wanted, sizes }
}

/// Memory that no VM wants stays with its holders, in proportion.
fn leave_the_rest(seats: &[BalanceInput], wanted: &mut [Bytes], pool: f64) {
    let taken = |(seat, wanted): (&BalanceInput, &Bytes)| {
        (seat.occupied(seat.held) - seat.occupied(*wanted)).max(0.0)
    };
    let all: f64 = seats.iter().zip(wanted.iter()).map(taken).sum();
    let occupied = seats.iter().zip(wanted.iter()).map(|(seat, wanted)| seat.occupied(*wanted));
    let left = (pool - occupied.sum::<f64>()).clamp(0.0, all);
    if left <= 0.0 {
        return;
    }
    for (seat, wanted) in seats.iter().zip(wanted).filter(|(seat, wanted)| **wanted < seat.held) {
        let more = seat.held.minus(*wanted).0 as f64 * left / all;
        *wanted = wanted.plus(bytes(more.ceil())).min(seat.held);
    }
}

/// The sizes of least cost that fit, higher priorities first.
fn least_waits(seats: &[BalanceInput], pool: f64) -> Vec<Bytes> {
    let span = |seat: &BalanceInput| seat.occupied(seat.most) - seat.occupied(seat.least);
    let widest = seats.iter().map(span).fold(0.0, f64::max);
    let unit = (widest / tuning::MOST_SIZES as f64).max(Bytes::mib(1).0 as f64);
    let least: f64 = seats.iter().map(|seat| seat.occupied(seat.least)).sum();
    let mut units = units((pool - least) / unit);
    let mut classes: BTreeMap<u8, Vec<usize>> = BTreeMap::new();
    for (index, seat) in seats.iter().enumerate() {
        classes.entry(seat.priority).or_default().push(index);
    }
    let size = |seat: &BalanceInput, at: u32| {
        let occupied = seat.occupied(seat.least) + f64::from(at) * unit;
        seat.memory_for(occupied).clamp(seat.least, seat.most)
    };
    let mut sizes = vec![Bytes::ZERO; seats.len()];
    for class in classes.values().rev() {
        let choice = |index: &usize| {
            let seat = &seats[*index];
            let most = u32::try_from(self::units((span(seat) / unit).ceil())).unwrap_or(u32::MAX);
            // Where moving costs more than it saves, the smaller size is as good.
            let falling = |least: &mut f64, at| {
                *least = least.min(seat.cost(size(seat, at)));
                Some(*least)
            };
            Choice { least: 0, misses: (0..=most).scan(f64::MAX, falling).collect() }
        };
        let choices: Vec<Choice> = class.iter().map(choice).collect();
        let placed = optimum::place(&choices, units);
        for (index, at) in class.iter().zip(placed.units) {
            units -= u64::from(at);
            let seat = &seats[*index];
            let size = size(seat, at);
            // The current size lies between two of the tried sizes.
            let is_as_good = seat.cost(seat.held) <= seat.cost(size);
            sizes[*index] = if is_as_good { size.min(seat.held) } else { size };
        }
    }
    sizes
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
    use super::*;

    /// A VM that swaps `per_second` MiB a second, which ends with 50 MiB more.
    fn swapping(held: u64, per_second: u64) -> BalanceInput {
        let worth = Worth::of_swapping(Bytes::mib(held), Bytes::mib(per_second), Bytes::mib(50));
        BalanceInput {
            most: Bytes::mib(held + 50),
            suffers: per_second > 0,
            worth,
            ..calm(held, 0)
        }
    }

    /// A VM that waits for nothing at any size.
    fn calm(held: u64, untouched: u64) -> BalanceInput {
        BalanceInput {
            held: Bytes::mib(held),
            least: Bytes::mib(64),
            most: Bytes::mib(512),
            untouched: Bytes::mib(untouched),
            out: Bytes::ZERO,
            granule: Bytes::kib(128),
            charged: Bytes::mib(held),
            frees: 1.0,
            worth: Worth::of_swapping(Bytes::mib(held), Bytes::ZERO, Bytes::mib(1)),
            weight: 1.0,
            suffers: false,
            priority: 0,
        }
    }

    fn sizes(seats: &[BalanceInput], surplus: u64) -> Vec<u64> {
        let round = round(seats, Bytes::mib(surplus), Bytes::ZERO);
        round.sizes.iter().map(|size| size.0 >> 20).collect()
    }

    #[test]
    fn what_is_not_touched_goes_at_once_to_who_waits_and_nothing_more() {
        assert_eq!(sizes(&[calm(300, 200), swapping(200, 10)], 0), [250, 250]);
        assert_eq!(sizes(&[calm(300, 200), swapping(200, 10)], 30), [280, 250]);
        assert_eq!(sizes(&[calm(300, 200), calm(200, 0)], 0), [300, 200], "for nobody");
    }

    #[test]
    fn what_is_touched_goes_in_steps_of_a_tenth() {
        let step = sizes(&[calm(300, 0), swapping(200, 10)], 0);
        assert_eq!(step, [270, 250], "what it is given has to be there first");
    }

    #[test]
    fn the_higher_priority_comes_first_and_then_the_longer_wait() {
        let prior = BalanceInput { priority: 1, ..swapping(200, 1) };
        assert_eq!(sizes(&[swapping(200, 10), prior], 50), [200, 250]);
        assert_eq!(sizes(&[swapping(200, 10), swapping(200, 1)], 50), [250, 200]);
        let weighty = BalanceInput { weight: 20.0, ..swapping(200, 1) };
        assert_eq!(sizes(&[swapping(200, 10), weighty], 50), [200, 250]);
    }

    #[test]
    fn who_suffers_gives_nothing_while_others_have_what_they_do_not_touch() {
        let worthless = |held| BalanceInput { suffers: true, ..calm(held, 0) };
        assert_eq!(sizes(&[worthless(300), calm(300, 20), swapping(200, 10)], 0), [300, 270, 250]);
        assert_eq!(sizes(&[worthless(300), calm(64, 0), swapping(200, 10)], 0)[0], 270);
    }

    #[test]
    fn shared_pages_cost_their_share() {
        let shared = BalanceInput { frees: 0.5, charged: Bytes::mib(128), ..calm(256, 0) };
        let mib = |occupied: f64| (occupied / f64::from(1 << 20)).round();
        assert_eq!(
            [156, 256, 300].map(|at| mib(shared.occupied(Bytes::mib(at)))),
            [78.0, 128.0, 172.0]
        );
        for size in [156, 256, 300].map(Bytes::mib) {
            assert_eq!(shared.memory_for(shared.occupied(size)), size);
        }
    }

    #[test]
    fn moving_what_is_touched_is_paid_for_by_what_it_saves() {
        let mut seat = swapping(200, 0);
        (seat.out, seat.most) = (Bytes::mib(100), Bytes::mib(512));
        assert!(seat.cost(Bytes::mib(250)) > seat.cost(Bytes::mib(200)), "reading back");
        assert!(seat.cost(Bytes::mib(100)) > seat.cost(Bytes::mib(200)), "paging out");
        seat.untouched = Bytes::mib(100);
        assert!((seat.cost(Bytes::mib(100)) - seat.cost(Bytes::mib(200))).abs() < 1e-12);
    }
}
