//! A period life table: how long granules stay untouched, learnt from the revoked ones.
//!
//! Demography answers "how old will people get?" from one year's deaths, without waiting for
//! people to grow old. Of those who were `a` years old this year, the share that died is the
//! *hazard* at age `a`, and the product of `1 - hazard` over the ages is the chance to outlive
//! them. Here a granule is born when it is revoked, dies when it is touched, and a year is a
//! tick. The same arithmetic accounts for cases that would bias an average of lifetimes: granules
//! that are still alive (censored) and those whose early life is too long ago (delayed entry).
//! Source: Chiang, The Life Table and its Applications, 1984.
//!
//! Counts fade with one time constant, so a hazard is *current*: when a guest falls asleep, the
//! first hundred granules that survive their first tick show it.
//!
//! Granules that proved hot behave unlike others. So there is a table for each class (by the
//! granule's previous lifetime), shrunk towards the table of all where a class has few events.
//! One more class is for granules that were idle and have just been touched: where a guest reads
//! on, the next touch is near.

/// Ages have bins of one tick up to here, then bins a tenth of their age wide.
const SINGLE: u32 = 8;
/// The last age that has a bin, in ticks: ten minutes.
pub(super) const OLDEST: u32 = 6000;
/// Classes of granules, by their previous lifetime.
pub(super) const CLASSES: usize = 5;
/// The weight, in events, of the pooled hazard in the hazard of a class.
const SHRINK: f64 = 1.0;
/// The weight, in events, of the previous bin's hazard in the pooled one.
const CARRY: f64 = 0.5;
/// A hazard never counts as certain.
const CERTAIN: f64 = 1.0 - 1e-9;

/// The class that a granule gets from its previous lifetime.
pub(super) const fn class_of(lifetime_ticks: u32) -> u8 {
    match lifetime_ticks {
        0 => HOT,
        1..=10 => 1,
        _ => IDLE,
    }
}

/// The class of granules that were touched in the tick in which they were revoked.
pub(super) const HOT: u8 = 0;
/// The class of granules that were not touched for more than a second.
pub(super) const IDLE: u8 = 2;
/// The class of granules that were never touched since tracking began.
pub(super) const UNKNOWN: u8 = 3;
/// The class of granules that were idle until they were touched, less than [`FRESH_TICKS`] ago.
pub(super) const FRESH: u8 = 4;
/// Ticks for which a granule that came back stays [`FRESH`].
pub(super) const FRESH_TICKS: u32 = 4;

/// The first age of every bin, in ticks, and one past the last.
fn bin_starts() -> Vec<u32> {
    let mut starts: Vec<u32> = (0..SINGLE).collect();
    let mut next = SINGLE;
    while next < OLDEST {
        starts.push(next);
        next = (next * 11 / 10).max(next + 1);
    }
    starts.push(OLDEST);
    starts
}

/// The cumulative hazard `-ln S` of each class at the first age of every bin.
pub(super) type Hazards = [Vec<f64>; CLASSES];

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    deaths: f64,
    survivals: f64,
}

/// Hazards by class and age.
#[derive(Clone, Debug)]
pub(super) struct LifeTable {
    /// First age of each bin.
    starts: Vec<u32>,
    /// Bin of each age.
    bin_of: Vec<u8>,
    counts: [Vec<Count>; CLASSES],
}

impl LifeTable {
    pub(super) fn new() -> Self {
        let starts = bin_starts();
        let bins = starts.len() - 1;
        let mut bin_of = Vec::new();
        for (bin, pair) in starts.windows(2).enumerate() {
            let bin = u8::try_from(bin).unwrap_or(u8::MAX);
            bin_of.resize(pair[1] as usize, bin);
        }
        Self { starts, bin_of, counts: std::array::from_fn(|_| vec![Count::default(); bins]) }
    }

    /// The bin of an age in ticks.
    fn bin(&self, age_ticks: u32) -> usize {
        usize::from(self.bin_of[age_ticks.min(OLDEST - 1) as usize])
    }

    /// A granule was touched during the tick after `age_ticks`.
    pub(super) fn died(&mut self, class: u8, age_ticks: u32) {
        let bin = self.bin(age_ticks);
        self.counts[usize::from(class)][bin].deaths += 1.0;
    }

    /// A granule was not touched during the ticks after the ages `from..to`.
    pub(super) fn survived(&mut self, class: u8, from: u32, to: u32) {
        for age in from.max(to.saturating_sub(OLDEST))..to {
            let bin = self.bin(age);
            self.counts[usize::from(class)][bin].survivals += 1.0;
        }
    }

    /// Lets the counts fade to `share`; the counts of the first ages, which come from probes
    /// only, fade to `young`.
    pub(super) fn fade(&mut self, share: f64, young: f64) {
        for counts in &mut self.counts {
            for (bin, count) in counts.iter_mut().enumerate() {
                let share = if bin < SINGLE as usize { young } else { share };
                count.deaths *= share;
                count.survivals *= share;
            }
        }
    }

    /// The number of probes that ended their first tick within the window: the basis of the
    /// estimates.
    pub(super) fn probes(&self) -> f64 {
        self.counts.iter().map(|c| c[0].deaths + c[0].survivals).sum()
    }

