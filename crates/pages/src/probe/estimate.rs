//! Computes the curve from the life table and the population.
//!
//! Let `r` be the time for which a granule has not been touched. The granules with `r < k` ticks
//! are Denning's working set `w(k)`: the content of a memory of that size under LRU. A touch of a
//! granule with `r >= k` misses it. So the misses per tick of a memory of `w(k)` are the touches
//! of such granules *now*: the guest's present behaviour counts, not its expected one.
//!
//! For a revoked granule, `r` is known from its revocation on. The time before that was drawn
//! from the life table of that moment (multiple imputation: Rubin, 1987). Errors of single
//! granules cancel over all of them, and the guest's behaviour before a change is kept as it was.
//! Touches of revoked granules are counted, not estimated: they trapped. Gaps longer than the
//! time that it takes to revoke idle memory are all seen. So the far part of the curve, which
//! determines the working set of a guest that reads much once, has little noise except the
//! guest's own.
//!
//! An accessible granule is known to have been touched when it last trapped. From then on the
//! life table applies: with `S(k)` the chance to be untouched for `k` ticks, it is in `w(k)` with
//! probability `1 - S(k)`, and is touched now with the hazard of its age. A granule that trapped
//! was counted in that tick; touches are estimated for the ticks after it.

use super::life_table::{CLASSES, Hazards, LifeTable};

/// Points of the kept curve, from 0 to all granules.
pub(super) const GRID: usize = 512;

/// The knowledge about one granule. Times are in ticks.
#[derive(Clone, Copy, Debug)]
pub(super) enum GranuleRecency {
    /// Its last touch that was seen is `seen` ticks ago; it may have been touched unseen since.
    Accessible { class: u8, seen: u32 },
    /// It has not been touched for `untouched` ticks.
    Revoked { untouched: u32 },
}

/// A touch that trapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    /// Ticks for which the granule had not been touched.
    pub(super) untouched: u32,
    /// The part of a reference that it counts as: a granule that traps twice in a tick is only
    /// one.
    pub(super) weight: f64,
}

/// One window that ends now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Window {
    /// Granules that were touched in the window.
    pub(super) size: f64,
    /// References per tick, now, to granules that were not touched in it.
    pub(super) misses: f64,
}

/// Size and misses of the windows that start where the bins of the life table do. `touched` are
/// the touches of the last `ticks`.
pub(super) fn windows(
    table: &LifeTable,
    hazards: &Hazards,
    population: &[GranuleRecency],
    touched: &[Touch],
    ticks: f64,
) -> Vec<Window> {
    let starts = table.starts();
    let none = Window { size: 0.0, misses: 0.0 };
    // Accessible granules by class and by the bin of their last touch that was seen: their
    // number, and the number of these ticks in which they may have been touched unseen.
    let mut accessible = vec![[none; CLASSES]; starts.len()];
    // Revoked granules by the bin of their last touch: their number, and the number of those
    // touched.
    let mut revoked = vec![none; starts.len()];
    for granule in population {
        match *granule {
            GranuleRecency::Accessible { class, seen } => {
                let at = &mut accessible[table.last_start(seen)][usize::from(class)];
                at.size += 1.0;
                at.misses += (f64::from(seen) / ticks).min(1.0);
            }
            GranuleRecency::Revoked { untouched } => {
                revoked[table.last_start(untouched)].size += 1.0
            }
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

/// Misses per tick for memories from none to all of `granules`, in [`GRID`] steps; the first is
/// the number of references per tick.
///
/// A memory that holds the window of `k` ticks but not that of `k + 1` has the misses of `k`. So
/// where windows are one tick apart, the curve has steps, not slopes.
pub(super) fn misses_per_tick(granules: f64, starts: &[u32], windows: &[Window]) -> Vec<f64> {
    let step = granules / (GRID - 1) as f64;
    // The largest window that fits into the size, and the next one; windows that noise has made
    // smaller than an earlier one are skipped.
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

    const ACCESSIBLE: GranuleRecency = GranuleRecency::Accessible { class: HOT, seen: 5000 };

    /// A table of granules that are touched in every tick.
    fn hot() -> LifeTable {
        let mut table = LifeTable::new();
        (0..1000).for_each(|_| table.died(HOT, 0));
        table
    }

    fn windows_of(
        table: &LifeTable,
        population: &[GranuleRecency],
        touched: &[Touch],
    ) -> Vec<Window> {
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
        let windows = windows_of(&table, &[GranuleRecency::Revoked { untouched: 100 }; 10], &[]);
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
        let trapped = GranuleRecency::Accessible { class: HOT, seen: 0 };
        let touches = [Touch { untouched: 0, weight: 1.0 }; 10];
        let windows = windows_of(&hot(), &[trapped; 10], &touches);
        assert!((windows[0].misses - 10.0).abs() < 1e-9, "{}", windows[0].misses);
    }
}
