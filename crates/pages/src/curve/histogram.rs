//! How often each stack distance occurred, in bounded memory.
//!
//! Distances below 2^`precision` have a bucket each. Above, each octave is cut into
//! 2^(`precision` − 1) buckets, so every distance is known to 1 part in 2^(`precision` − 1). At
//! the default precision that is 1 in 2048, and 2³² distinct ids take 360 kB (log-linear buckets,
//! as in HdrHistogram). Counts are floating point, because sampled and aged references weigh more
//! or less than 1.

use super::{MissRatioCurve, Point};

/// Enough precision for plots and working sets.
const DEFAULT_PRECISION: u32 = 12;
const MOST_PRECISION: u32 = 32;

/// Counts of stack distances.
#[derive(Debug, Clone)]
pub struct Histogram {
    precision: u32,
    /// Grows up to the largest distance seen.
    buckets: Vec<f64>,
    first: f64,
    total: f64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { precision: DEFAULT_PRECISION, buckets: Vec::new(), first: 0.0, total: 0.0 }
    }
}

impl Histogram {
    /// A histogram that distinguishes all distances up to `largest`.
    #[must_use]
    pub fn exact_to(largest: u64) -> Self {
        let precision = (largest.checked_ilog2().unwrap_or(0) + 1).clamp(2, MOST_PRECISION);
        Self { precision, ..Self::default() }
    }

    /// Counts a reference; `None` is a first reference, which has no distance.
    pub fn record(&mut self, distance: Option<u64>) {
        self.add(distance, 1.0);
    }

    /// Counts a reference `weight` times.
    #[inline]
    pub fn add(&mut self, distance: Option<u64>, weight: f64) {
        self.total += weight;
        let Some(distance) = distance else {
            self.first += weight;
            return;
        };
        let bucket = self.bucket_of(distance);
        if bucket >= self.buckets.len() {
            self.buckets.resize(bucket + 1, 0.0);
        }
        self.buckets[bucket] += weight;
    }

    /// Multiplies all counts.
    pub fn scale(&mut self, factor: f64) {
        self.buckets.iter_mut().for_each(|count| *count *= factor);
        self.first *= factor;
        self.total *= factor;
    }

    /// The weight of all references.
    #[must_use]
    pub const fn total(&self) -> f64 {
        self.total
    }

    /// The weight of the first references, which miss at every size.
    #[must_use]
    pub const fn first(&self) -> f64 {
        self.first
    }

    /// The curve; "unknown" while nothing was counted. A count below 0, which a correction may
    /// leave at short distances, reduces the hits of longer ones.
    #[must_use]
    pub fn curve(&self) -> MissRatioCurve {
        if self.total <= 0.0 {
            return MissRatioCurve::unknown();
        }
        let mut before = Point { size: 0.0, ratio: 1.0 };
        let (mut points, mut hits) = (vec![before], 0.0);
        for (bucket, count) in self.buckets.iter().enumerate() {
            hits += count;
            let ratio = ((self.total - hits) / self.total).clamp(0.0, before.ratio);
            if *count == 0.0 || ratio >= before.ratio {
                continue;
            }
            let (least, largest) = self.bounds(bucket);
            let start = least.saturating_sub(1) as f64;
            if start > before.size {
                points.push(Point { size: start, ratio: before.ratio });
            }
            before = Point { size: largest as f64, ratio };
            points.push(before);
        }
        MissRatioCurve::new(points).unwrap_or_else(|_| MissRatioCurve::unknown())
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a bucket is far below 2^38")]
    fn bucket_of(&self, distance: u64) -> usize {
        let half = 1_u64 << (self.precision - 1);
        let octave = (distance | half).ilog2() + 1 - self.precision;
        (u64::from(octave) * half + (distance >> octave)) as usize
    }

    /// The least and the largest distance of a bucket.
    fn bounds(&self, bucket: usize) -> (u64, u64) {
        let (half, bucket) = (1_u64 << (self.precision - 1), bucket as u64);
        let octave = (bucket / half).saturating_sub(1);
        let least = (bucket - octave * half) << octave;
        (least, least + ((1 << octave) - 1))
    }
}