    /// The cumulative hazards of every class.
    pub(super) fn hazards(&self) -> Hazards {
        std::array::from_fn(|class| self.cumulative_hazard(class))
    }

    /// Cumulative hazard `-ln S` of one class at the first age of every bin.
    fn cumulative_hazard(&self, class: usize) -> Vec<f64> {
        let mut hazard = Vec::with_capacity(self.starts.len());
        let (mut sum, mut prior) = (0.0, 0.0);
        hazard.push(0.0);
        for (bin, pair) in self.starts.windows(2).enumerate() {
            let all = self.counts.iter().fold(Count::default(), |a, c| Count {
                deaths: a.deaths + c[bin].deaths,
                survivals: a.survivals + c[bin].survivals,
            });
            let pooled = (all.deaths + CARRY * prior) / (all.deaths + all.survivals + CARRY);
            let own = self.counts[class][bin];
            let died = (own.deaths + SHRINK * pooled) / (own.deaths + own.survivals + SHRINK);
            prior = pooled;
            sum += -(1.0 - died.min(CERTAIN)).ln() * f64::from(pair[1] - pair[0]);
            hazard.push(sum);
        }
        hazard
    }

    /// Interpolates [`Self::cumulative_hazard`] at an age.
    pub(super) fn at(&self, hazard: &[f64], age_ticks: u32) -> f64 {
        if age_ticks >= OLDEST {
            return hazard[hazard.len() - 1];
        }
        let bin = self.bin(age_ticks);
        let (from, to) = (self.starts[bin], self.starts[bin + 1]);
        let share = f64::from(age_ticks - from) / f64::from(to - from);
        hazard[bin] + share * (hazard[bin + 1] - hazard[bin])
    }

    /// The age that is outlived with this chance: the inverse of [`Self::at`].
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "inside a bin")]
    pub(super) fn outlived(&self, hazard: &[f64], chance: f64) -> u32 {
        let sum = -chance.ln();
        let after = hazard.partition_point(|&h| h <= sum);
        if after == 0 || after == hazard.len() {
            return if after == 0 { 0 } else { OLDEST };
        }
        let (from, to) = (self.starts[after - 1], self.starts[after]);
        let share = (sum - hazard[after - 1]) / (hazard[after] - hazard[after - 1]);
        from + (share * f64::from(to - from)) as u32
    }

    /// The last bin that starts at or before this age.
    pub(super) fn last_start(&self, age_ticks: u32) -> usize {
        if age_ticks >= OLDEST { self.starts.len() - 1 } else { self.bin(age_ticks) }
    }

    /// First ages of the bins.
    pub(super) fn starts(&self) -> &[u32] {
        &self.starts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hazards_are_those_of_the_recent_deaths_at_each_age() {
        let mut table = LifeTable::new();
        for _ in 0..900 {
            table.survived(0, 0, 1);
            table.survived(0, 1, 5);
        }
        for _ in 0..100 {
            table.died(0, 0);
        }
        let hazard = table.cumulative_hazard(0);
        assert!((hazard[1] - 0.105).abs() < 0.001, "{}", hazard[1]);
        assert!(hazard[5] - hazard[1] < 0.001);
    }

    #[test]
    fn ages_entered_late_count_only_from_there() {
        let mut table = LifeTable::new();
        for _ in 0..50 {
            table.survived(2, 40, 41);
            table.died(2, 41);
        }
        let hazard = table.cumulative_hazard(2);
        let bin = table.bin(41);
        assert!((hazard[bin + 1] - hazard[bin]) > 2.0);
        assert!(hazard[table.bin(30)] < 1e-9);
    }

    #[test]
    fn a_class_without_events_of_its_own_behaves_like_all() {
        let mut table = LifeTable::new();
        for _ in 0..500 {
            table.survived(0, 0, 1);
            table.died(0, 0);
        }
        let (own, other) = (table.cumulative_hazard(0), table.cumulative_hazard(1));
        assert!((own[1] - other[1]).abs() < 0.01);
    }

    #[test]
    fn what_is_outlived_with_a_chance_is_where_the_hazard_says_so() {
        let mut table = LifeTable::new();
        for age in (0..60).flat_map(|age| [age; 50]) {
            table.survived(0, 0, age);
            table.died(0, age);
        }
        let hazard = table.cumulative_hazard(0);
        for age in [0, 3, 20, 39, 41] {
            let chance = (-table.at(&hazard, age)).exp();
            assert!(table.outlived(&hazard, chance * 0.999_999).abs_diff(age) <= 1, "{age}");
        }
        assert_eq!((table.outlived(&hazard, 0.0), table.outlived(&hazard, 1.0)), (OLDEST, 0));
    }

    #[test]
    fn what_faded_no_longer_counts() {
        let mut table = LifeTable::new();
        table.died(0, 0);
        table.fade(0.5, 0.25);
        assert!((table.probes() - 0.25).abs() < 1e-9);
    }

    #[test]
    fn a_stall_of_days_is_no_endless_loop() {
        let mut table = LifeTable::new();
        table.survived(0, 0, u32::MAX);
        table.died(0, u32::MAX);
        assert!(table.cumulative_hazard(0).iter().all(|h| h.is_finite()));
    }
}
