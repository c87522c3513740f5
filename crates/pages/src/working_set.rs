//! A VM's working set in bytes: what is measured inside its memory, and what it swapped out beyond.
//!
//! Problem: a curve reaches only as far as the memory that the VM has. A guest that swaps looks as
//! if it needed just what it got.
//!
//! Idea (MEB §3.6, Wang et al. 2016): references that reach the guest's swap were filtered by its
//! memory and have little locality left, so that the swap *in use* stands for what is missing. It
//! falls as soon as the program that needed it ends, where a history of swap reads would linger. It
//! counts only while the memory inside is busy: pages that sank to swap long ago and are not wanted
//! back take no memory away from anybody, and a guest whose working set leaves a good part of its
//! memory unused could fetch them any time.
//!
//! What is measured inside is the least memory with a tolerable miss ratio ([`WorkingSet`]). Where a
//! curve is flat and lies close to that ratio, the least noise makes it jump between a small part of
//! the guest and nearly all of it. So there are two ratios: a set that is known is given up as too
//! small at the tolerable one, and as too large only when less memory would do with a lower one.
//!
//! The granule follows from the size: 32 pages (0.9 % of error in the paper), and 512 above 2 GiB,
//! where moves by whole huge pages are cheaper and the table of granules stays small. Left out:
//! guests that report no swap; theirs ends at the allocation.

use model::Bytes;

use crate::curve::MissRatioCurve;

/// Pages of 4 KiB in a granule of a VM with a small working set.
pub const SMALL_GRANULE: u32 = 32;
/// And with a large one: a huge page.
pub const LARGE_GRANULE: u32 = 512;
/// Working sets above this are tracked by large granules.
const LARGE_ABOVE: Bytes = Bytes::mib(2048);
/// And below this by small ones again.
const SMALL_BELOW: Bytes = Bytes::mib(1536);
/// Below this share of the memory, in percent, a working set leaves room, and swap does not count.
const ROOM_PERCENT: u64 = 50;
/// From this share on it fills the memory, and all swap counts; in between a part of it.
const FULL_PERCENT: u64 = 75;

/// The miss ratio that a working set may have.
pub const TOLERABLE_MISS_RATIO: f64 = 0.05;
/// A working set shrinks to what has this miss ratio. It is seen a quarter of a time constant later.
pub const LOW_MISS_RATIO: f64 = 0.04;

/// The working set of a curve that changes, in the unit of the curve.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkingSet {
    held: f64,
}

impl WorkingSet {
    /// The working set now; `None`: no memory is enough.
    pub fn follow(&mut self, curve: &MissRatioCurve) -> Option<f64> {
        let least = curve.least_size(TOLERABLE_MISS_RATIO)?;
        let ample = curve.least_size(LOW_MISS_RATIO).unwrap_or(f64::INFINITY);
        self.held = self.held.clamp(least, ample);
        Some(self.held)
    }
}

/// The memory that a VM could use: its working set inside, and its swap in use where that fills
/// what it has.
#[must_use]
pub fn demand(inside: Bytes, swap_in_use: Option<Bytes>, memory: Bytes) -> Bytes {
    let (room, full) = (memory.percent(ROOM_PERCENT), memory.percent(FULL_PERCENT));
    let filled = inside.minus(room).min(full.minus(room));
    let swap = swap_in_use.unwrap_or(Bytes::ZERO);
    inside.plus(swap.share(filled.0, full.minus(room).0))
}

/// Pages per granule for a working set, given what is in force (any other number counts as small).
#[must_use]
pub fn granule_pages(present: u32, working_set: Bytes) -> u32 {
    let limit = if present == LARGE_GRANULE { SMALL_BELOW } else { LARGE_ABOVE };
    if working_set > limit { LARGE_GRANULE } else { SMALL_GRANULE }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::Point;

    /// Half of the references go to 10 granules; of the rest all but `far` go to 100.
    fn flat(far: f64) -> MissRatioCurve {
        let ratios = [1.0, 1.0, far, far, 0.0];
        let point = |(size, ratio)| Point { size, ratio };
        MissRatioCurve::new(
            [0.0, 9.0, 10.0, 99.0, 100.0].into_iter().zip(ratios).map(point).collect(),
        )
        .unwrap()
    }

    #[test]
    fn it_grows_at_the_tolerable_ratio_and_shrinks_at_the_low_one() {
        let mut set = WorkingSet::default();
        let sizes = [0.048, 0.052, 0.048, 0.042, 0.038, 0.042, 0.052]
            .map(|far| set.follow(&flat(far)).unwrap().round());
        assert_eq!(sizes, [10.0, 99.0, 99.0, 99.0, 10.0, 10.0, 99.0]);
    }

    #[test]
    fn where_the_curve_is_steep_it_is_the_least_size() {
        let mut set = WorkingSet::default();
        for (size, at_most) in [(100.0, 100.0), (30.0, 30.0), (60.0, 60.0)] {
            let points = [(0.0, 1.0), (size - 1.0, 1.0), (size, 0.0)];
            let points = points.map(|(size, ratio)| Point { size, ratio }).to_vec();
            let held = set.follow(&MissRatioCurve::new(points).unwrap()).unwrap();
            assert!((at_most - 0.1..=at_most).contains(&held), "{held}");
        }
    }

    #[test]
    fn where_no_memory_is_enough_there_is_none() {
        assert_eq!(WorkingSet::default().follow(&MissRatioCurve::unknown()), None);
    }

    #[test]
    fn swap_in_use_is_added_where_the_memory_is_full() {
        let memory = Bytes::mib(400);
        let swap = Some(Bytes::mib(300));
        assert_eq!(demand(Bytes::mib(380), swap, memory), Bytes::mib(680));
        assert_eq!(demand(Bytes::mib(380), None, memory), Bytes::mib(380));
    }

    #[test]
    fn what_sank_to_swap_and_is_not_wanted_back_does_not_count() {
        assert_eq!(demand(Bytes::mib(40), Some(Bytes::mib(300)), Bytes::mib(400)), Bytes::mib(40));
    }

    #[test]
    fn in_between_a_part_of_the_swap_counts_so_that_nothing_jumps() {
        let swap = Some(Bytes::mib(300));
        assert_eq!(demand(Bytes::mib(250), swap, Bytes::mib(400)), Bytes::mib(400));
    }

    #[test]
    fn an_absurd_swap_reading_does_not_wrap() {
        let all = Bytes(u64::MAX);
        assert_eq!(demand(Bytes::mib(400), Some(all), Bytes::mib(400)), all);
    }

    #[test]
    fn the_granule_follows_the_working_set_and_does_not_flap() {
        assert_eq!(granule_pages(32, Bytes::mib(2000)), 32);
        assert_eq!(granule_pages(32, Bytes::mib(2100)), 512);
        assert_eq!(granule_pages(512, Bytes::mib(2000)), 512);
        assert_eq!(granule_pages(512, Bytes::mib(1500)), 32);
        assert_eq!(granule_pages(0, Bytes::mib(10)), 32);
    }
}
