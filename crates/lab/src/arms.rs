//! The same experiment under each of several set-ups (its arms), round after round.
//!
//! **Idea.** A machine's speed drifts, so the arms of a round follow each other, and results are
//! compared within a round. A claim takes [`ROUNDS`] rounds, and holds where the worse end of their
//! interval does.
//!
//! **Invariant.** An arm that a round lacks is no number in that round, and never left out.

use crate::lab::LabError;
use crate::meb::pairs::LEAST_COUNT;
use crate::scenario::Context;

/// The rounds of a claim: the fewest whose median has a 95 % interval (five have none).
pub const ROUNDS: u32 = 6;
const _: () = assert!(ROUNDS as usize == LEAST_COUNT);

/// The order of the arms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArmOrder {
    Listed,
    /// In every second round backwards, so that none is always first.
    Alternating,
}

/// The results of each round, with their arms' names, in the order of the runs.
#[derive(Debug, Clone)]
pub struct Arms<R>(pub Vec<Vec<(&'static str, R)>>);

impl<R> Default for Arms<R> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<R> Arms<R> {
    /// Runs each arm once, and tells when it begins.
    pub fn once<A>(
        context: &Context,
        arms: &[(&'static str, A)],
        mut run: impl FnMut(&'static str, &A) -> Result<R, LabError>,
    ) -> Result<Self, LabError> {
        let mut all = Self::default();
        all.turn(ArmOrder::Listed, arms, |name, arm| {
            context.say(&format!("{name} ..."));
            run(name, arm)
        })?;
        Ok(all)
    }

    /// Runs a further round.
    pub fn turn<A>(
        &mut self,
        order: ArmOrder,
        arms: &[(&'static str, A)],
        mut run: impl FnMut(&'static str, &A) -> Result<R, LabError>,
    ) -> Result<(), LabError> {
        let mut turn: Vec<_> = arms.iter().collect();
        if order == ArmOrder::Alternating && self.0.len() % 2 == 1 {
            turn.reverse();
        }
        let round = turn.into_iter().map(|(name, arm)| Ok((*name, run(name, arm)?)));
        self.0.push(round.collect::<Result<_, LabError>>()?);
        Ok(())
    }

    /// An arm's result in each round; `None`: the round lacks it.
    fn in_rounds(&self, arm: &str) -> impl Iterator<Item = Option<&R>> {
        self.0.iter().map(move |round| round.iter().find(|(name, _)| *name == arm).map(|it| &it.1))
    }

    /// An arm's results.
    pub fn of(&self, arm: &str) -> impl Iterator<Item = &R> {
        self.in_rounds(arm).flatten()
    }

    /// All results, with their arms' names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &R)> {
        self.0.iter().flatten().map(|(name, result)| (*name, result))
    }

    /// A number of an arm in its only round; NaN where there is none.
    pub fn number(&self, arm: &str, of: impl Fn(&R) -> f64) -> f64 {
        self.of(arm).next().map_or(f64::NAN, of)
    }

    /// A number of an arm in each round.
    pub fn each(&self, arm: &str, of: impl Fn(&R) -> f64) -> Vec<f64> {
        self.in_rounds(arm).map(|result| result.map_or(f64::NAN, &of)).collect()
    }

    /// A number of two arms in each round.
    pub fn both(&self, one: &str, other: &str, of: impl Fn(&R, &R) -> f64) -> Vec<f64> {
        let pairs = self.in_rounds(one).zip(self.in_rounds(other));
        pairs.map(|(one, other)| one.zip(other).map_or(f64::NAN, |(a, b)| of(a, b))).collect()
    }

    /// A number of one arm divided by that of another one, in each round.
    pub fn ratios(&self, one: &str, other: &str, of: impl Fn(&R) -> f64) -> Vec<f64> {
        self.both(one, other, |one, other| of(one) / of(other))
    }
}

/// One number of several lists in each round.
pub fn across(lists: &[Vec<f64>], of: impl Fn(Vec<f64>) -> f64) -> Vec<f64> {
    let at = |list: &Vec<f64>, round: usize| list.get(round).copied().unwrap_or(f64::NAN);
    let rounds = 0..lists.iter().map(Vec::len).max().unwrap_or(0);
    rounds.map(|round| of(lists.iter().map(|list| at(list, round)).collect())).collect()
}

/// The geometric mean of positive numbers; NaN when there are none.
pub fn geometric_mean(values: impl IntoIterator<Item = f64>) -> f64 {
    f64::exp(crate::recording::mean(values.into_iter().map(f64::ln)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_second_round_runs_backwards() {
        let mut arms = Arms::default();
        let mut ran = Vec::new();
        for order in
            [ArmOrder::Alternating, ArmOrder::Alternating, ArmOrder::Listed, ArmOrder::Listed]
        {
            let run = |name, number: &f64| {
                ran.push(name);
                Ok(*number)
            };
            arms.turn(order, &[("a", 4.0), ("b", 2.0)], run).unwrap();
        }
        assert_eq!(ran.concat(), "abbaabab");
        assert_eq!(arms.ratios("a", "b", |number| *number), [2.0; 4]);
    }

    #[test]
    fn an_arm_that_a_round_lacks_is_no_number_there() {
        let arms = Arms(vec![vec![("a", 4.0), ("b", 2.0)], vec![("a", 3.0)]]);
        let ratios = arms.ratios("a", "b", |number| *number);
        assert!((ratios[0] - 2.0).abs() < 1e-9 && ratios[1].is_nan());
        assert!(arms.number("c", |number| *number).is_nan());
        let sums = across(&[vec![1.0, 2.0], vec![1.0]], |values| values.into_iter().sum());
        assert!((sums[0] - 2.0).abs() < 1e-9 && sums[1].is_nan());
        assert!(geometric_mean([]).is_nan());
    }
}
