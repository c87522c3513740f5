//! Repeated comparison of windows with something and without it: its cost, with a confidence
//! interval.
//!
//! **Problem.** A guest's speed drifts by several percent from minute to minute (its own phases,
//! the host's other work), and a cost of one percent has to be distinguished from zero.
//!
//! **Idea.** Windows with and without alternate within one guest. Each window *with* is compared
//! to the mean of its two neighbours *without*, so that a drift cancels. The median over all of
//! them is robust against a few disturbed windows. Its confidence interval follows from the order
//! of the values alone (the binomial interval of a median): no distribution is assumed.

use crate::recording::median;

/// The least number of values that have such an interval.
pub const LEAST_COUNT: usize = 6;

/// Speeds with and without, as measured in turn.
#[derive(Debug, Clone, Default)]
pub struct Pairs {
    without: Vec<f64>,
    with: Vec<f64>,
}

/// A median and the interval that holds the true one in at least 95 of 100 cases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Median {
    pub value: f64,
    /// The lower end of its interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    pub count: usize,
}

impl Pairs {
    /// Adds a window without; such a window must come first and last.
    pub fn add_without(&mut self, rate: f64) {
        self.without.push(rate);
    }

    pub fn add_with(&mut self, rate: f64) {
        self.with.push(rate);
    }

    /// The increase of an operation's time: 0.01 is one percent. There is one value per window
    /// with.
    pub fn overheads(&self) -> Vec<f64> {
        let neighbours = self.without.windows(2).map(|pair| f64::midpoint(pair[0], pair[1]));
        let ratios = neighbours.zip(&self.with).map(|(without, with)| without / with - 1.0);
        ratios.filter(|ratio| ratio.is_finite()).collect()
    }

    /// Their median.
    pub fn overhead(&self) -> Median {
        Median::of(self.overheads())
    }
}

impl Median {
    /// The median of `values`; NaN when there are none.
    pub fn of(mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let rank = rank_of_interval(count);
        let at = |index: Option<usize>| index.and_then(|i| values.get(i)).copied();
        let low = at(Some(rank)).unwrap_or(f64::NAN);
        let high = at(count.checked_sub(rank + 1)).unwrap_or(f64::NAN);
        Self { value: median(values.clone()), low, high, count }
    }

    /// A text for a figure's note, in percent.
    pub fn interval_percent(&self) -> String {
        let interval = format!("{:+.2} to {:+.2} %", self.low * 100.0, self.high * 100.0);
        match self.count {
            1 => "one pair".to_owned(),
            count if count < LEAST_COUNT => format!("{interval}, all of {count} pairs"),
            count => format!("95 % interval {interval}, {count} pairs"),
        }
    }
}

/// The number of values below the interval: the largest for which each tail holds at most 2.5 %.
/// (With fewer than [`LEAST_COUNT`] values, the interval holds all of them, with less
/// confidence.)
fn rank_of_interval(count: usize) -> usize {
    let n = i32::try_from(count).unwrap_or(i32::MAX);
    // The chance that exactly k of n values fall below the true median: n over k, times 2^-n.
    let (mut chance, mut tail, mut rank) = (0.5_f64.powi(n), 0.0, 0);
    for k in 0..n / 2 {
        tail += chance;
        if tail > 0.025 {
            break;
        }
        rank = usize::try_from(k).unwrap_or(0);
        chance *= f64::from(n - k) / f64::from(k + 1);
    }
    rank.min(count.saturating_sub(1) / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_drift_cancels() {
        let mut pairs = Pairs::default();
        for window in 0..6 {
            let speed = 100.0 + f64::from(window) * 10.0;
            pairs.add_without(speed);
            pairs.add_with((speed + 5.0) / 1.02);
        }
        pairs.add_without(160.0);
        let overhead = pairs.overhead();
        assert!((overhead.value - 0.02).abs() < 1e-9, "{overhead:?}");
        assert_eq!(overhead.count, 6);
    }

    #[test]
    fn a_window_that_was_disturbed_does_not_decide() {
        let mut pairs = Pairs::default();
        for window in 0..9 {
            pairs.add_without(100.0);
            pairs.add_with(if window == 4 { 10.0 } else { 99.0 });
        }
        pairs.add_without(100.0);
        assert!((pairs.overhead().value - 1.0 / 99.0).abs() < 1e-9);
    }

    #[test]
    fn the_interval_is_that_of_the_tables() {
        for (count, rank_from_1) in [(3, 1), (6, 1), (10, 2), (20, 6), (50, 18)] {
            assert_eq!(rank_of_interval(count) + 1, rank_from_1, "{count}");
        }
    }

    #[test]
    fn few_pairs_do_not_pretend_to_have_an_interval() {
        let words = |count| Median::of(vec![0.01; count]).interval_percent();
        assert_eq!(words(1), "one pair");
        assert_eq!(words(5), "+1.00 to +1.00 %, all of 5 pairs");
        assert_eq!(words(6), "95 % interval +1.00 to +1.00 %, 6 pairs");
    }

    #[test]
    fn nothing_measured_is_no_number() {
        assert!(Pairs::default().overhead().value.is_nan());
        assert!(Median::of(Vec::new()).low.is_nan());
    }
}
