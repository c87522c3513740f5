//! From life table and population to the curve.
//!
//! With `r` the time for which a granule has not been touched, the granules with `r < k` ticks are
//! Denning's working set `w(k)`: what a memory of that size under LRU holds. A touch of a granule
//! with `r >= k` misses it. So the misses per tick of a memory of `w(k)` are the touches of such
//! granules *now*: what a guest does at present counts, not what it is expected to do later.
//!
//! Of a revoked granule `r` is known, up to the moment of its revocation: how long it had not been
//! touched *then* was drawn from the life table as it stood then (multiple imputation: Rubin,
//! 1987). Errors of single granules cancel over all of them; and what guests did before they
//! changed is kept as it was. Touches of revoked granules are counted, not estimated: they trapped.
//! Gaps longer than it takes to revoke what is idle are all seen; so the far part of the curve,
//! which decides about the working set of a guest that reads much once, has little noise but the
//! guest's own.
//!
//! Of an accessible granule it is known that it was touched when it last trapped. Since then the
//! life table decides: with `S(k)` the chance to be untouched for `k` ticks, it is in `w(k)` with
//! `1 - S(k)`, and touched now with the hazard of its age. A granule that trapped was counted in
//! that tick; touches are estimated for the ticks after it.

use super::life_table::{CLASSES, Hazards, LifeTable};

/// Points of the curve that is kept, from 0 to all granules.
pub(super) const GRID: usize = 512;

/// What is known of one granule. Times are in ticks.
#[derive(Clone, Copy, Debug)]
pub(super) enum Known {
    /// Its last touch that was seen lies so far back; it may have been touched unseen since.
    Accessible { class: u8, seen: u32 },
    /// It has not been touched for so long.
    Revoked { untouched: u32 },
}

/// A touch that trapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    /// For how many ticks the granule had not been touched.
    pub(super) untouched: u32,
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

/// Size and misses of the windows that the bins of the life table begin with. `touched`: in the
/// last `ticks`.
pub(super) fn windows(
    table: &LifeTable,
    hazards: &Hazards,
    population: &[Known],
    touched: &[Touch],
    ticks: f64,
) -> Vec<Window> {
    let starts = table.starts();
    let none = Window { size: 0.0, misses: 0.0 };
    // Accessible granules by class and by the bin of their last touch that was seen: their number,
    // and how many ticks of these they may have been touched in, unseen.
    let mut accessible = vec![[none; CLASSES]; starts.len()];
    // Revoked ones by the bin of their last touch: their number, and how many of them were touched.
    let mut revoked = vec![none; starts.len()];
    for granule in population {
        match *granule {
            Known::Accessible { class, seen } => {
                let at = &mut accessible[table.last_start(seen)][usize::from(class)];
                at.size += 1.0;
                at.misses += (f64::from(seen) / ticks).min(1.0);
            }
            Known::Revoked { untouched } => revoked[table.last_start(untouched)].size += 1.0,
        }
    }
    for touch in touched {
        revoked[table.last_start(touch.untouched)].misses += touch.weight / ticks;
    }
    let mut windows = vec![none; starts.len()];
    let (mut beyond, mut reach) = (none, [none; CLASSES]);
    for bin in (0..starts.len()).rev() {
        beyond.size += revoked[bin].size;
        beyond.misses += revoked[bin].misses;
        windows[bin] = Window { size: population.len() as f64 - beyond.size, ..beyond };
        for (class, hazard) in hazards.iter().enumerate() {
            reach[class].size += accessible[bin][class].size;
            reach[class].misses += accessible[bin][class].misses;
            let survived = (-hazard[bin]).exp();
            let next = table.at(hazard, starts[bin] + 1) - hazard[bin];
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
    use super::super::life_table::HOT;
    use super::*;

    const ACCESSIBLE: Known = Known::Accessible { class: HOT, seen: 5000 };

    /// Of granules that are touched in every tick.
    fn hot() -> LifeTable {
        let mut table = LifeTable::new();
        (0..1000).for_each(|_| table.died(HOT, 0));
        table
    }

    fn windows_of(table: &LifeTable, population: &[Known], touched: &[Touch]) -> Vec<Window> {
        windows(table, &table.hazards(), population, touched, 1.0)
    }

    #[test]
    fn a_set_that_is_touched_in_every_tick_gives_a_step() {
        let table = hot();
        let windows = windows_of(&table, &[ACCESSIBLE; 300], &[]);
        let misses = misses_per_tick(1022.0, table.starts(), &windows);
        assert!((misses[148] - 300.0).abs() < 0.1, "{}", misses[148]);
        assert!(misses[151] < 0.1, "{}", misses[151]);
    }

    #[test]
    fn what_was_untouched_for_long_is_outside_of_shorter_windows_and_within_longer_ones() {
        let table = hot();
        let windows = windows_of(&table, &[Known::Revoked { untouched: 100 }; 10], &[]);
        let size = |ticks| windows[table.last_start(ticks)].size;
        assert!(size(80) < 1e-9, "{}", size(80));
        assert!((size(150) - 10.0).abs() < 1e-9, "{}", size(150));
    }

    #[test]
    fn a_touch_after_long_misses_all_windows_that_are_shorter() {
        let table = hot();
        let touched = [100, 100, 3].map(|untouched| Touch { untouched, weight: 1.0 });
        let windows = windows_of(&table, &[ACCESSIBLE; 10], &touched);
        let misses = |ticks| windows[table.last_start(ticks)].misses;
        assert!((misses(50) - 2.0).abs() < 0.04, "{}", misses(50));
        assert!((misses(2) - 3.0).abs() < 0.04, "{}", misses(2));
        assert!(misses(200) < 0.04, "{}", misses(200));
    }

    #[test]
    fn what_trapped_in_this_tick_is_no_second_reference() {
        let trapped = Known::Accessible { class: HOT, seen: 0 };
        let touches = [Touch { untouched: 0, weight: 1.0 }; 10];
        let windows = windows_of(&hot(), &[trapped; 10], &touches);
        assert!((windows[0].misses - 10.0).abs() < 1e-9, "{}", windows[0].misses);
    }
}
