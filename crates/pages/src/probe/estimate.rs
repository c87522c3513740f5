//! From life table and population to the curve.
//!
//! With `r` the time for which a granule has not been touched, the granules with `r < k` ticks are
//! Denning's working set `w(k)`: what a memory of that size under LRU holds. A touch of a granule
//! with `r >= k` misses it. So the misses per tick of a memory of `w(k)` are the touches of such
//! granules *now*: what a guest does at present counts, not what it is expected to do later.
//!
//! Of each granule it is known that it was touched when it last trapped (`e` ticks ago: `r <= e`)
//! and, if it is revoked, that it was not touched for `b` ticks (`r >= b`). Between them the life
//! table decides: with `S(k)` the chance to be untouched for `k` ticks, it is `S(k) / S(b)` for
//! `b < k <= e`. Touches of revoked granules are counted, not estimated: they trapped. Gaps longer
//! than it takes to revoke what is idle are all seen; so the far part of the curve, which decides
//! about the working set of a guest that reads much once, has little noise but the guest's own.
//!
//! Just after a change nothing has been revoked for long, and a touch may have reached further back
//! than `b`. The hazard of all that are revoked counts such touches on average, as if each granule
//! were as likely as any other. What is read in the order in which it was written is not: those
//! touched reach furthest. So each touch counts beyond `b` as well, by the square of `S(k) / S(b)`
//! (whoever is touched is not of the idlest) and by the share [`REACH`], which recorded guests and
//! simulated ones agree on. Where both count the same touch, a working set comes out rather too
//! large than too small.
//!
//! A granule that trapped was counted in that tick; accessible since, its touches are estimated
//! for the ticks after it only.

use super::life_table::{CLASSES, LifeTable};

/// Points of the curve that is kept, from 0 to all granules.
pub(super) const GRID: usize = 512;

/// How much of what a touch may have reached beyond the time for which it was revoked counts.
const REACH: f64 = 0.7;

/// What is known of one granule. Times are in ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) class: u8,
    /// Untouched for this long for certain: since it was revoked; 0: it is accessible.
    pub(super) untouched: u32,
    /// Its last touch that was seen lies so far back; it may have been touched unseen since.
    pub(super) seen: u32,
}

/// A touch that trapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    /// For how many ticks the granule had been revoked.
    pub(super) age: u32,
    /// Its last touch before that was seen lies so many ticks back; there may have been one unseen.
    pub(super) seen: u32,
    /// The granule's class until now.
    pub(super) class: u8,
    /// What share of a reference it is: one that traps twice in a tick is only one.
    pub(super) weight: f64,
}

/// One window that looks back from now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    /// Granules that were touched within it.
    pub(super) size: f64,
    /// References per tick, now, to granules that were not.
    pub(super) misses: f64,
}

/// Size and misses of the windows that the bins of the life table begin with.
/// `touched`: in the last `ticks`.
pub(super) fn windows(
    table: &LifeTable,
    population: &[Known],
    touched: &[Touch],
    ticks: f64,
) -> Vec<Window> {
    let starts = table.starts();
    let hazards: Vec<Vec<f64>> = (0..CLASSES).map(|c| table.cumulative_hazard(c)).collect();
    let mut windows = vec![Window { size: population.len() as f64, misses: 0.0 }; starts.len()];
    // Accessible granules by class and by the bin of their last touch that was seen.
    let mut accessible = vec![[Window { size: 0.0, misses: 0.0 }; CLASSES]; starts.len()];
    // Revoked ones by the bin of their age: their number, and how many of them are touched now.
    let mut revoked = vec![Window { size: 0.0, misses: 0.0 }; starts.len()];
    for granule in population {
        let class = usize::from(granule.class);
        let last = table.last_start(granule.seen.max(granule.untouched));
        if granule.untouched == 0 {
            accessible[last][class].size += 1.0;
            accessible[last][class].misses += (f64::from(granule.seen) / ticks).min(1.0);
            continue;
        }
        let first = table.last_start(granule.untouched);
        let hazard = &hazards[class];
        let lived = table.at(hazard, granule.untouched);
        revoked[first].size += 1.0;
        for bin in first + 1..=last {
            let survived = (lived - hazard[bin]).exp();
            let next = table.at(hazard, starts[bin] + 1) - hazard[bin];
            windows[bin].size -= survived;
            windows[bin].misses -= survived * (-next).exp_m1();
        }
    }
    for touch in touched {
        let first = table.last_start(touch.age);
        let hazard = &hazards[usize::from(touch.class)];
        let lived = table.at(hazard, touch.age);
        revoked[first].misses += touch.weight / ticks;
        for bin in first + 1..=table.last_start(touch.seen.max(touch.age)) {
            let reached = REACH * (2.0 * (lived - hazard[bin])).exp();
            windows[bin].misses += reached * touch.weight / ticks;
        }
    }
    let mut sum = Window { size: 0.0, misses: 0.0 };
    let mut reach = [sum; CLASSES];
    for bin in (0..starts.len()).rev() {
        sum.size += revoked[bin].size;
        sum.misses += revoked[bin].misses;
        windows[bin].size -= sum.size;
        windows[bin].misses += sum.misses;
        for class in 0..CLASSES {
            reach[class].size += accessible[bin][class].size;
            reach[class].misses += accessible[bin][class].misses;
            let survived = (-hazards[class][bin]).exp();
            let next = table.at(&hazards[class], starts[bin] + 1) - hazards[class][bin];
            windows[bin].size -= reach[class].size * survived;
            windows[bin].misses -= reach[class].misses * survived * (-next).exp_m1();
        }
    }
    windows
}

