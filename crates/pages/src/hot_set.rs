//! The dynamic hot set: how many granules stay accessible while every reference is tracked (MEB
//! §3.4).
//!
//! Problem: behind a hot set (a FIFO of accessible granules, kept by the shim) only touches of
//! *cold* granules trap. With a small hot set, a guest with poor locality traps on every touch. A
//! large hot set hides the short distances from the curve.
//!
//! Idea: the curve tells the locality, `α = MRC⁻¹(50 %) / (WSS / 2)`. Where half of the misses
//! need more than a sixth of the working set (α > 1/3), locality is poor: the hot set grows by a
//! fifth, and at once to at least WSS/12. Where α < 1/5 it shrinks by a tenth. It grows faster
//! than it shrinks, because a hot set that is too small stops the guest, and one that is too
//! large only blurs the curve.
//!
//! Invariant: [`LEAST`] ≤ size ≤ an eighth of the VM. Below 64 granules of 2 MiB each a guest
//! appears hung. A hot set as large as the working set traps nothing, and then nothing is known.
//! Source: Wang et al. 2016, which has "a preset upper bound" without naming it: the eighth is
//! ours. Left out: the cost of the traps, which [`budget`](crate::budget) governs.

use crate::curve::MissRatioCurve;

/// The least size in granules.
pub const LEAST: u32 = 64;
/// Locality is poor above this α.
const POOR: f64 = 1.0 / 3.0;
/// Locality is good below this α.
const GOOD: f64 = 1.0 / 5.0;
const GROW: f64 = 1.2;
const SHRINK: f64 = 0.9;
/// With poor locality the hot set grows at once to the working set divided by this.
const PART_OF_WORKING_SET: f64 = 12.0;

/// The hot set is at most one part in `MOST_IS_PART` of the VM's granules. Distances below it are
/// not seen, and a working set that matters for balancing is several times as large.
const MOST_IS_PART: u32 = 8;

/// The controller of one VM's hot-set size.
#[derive(Clone, Copy, Debug)]
pub struct HotSet {
    size: f64,
    most: f64,
}

impl HotSet {
    /// A controller for a VM of `granules` granules; it begins with the least size.
    #[must_use]
    pub fn new(granules: u32) -> Self {
        let most = (granules / MOST_IS_PART).max(LEAST);
        Self { size: f64::from(LEAST), most: f64::from(most) }
    }

    /// The size in granules.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "LEAST to most")]
    pub fn size(&self) -> u32 {
        self.size as u32
    }

    /// The locality of a curve with this working set: smaller is better. `None` without a working
    /// set.
    #[must_use]
    pub fn alpha(curve: &MissRatioCurve, working_set: f64) -> Option<f64> {
        let half = curve.least_size(0.5)?;
        (working_set > 0.0).then(|| half / (working_set / 2.0))
    }

    /// Adjusts the size, once per sampling interval; sizes in granules.
    pub fn adjust(&mut self, curve: &MissRatioCurve, working_set: f64) {
        let Some(alpha) = Self::alpha(curve, working_set) else { return };
        if alpha > POOR {
            self.size = (self.size * GROW).max(working_set / PART_OF_WORKING_SET);
        } else if alpha < GOOD {
            self.size *= SHRINK;
        }
        self.size = self.size.clamp(f64::from(LEAST), self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::Point;

    fn curve(half_at: f64, end: f64) -> MissRatioCurve {
        let points = [(0.0, 1.0), (half_at, 0.5), (end, 0.0)];
        MissRatioCurve::new(points.map(|(size, ratio)| Point { size, ratio }).to_vec()).unwrap()
    }

    #[test]
    fn poor_locality_grows_the_set_at_once_to_a_twelfth_of_the_working_set() {
        let mut set = HotSet::new(32_000);
        set.adjust(&curve(1200.0, 2400.0), 2400.0);
        assert_eq!(set.size(), 200);
        set.adjust(&curve(1200.0, 2400.0), 2400.0);
        assert_eq!(set.size(), 240);
    }

    #[test]
    fn good_locality_shrinks_it_by_a_tenth() {
        let mut set = HotSet::new(32_000);
        set.adjust(&curve(1200.0, 2400.0), 2400.0);
        set.adjust(&curve(100.0, 2400.0), 2400.0);
        assert_eq!(set.size(), 180);
    }

    #[test]
    fn locality_between_the_thresholds_changes_nothing() {
        let mut set = HotSet::new(32_000);
        set.adjust(&curve(1200.0, 2400.0), 2400.0);
        set.adjust(&curve(300.0, 2400.0), 2400.0);
        assert_eq!(set.size(), 200);
    }

    #[test]
    fn the_size_stays_within_its_bounds() {
        let mut set = HotSet::new(800);
        for _ in 0..50 {
            set.adjust(&curve(1200.0, 2400.0), 2400.0);
        }
        assert_eq!(set.size(), 100, "an eighth");
        for _ in 0..50 {
            set.adjust(&curve(1.0, 2400.0), 2400.0);
        }
        assert_eq!(set.size(), LEAST);
        assert_eq!(HotSet::new(3).size(), LEAST);
    }

    #[test]
    fn a_curve_that_is_not_known_changes_nothing() {
        let mut set = HotSet::new(800);
        set.adjust(&MissRatioCurve::unknown(), 0.0);
        set.adjust(&curve(1.0, 2.0), 0.0);
        assert_eq!(set.size(), LEAST);
    }
}
