//! An axis of a plot: its ends, and round amounts on it.

/// An axis.
#[derive(Clone, Debug)]
pub struct PlotAxis {
    /// Its label.
    pub label: String,
    /// Where amounts lie on it.
    pub scale: PlotScale,
    /// The words for an amount.
    pub text: fn(f64) -> String,
    /// The greatest amount; `None`: that of the lines.
    pub end: Option<f64>,
}

/// Where amounts lie on an axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlotScale {
    /// From zero on, with round decimal amounts.
    Linear,
    /// From zero on, with round binary amounts.
    Binary,
    /// By powers of ten.
    Logarithmic,
}

/// The ends of an axis.
#[derive(Clone, Debug)]
pub(super) struct AxisRange {
    scale: PlotScale,
    text: fn(f64) -> String,
    from: f64,
    to: f64,
}

impl PlotAxis {
    /// An axis with decimal amounts.
    #[must_use]
    pub fn linear(label: &str) -> Self {
        Self { label: label.to_owned(), scale: PlotScale::Linear, text: decimal, end: None }
    }

    /// The same, with powers of ten at equal distances.
    #[must_use]
    pub fn logarithmic(label: &str) -> Self {
        Self { scale: PlotScale::Logarithmic, ..Self::linear(label) }
    }

    /// The label, with the kind of the scale if it is not the usual one.
    pub(super) fn words(&self) -> String {
        match self.scale {
            PlotScale::Logarithmic => format!("{} (logarithmic)", self.label),
            PlotScale::Linear | PlotScale::Binary => self.label.clone(),
        }
    }

    /// The range of the axis for these amounts.
    pub(super) fn range(&self, amounts: impl Iterator<Item = f64>) -> AxisRange {
        let known: Vec<f64> = amounts.filter(|it| it.is_finite()).collect();
        let most = known.iter().copied().fold(0.0, f64::max);
        let (from, to) = match self.scale {
            PlotScale::Linear | PlotScale::Binary => (0.0, if most > 0.0 { most } else { 1.0 }),
            PlotScale::Logarithmic => {
                let least = known.iter().copied().filter(|it| *it > 0.0).fold(most, f64::min);
                let least = if least > 0.0 { least } else { 1.0 };
                let from = 10_f64.powf(least.log10().floor());
                let to = 10_f64.powf(most.max(least).log10().ceil());
                (from, if to > from { to } else { from * 10.0 })
            }
        };
        AxisRange { scale: self.scale, text: self.text, from, to: self.end.unwrap_or(to) }
    }
}

impl AxisRange {
    /// The place of an amount, from 0 to 1.
    pub(super) fn share(&self, amount: f64) -> f64 {
        let share = match self.scale {
            PlotScale::Linear | PlotScale::Binary => amount / self.to,
            PlotScale::Logarithmic => {
                let amount = amount.max(self.from);
                (amount / self.from).log10() / (self.to / self.from).log10()
            }
        };
        share.clamp(0.0, 1.0)
    }

    /// Round amounts with their words, at most about `most`.
    pub(super) fn ticks(&self, most: f64) -> Vec<(f64, String)> {
        let amounts = match self.scale {
            PlotScale::Logarithmic => {
                let decades = (self.to / self.from).log10().round();
                let every = (decades / most).ceil().max(1.0);
                let ten = 10_f64.powf(every);
                std::iter::successors(Some(self.from), |at| Some(at * ten))
                    .take_while(|at| *at <= self.to * 1.001)
                    .collect::<Vec<_>>()
            }
            PlotScale::Linear => multiples(decimal_step(self.to / most), self.to),
            PlotScale::Binary => multiples((self.to / most).log2().ceil().exp2(), self.to),
        };
        amounts.into_iter().map(|at| (at, (self.text)(at))).collect()
    }
}

/// 1, 2 or 5 times a power of ten, at least `least`.
fn decimal_step(least: f64) -> f64 {
    let ten = 10_f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|it| it * ten).find(|it| *it >= least).unwrap_or(10.0 * ten)
}

fn multiples(step: f64, to: f64) -> Vec<f64> {
    (0_u32..=100).map(|n| f64::from(n) * step).take_while(|at| *at <= to * 1.001).collect()
}

/// An amount with as many digits as it needs; large ones with `k` or `M`.
fn decimal(amount: f64) -> String {
    let short = |amount: f64| {
        let text = format!("{amount:.2}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    match amount {
        it if it >= 1e9 => format!("{} G", short(it / 1e9)),
        it if it >= 1e6 => format!("{} M", short(it / 1e6)),
        it if it >= 1e4 => format!("{} k", short(it / 1e3)),
        it if it > 0.0 && it < 0.01 => format!("{it:e}"),
        it => short(it),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticks(axis: &PlotAxis, amounts: &[f64]) -> Vec<String> {
        axis.range(amounts.iter().copied()).ticks(5.0).into_iter().map(|tick| tick.1).collect()
    }

    #[test]
    fn ticks_are_round() {
        let axis = PlotAxis::linear("s");
        assert_eq!(ticks(&axis, &[0.0, 37.0]), ["0", "10", "20", "30"]);
        assert_eq!(ticks(&axis, &[95_000.0]), ["0", "20 k", "40 k", "60 k", "80 k"]);
        assert_eq!(ticks(&axis, &[0.9]), ["0", "0.2", "0.4", "0.6", "0.8"]);
        assert_eq!(ticks(&axis, &[]), ["0", "0.2", "0.4", "0.6", "0.8", "1"]);
        let axis = PlotAxis { scale: PlotScale::Binary, ..PlotAxis::linear("MiB") };
        assert_eq!(ticks(&axis, &[190.0]), ["0", "64", "128"]);
        assert_eq!(ticks(&axis, &[600.0]), ["0", "128", "256", "384", "512"]);
    }

    #[test]
    fn a_logarithmic_axis_has_powers_of_ten_and_says_so() {
        let axis = PlotAxis::logarithmic("operations/s");
        assert_eq!(ticks(&axis, &[3.0, 40_000.0]), ["1", "10", "100", "1000", "10 k", "100 k"]);
        assert_eq!(ticks(&axis, &[f64::NAN, 0.0]), ["1", "10"]);
        let range = axis.range([1.0, 100.0].into_iter());
        assert!((range.share(10.0) - 0.5).abs() < 1e-9 && range.share(0.0) == 0.0);
        assert_eq!(axis.words(), "operations/s (logarithmic)");
    }
}