/// Misses per tick with memories from none to all of `granules`, in [`GRID`] steps; the first is
/// the number of references per tick.
///
/// A memory that holds the window of `k` ticks and not that of `k + 1` misses what it missed at
/// `k`: where windows are told apart tick by tick the curve has steps, not slopes.
pub(super) fn misses_per_tick(granules: f64, starts: &[u32], windows: &[Window]) -> Vec<f64> {
    let step = granules / (GRID - 1) as f64;
    // The window that the size reaches and the next one, without those that noise has made smaller
    // than one before.
    let (mut bin, mut from) = (0, 0.0);
    (0..GRID)
        .map(|i| {
            let size = i as f64 * step;
            while let Some(next) = windows.get(bin + 1).filter(|next| next.size.max(from) <= size) {
                from = next.size.max(from);
                bin += 1;
            }
            let Some(next) = windows.get(bin + 1) else { return 0.0 };
            let share = match starts[bin + 1] - starts[bin] {
                1 => 0.0,
                _ => (size - from) / (next.size - from),
            };
            windows[bin].misses + share * (next.misses - windows[bin].misses)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ACCESSIBLE: Known = Known { class: 0, untouched: 0, seen: 5000 };

    fn touch(age: u32) -> Touch {
        Touch { age, seen: age, class: 0, weight: 1.0 }
    }

    /// Of granules that are touched in every tick.
    fn hot() -> LifeTable {
        let mut table = LifeTable::new();
        (0..1000).for_each(|_| table.died(0, 0));
        table
    }

    #[test]
    fn a_set_that_is_touched_in_every_tick_gives_a_step() {
        let table = hot();
        let windows = windows(&table, &[ACCESSIBLE; 300], &[], 2.0);
        let misses = misses_per_tick(1022.0, table.starts(), &windows);
        assert!((misses[148] - 300.0).abs() < 0.1, "{}", misses[148]);
        assert!(misses[151] < 0.1, "{}", misses[151]);
    }

    #[test]
    fn what_was_untouched_for_long_is_outside_of_shorter_windows_and_within_longer_ones() {
        let table = hot();
        let idle = Known { class: 2, untouched: 100, seen: 103 };
        let windows = windows(&table, &[idle; 10], &[], 1.0);
        let size = |ticks| windows[table.last_start(ticks)].size;
        assert!(size(80) < 1e-9, "{}", size(80));
        assert!((size(150) - 10.0).abs() < 1e-9, "{}", size(150));
    }

    #[test]
    fn a_touch_after_long_misses_all_windows_that_are_shorter() {
        let table = hot();
        let windows = windows(&table, &[ACCESSIBLE; 10], &[touch(100), touch(100), touch(3)], 2.0);
        let misses = |ticks| windows[table.last_start(ticks)].misses;
        assert!((misses(50) - 1.0).abs() < 0.02, "{}", misses(50));
        assert!((misses(2) - 1.5).abs() < 0.02, "{}", misses(2));
        assert!(misses(200) < 0.02, "{}", misses(200));
    }

    #[test]
    fn a_touch_may_reach_back_to_the_last_one_that_was_seen_and_no_further() {
        let mut table = LifeTable::new();
        (0..1000).for_each(|_| table.survived(2, 0, 400));
        let late = Touch { seen: 300, class: 2, ..touch(100) };
        let windows = windows(&table, &[ACCESSIBLE; 10], &[late], 1.0);
        let misses = |ticks| windows[table.last_start(ticks)].misses;
        assert!((misses(250) - REACH).abs() < 0.1, "{}", misses(250));
        assert!(misses(350) < 0.1, "{}", misses(350));
    }

    #[test]
    fn what_trapped_in_this_tick_is_no_second_reference() {
        let trapped = Known { seen: 0, ..ACCESSIBLE };
        let windows = windows(&hot(), &[trapped; 10], &[touch(0); 10], 1.0);
        assert!((windows[0].misses - 10.0).abs() < 1e-9, "{}", windows[0].misses);
    }
}
