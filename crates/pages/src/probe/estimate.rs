//! From life table and population to the curve.
//!
//! With `F(k)` the share of granules that will be touched within the next `k` ticks, `w(k) = N
//! F(k)` is Denning's working-set function: a memory of `w(k)` granules under LRU keeps what was
//! touched in the last `k` ticks, and misses what returns later. So its misses per tick are `w(k+1)
//! - w(k)`, and the miss ratio at `w(k)` is that over `w(1)`, the references per tick.
//!
//! The population is known, not sampled: each accessible granule starts a life now (age 0), each
//! revoked one is at its exact age `a`, and will be touched within `k` with probability `1 -
//! S(a+k)/S(a)`.

use super::life_table::{CLASSES, LifeTable, OLDEST};

/// Points of the curve that is kept, from 0 to all granules.
pub(super) const GRID: usize = 512;
/// A hazard that no curve shows; most of a guest is idle.
const NEGLIGIBLE: f64 = 1e-7;

/// Granules by class and age, at one moment.
pub(super) struct Population {
    /// Accessible granules of each class.
    accessible: [u32; CLASSES],
    /// Revoked granules of each class, by age: see [`age_slot`].
    revoked: [Vec<u32>; CLASSES],
}

/// Ages are binned a 32nd of their octave wide: finer than hazards, for a pattern with a sharp
/// period.
fn age_slot(age: u32) -> usize {
    let age = age.min(OLDEST);
    if age < 32 {
        return age as usize;
    }
    let shift = age.ilog2() - 5;
    (((shift + 1) << 5) + ((age >> shift) - 32)) as usize
}

/// The middle of a slot.
fn slot_age(slot: usize) -> u32 {
    let slot = u32::try_from(slot).unwrap_or(u32::MAX);
    if slot < 64 {
        return slot;
    }
    let shift = (slot >> 5) - 1;
    ((32 + (slot & 31)) << shift) + (1 << shift) / 2
}

impl Population {
    pub(super) fn new() -> Self {
        Self {
            accessible: [0; CLASSES],
            revoked: std::array::from_fn(|_| vec![0; age_slot(OLDEST) + 1]),
        }
    }

    pub(super) fn add_accessible(&mut self, class: u8) {
        self.accessible[usize::from(class)] += 1;
    }

    pub(super) fn add_revoked(&mut self, class: u8, age: u32) {
        self.revoked[usize::from(class)][age_slot(age)] += 1;
    }
}

/// The working-set function at windows of 0 ticks, 1 tick and so on: `(ticks, granules)`.
pub(super) fn working_set_function(table: &LifeTable, population: &Population) -> Vec<(u32, f64)> {
    let windows = table.starts();
    let mut sizes = vec![0.0; windows.len()];
    for class in 0..CLASSES {
        let hazard = table.cumulative_hazard(class);
        let accessible = f64::from(population.accessible[class]);
        for (size, hazard) in sizes.iter_mut().zip(&hazard) {
            *size -= accessible * (-hazard).exp_m1();
        }
        for (slot, &count) in population.revoked[class].iter().enumerate().filter(|c| *c.1 > 0) {
            let age = slot_age(slot);
            let lived = table.at(&hazard, age);
            for (size, window) in sizes.iter_mut().zip(windows) {
                let ahead = table.at(&hazard, age.saturating_add(*window)) - lived;
                if ahead > NEGLIGIBLE {
                    *size -= f64::from(count) * (-ahead).exp_m1();
                }
            }
        }
    }
    windows.iter().copied().zip(sizes).collect()
}

/// Misses per tick with memories from none to all of `granules`, in [`GRID`] steps; the first is
/// the number of references per tick.
pub(super) fn misses_per_tick(granules: f64, function: &[(u32, f64)]) -> Vec<f64> {
    let segments = concave(function);
    let references = segments[0].rate;
    let one_tick = segments[0].to;
    let step = granules / (GRID - 1) as f64;
    let mut next = 1;
    (0..GRID)
        .map(|i| {
            let size = i as f64 * step;
            if size < one_tick {
                return references;
            }
            while segments.get(next).is_some_and(|s| s.middle() < size) {
                next += 1;
            }
            match (&segments[next - 1], segments.get(next)) {
                (_, Some(after)) if next == 1 => after.rate,
                (before, Some(after)) => {
                    let share = (size - before.middle()) / (after.middle() - before.middle());
                    before.rate + share * (after.rate - before.rate)
                }
                (last, None) if size <= last.to => last.rate,
                _ => 0.0,
            }
        })
        .collect()
}

/// A piece of the working-set function.
struct Segment {
    from: f64,
    to: f64,
    /// Granules per tick.
    rate: f64,
}

impl Segment {
    fn middle(&self) -> f64 {
        f64::midpoint(self.from, self.to)
    }
}

/// Misses per tick between neighbouring windows, made to fall with size: where noise makes them
/// rise, neighbours are pooled (isotonic regression by pooling adjacent violators).
fn concave(function: &[(u32, f64)]) -> Vec<Segment> {
    let mut pools: Vec<(usize, f64, f64)> = Vec::with_capacity(function.len());
    for (i, pair) in function.windows(2).enumerate() {
        let mut pool = (i + 1, (pair[1].1 - pair[0].1).max(0.0), f64::from(pair[1].0 - pair[0].0));
        while let Some(before) = pools.last().copied() {
            if before.1 * pool.2 >= pool.1 * before.2 {
                break;
            }
            pool = (pool.0, pool.1 + before.1, pool.2 + before.2);
            pools.pop();
        }
        pools.push(pool);
    }
    let mut segments = Vec::with_capacity(function.len());
    let mut at = 0;
    for (end, growth, ticks) in pools {
        for i in at..end {
            segments.push(Segment {
                from: function[i].1,
                to: function[i + 1].1,
                rate: growth / ticks,
            });
        }
        at = end;
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_ages_ascend_without_gaps() {
        let mut before = 0;
        for age in 0..=OLDEST {
            let slot = age_slot(age);
            assert!(slot == before || slot == before + 1, "{age}");
            assert!(slot_age(slot).abs_diff(age) <= age / 32, "{age}: {}", slot_age(slot));
            before = slot;
        }
    }

    #[test]
    fn a_set_that_is_touched_in_every_tick_gives_a_step() {
        let function = [(0, 0.0), (1, 300.0), (2, 300.0), (4, 300.0)];
        let misses = misses_per_tick(1022.0, &function);
        assert!((misses[149] - 300.0).abs() < 1e-9);
        assert!(misses[150] < 1e-9);
    }

    #[test]
    fn noise_that_would_make_a_curve_rise_is_pooled() {
        let function = [(0, 0.0), (1, 100.0), (2, 110.0), (3, 150.0), (4, 160.0)];
        let rates: Vec<f64> = concave(&function).iter().map(|s| s.rate).collect();
        assert_eq!(rates, [100.0, 25.0, 25.0, 10.0]);
    }

    #[test]
    fn revoked_granules_count_by_what_their_age_says() {
        let mut table = LifeTable::new();
        for _ in 0..1000 {
            table.survived(2, 0, 100);
            table.died(2, 100);
            table.survived(2, 4900, 5500);
        }
        let mut population = Population::new();
        for _ in 0..10 {
            population.add_revoked(2, 60);
            population.add_revoked(2, 5000);
        }
        let function = working_set_function(&table, &population);
        let at = |ticks| function.iter().find(|f| f.0 >= ticks).unwrap().1;
        assert!(at(1) < 1.0, "{}", at(1));
        assert!((at(60) - 10.0).abs() < 1.0, "{}", at(60));
    }
}
