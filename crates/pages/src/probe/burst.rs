//! Whether a guest touches more in a tick than it usually does.
//!
//! Problem: guests work in bursts. A timer fires once a second and touches hundreds of granules in
//! one tick; to the life table each of them is touched at some time within a second. The number of
//! touches comes out right on average, but in the tick of the burst the working set is larger by
//! all of them, and in the others it is smaller.
//!
//! Idea: hazards of one tick rise and fall together, by one factor that all granules of a class
//! share (a *shared frailty*: Clayton, 1978). It is the touches that were counted among its revoked
//! granules by those that the life table expected of them; what cannot be seen of the accessible ones
//! follows. By class, because what sleeps does not wake when a timer fires: with one factor for all, a
//! guest of which little was seen yet came out a third too large.

/// Touches that count as expected and as seen in every tick: a few of what was expected of none are no
/// burst.
const PRIOR: f64 = 1.0;

/// The revoked granules of one class in one tick.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Burst {
    /// How many were touched.
    pub(super) touched: f64,
    /// How many were expected to be: the sum of their chances.
    pub(super) expected: f64,
}

impl Burst {
    /// By what hazards are to be multiplied in this tick.
    pub(super) fn factor(self) -> f64 {
        (self.touched + PRIOR) / (self.expected + PRIOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tick_like_all_others_changes_nothing() {
        assert!((Burst { touched: 7.0, expected: 7.0 }.factor() - 1.0).abs() < 1e-9);
        assert!((Burst::default().factor() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn many_touches_raise_hazards_and_a_few_of_little_tell_little() {
        assert!(Burst { touched: 40.0, expected: 4.0 }.factor() > 8.0);
        assert!(Burst { touched: 1.0, expected: 0.1 }.factor() < 2.0);
        assert!(Burst { touched: 0.0, expected: 10.0 }.factor() < 0.1);
    }
}
