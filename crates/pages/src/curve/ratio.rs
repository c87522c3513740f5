//! The curve itself: a falling polyline from size 0.
//!
//! Invariants: the first point has size 0; sizes ascend strictly; ratios lie in 0 ..= 1 and never
//! rise. Beyond the last point the curve keeps its ratio: the floor, made of first references.

/// A point of a miss-ratio curve.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// The size of memory, in the unit of the distances.
    pub size: f64,
    /// The share of references that miss at that size.
    pub ratio: f64,
}

/// The share of references that miss, at every size of memory.
#[derive(Debug, Clone, PartialEq)]
pub struct MissRatioCurve {
    points: Vec<Point>,
}

/// The reason why points are no miss-ratio curve.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
pub enum CurveError {
    /// There is no point at size 0.
    #[error("a miss-ratio curve begins at size 0, not at {0:?}")]
    Start(Option<f64>),
    /// A size is not above the previous one, or not finite.
    #[error("point {index} of a miss-ratio curve has size {size}; sizes must ascend")]
    Size {
        /// Which point, from 0.
        index: usize,
        /// Its size.
        size: f64,
    },
    /// A ratio is outside 0 ..= 1, or above the previous one.
    #[error(
        "point {index} of a miss-ratio curve has ratio {ratio}; it must lie in 0 ..= 1 and not rise"
    )]
    Ratio {
        /// Which point, from 0.
        index: usize,
        /// Its ratio.
        ratio: f64,
    },
}

impl MissRatioCurve {
    /// A curve without knowledge: every reference misses.
    #[must_use]
    pub fn unknown() -> Self {
        Self { points: vec![Point { size: 0.0, ratio: 1.0 }] }
    }

    /// A curve through these points.
    ///
    /// # Errors
    /// If they break the rules of a curve, which the error names.
    pub fn new(points: Vec<Point>) -> Result<Self, CurveError> {
        let first = points.first().map(|point| point.size);
        if first != Some(0.0) {
            return Err(CurveError::Start(first));
        }
        let mut before = Point { size: -1.0, ratio: 1.0 };
        for (index, &Point { size, ratio }) in points.iter().enumerate() {
            if !(size.is_finite() && size > before.size) {
                return Err(CurveError::Size { index, size });
            }
            if !(0.0..=before.ratio).contains(&ratio) {
                return Err(CurveError::Ratio { index, ratio });
            }
            before = Point { size, ratio };
        }
        Ok(Self { points })
    }

    /// The curve's points.
    #[must_use]
    pub fn points(&self) -> &[Point] {
        &self.points
    }

    /// The size beyond which the curve is flat.
    #[must_use]
    pub fn end(&self) -> f64 {
        self.last().size
    }

    /// The ratio that no size gets below.
    #[must_use]
    pub fn floor(&self) -> f64 {
        self.last().ratio
    }

    fn last(&self) -> Point {
        self.points.last().copied().unwrap_or(Point { size: 0.0, ratio: 1.0 })
    }

    /// The share of references that miss with a memory of `size`.
    #[must_use]
    pub fn miss_ratio(&self, size: f64) -> f64 {
        let after = self.points.partition_point(|point| point.size <= size);
        match (self.points.get(after.wrapping_sub(1)), self.points.get(after)) {
            (Some(before), Some(after)) => at_size(*before, *after, size),
            (Some(last), None) => last.ratio,
            (None, first) => first.map_or(1.0, |point| point.ratio),
        }
    }

    /// The number of misses, given the number of references (or the rate of misses, given their
    /// rate).
    #[must_use]
    pub fn misses(&self, size: f64, references: f64) -> f64 {
        self.miss_ratio(size) * references
    }

    /// The least size whose miss ratio is at most `tolerable`; `None` if even the floor is above
    /// it. A caller whose sizes come in whole units rounds up.
    #[must_use]
    pub fn least_size(&self, tolerable: f64) -> Option<f64> {
        let after = self.points.partition_point(|point| point.ratio > tolerable);
        let reached = self.points.get(after)?;
        let Some(before) = after.checked_sub(1).and_then(|index| self.points.get(index)) else {
            return Some(reached.size);
        };
        let share = (before.ratio - tolerable) / (before.ratio - reached.ratio);
        Some(before.size + share * (reached.size - before.size))
    }

    /// The same curve with every size multiplied, for example from granules to bytes. `unit` must
    /// be above 0.
    #[must_use]
    pub fn scaled(mut self, unit: f64) -> Self {
        for point in &mut self.points {
            point.size *= unit;
        }
        self
    }

    /// The curve in at most `most` (and at least two) points, at even steps along its path with
    /// both axes scaled to 1. No size and no ratio then moves by more than 2 / (`most` − 1) of
    /// its axis.
    #[must_use]
    pub fn resampled(&self, most: usize) -> Self {
        let (first, last) = (self.points[0], self.last());
        if self.points.len() <= most.max(2) {
            return self.clone();
        }
        let fall = (first.ratio - last.ratio).max(f64::MIN_POSITIVE);
        let along = |p: Point| p.size / last.size + (first.ratio - p.ratio) / fall;
        let step = along(last) / (most.max(2) - 1) as f64;
        let mut points = vec![first];
        for pair in self.points.windows(2) {
            let (from, to) = (along(pair[0]), along(pair[1]));
            while points.len() < most.max(2) - 1 && points.len() as f64 * step <= to {
                let share = (points.len() as f64 * step - from) / (to - from);
                points.push(between(pair[0], pair[1], share.clamp(0.0, 1.0)));
            }
        }
        points.push(last);
        points.dedup_by(|next, kept| next.size <= kept.size);
        Self { points }
    }

    /// The mean of the absolute difference of two curves over the sizes from 0 to `size` (the error
    /// measure of Waldspurger 2015). It is integrated exactly, not sampled.
    #[must_use]
    pub fn mean_absolute_error(&self, other: &Self, size: f64) -> f64 {
        if size <= 0.0 {
            return (self.miss_ratio(0.0) - other.miss_ratio(0.0)).abs();
        }
        let inner = |curve: &Self| {
            let sizes = curve.points.iter().map(|point| point.size);
            sizes.filter(|s| *s > 0.0 && *s < size).collect::<Vec<f64>>()
        };
        let mut sizes = [inner(self), inner(other), vec![0.0, size]].concat();
        sizes.sort_by(f64::total_cmp);
        let difference = |size: f64| self.miss_ratio(size) - other.miss_ratio(size);
        let areas = sizes.windows(2).map(|pair| {
            let (from, to) = (difference(pair[0]), difference(pair[1]));
            area_of_line(from, to) * (pair[1] - pair[0])
        });
        areas.sum::<f64>() / size
    }
}

/// The mean of |x| along a straight line between two values, which may cross 0.
fn area_of_line(from: f64, to: f64) -> f64 {
    if from * to >= 0.0 {
        return (from + to).abs() / 2.0;
    }
    (from * from + to * to) / (2.0 * (from.abs() + to.abs()))
}

fn at_size(before: Point, after: Point, size: f64) -> f64 {
    between(before, after, (size - before.size) / (after.size - before.size)).ratio
}

fn between(before: Point, after: Point, share: f64) -> Point {
    Point {
        size: before.size + share * (after.size - before.size),
        ratio: before.ratio + share * (after.ratio - before.ratio),
    }
}
