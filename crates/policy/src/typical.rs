//! What a VM typically works on: of late, and not in this second.
//!
//! **Problem.** One reading of a working set rests on a second. It varies by a tenth and more; of a
//! VM that touches little (it idles, or waits for its disk) some are several times too large or too
//! small. The largest of twenty is too large by a tenth. **Idea.** The mean of a span of
//! [`tuning::TYPICAL_OF`], in which each reading counts as much as it saw references, and with it
//! the curve of the reading that is nearest to it. Of the last two spans the busier one is typical:
//! memory is taken from a VM a span late rather than early.

use model::{Bytes, Time, Tracking};
use serde::{Deserialize, Serialize};

use crate::tuning;

/// Two spans of readings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tracked {
    before: Option<Span>,
    newer: Span,
    /// What lies in its swap, as of the latest reading.
    swapped: Bytes,
}

/// The readings of some seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Span {
    since: Time,
    count: u32,
    /// The mean working set in bytes, without what lies in swap.
    mean: f64,
    /// Of all its readings.
    references: f64,
    /// The reading that is nearest to the mean.
    nearest: Tracking,
}

impl Tracked {
    /// As it stands with one more reading; nothing, if that says nothing.
    pub(crate) fn with(known: Option<Self>, latest: Tracking, now: Time) -> Option<Self> {
        if latest.working_set.is_none() || !latest.references_per_s.is_finite() {
            return None;
        }
        let swapped = latest.swapped;
        Some(match known {
            Some(Self { newer, .. }) if now.since(newer.since) >= tuning::TYPICAL_OF => {
                Self { before: Some(newer), newer: Span::new(latest, now), swapped }
            }
            Some(Self { before, newer, .. }) => Self { before, newer: newer.with(latest), swapped },
            None => Self { before: None, newer: Span::new(latest, now), swapped },
        })
    }

    /// Whether a whole span was seen.
    pub(crate) fn is_settled(&self) -> bool {
        self.before.is_some()
    }

    /// What is typical. What lies in swap is as of now.
    pub(crate) fn typical(&self) -> Tracking {
        let span = match &self.before {
            Some(before) if self.newer.count < Span::ENOUGH || self.newer.mean < before.mean => {
                before
            }
            _ => &self.newer,
        };
        let working_set = Some(size(span.mean).plus(self.swapped));
        Tracking { working_set, swapped: self.swapped, ..span.nearest.clone() }
    }
}

impl Span {
    /// So many readings have a mean.
    const ENOUGH: u32 = 5;

    fn new(nearest: Tracking, since: Time) -> Self {
        let (mean, references) = (inside(&nearest), weight(&nearest));
        Self { since, count: 1, mean, references, nearest }
    }

    fn with(self, latest: Tracking) -> Self {
        let count = self.count.saturating_add(1);
        let references = self.references + weight(&latest);
        let mean = self.mean + (inside(&latest) - self.mean) * weight(&latest) / references;
        let off = |tracking: &Tracking| (inside(tracking) - mean).abs();
        let nearest = if off(&latest) < off(&self.nearest) { latest } else { self.nearest };
        Self { count, mean, references, nearest, ..self }
    }
}

/// How much a reading counts.
fn weight(tracking: &Tracking) -> f64 {
    tracking.references_per_s.clamp(1.0, 1e12)
}

/// The working set without what lies in swap.
fn inside(tracking: &Tracking) -> f64 {
    tracking.working_set.unwrap_or_default().minus(tracking.swapped).0 as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size")]
fn size(bytes: f64) -> Bytes {
    Bytes(bytes as u64)
}

#[cfg(test)]
mod tests {
    use model::Millis;

    use super::*;

    fn reading(mib: u64, references_per_s: f64) -> Tracking {
        Tracking { working_set: Some(Bytes::mib(mib)), references_per_s, ..Tracking::default() }
    }

    /// One reading a second.
    fn seen(readings: &[Tracking]) -> Tracked {
        let with = |known, (second, latest): (u64, &Tracking)| {
            Tracked::with(known, latest.clone(), Time(0).after(Millis::secs(second)))
        };
        (0..).zip(readings).fold(None, with).unwrap()
    }

    fn typical(tracked: &Tracked) -> u64 {
        tracked.typical().working_set.unwrap().0 >> 20
    }

    #[test]
    fn readings_that_scatter_have_a_mean_and_the_nearest_ones_curve() {
        let mut readings = [232, 192, 261, 230, 212, 265].map(|mib| reading(mib, 3e3));
        readings[3].cost.traps = 7;
        let tracked = seen(&readings);
        assert_eq!(typical(&tracked), 232);
        assert_eq!((tracked.typical().cost.traps, tracked.is_settled()), (7, false));
    }

    #[test]
    fn a_reading_of_a_few_references_hardly_counts() {
        let tracked = seen(&[reading(14, 400.0), reading(190, 10.0), reading(12, 400.0)]);
        assert!(typical(&tracked) <= 16, "{}", typical(&tracked));
    }

    #[test]
    fn who_works_on_less_is_believed_a_span_later_and_who_works_on_more_within_half_a_span() {
        let busy: Vec<Tracking> = (0..10).map(|_| reading(300, 1e3)).collect();
        let calm: Vec<Tracking> = (0..11).map(|_| reading(50, 1e3)).collect();
        let after = |before: &[Tracking], later: &[Tracking], seconds: usize| {
            typical(&seen(&[before, &later[..seconds]].concat()))
        };
        assert_eq!([1, 10, 11].map(|s| after(&busy, &calm, s)), [300, 300, 50]);
        assert_eq!([1, 4, 5].map(|s| after(&calm[..10], &busy, s)), [50, 50, 300]);
    }

    #[test]
    fn what_lies_in_swap_is_as_of_now() {
        let swapping = Tracking { swapped: Bytes::mib(60), ..reading(260, 1e3) };
        let tracked = seen(&[reading(200, 1e3), swapping, reading(200, 1e3)]);
        assert_eq!((typical(&tracked), tracked.typical().swapped), (200, Bytes::ZERO));
    }

    #[test]
    fn a_reading_that_says_nothing_is_the_end_of_what_was_known() {
        let known = Some(seen(&[reading(10, 1.0)]));
        assert_eq!(Tracked::with(known.clone(), reading(10, f64::NAN), Time(9)), None);
        assert_eq!(Tracked::with(known, Tracking::default(), Time(9)), None);
    }
}
